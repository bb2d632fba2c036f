"""Jobs on simulated devices whose loop is a trainer's: Lightning's and the Hugging Face Trainer's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overlap_callbacks import Mode

Pins = Callable[[int], Mode | None]


@dataclass
class Notes:
    """What callbacks see of a training. They come before the callback that measures.

    When a step ends for them, the mode is still that of the step.

    Attributes:
        measuring: the callback that measures; None without the library.
        pins: the mode from each step on; None where modes are left alone.
        moments: when each step began and ended; as ``time.monotonic_ns``.
        modes: of each step.
        arms: that steps had.
        losses: of each step.
        weights: the model's, at the end.
    """

    measuring: Any = None
    pins: Pins | None = None
    moments: list[int] = field(default_factory=list)
    modes: list[Mode] = field(default_factory=list)
    arms: set[str] = field(default_factory=set)
    losses: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)

    def step_begins(self) -> None:
        monitor = None if self.measuring is None else self.measuring.monitor
        if monitor is not None and self.pins is not None:
            monitor.force(self.pins(len(self.modes)))
        self.moments.append(time.monotonic_ns())

    def step_ends(self) -> None:
        monitor = None if self.measuring is None else self.measuring.monitor
        self.modes.append(Mode.OVERLAPPED if monitor is None else monitor.mode)
        if monitor is not None and monitor.arm is not None:
            self.arms.add(monitor.arm)
        self.moments.append(time.monotonic_ns())

    def training_ends(self, model: nn.Module) -> None:
        self.weights = [parameter.detach() for parameter in model.parameters()]


def lightning(
    notes: Notes, folder: Path, ranks: int, steps: int, width: int, layers: int, batch: int, bucket_mb: float
) -> None:
    """Train linear layers with Lightning's DDP."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = self.layers(batch).square().mean()
            notes.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Watch(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            notes.step_begins()

        def on_train_batch_end(self, *_: Any) -> None:
            notes.step_ends()

        def on_train_end(self, trainer: Any, module: nn.Module) -> None:
            notes.training_ends(module)

    torch.manual_seed(0)
    data = torch.randn(steps * batch * ranks, width)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=ranks,
        strategy=pl.strategies.DDPStrategy(bucket_cap_mb=bucket_mb),
        max_steps=steps,
        default_root_dir=folder,
        callbacks=[Watch(), *([] if notes.measuring is None else [notes.measuring])],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=batch))
    torch.cuda.synchronize()


def hugging_face(notes: Notes, folder: Path, rank: int, steps: int) -> None:
    """Train a small GPT-2 with the Hugging Face Trainer."""
    from transformers import TrainerCallback

    from tests.integrations import huggingface_jobs

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            notes.step_begins()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            notes.step_ends()

        def on_train_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
            notes.training_ends(model)

    callbacks = [Watch(), *([] if notes.measuring is None else [notes.measuring])]
    trainer = huggingface_jobs.trainer(rank, folder, *callbacks, max_steps=steps, use_cpu=False)
    trainer.model.register_forward_hook(lambda _, __, found: notes.losses.append(found.loss.detach()))
    trainer.train()
    torch.cuda.synchronize()
