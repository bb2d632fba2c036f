"""Each wait of the gate is needed: without it a sequential step overlaps by the device's log, or has wrong numbers.

The waits are found in the gate's source, and left out one at a time. Those on the host need no device: tests of
``tests/gate`` fail without them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from overlap_callbacks.gate import gate as gate_module
from overlap_callbacks.gate import patience, serialiser
from overlap_callbacks.gate.deadlock import CollectiveSequence
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.serialiser import StreamSerialiser
from overlap_callbacks.gate.step_log import ExpectedSequence
from overlap_callbacks.instruments.valve import Valve
from tests.gate import test_serialiser as on_host
from tests.simulated_gpu import left_out
from tests.simulated_gpu.jobs import on_device
from tests.simulated_gpu.left_out import ByJob, Ran, Shown, Wait, host_ahead, waits_of
from tests.simulated_gpu.parameters import Parameters

# Waits for delayed collectives are left out in ``test_delays.py`` and in ``tests/gate/test_delays.py``.
WAITS = waits_of(Path(gate_module.__file__).parent, without="delays.py")
# Waits on the host, and a test that fails without each.
ON_HOST: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "HostSerialiser._wait": lambda _: (
        on_host.test_on_the_host_a_collective_that_outlasts_the_patience_is_stuck_and_has_no_end()
    ),
    "HostSerialiser._poll": lambda patch: (
        on_host.test_a_work_of_torchcomms_is_waited_for_without_a_timeout_and_not_for_ever(3, True, patch)
    ),
}


# -- jobs: each step returns its numbers, and overlaps unless the gate serialises it


Step = Callable[[], list[Tensor]]


def _new(device: torch.device, count: int) -> list[Tensor]:
    return [torch.full((64,), float(number + 1), device=device) for number in range(count)]


def _late_wait(device: torch.device, gate: Gate) -> Step:
    """An asynchronous all-reduce that its owner waits for late."""
    numbers, gradient = _new(device, 2)

    def step() -> list[Tensor]:
        work = dist.all_reduce(gradient, async_op=True)
        numbers.mul_(2)
        work.wait()
        return [numbers.add_(gradient)]

    return step


def _before_side_stream(device: torch.device, gate: Gate) -> Step:
    """An all-reduce on a stream of its own while compute is running."""
    numbers, gradient = _new(device, 2)
    compute, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def step() -> list[Tensor]:
        ready = compute.record_event()
        numbers.mul_(2)
        with torch.cuda.stream(side):
            side.wait_event(ready)
            dist.all_reduce(gradient)
        compute.wait_stream(side)
        return [numbers.add_(gradient)]

    return step


def _after_side_stream(device: torch.device, gate: Gate) -> Step:
    """An all-reduce on a stream of its own, and compute that comes after it."""
    numbers, gradient = _new(device, 2)
    compute, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def step() -> list[Tensor]:
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            dist.all_reduce(gradient)
        numbers.mul_(2)
        compute.wait_stream(side)
        return [numbers.add_(gradient)]

    return step


def _compute_after_communication(device: torch.device, gate: Gate) -> Step:
    """Compute on the stream of an earlier all-reduce, as FSDP2 accumulates gradients."""
    first, second = _new(device, 2)
    compute, streams = torch.cuda.current_stream(), (torch.cuda.Stream(), torch.cuda.Stream())

    def step() -> list[Tensor]:
        for stream in streams:
            stream.wait_stream(compute)
        with torch.cuda.stream(streams[0]):
            dist.all_reduce(first)
            first.mul_(0.5)
        with torch.cuda.stream(streams[1]):
            dist.all_reduce(second)
        for stream in streams:
            compute.wait_stream(stream)
        return [first, second]

    return step


def _second_compute_stream(device: torch.device, gate: Gate) -> Step:
    """Compute on a stream that never communicates, which the adapter has named."""
    numbers, gradient = _new(device, 2)
    compute, second = torch.cuda.current_stream(), torch.cuda.Stream()
    gate.side_streams.append([second])

    def step() -> list[Tensor]:
        second.wait_stream(compute)
        with torch.cuda.stream(second):
            numbers.mul_(2)
        dist.all_reduce(gradient)
        compute.wait_stream(second)
        return [numbers.add_(gradient)]

    return step


def _after_block(device: torch.device, gate: Gate) -> Step:
    """A block that starts when it ends, compute on its stream, and an all-reduce on another."""
    first, second, third = _new(device, 3)
    compute, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def step() -> list[Tensor]:
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            with dist._coalescing_manager(device=device):
                dist.all_reduce(first)
                dist.all_reduce(second)
            first.mul_(0.5)
        dist.all_reduce(third)
        compute.wait_stream(side)
        return [first, second, third]

    return step


def _messages(device: torch.device, gate: Gate) -> Step:
    """A batch of a send and a receive on a stream of its own, between compute."""
    numbers, sent, received = _new(device, 3)
    compute, side, peer = torch.cuda.current_stream(), torch.cuda.Stream(), 1 - dist.get_rank()

    def issue() -> list[Any]:
        return dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)])

    def step() -> list[Tensor]:
        sent.add_(1)
        ready = compute.record_event()
        numbers.mul_(2)
        with torch.cuda.stream(side):
            side.wait_event(ready)
            for work in gate.post(issue, list)[1]:
                work.wait()
            read = received + 1
        numbers.mul_(2)
        compute.wait_stream(side)
        return [numbers, read]

    return step


JOBS = {
    "late wait": _late_wait,
    "before side stream": _before_side_stream,
    "after side stream": _after_side_stream,
    "compute after communication": _compute_after_communication,
    "second compute stream": _second_compute_stream,
    "after block": _after_block,
    "messages": _messages,
}


# -- what is left out


MODULES = gate_module, serialiser


@contextlib.contextmanager
def _patched(holder: Any, name: str, value: Any) -> Iterator[None]:
    with mock.patch.object(holder, name, value):
        yield


class _OnComputeStreamAlone(StreamSerialiser):
    def __init__(self, compute: Any, others: Any = (), valve: Any = None) -> None:
        super().__init__(compute, (), valve)


# What decides on which streams the gate waits.
STREAMS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "streams that issued": functools.partial(
        _patched,
        StreamSerialiser,
        "_track_current_stream",
        lambda self: self._accelerator.current_stream(self._compute.device),
    ),
    "streams that only compute": functools.partial(_patched, gate_module, "StreamSerialiser", _OnComputeStreamAlone),
    "streams of what is let pass": functools.partial(_patched, StreamSerialiser, "skip", lambda self, tensor: None),
}


@contextlib.contextmanager
def _without_valve(*left_out: Wait) -> Iterator[None]:
    with mock.patch.object(patience, "valve_of", return_value=None), contextlib.ExitStack() as stack:
        for wait in left_out:
            stack.enter_context(wait.left_out(*MODULES))
        yield


_order = Valve.order
# The host's part is in ``tests/instruments/test_valve.py``.
VALVE: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "streams, for the valve": functools.partial(
        _patched, Valve, "order", lambda self, make_wait, later, what: make_wait(self._own)
    ),
    "the valve, for what is ordered": functools.partial(
        _patched, Valve, "order", lambda self, make_wait, later, what: _order(self, lambda stream: None, later, what)
    ),
}
FOR_WORK = Wait("StreamSerialiser._wait_for_work")
LEFT_OUT: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "nothing, without the valve": _without_valve,
    "nothing, and collectives are not timed": functools.partial(_patched, serialiser, "MAX_TIMED", 0),
    **{wait.name: functools.partial(wait.left_out, *MODULES) for wait in WAITS if wait.where not in ON_HOST},
    FOR_WORK.name: functools.partial(_without_valve, FOR_WORK),
    **STREAMS,
    **VALVE,
}
# The jobs whose sequential steps then overlap, and those that get wrong numbers.
OVERLAPS: dict[str, set[str]] = {
    "nothing": set(),
    "nothing, without the valve": set(),
    "nothing, and collectives are not timed": set(),
    "StreamSerialiser._wait_for_work": {"late wait"},
    "StreamSerialiser._wait_for_work 1": {"late wait"},
    "StreamSerialiser._wait_for_known": {
        "before side stream",
        "compute after communication",
        "second compute stream",
        "after block",
        "messages",
    },
    "StreamSerialiser._make_known_wait": {"after side stream", "messages"},
    "Gate._end_batch": {"messages"},
    "streams that issued": {"compute after communication", "after block"},
    "streams that only compute": {"second compute stream"},
    "streams of what is let pass": {"after block"},
    "streams, for the valve": set(JOBS),
    "the valve, for what is ordered": set(JOBS),
}
WRONG = {"Gate._end_batch": {"messages"}}


# -- on the ranks


def _run(job: Callable[[torch.device, Gate], Step], device: torch.device) -> Ran:
    gate = Gate()
    gate.register()
    step, expected, begun, numbers = job(device, gate), ExpectedSequence(), [], []
    for sequential in (False, True):
        with host_ahead():
            begun.append(time.monotonic_ns())
            gate.begin_step(sequential=sequential, expected=expected, compute_stream=torch.cuda.current_stream())
            found = step()
            log = gate.end_step()
        assert log.divergence is None
        expected = ExpectedSequence.of([CollectiveSequence.of(log.collectives, dist.get_rank())])
        numbers.append([value for one in found for value in one.tolist()])
    gate.close()
    assert gate.last_error is None
    return Ran((*begun, time.monotonic_ns()), numbers)


def _run_all(rank: int, parameters: Parameters) -> tuple[int, ByJob]:
    found: ByJob = {}
    with on_device(rank, parameters) as device:
        warm = torch.ones(1, device=device)
        dist.all_reduce(warm)
        dist.batch_isend_irecv([dist.P2POp(op, warm.clone(), 1 - rank) for op in (dist.isend, dist.irecv)])
        torch.cuda.synchronize()
        for name, leave_out in LEFT_OUT.items():
            # The valve too, although the ranks of these jobs have one communicator each.
            with mock.patch.object(ExpectedSequence, "can_deadlock", True), leave_out():
                found[name] = {job: _run(make, device) for job, make in JOBS.items()}
    return os.getpid(), found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Shown]]:
    found = left_out.run(_run_all, tmp_path_factory.mktemp("waits"))
    for of_name in found.values():
        assert min(one.overlapped_ms for one in of_name.values()) > 0  # there is something to serialise
    return found


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_wait_that_is_left_out_shows_as_overlap_of_the_device(ran: dict[str, dict[str, Shown]], name: str) -> None:
    assert left_out.overlapping(ran[name]) == OVERLAPS[name]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_wait_that_the_gate_takes_over_shows_in_the_numbers_when_it_is_left_out(
    ran: dict[str, dict[str, Shown]], name: str
) -> None:
    assert left_out.wrong(ran[name], ran["nothing"]) == WRONG.get(name, set())


def test_every_wait_of_the_gate_is_left_out_once() -> None:
    assert {wait.name for wait in WAITS} == {name for name in (*OVERLAPS, *ON_HOST) if "." in name}


@pytest.mark.parametrize("where", ON_HOST)
def test_a_wait_on_the_host_that_is_left_out_fails_a_test(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ON_HOST[where](monkeypatch)
    with Wait(where).left_out(*MODULES), pytest.raises(AssertionError):
        ON_HOST[where](monkeypatch)
