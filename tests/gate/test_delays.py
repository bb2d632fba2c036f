"""Delays of collectives on the host: the weights' bits, errors, timeouts, and nothing that stays."""

from __future__ import annotations

import datetime
import gc
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks.gate import delays
from overlap_callbacks.gate.delays import _DelayedWork
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import StepLog
from tests.distributed import run_ranks
from tests.gate.sequences import collective, conflict_of
from tests.simulated_gpu.left_out import Wait

RANKS_LOAD = ("torch",)
DELAY_MS, STEPS = 20.0, 4
Step = Callable[[torch.Tensor], None]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])


def _reduced(model: nn.Module) -> Step:
    """The user's own loop: asynchronous all-reduces."""

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
        for number, work in enumerate(works):
            assert work.wait(datetime.timedelta(seconds=60)) if number % 2 else work.wait()
            assert work.is_completed()

    return step


def _ddp(model: nn.Module) -> Step:
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.005)  # type: ignore[arg-type]
    return lambda batch: parallel(batch).square().mean().backward()


def _functional(model: nn.Module) -> Step:
    """Functional collectives, whose works only torch's registry holds."""

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        found = [functional.all_reduce(parameter.grad, "sum", dist.group.WORLD) for parameter in model.parameters()]
        gc.collect()
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient + 0

    return step


def _synchronous(model: nn.Module) -> Step:
    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    return step


JOBS: dict[str, Callable[[nn.Module], Step]] = {
    "own": _reduced,
    "ddp": _ddp,
    "functional": _functional,
    "synchronous": _synchronous,
}


def _train(job: str, rank: int, delay_ms: float | None) -> tuple[list[torch.Tensor], list[StepLog], float]:
    model = _model()
    step, optimizer, generator = JOBS[job](model), torch.optim.SGD(model.parameters(), 0.1), torch.Generator()
    generator.manual_seed(rank)
    gate, logs, began = Gate(), [], time.perf_counter()
    gate.register()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    told = None if delay_ms is None else {("allreduce_", name, place): delay_ms for place in range(100)}
    for _ in range(STEPS):
        gate.begin_step(sequential=False, delays_ms=told)
        step(torch.randn(4, 32, generator=generator))
        logs.append(gate.end_step())
        assert gate.last_error is None
        optimizer.step()
        optimizer.zero_grad()
    gate.close()
    return [parameter.detach().clone() for parameter in model.parameters()], logs, time.perf_counter() - began


def _compare(rank: int, job: str) -> None:
    plain, logs, _ = _train(job, rank, None)
    assert [log.delays for log in logs] == [()] * STEPS
    for delay_ms in (0.0, DELAY_MS):
        found, logs, took_s = _train(job, rank, delay_ms)
        assert all(map(torch.equal, found, plain))
        for log in logs:  # DDP's buckets are broadcast once
            assert log.delays == (delay_ms,) * [call.operator for call in log.collectives].count("allreduce_") != ()
        assert took_s > STEPS * delay_ms / 1e3
        assert delays._kept == []
    deadline_s = time.monotonic() + 30
    while any(thread.name == "overlap-callbacks-delays" for thread in threading.enumerate()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("job", JOBS)
def test_delays_change_no_bit_and_leave_nothing_behind(job: str) -> None:
    run_ranks(_compare, 2, job)


GROUPS_OF_THREE = {"a": (0, 1, 2), "b": (0, 1), "c": (1, 2), "d": (0, 2)}


def accepted_orders(number: int) -> tuple[list[list[list[str]]], int]:
    """Each rank's collectives, by group, in random orders that the order check accepts; how many it refused."""
    draw, found, refused = random.Random(0), list[list[list[str]]](), 0
    while len(found) < number:
        events = draw.choices(list(GROUPS_OF_THREE), k=draw.randint(2, 10))
        ranks = [[name for name in events if rank in GROUPS_OF_THREE[name]] for rank in range(3)]
        for own in ranks:
            for place in [draw.randrange(len(own) - 1) for _ in range(draw.randrange(3)) if len(own) > 1]:
                own[place : place + 2] = own[place + 1], own[place]
        sequences = [[collective(name) for name in own] for own in ranks]
        if conflict_of(*sequences, groups=GROUPS_OF_THREE) is None:
            found.append(ranks)
        else:
            refused += 1
    return found, refused


def run_orders(rank: int, orders: list[list[list[str]]], device: str | torch.device = "cpu") -> int:
    """The collectives of each order, synchronous or waited for anywhere later, some delayed; their number."""
    made = {name: dist.new_group(list(ranks)) for name, ranks in GROUPS_OF_THREE.items()}
    groups = {name: group for name, group in made.items() if rank in GROUPS_OF_THREE[name]}
    gate, delayed = Gate(), 0
    gate.register()
    for number, of_ranks in enumerate(orders):
        draw, own = random.Random(number), random.Random(f"{number} {rank}")
        places = list(itertools.product(GROUPS_OF_THREE, range(10)))  # delays are the same on all ranks
        delays_ms = dict(zip(places, draw.choices((0.0, 1.0, 4.0), k=len(places)), strict=True))
        own_ms = {("allreduce_", groups[of].group_name, at): ms for (of, at), ms in delays_ms.items() if of in groups}
        stream = None if device == "cpu" else torch.cuda.current_stream()
        gate.begin_step(sequential=False, compute_stream=stream, delays_ms=own_ms)
        pending, issued = list[tuple[Any, torch.Tensor, float]](), Counter[str]()
        for name in of_ranks[rank]:
            tensor = torch.full((4,), float(rank + issued[name]), device=device)
            total = float(sum(GROUPS_OF_THREE[name]) + len(GROUPS_OF_THREE[name]) * issued[name])
            issued[name] += 1
            asynchronous = own.random() < 0.7
            pending.append((dist.all_reduce(tensor, group=groups[name], async_op=asynchronous), tensor, total))
            while pending and (own.random() < 0.4 or not asynchronous):
                _finish(*pending.pop(own.randrange(len(pending))))
        for one in pending:
            _finish(*one)
        log = gate.end_step()
        assert gate.last_error is None
        assert len(log.delays) == len(of_ranks[rank])
        delayed += len(log.delays)
    gate.close()
    return delayed


def _finish(work: Any, tensor: torch.Tensor, total: float) -> None:
    if work is not None:
        work.wait()
    assert tensor.tolist() == [total] * 4


@pytest.mark.nightly
def test_delays_hang_in_no_order_that_the_order_check_accepts() -> None:
    orders, refused = accepted_orders(60)
    assert refused > 60
    found = run_ranks(run_orders, 3, orders)
    assert found == [sum([len(of_ranks[rank]) for of_ranks in orders]) for rank in range(3)]


# Longer than a busy machine stalls: without the wait, the delay is not over by then.
LONG_MS = 1000.0


class _Real(dist.Work):
    """A work of Gloo's, as far as a delayed one asks it."""

    def __init__(self) -> None:
        super().__init__()
        self.future: Any = torch.futures.Future()
        self.error: Exception | None = None

    def get_future(self) -> Any:
        return self.future

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if self.error is not None:
            raise self.error
        if timeout:
            raise RuntimeError(f"timed out after {timeout}")
        self.future.wait()
        return True


def test_a_delayed_work_is_complete_so_much_later() -> None:
    real = _Real()
    work = _DelayedWork(real, LONG_MS)
    began_s = time.monotonic()
    real.future.set_result([torch.ones(1)])
    early = work.is_completed()
    assert not early or time.monotonic() - began_s >= LONG_MS / 1e3
    assert work.wait()
    assert time.monotonic() - began_s >= LONG_MS / 1e3
    assert work.is_completed()
    assert work.get_future().value() == [torch.ones(1)]


def test_synchronizing_a_delayed_work_waits_for_its_end() -> None:
    real = _Real()
    work = _DelayedWork(real, LONG_MS)
    real.future.set_result([torch.ones(1)])
    work.synchronize()
    assert work.is_completed()


@pytest.mark.parametrize(
    ("where", "fails"),
    [
        ("_DelayedWork.wait", test_a_delayed_work_is_complete_so_much_later),
        ("_DelayedWork.synchronize", test_synchronizing_a_delayed_work_waits_for_its_end),
    ],
)
def test_a_wait_that_is_left_out_fails_a_test(where: str, fails: Callable[[], None]) -> None:
    with Wait(where).left_out(delays), pytest.raises(AssertionError):
        fails()


def test_an_error_of_the_collective_comes_at_once_and_is_its_own() -> None:
    real = _Real()
    work = _DelayedWork(real, 60_000)
    real.error = RuntimeError("peer died")
    real.future.set_exception(real.error)
    with pytest.raises(RuntimeError, match="peer died"):
        work.wait()
    with pytest.raises(RuntimeError, match="peer died"):
        work.get_future().wait()


def test_a_timeout_of_the_job_is_passed_on() -> None:
    with pytest.raises(RuntimeError, match="timed out after 0:00:05"):
        _DelayedWork(_Real(), 1).wait(datetime.timedelta(seconds=5))


def _fails(rank: int) -> None:
    """A collective that cannot be issued leaves nothing behind."""
    gate = Gate()
    gate.register()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    gate.begin_step(sequential=False, delays_ms={("allreduce_", name, place): 1.0 for place in range(2)})
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX, async_op=True)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.tolist() == [2, 2]
    gate.end_step()
    gate.close()


def test_after_a_collective_that_is_refused_the_next_one_works() -> None:
    run_ranks(_fails, 2)
