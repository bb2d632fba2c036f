"""Lightning on simulated devices, with its own set-up of ranks: one callback gives a record that equals the log."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overlap_callbacks import Mode
from overlap_callbacks.report import record
from tests.distributed import run_ranks
from tests.simulated_gpu.figures import Case, compare
from tests.simulated_gpu.jobs import FIRST_STEP
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.truth import DeviceLog, StepTruth

RANKS_LOAD = ("lightning.pytorch",)

WIDTH, LAYERS, BATCH = 1024, 6, 256
NUM_STEPS = FIRST_STEP + 70
FIGURES = (
    "compute_ms", "compute_isolated_ms", "compute_busy_ms", "slowest_compute_ms", "comm_ms", "comm_isolated_ms",
    "hidden_comm_ms", "exposed_comm_ms", "waiting_ms", "waiting_isolated_ms", "overlap_ratio", "1 + compute_slowdown",
    "1 + comm_slowdown", "comm/allreduce_busbw_gb_s", "1 + slowdown of gemm during all_reduce",
)  # fmt: skip


def _train(rank: int, parameters: Parameters, folder: str) -> tuple[int, list[int], list[int], list[Mode]]:
    parameters.apply()
    import lightning.pytorch as pl

    from overlap_callbacks.integrations.lightning import OverlapCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layers(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    begun: list[int] = []
    ended: list[int] = []
    modes: list[Mode] = []

    class Notes(pl.Callback):
        """Stands before the callback that measures: when a step ends here, the mode is still that of the step."""

        def on_train_batch_start(self, *_: Any) -> None:
            begun.append(time.monotonic_ns())

        def on_train_batch_end(self, *_: Any) -> None:
            assert measuring.monitor is not None
            modes.append(measuring.monitor.mode)
            ended.append(time.monotonic_ns())

    options: dict[str, Any] = {"first_step": FIRST_STEP, "every_n_steps": 1000, "spread": False, "max_overhead": None}
    measuring = OverlapCallback(run_dir=str(Path(folder, "run")), strict=True, **options)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=2,
        strategy=pl.strategies.DDPStrategy(bucket_cap_mb=4),
        max_steps=NUM_STEPS,
        default_root_dir=folder,
        callbacks=[Notes(), measuring],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    data = torch.randn(NUM_STEPS * BATCH * 2, WIDTH)
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=BATCH))
    torch.cuda.synchronize()
    return os.getpid(), begun, ended, modes


def test_a_lightning_record_equals_the_devices_log(tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"rules": "gemm=4000", "link_gbs": 1, "compute_slowdown": 1.3}
    told = Parameters(log=tmp_path / "log", **parameters)
    trained = run_ranks(_train, 2, told, str(tmp_path), backend="", timeout_s=120)
    (window,) = record.read(tmp_path / "run").windows
    assert window.valid, window.problems
    truths: list[list[StepTruth]] = []
    sequential: list[StepTruth] = []
    for process, begun, ended, modes in trained:
        # Before each batch Lightning broadcasts whether it was told to stop. That belongs to no step.
        moments = [moment for step in zip(begun, ended, strict=True) for moment in step]
        truths.append(DeviceLog.read(tmp_path / "log", process).steps(moments)[::2])
        sequential += [step for step, mode in zip(truths[-1], modes, strict=True) if mode is Mode.SEQUENTIAL]
    assert len(sequential) > 16
    assert max(step.hidden_ms for step in sequential) == 0
    # 6 products forwards and 11 backwards; of the smaller kernels none takes as long as 1 % of a product.
    for step in sequential:
        assert step.compute_ms == pytest.approx(17 * 4, rel=0.02)
    compared = {one.name: one for one in compare(window, truths, Case("lightning", parameters=parameters))}
    # Not the times of steps: the device is idle between them, while Lightning fetches a batch.
    for name in FIGURES:
        assert compared[name].holds, compared[name]
