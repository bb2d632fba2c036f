"""A delay that is put into a part of a step appears in that part, in every adapter; and parts add up exactly."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlap_callbacks.analysis.job.frontier import total
from overlap_callbacks.analysis.step_vectors import PARTS, StepVectors
from overlap_callbacks.report import record
from overlap_callbacks.report.views.short import short_of
from tests.distributed import run_alone, run_ranks
from tests.integrations import megatron_jobs

RANKS_LOAD = (
    "lightning.pytorch",
    "transformers.trainer",
    "accelerate",
    "tests.integrations.deepspeed_jobs",
    *megatron_jobs.LOADS,
)

DELAY_S = 0.04
# Of rank 1's backward pass, on a machine where a pass takes long itself.
MOST_DELAY_S, TIMES_OWN = 0.5, 4
STEPS = 48
# In turn, a part is delayed in every sixth step: rank 1's backward pass alone holds up the collectives of rank 0.
DELAYED = ("input", "forward", "backward", "optimizer", "collective")


class Delays:
    """Delays what is called for the n-th time, once in six times, and notes from when to when."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._begun_s = self._own_s = 0.0  # forward and backward pass of a step without a delay
        self._calls = dict.fromkeys(("input", "forward", "backward", "optimizer"), 0)
        # In ns of a clock that the ranks share. ``collective``: in the backward pass of rank 1 alone.
        self.given: dict[str, list[tuple[int, int]]] = {part: [] for part in DELAYED}

    def of(self, part: str) -> None:
        self._calls[part] += 1
        delayed = (*DELAYED, "nothing")[self._calls[part] % 6]
        if delayed == part:
            self._delay(part, DELAY_S)
        elif part == "backward" and delayed == "collective":
            self._delay(delayed, self._rank * min(max(DELAY_S, TIMES_OWN * self._own_s), MOST_DELAY_S))
        elif delayed == "nothing":
            now_s = time.perf_counter()
            if part == "forward":
                self._begun_s = now_s
            elif part == "optimizer":
                self._own_s = now_s - self._begun_s

    def _delay(self, part: str, delay_s: float) -> None:
        began_ns = time.perf_counter_ns()
        time.sleep(delay_s)
        self.given[part].append((began_ns, time.perf_counter_ns()))

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


Found = tuple[dict[str, list[tuple[int, int]]], StepVectors]
OPTIONS: dict[str, Any] = {"first_step": 100_000, "every_n_steps": 500, "strict": True, "power": False, "sinks": []}


def pytorch(rank: int, with_model: bool, wrap: Callable[..., nn.Module] = nn.parallel.DistributedDataParallel) -> Found:
    from overlap_callbacks.integrations.pytorch import attach

    delays = Delays(rank)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    delays.slow_down(net[1])
    model = wrap(net)
    optimizer = torch.optim.AdamW(model.parameters())
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


def fsdp2(rank: int, folder: str) -> Found:
    from torch.distributed.fsdp import fully_shard

    return pytorch(rank, True, fully_shard)


def pipeline(rank: int, folder: str) -> Found:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from overlap_callbacks.integrations.pytorch import attach

    delays = Delays(rank)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    delays.slow_down(net[1])
    optimizer = torch.optim.AdamW(net.parameters())
    stage = PipelineStage(net, rank, 2, torch.device("cpu"), input_args=(torch.randn(4, 16),))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    monitor = attach(optimizer, model=net, pipeline=schedule, **OPTIONS)
    delays.slow_down_optimizer(optimizer)
    for batch in delays.data(torch.randn(STEPS, 8, 16)):
        schedule.step(batch) if rank == 0 else schedule.step(target=batch)
        optimizer.step()
        optimizer.zero_grad()
    found = monitor._driver.ring.vectors()
    monitor.close()
    return delays.given, found


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


def zero2(rank: int, folder: str) -> Found:
    return deepspeed(rank, folder, 2)


def zero3(rank: int, folder: str) -> Found:
    return deepspeed(rank, folder, 3)


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
MORE_JOBS = (fsdp2, pipeline, zero2, zero3)


def times_in(part: str, vectors: StepVectors, moments_ns: Sequence[int]) -> dict[int, int]:
    """The time in a part of the step in which a moment lies, by the moment's place, as far as the step is known."""
    last_ns = vectors.begun_ns[-1] + vectors.step_ns[-1]
    known = {place: ns for place, ns in enumerate(moments_ns) if vectors.begun_ns[0] <= ns < last_ns}
    rows = {place: int(np.searchsorted(vectors.begun_ns, ns, side="right")) - 1 for place, ns in known.items()}
    return {place: int(vectors.parts_ns[row, PARTS.index(part)]) for place, row in rows.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", [*JOBS, *[pytest.param(job, marks=pytest.mark.nightly) for job in MORE_JOBS]], ids=lambda job: job.__name__
)
def test_a_delay_appears_in_the_part_that_it_was_put_into(job: Callable[..., Found], tmp_path: Path) -> None:
    ranks = run_ranks(job, 2, str(tmp_path))
    for given, vectors in ranks:
        assert len(vectors) >= STEPS - 3
        assert (vectors.step_ns[:-1] == np.diff(vectors.begun_ns)).all()  # exactly
        assert (vectors.parts_ns >= 0).all()
        for part, delays in given.items():
            if part == "collective":
                continue
            where = part
            if job is pytorch_alone and part in ("input", "forward", "backward"):
                where = "input_forward_backward"
            found_ns = times_in(where, vectors, [began_ns for began_ns, _ in delays])
            assert len(found_ns) >= len(delays) - 1 >= 4, part
            for place, part_ns in found_ns.items():
                began_ns, ended_ns = delays[place]
                assert part_ns >= 0.95 * (ended_ns - began_ns), (part, vectors.parts_ns // 1_000_000)
        if job is pytorch_alone:
            assert not vectors.parts_ns[:, 1:4].any()
        else:
            others = vectors.parts_ns[1:, [PARTS.index(name) for name in ("input_forward_backward", "other")]]
            assert np.median(others.sum(axis=1) / vectors.step_ns[1:]) < 0.02
    # What rank 0 does itself, from where rank 1 is late, is no waiting.
    (first, vectors), (second, _) = ranks
    came_ns = [began_ns for began_ns, _ in (second if job is pipeline else first)["collective"]]
    late_ns = [ended_ns - ns for ns, (_, ended_ns) in zip(came_ns, second["collective"], strict=True)]
    waited_ns = times_in("waiting", vectors, came_ns)
    own = (
        ["forward", "backward"]
        if job is pipeline
        else ["input_forward_backward" if job is pytorch_alone else "backward"]
    )
    by_part = [times_in(part, vectors, came_ns) for part in own]
    own_ns = {place: sum(times[place] for times in by_part) for place in waited_ns}
    assert len(waited_ns) >= len(late_ns) - 1 >= 4
    for place, waited in waited_ns.items():
        assert waited >= 0.95 * late_ns[place] - own_ns[place], (late_ns[place], vectors.parts_ns // 1_000_000)
    # Collectives that ZeRO-3 waits for within the pass are in it.
    assert any(late_ns[place] > 2 * own for place, own in own_ns.items()) or job is zero3


def a_model(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return net, torch.optim.AdamW(net.parameters())


def train_compiled_copied_and_saved(rank: int) -> dict[str, Any]:
    from overlap_callbacks.integrations.pytorch import attach

    found: dict[str, Any] = {}
    for attached in (False, True):
        net, optimizer = a_model(rank)
        monitor = attach(optimizer, model=net, **{**OPTIONS, "strict": False}) if attached else None
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        for model in (net, net, net, compiled, compiled, compiled):
            model(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[f"weights {attached}"] = [p.detach().numpy().tobytes() for p in net.parameters()]
        if monitor is not None:
            ring = monitor._driver.ring
            found["vectors"] = ring.vectors()
            torch.save(net, io.BytesIO())
            num_marks = len(ring._items)
            copy.deepcopy(net)(torch.ones(4, 8)).sum().backward()
            pickle.loads(pickle.dumps(net))(torch.ones(4, 8)).sum().backward()
            torch.export.export(net, (torch.ones(4, 8),), strict=False)
            found["marks by copies and exports"] = len(ring._items) - num_marks
            monitor.close()
            found["hooks left"] = [*net._forward_hooks, *net._forward_pre_hooks, *optimizer._optimizer_step_pre_hooks]
    return found


def test_marks_break_no_graph_stay_out_of_copies_and_change_no_bit() -> None:
    (found,) = run_ranks(train_compiled_copied_and_saved, 1)
    assert found["weights False"] == found["weights True"]
    assert found["marks by copies and exports"] == 0
    assert found["hooks left"] == []
    eager, compiled = found["vectors"].parts_ns[0], found["vectors"].parts_ns[-1]
    names = [PARTS.index(name) for name in ("input", "forward", "backward", "waiting", "optimizer")]
    assert (eager[names] > 0).all()
    # What is compiled is not divided, but ends.
    assert compiled[names[:3]].tolist() == [0, 0, 0]
    assert (compiled[[0, *names[3:]]] > 0).all()


def train_without_a_process_group(folder: str) -> bool:
    multiprocessing.parent_process = lambda: None  # as in a script: this process is a test's child
    os.environ.pop("WORLD_SIZE", None)
    return train_with_a_late_rank(0, folder)


def train_with_a_late_rank(rank: int, folder: str) -> bool:
    from overlap_callbacks.integrations.pytorch import attach

    net, optimizer = a_model(rank)
    model = nn.parallel.DistributedDataParallel(net) if dist.is_initialized() and dist.get_world_size() > 1 else net
    with attach(optimizer, model=model, **{**OPTIONS, "sinks": None, "strict": False}, run_dir=folder) as monitor:
        for _ in range(280):
            time.sleep(0.005 * rank)
            model(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()
        return monitor.active


@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_the_record_has_the_parts_of_all_steps_and_the_rank_that_holds_others_up(ranks: int, tmp_path: Path) -> None:
    if ranks:
        assert run_ranks(train_with_a_late_rank, ranks, str(tmp_path)) == [True] * ranks
    else:
        assert run_alone(train_without_a_process_group, str(tmp_path))
        ranks = 1
        assert "One rank: nothing to overlap" in short_of(record.read(tmp_path)).headline[0]
    found = record.read(tmp_path)
    assert [(row.first_step, row.num_ranks) for row in found.frontier] == [(0, ranks), (128, ranks), (256, ranks)]
    whole = total(found.frontier)
    assert whole is not None
    assert whole.num_steps >= 275
    if ranks == 1:
        assert whole.frontier_ns == whole.mean_ns
    else:
        # Rank 1's delays are in its input, and so in the latest rank's. What one rank holds the other up by is half of
        # what it takes more: in all, the two differ by what rank 1 takes less the mean, whatever rank 0 takes.
        delays_ns = 0.95 * 5e6 * whole.num_steps
        assert whole.frontier_ns["input"] >= delays_ns
        held_up_ns = {row.rank: row.ns for row in whole.held_up if row.part == "input"}
        assert held_up_ns[1] - held_up_ns.get(0, 0) >= delays_ns - whole.mean_ns["input"]
        assert whole.held_up[0].ns == max(row.ns for row in whole.held_up)
        assert whole.frontier_ns["waiting"] < whole.mean_ns["waiting"]
