"""The promise that everything rests on: measuring changes no bit of the weights and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from overlap_callbacks import Mode, OverlapMonitor
from tests.distributed import run_ranks
from tests.monitor.jobs import KeptReports, Training, ddp, dispatch_table, kept_logs, new_monitor, tiny_schedule

NUM_STEPS = 60
# 1 recorded step, 4 blocks of 1 + 1 timed steps, 4 of 1 + 1 profiled ones: 17 steps, at 3, 23 and 43.
SCHEDULE = {"spread": False, "every_n_steps": 20, "first_step": 3, "warmup_steps": 1, "profiled_steps": 2}


def ddp_with_fp16_hook(model: torch.nn.Module) -> torch.nn.Module:
    wrapped = ddp(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def fsdp2(model: torch.nn.Module) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


JOBS: dict[str, dict[str, Any]] = {
    "ddp": {"wrap": ddp},
    "ddp_with_gradient_accumulation": {"wrap": ddp, "micro_batches": 3},
    "ddp_with_fp16_hook": {"wrap": ddp_with_fp16_hook},
    "fsdp2": {"wrap": fsdp2},
}


def train(rank: int, job: str, monitor: OverlapMonitor | None, look: Callable[[], None]) -> str:
    training = Training(rank, **JOBS[job])
    for _ in range(NUM_STEPS):
        if monitor is None:
            training.step()
            continue
        with monitor.step():
            look()
            training.step()
    if monitor is not None:
        monitor.close()
    return training.digest()


def train_three_times(rank: int, job: str) -> dict[str, Any]:
    untouched = dispatch_table()
    digests = {"absent": train(rank, job, None, lambda: None)}
    assert dispatch_table() == untouched

    sink, modes = KeptReports(), []
    attached = new_monitor(sink, schedule=tiny_schedule(**SCHEDULE))
    with kept_logs() as logs:
        digests["attached"] = train(rank, job, attached, lambda: modes.append(attached.mode))
    serialised = sum(c.start is not None for log in logs for c in log.collectives)

    forced_modes = []
    forced = new_monitor(KeptReports())
    forced.force(Mode.SEQUENTIAL)
    with kept_logs() as logs:
        digests["forced"] = train(rank, job, forced, lambda: forced_modes.append(forced.mode))
    return {
        "digests": digests,
        "reports": sink.facts(),
        "sequential_steps": modes.count(Mode.SEQUENTIAL),
        "serialised": serialised,
        "forced_sequential_steps": forced_modes.count(Mode.SEQUENTIAL),
        "forced_left_out": sum(c.start is None for log in logs[1:] for c in log.collectives),
    }


@pytest.mark.parametrize("job", JOBS)
def test_weights_and_losses_are_bit_identical_without_with_and_in_forced_sequential_mode(job):
    found = run_ranks(train_three_times, 2, job, timeout_s=90)
    for rank in found:
        digests = rank["digests"]
        assert digests["attached"] == digests["absent"]
        assert digests["forced"] == digests["absent"]

        # 3 windows of 2 x 2 timed and 2 x 2 profiled sequential steps: the promise was put to the test.
        assert rank["sequential_steps"] == 3 * 8
        assert rank["serialised"] >= 3 * 8
        assert rank["forced_sequential_steps"] > NUM_STEPS // 2
        assert rank["forced_left_out"] == 0
    reports = found[0]["reports"]
    assert [(report["complete"], report["ranks"]) for report in reports] == [(True, [0, 1])] * 3
    for report in reports:
        assert {"e2e_overlapped_ms", "e2e_sequential_ms", "compute_ms", "comm_isolated_ms"} <= set(report["figures"])
        assert report["blocks"] == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}


def train_with_other_data(rank: int) -> list[str]:
    return [train(rank + offset, "ddp", None, lambda: None) for offset in (0, 0, 1)]


def test_the_digest_for_identity_differs_between_two_trainings():
    for first, again, other in run_ranks(train_with_other_data, 2):
        assert first == again
        assert first != other
