"""Lightning on simulated devices, with its own set-up of ranks: one callback gives a record that equals the log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overlap_callbacks.report import record
from tests.distributed import run_ranks
from tests.simulated_gpu.jobs import FIRST_STEP
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.truth import DeviceLog

RANKS_LOAD = ("lightning.pytorch",)

WIDTH, LAYERS, BATCH = 1024, 6, 256
NUM_STEPS = FIRST_STEP + 70


def _train(rank: int, parameters: Parameters, folder: str) -> int:
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

    options: dict[str, Any] = {"first_step": FIRST_STEP, "every_n_steps": 1000, "spread": False, "max_overhead": None}
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=2,
        strategy=pl.strategies.DDPStrategy(bucket_cap_mb=4),
        max_steps=NUM_STEPS,
        default_root_dir=folder,
        callbacks=[OverlapCallback(run_dir=str(Path(folder, "run")), strict=True, **options)],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    data = torch.randn(NUM_STEPS * BATCH * 2, WIDTH)
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=BATCH))
    return os.getpid()


def test_a_lightning_record_equals_the_devices_log(tmp_path: Path) -> None:
    told = Parameters(log=tmp_path / "log", rules="gemm=4000", link_gbs=1, compute_slowdown=1.3)
    processes = run_ranks(_train, 2, told, str(tmp_path), backend="", timeout_s=120)
    (window,) = record.read(tmp_path / "run").windows
    assert window.valid, window.problems
    assert window.compute_slowdown is not None
    assert window.compute_isolated_ms is not None
    log = DeviceLog.read(tmp_path / "log", processes[0]).tasks
    products = [task for task in log if "gemm" in task.name]
    # A step has 6 products forwards and 11 backwards; of its smaller kernels none takes as long as 1 % of a product.
    assert window.compute_isolated_ms.value == pytest.approx(17 * 4, rel=0.02)
    steps = [products[at : at + 17] for at in range(0, len(products), 17)]
    slowdowns = [sum(task.duration_ns for task in step) / (17 * 4e6) for step in steps]
    # Sequential steps have none. In overlapped ones it depends on how late the ranks' hosts are.
    beside = [slowdown for slowdown in slowdowns if slowdown > 1.001]
    assert 0.995 * min(beside) < 1 + window.compute_slowdown.value < 1.005 * max(beside)
