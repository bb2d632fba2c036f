"""A delay that is put into a part of a step appears in that part, in every adapter; and parts add up exactly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from overlap_callbacks.analysis.step_vectors import PARTS, StepVectors
from tests.distributed import run_ranks
from tests.integrations import megatron_jobs

RANKS_LOAD = (
    "lightning.pytorch",
    "transformers.trainer",
    "accelerate",
    "tests.integrations.deepspeed_jobs",
    *megatron_jobs.LOADS,
)

DELAY_S = 0.04
STEPS = 48
# In turn, a part is delayed in every sixth step: rank 1's backward pass alone holds up the collectives of rank 0.
DELAYED = ("input", "forward", "backward", "optimizer", "collective")


class Delays:
    """Delays what is called for the n-th time, once in six times."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._calls = dict.fromkeys(("input", "forward", "backward", "optimizer"), 0)
        self.given = dict.fromkeys((*DELAYED, "waiting"), 0)

    def of(self, part: str) -> None:
        self._calls[part] += 1
        place = self._calls[part] % 6
        if place == DELAYED.index(part):
            time.sleep(DELAY_S)
            self.given[part] += 1
        if part == "backward" and place == DELAYED.index("collective"):
            self.given["waiting"] += self._rank == 0
            time.sleep(DELAY_S * self._rank)

    def slow_down(self, module: nn.Module) -> None:
        """Delay the forward and the backward pass of a part of a model, whose output is a tensor."""
        inner, delays = module.forward, self

        class Late(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                delays.of("forward")
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                delays.of("backward")
                return grad

        module.forward = lambda *args, **kwargs: Late.apply(inner(*args, **kwargs))  # type: ignore[method-assign]

    def slow_down_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda *_: self.of("optimizer"))

    def data(self, inner: Any) -> Iterator[Any]:
        for batch in inner:
            self.of("input")
            yield batch


Found = tuple[dict[str, int], StepVectors]
OPTIONS: dict[str, Any] = {"first_step": 100_000, "every_n_steps": 500, "strict": True, "power": False, "sinks": []}


def pytorch(rank: int, with_model: bool) -> Found:
    from overlap_callbacks.integrations.pytorch import attach

    delays = Delays(rank)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    delays.slow_down(net[1])
    monitor = attach(optimizer, model=model if with_model else None, **OPTIONS)
    delays.slow_down_optimizer(optimizer)
    for batch in delays.data(torch.randn(STEPS, 8, 16)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = monitor._driver.ring.vectors()
    monitor.close()
    return delays.given, found


def pytorch_with_the_model(rank: int, folder: str) -> Found:
    return pytorch(rank, True)


def pytorch_alone(rank: int, folder: str) -> Found:
    return pytorch(rank, False)


def lightning(rank: int, folder: str) -> Found:
    from tests.integrations.test_lightning import Regression, batches, overlap_callback, trainer

    delays = Delays(rank)
    module = Regression()
    delays.slow_down(module.net[1])
    configure = module.configure_optimizers

    def slow_optimizer() -> Any:
        optimizer = configure()
        # Lightning trains the batch within optimizer.step, after the hooks before it.
        optimizer.register_step_post_hook(lambda *_: delays.of("optimizer"))
        return optimizer

    module.configure_optimizers = slow_optimizer
    callback = overlap_callback(**OPTIONS, repeats=1)
    loader = batches(rank, STEPS)
    fetch = loader.dataset.__getitem__

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> torch.Tensor:
            delays.of("input")
            return fetch(index)

    fit = trainer(rank, folder, callback, max_epochs=1)
    kept: list[StepVectors] = []
    end = callback.on_train_end
    callback.on_train_end = lambda *args: (kept.append(callback.monitor._driver.ring.vectors()), end(*args))
    fit.fit(module, torch.utils.data.DataLoader(Data(), batch_size=None))
    return delays.given, kept[0]


def huggingface(rank: int, folder: str) -> Found:
    from tests.integrations.huggingface_jobs import overlap_callback, sentences, trainer

    delays = Delays(rank)
    rows = sentences(200)

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> Any:
            delays.of("input")
            return rows[index]

    callback = overlap_callback(**OPTIONS)
    train = trainer(rank, folder, callback, data=Data(), max_steps=STEPS, per_device_train_batch_size=1)
    delays.slow_down(train.model.transformer.ln_f)
    train.optimizer = torch.optim.AdamW(train.model.parameters())
    delays.slow_down_optimizer(train.optimizer)
    kept: list[StepVectors] = []
    close = callback._close
    callback._close = lambda *args: (
        kept.append(callback.monitor._driver.ring.vectors()) if callback.monitor else None,
        close(*args),
    )
    train.train()
    return delays.given, kept[0]


def deepspeed(rank: int, folder: str, stage: int = 1) -> Found:
    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs

    deepspeed_jobs.set_up(rank)
    delays = Delays(rank)
    training = deepspeed_jobs.Training(rank, deepspeed_jobs.config(stage, zero={"reduce_bucket_size": 100_000}))
    engine = training.engine
    delays.slow_down(engine.module[-1])
    step = engine.optimizer.step
    engine.optimizer.step = lambda *args, **kwargs: (delays.of("optimizer"), step(*args, **kwargs))[1]
    monitor = attach(engine, **OPTIONS)
    for _ in delays.data(range(STEPS)):
        training.step()
    found = monitor._driver.ring.vectors()
    monitor.close()
    return delays.given, found


def megatron(rank: int, folder: str) -> Found:
    from overlap_callbacks.integrations.megatron import attach
    from tests.integrations import megatron_shims

    delays = Delays(rank)
    megatron_shims.install()
    with megatron_jobs.job(megatron_jobs.Setup()) as job:
        delays.slow_down(job.model[0].module.decoder.final_layernorm)
        step = job.optimizer.step
        job.optimizer.step = lambda: (delays.of("optimizer"), step())[1]
        data = job._data
        job._data = lambda step: delays.data(data(step))
        monitor = attach(job.model, job.optimizer, **OPTIONS)
        for _ in range(STEPS):
            job.step()
        found = monitor._driver.ring.vectors()
        monitor.close()
    return delays.given, found


JOBS = (pytorch_with_the_model, pytorch_alone, lightning, huggingface, deepspeed, megatron)


def late_steps(vectors: StepVectors, part: str) -> int:
    """In how many steps a part took longer than usual by 95 % of the delay at least."""
    of_part = vectors.parts_ns[:, PARTS.index(part)]
    return int((of_part >= np.quantile(of_part, 0.1) + 0.95e9 * DELAY_S).sum())


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_a_delay_appears_in_the_part_that_it_was_put_into(job: Callable[..., Found], tmp_path: Path) -> None:
    for rank, (given, vectors) in enumerate(run_ranks(job, 2, str(tmp_path))):
        assert len(vectors) >= STEPS - 3
        assert (vectors.step_ns[:-1] == np.diff(vectors.begun_ns)).all()  # exactly
        assert (vectors.parts_ns >= 0).all()
        for part, number in given.items():
            if part == "collective" or (part == "waiting" and rank):
                continue
            where = part
            if job is pytorch_alone and part in ("input", "forward", "backward"):
                where = "input_forward_backward"
            assert late_steps(vectors, where) >= number - 1 >= 4, (rank, part, vectors.parts_ns // 1_000_000)
        if job is pytorch_alone:
            assert not vectors.parts_ns[:, 1:4].any()
        else:
            others = vectors.parts_ns[1:, [PARTS.index(name) for name in ("input_forward_backward", "other")]]
            assert np.median(others.sum(axis=1) / vectors.step_ns[1:]) < 0.02
