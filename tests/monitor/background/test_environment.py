"""The environment's way from all ranks into the record."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overlap_callbacks import JsonlSink, OverlapMonitor, Schedule
from overlap_callbacks.instruments.device import MemoryReader
from overlap_callbacks.report import record
from tests.distributed import run_ranks

SCHEDULE = Schedule(every_n_steps=17, first_step=0, repeats=2, steps_per_block=1, profiled_steps=0)


def _train(rank: int, folder: str) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    os.environ["MY_TOKEN"] = os.environ["NCCL_PSK"] = "do not tell"
    if rank == 1:
        os.environ["NCCL_MAX_CTAS"] = "4"
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    with OverlapMonitor(SCHEDULE, [JsonlSink(folder)], strict=True, framework="mine 1.0", max_overhead=None) as monitor:
        for step in range(2 * 17):
            with monitor.step(step):
                model(torch.ones(8, 64)).sum().backward()


def test_every_rank_is_in_the_record_once_and_no_secret_is(tmp_path: Path) -> None:
    run_ranks(_train, 2, str(tmp_path))
    found = record.read(tmp_path)
    own = found.runs[0].environment
    assert own is not None
    assert (own.framework, own.device, own.torch) == ("mine 1.0", "cpu", str(torch.__version__))
    assert own.variables["TORCH_DISTRIBUTED_DEBUG"] == "OFF"
    first, second = found.windows
    assert first.environment is not None
    assert first.environment.lowest_rank == own
    assert (first.environment.num_ranks, first.environment.num_hosts) == (2, 1)
    (difference,) = first.environment.differing
    assert (difference.name, [value.value for value in difference.values]) == ("NCCL_MAX_CTAS", [None, "4"])
    assert [transport.transport for transport in first.environment.transports] == ["TCP sockets"]
    assert "ranks-differ" in {finding.rule for finding in first.findings}
    # It has not changed since.
    assert second.environment is None
    assert {finding.rule for finding in second.findings} == {finding.rule for finding in first.findings}
    assert "do not tell" not in Path(tmp_path, "overlap.jsonl").read_text()


def _train_on_a_stand_in_for_the_allocator(rank: int, folder: str) -> Any:
    readings = 0

    def read(_: MemoryReader) -> Any:  # each step holds a little more than the one before
        nonlocal readings
        readings += 1
        return {"allocated_bytes": {"all": {"current": 1, "peak": 1000 * (rank + 1) + readings}}}

    MemoryReader.read = read  # type: ignore[method-assign]
    _train(rank, folder)


def test_the_allocator_is_read_around_each_step_of_a_window(tmp_path: Path) -> None:
    run_ranks(_train_on_a_stand_in_for_the_allocator, 2, str(tmp_path))
    metrics = record.read(tmp_path).windows[0].metrics()
    # Of 17 steps, the last of each mode that count are near the end.
    for mode in ("overlapped", "sequential"):
        assert 2000 + 2 * 14 < metrics[f"gpu/{mode}_memory_peak_bytes"] <= 2000 + 2 * 17
    assert metrics["gpu/overlapped_memory_peak_bytes"] != metrics["gpu/sequential_memory_peak_bytes"]
