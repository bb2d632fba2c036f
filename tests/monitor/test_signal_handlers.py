"""A signal handler of the user's that raises during ``backward()``, in a job that catches it and goes on."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.interruptions import is_from_handler
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import KeptReports, new_monitor, tiny_schedule
from tests.toggling import at_night

_PERIOD_S = 0.001
_NUM_STEPS, _NUM_LAYERS = 40, 40


class TickError(RuntimeError):
    """An ``Exception``, of a type that the library's own waits expect from torch."""


class Tick(BaseException):
    """What no ``except Exception`` catches."""


class Ticks:
    """Raises once in each backward pass, at the first signal after its first gradient.

    Attributes:
        armed: whether the handler raises at the next signal; else it returns.
        raised: how often it has raised.
        kind: of what it raises.
    """

    def __init__(self, kind: type[BaseException]) -> None:
        self.armed = False
        self.raised = 0
        self.kind = kind

    def handle(self, number: int, frame: Any) -> None:
        if self.armed:
            self.armed = False
            self.raised += 1
            raise self.kind

    def arm(self, gradient: torch.Tensor) -> None:
        # The last thing that Python does before the reducer: nothing of the test's own is interrupted.
        self.armed = True

    def backward(self, loss: torch.Tensor) -> None:
        loss.register_hook(self.arm)
        with contextlib.suppress(self.kind):
            loss.backward()
        self.armed = False


def train(rank: int, kind: type[BaseException], monitor: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(_NUM_LAYERS)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    ticks = Ticks(kind)
    before = signal.signal(signal.SIGALRM, ticks.handle)
    signal.setitimer(signal.ITIMER_REAL, _PERIOD_S, _PERIOD_S)
    try:
        for step in range(_NUM_STEPS):
            if monitor is not None:
                monitor.step_begin(step)
            optimizer.zero_grad()
            ticks.backward(model(torch.randn(64, 64, generator=data)).square().mean())
            optimizer.step()
            if monitor is not None:
                with contextlib.suppress(kind):
                    monitor.step_end(step)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return {"weights": hashlib.sha256(weights).hexdigest(), "raised": ticks.raised}


def train_with_and_without(rank: int, kind: type[BaseException], nested: bool, every_n_steps: int) -> dict[str, Any]:
    plain = train(rank, kind, None)
    with captured_log() as lines, new_monitor(schedule=tiny_schedule(every_n_steps)) as monitor:
        if nested:
            monitor.expect_nested_collectives()
        measured = train(rank, kind, monitor)
        active = monitor.active
    return {"plain": plain, "measured": measured, "active": active, "log": lines}


@pytest.mark.parametrize(
    ("every_n_steps", "nested", "kind"),
    at_night(
        [(every, nested, kind) for every in (5, 1000) for nested in (False, True) for kind in (TickError, Tick)],
        [(1000, nested, kind) for nested in (False, True) for kind in (TickError, Tick)]
        + [(5, False, TickError), (5, True, Tick)],
    ),
)
def test_a_handler_that_raises_in_backward_changes_nothing(kind, nested, every_n_steps):
    results = run_ranks(train_with_and_without, 2, kind, nested, every_n_steps, timeout_s=60.0)
    weights = {result[run]["weights"] for result in results for run in ("plain", "measured")}
    assert len(weights) == 1
    assert all(result[run]["raised"] > 0 for result in results for run in ("plain", "measured"))
    assert all(result["active"] and not result["log"] for result in results)


# -- where the handler raises in the gate itself


def raise_from_handler(kind: type[BaseException]) -> None:
    def handle(number: int, frame: Any) -> None:
        raise kind

    signal.signal(signal.SIGUSR1, handle)
    signal.raise_signal(signal.SIGUSR1)


def raise_from_another_thread(kind: type[BaseException]) -> None:
    """As if another thread had set the exception on this one: Python raises it at its next look."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(kind))
    while True:
        pass


def all_reduce_with_interrupted(
    rank: int,
    kind: type[BaseException],
    method: str,
    nested: bool,
    interrupt: Callable[[type[BaseException]], None] = raise_from_handler,
) -> dict[str, Any]:
    """In the window's first sequential step an exception is raised within a method of the gate."""
    tensor, sink = torch.ones(4), KeptReports()
    monitor, raised = new_monitor(sink), []
    if nested:
        monitor.expect_nested_collectives()
    inner = getattr(Gate, method)
    for step in range(12):
        monitor.step_begin(step)
        if step == 4:
            setattr(Gate, method, lambda *args: interrupt(kind))
        dist.all_reduce(tensor)
        setattr(Gate, method, inner)
        try:
            monitor.step_end(step)
        except BaseException as error:
            raised.append((step, type(error)))
    active = monitor.active
    monitor.close()
    windows = [(report["complete"], report["valid"]) for report in sink.facts()]
    return {"sum": tensor[0].item(), "raised": raised, "active": active, "windows": windows}


@pytest.mark.parametrize("kind", [TickError, Tick])
@pytest.mark.parametrize("method", ["before_call", "after_call"])
@pytest.mark.parametrize("nested", [False, True], ids=["own key", "BackendSelect"])
def test_an_interrupted_collective_is_issued_once_and_the_step_s_end_raises(kind, method, nested):
    results = run_ranks(all_reduce_with_interrupted, 2, kind, method, nested)
    for result in results:
        assert result["sum"] == 2.0**12
        assert result["active"]
        assert result["raised"] == [(4, kind)]
    assert any(complete for complete, _ in results[0]["windows"])


@pytest.mark.parametrize("nested", [False, True], ids=["own key", "BackendSelect"])
def test_what_another_thread_sets_on_this_one_is_kept_until_the_step_s_end(nested):
    for result in run_ranks(all_reduce_with_interrupted, 2, Tick, "before_call", nested, raise_from_another_thread):
        assert result["sum"] == 2.0**12
        assert result["active"]
        assert result["raised"] == [(4, Tick)]


def test_an_exception_of_a_handler_is_distinguished_from_an_internal_error():
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(TickError) as from_handler:
            raise_from_handler(TickError)
        assert is_from_handler(from_handler.value)
        with pytest.raises(TickError) as own:
            raise TickError
        assert not is_from_handler(own.value)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("handler", ["method", "partial", "object"])
def test_any_form_of_a_handler_is_known(handler):
    class Handler:
        def method(self, *args: Any) -> None:
            raise TickError

        __call__ = method

    form = {"method": Handler().method, "partial": functools.partial(Handler().method), "object": Handler()}[handler]
    before = signal.signal(signal.SIGUSR1, form)
    try:
        with pytest.raises(TickError) as raised:
            signal.raise_signal(signal.SIGUSR1)
        assert is_from_handler(raised.value)
    finally:
        signal.signal(signal.SIGUSR1, before)
