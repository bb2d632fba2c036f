"""Steps are timed and nothing else, where the environment says so; and the record goes where it says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import JsonlSink, Mode, Schedule
from overlap_callbacks.analysis.results.env_overrides import RUN_DIR, TIME_ONLY
from overlap_callbacks.gate.dispatcher import dispatcher
from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.report.record import read
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import tiny_schedule

PLAN = '{"warmup_steps":3,"steps_per_block":4,"min_block_seconds":0}'
NUM_STEPS = 20


def train(rank: int, folder: str, told: dict[str, str], schedule: Schedule | None = None) -> dict[str, Any]:
    os.environ.update(told)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    modes = set()
    sinks = [JsonlSink(Path(folder, "by-the-script"))]
    with captured_log() as lines, attach(optimizer, sinks=sinks, schedule=schedule, max_overhead=None) as monitor:
        for step in range(NUM_STEPS):
            if step == 9:
                with monitor.pause():
                    pass
            model(torch.full((4, 32), float(rank))).sum().backward()
            modes.add(monitor.mode)
            optimizer.step()
            optimizer.zero_grad()
    gate_was_installed = dispatcher.placement is not None
    for name in told:
        del os.environ[name]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {
        "weights": weights.numpy().tobytes(), "lines": lines, "modes": modes, "gate": gate_was_installed,
    }  # fmt: skip


def three_jobs(rank: int, folder: str) -> list[dict[str, Any]]:
    return [
        train(rank, folder, {RUN_DIR: f"{folder}/timed", TIME_ONLY: PLAN}),
        train(rank, folder, {RUN_DIR: f"{folder}/moved"}, tiny_schedule()),
        train(rank, folder, {TIME_ONLY: "ten"}),
    ]


def test_a_job_configured_by_environment_variables(tmp_path: Path) -> None:
    timed, moved, wrong = zip(*run_ranks(three_jobs, 2, str(tmp_path)), strict=True)

    # Attached after step 0 has begun, so steps 1 to 19 are seen; 3 are warm-up, 1 is paused: 15 or so are timed.
    record = read(tmp_path / "timed")
    assert len(record.runs) == 1
    assert record.windows == []
    assert record.unfinished is not None
    blocks = record.unfinished.samples[0].timed
    assert [(block.block, block.mode, len(block.step_ms)) for block in blocks] == [
        (number, Mode.OVERLAPPED, 4) for number in range(3)
    ]
    assert all(rank["modes"] == {Mode.OVERLAPPED} and rank["lines"] == [] for rank in timed)
    # The gate is not even installed; windows install it.
    assert [rank["gate"] for rank in (*timed, *moved)] == [False, False, True, True]

    assert len(read(tmp_path / "moved").windows) >= 1
    assert not (tmp_path / "by-the-script").exists()

    (line,) = wrong[0]["lines"]
    assert f"measuring is switched off on all ranks, training goes on: {TIME_ONLY}" in line
    assert wrong[1]["lines"] == []
    assert len({rank["weights"] for job in (timed, moved, wrong) for rank in job}) == 1
