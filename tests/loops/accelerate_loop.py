"""A loop of our own around Accelerate's ``Accelerator``, in the shape of its examples.

Two micro-batches a step, clipping, a schedule, an evaluation after each epoch. Accelerate's own examples are not in the
package; ``test_accelerate.py`` runs them from a checkout.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from tests.loops.watching import NUM_STEPS

STEPS_PER_EPOCH, MICRO_BATCHES, BATCH, NUM_RANKS = 10, 2, 4, 2


def train(options: dict[str, Any] | None) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
    made = torch.Generator().manual_seed(1)
    num_samples = STEPS_PER_EPOCH * MICRO_BATCHES * BATCH * NUM_RANKS
    inputs, targets = torch.randn(num_samples, 16, generator=made), torch.randint(0, 4, (num_samples,), generator=made)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, targets), batch_size=BATCH, shuffle=True
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    model, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    monitor = None
    if options is not None:
        from overlap_callbacks.integrations.transformers import attach_accelerate

        monitor = attach_accelerate(optimizer, **options)
    for _ in range(NUM_STEPS // STEPS_PER_EPOCH):
        model.train()
        for batch, target in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(batch), target))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), contextlib.nullcontext() if monitor is None else monitor.pause():
            accelerator.gather_for_metrics(model(inputs[:BATCH]).argmax(-1))
    if monitor is not None:
        monitor.close()
