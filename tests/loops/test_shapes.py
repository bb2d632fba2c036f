"""The shapes that training loops have, in our own words: what nanoGPT, minGPT and their like do around DDP.

These run everywhere. The loops themselves are in the files beside this one, and need their packages or checkouts.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.loops.harness import compare, expect_measured
from tests.loops.watching import NUM_STEPS


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def _batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def _attached(optimizer: torch.optim.Optimizer, options: dict[str, Any] | None) -> Any:
    from overlap_callbacks.integrations.pytorch import attach

    return contextlib.nullcontext() if options is None else attach(optimizer, **options)


def _toggled_synchronisation(options: dict[str, Any] | None, accumulate: int, scaler_on: bool) -> None:
    """Gradients accumulate by ``require_backward_grad_sync``; with a scaler, clipping, and batches fetched early."""
    dist.init_process_group("gloo")
    data = torch.Generator().manual_seed(dist.get_rank())
    model = DistributedDataParallel(_network(), bucket_cap_mb=0.005)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=scaler_on, init_scale=2.0**8)
    inputs, targets = _batch(data)
    with _attached(optimizer, options):
        for step in range(NUM_STEPS):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (step + 1) / NUM_STEPS
            for micro_batch in range(accumulate):
                model.require_backward_grad_sync = micro_batch == accumulate - 1
                loss = nn.functional.cross_entropy(model(inputs), targets) / accumulate
                inputs, targets = _batch(data)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize(("accumulate", "scaler_on"), [(1, False), (4, False), (4, True)])
def test_synchronisation_toggled_by_hand(accumulate: int, scaler_on: bool, tmp_path: Path) -> None:
    expect_measured(compare(_toggled_synchronisation, tmp_path, accumulate, scaler_on))


def _epochs(options: dict[str, Any] | None) -> None:
    """Short epochs with a sampler and a loader, ``no_sync``, an evaluation on all ranks, and a checkpoint on one."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    made = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(160, 16, generator=made), torch.randint(0, 4, (160,), generator=made)
    )
    sampler = torch.utils.data.DistributedSampler(data, seed=0)
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)  # 10 batches a rank, 5 steps an epoch
    model = DistributedDataParallel(_network(), bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    with _attached(optimizer, options):
        for epoch in range(NUM_STEPS // 5 + 1):
            sampler.set_epoch(epoch)
            model.train()
            for index, (inputs, targets) in enumerate(loader):
                last = index % 2 == 1
                with contextlib.nullcontext() if last else model.no_sync():
                    nn.functional.cross_entropy(model(inputs), targets).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
            model.eval()
            with torch.no_grad():
                total = model(data[:8][0]).sum()
                dist.all_reduce(total)
            if rank == 0:
                model.module.state_dict()
            dist.barrier()


def test_epochs_with_evaluations_and_checkpoints_between(tmp_path: Path) -> None:
    window = compare(_epochs, tmp_path)
    assert window.complete
    assert window.ranks == (0, 1)
    # The steps after an evaluation communicate more than the recorded one. They do not count, and a note says so.
    assert any("left out" in problem for problem in window.problems), window.problems


def _two_optimizers(options: dict[str, Any] | None) -> None:
    """Two models that train in turn, each with its DDP and optimizer, as generator and discriminator do."""
    dist.init_process_group("gloo")
    data = torch.Generator().manual_seed(dist.get_rank())
    models = [DistributedDataParallel(_network(), bucket_cap_mb=0.005) for _ in range(2)]
    first, second = (torch.optim.Adam(model.parameters(), lr=1e-3) for model in models)
    with _attached(second, options):
        for _ in range(NUM_STEPS):
            for model, optimizer in zip(models, (first, second), strict=True):
                inputs, targets = _batch(data)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()


def test_two_models_in_turn(tmp_path: Path) -> None:
    expect_measured(compare(_two_optimizers, tmp_path))
