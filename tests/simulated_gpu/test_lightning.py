"""Lightning on simulated devices, with its own set-up of ranks: one callback gives a record that equals the log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks import Mode
from overlap_callbacks.report import record
from tests.distributed import run_ranks
from tests.simulated_gpu.figures import Case, compare
from tests.simulated_gpu.jobs import FIRST_STEP
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.trainers import Notes, lightning
from tests.simulated_gpu.truth import DeviceLog, StepTruth

RANKS_LOAD = ("lightning.pytorch",)

WIDTH, LAYERS, BATCH = 1024, 6, 256
NUM_STEPS = FIRST_STEP + 70
FIGURES = (
    "compute_ms", "compute_isolated_ms", "compute_busy_ms", "slowest_compute_ms", "comm_ms", "comm_isolated_ms",
    "hidden_comm_ms", "exposed_comm_ms", "waiting_ms", "waiting_isolated_ms", "overlap_ratio", "1 + compute_slowdown",
    "1 + comm_slowdown", "comm/allreduce_busbw_gb_s", "1 + slowdown of gemm during all_reduce",
)  # fmt: skip


def _train(rank: int, parameters: Parameters, folder: str) -> tuple[int, Notes]:
    parameters.apply()
    from overlap_callbacks.integrations.lightning import OverlapCallback

    options: dict[str, Any] = {"first_step": FIRST_STEP, "every_n_steps": 1000, "spread": False, "max_overhead": None}
    notes = Notes(OverlapCallback(run_dir=str(Path(folder, "run")), strict=True, **options))
    lightning(notes, Path(folder), 2, NUM_STEPS, WIDTH, LAYERS, BATCH, bucket_mb=4)
    return os.getpid(), Notes(moments=notes.moments, modes=notes.modes)


def test_a_lightning_record_equals_the_devices_log(tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"rules": "gemm=4000", "link_gbs": 1, "compute_slowdown": 1.3}
    told = Parameters(log=tmp_path / "log", **parameters)
    trained = run_ranks(_train, 2, told, str(tmp_path), backend="", timeout_s=120)
    (window,) = record.read(tmp_path / "run").windows
    assert window.valid, window.problems
    truths: list[list[StepTruth]] = []
    sequential: list[StepTruth] = []
    for process, notes in trained:
        # Before each batch Lightning broadcasts whether it was told to stop. That belongs to no step.
        truths.append(DeviceLog.read(tmp_path / "log", process).steps(notes.moments)[::2])
        sequential += [step for step, mode in zip(truths[-1], notes.modes, strict=True) if mode is Mode.SEQUENTIAL]
    assert len(sequential) > 16
    assert max(step.hidden_ms for step in sequential) == 0
    # 6 products forwards and 11 backwards; of the smaller kernels none takes as long as 1 % of a product.
    for step in sequential:
        assert step.compute_ms == pytest.approx(17 * 4, rel=0.02)
    compared = {one.name: one for one in compare(window, truths, Case("lightning", parameters=parameters))}
    # Not the times of steps: the device is idle between them, while Lightning fetches a batch.
    for name in FIGURES:
        assert compared[name].holds, compared[name]
