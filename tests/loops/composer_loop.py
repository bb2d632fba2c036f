"""Composer's ``Trainer``: where there are options, ``attach`` on its optimizer, in a callback of Composer's.

Composer 0.32 asks for a torch before 2.7.1, and this library for 2.8: pip refuses to install both. Where Composer was
installed without its dependencies, it is tried all the same.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from tests.loops.cpu_shims import stub_modules
from tests.loops.watching import NUM_STEPS


def train(options: dict[str, Any] | None, micro_batch: int) -> None:
    if importlib.util.find_spec("torchvision") is None:
        parts = ("transforms", "transforms.functional", "datasets", "models", "models.resnet", "ops", "utils")
        stub_modules("torchvision", *[f"torchvision.{part}" for part in parts])
    from composer import Callback, Trainer
    from composer.models import ComposerModel

    class Net(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))

        def forward(self, batch: Any) -> Any:
            return self.net(batch[0])

        def loss(self, outputs: Any, batch: Any, *_: Any, **__: Any) -> Any:
            return torch.nn.functional.cross_entropy(outputs, batch[1])

    class Overlap(Callback):
        def fit_start(self, state: Any, logger: Any) -> None:
            from overlap_callbacks.integrations.pytorch import attach

            self.monitor = attach(state.optimizers[0], **(options or {}))

        def fit_end(self, state: Any, logger: Any) -> None:
            self.monitor.close()

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2 * 8 * NUM_STEPS, 16, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, torch.randint(0, 4, (len(inputs),), generator=generator))
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False, num_replicas=2, rank=int(os.environ["RANK"]))
    net = Net()
    Trainer(
        model=net,
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler),
        optimizers=torch.optim.AdamW(net.parameters(), lr=1e-2),
        max_duration=f"{NUM_STEPS}ba",
        device="cpu",
        device_train_microbatch_size=micro_batch,
        callbacks=[] if options is None else [Overlap()],
        progress_bar=False,
        seed=1,
    ).fit()
