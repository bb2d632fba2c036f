"""Lightning's ``Trainer`` with DDP and two micro-batches; where there are options, with ``OverlapCallback``."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch
from torch import nn

from tests.loops.watching import NUM_STEPS

RANKS_LOAD = ("lightning.pytorch",)


def train(options: dict[str, Any] | None, folder: str, micro_batches: int) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
            # A collective of its own, which no training step has.
            self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    callbacks = []
    if options is not None:
        from overlap_callbacks.integrations.lightning import OverlapCallback

        callbacks.append(OverlapCallback(**options))
    made = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(320, 16, generator=made), torch.randint(0, 4, (320,), generator=made)
    data = torch.utils.data.TensorDataset(inputs, targets)
    os.environ.setdefault("NODE_RANK", "0")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=NUM_STEPS,
        accumulate_grad_batches=micro_batches,
        gradient_clip_val=1.0,
        val_check_interval=micro_batches * 10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=callbacks,
    )
    trainer.fit(
        Classifier(),
        torch.utils.data.DataLoader(data, batch_size=4, shuffle=True),
        torch.utils.data.DataLoader(data, batch_size=160),
    )
