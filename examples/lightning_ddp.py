"""A Lightning trainer; the callback is all that the library needs.

python examples/lightning_ddp.py
"""

import logging

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from overlap_callbacks.integrations.lightning import OverlapCallback

logging.basicConfig(format="%(message)s")
logging.getLogger("overlap_callbacks").setLevel(logging.INFO)  # shows a line for each window


class Module(pl.LightningModule):
    """A small network on random data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """Mean square of the output."""
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with its defaults."""
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    on_gpu = torch.cuda.device_count() > 1
    if not on_gpu:
        torch.set_num_threads(1)
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="nccl" if on_gpu else "gloo", bucket_cap_mb=1),
        max_steps=200,
        callbacks=[OverlapCallback(every_n_steps=100, max_overhead=None)],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(4096, 512), batch_size=64))
