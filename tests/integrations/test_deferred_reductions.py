"""Jobs that reduce each gradient in each micro-batch are advised to defer it; others are not."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.report import record
from tests.distributed import run_ranks
from tests.toggling import at_night

WIDTH, LAYERS, MICRO_BATCHES, STEPS = 470, 4, 4, 36  # 3.54 MB of parameters
SCHEDULE = {
    "spread": False, "first_step": 3, "every_n_steps": 40, "repeats": 1, "steps_per_block": 2, "warmup_steps": 1,
    "profiled_steps": 2,
}  # fmt: skip


def _train(rank: int, folder: str, way: str, deferred: bool) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    if way == "ddp":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    else:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = attach(optimizer, model=model, run_dir=folder, strict=True, max_overhead=None, **SCHEDULE)
    for _ in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            last = micro_batch == MICRO_BATCHES - 1
            around = contextlib.nullcontext()
            if deferred and way == "ddp" and not last:
                around = model.no_sync()  # type: ignore[operator]
            elif deferred and way == "fsdp2":
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            with around:
                model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()


@pytest.mark.parametrize("way", at_night(["ddp", "fsdp2"], ["fsdp2"]))
def test_gradients_reduced_at_each_micro_batch_are_to_be_deferred_and_no_others(tmp_path: Path, way: str) -> None:
    for deferred in (False, True):
        folder = tmp_path / str(deferred)
        run_ranks(_train, 2, str(folder), way, deferred, timeout_s=120)
        found = record.read(folder).bottleneck()
        assert found is not None
        advice = {row.topic: row for row in found.advice}
        assert ("defer-reductions" in advice) is not deferred
        if not deferred:
            assert "Each gradient is reduced 4 times a step: defer it" in advice["defer-reductions"].what
            assert "13.5 MiB for 3.38 MiB of gradients" in advice["defer-reductions"].why
            assert "accumulate" not in advice.get("fewer-bytes", advice["defer-reductions"]).what
