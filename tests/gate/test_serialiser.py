"""The waits around a collective: on streams that only write down what they are asked, so no accelerator is needed."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_callbacks.gate.collectives import Group, OperatorSpec
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.serialiser import CompletedWork, HostSerialiser, StreamSerialiser
from overlap_callbacks.gate.step_log import CollectiveCall, ExpectedSequence
from overlap_callbacks.instruments import clocks

DEVICE = torch.device("cuda", 0)
GROUP = Group("0", "", (0, 1), "nccl")


@dataclass(eq=False)
class Stream:
    name: str
    said: list[str]
    device: torch.device = DEVICE

    def wait_stream(self, other: Stream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")


@dataclass
class Work:
    said: list[str]

    def wait(self) -> None:
        self.said.append("current stream waits for the work")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Streams ``compute`` and ``side``; ``current`` is the one that the next call is issued on."""
    said: list[str] = []
    state = SimpleNamespace(said=said, compute=Stream("compute", said), side=Stream("side", said), capturing=False)
    state.current = state.compute
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: state.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)

    def mark(stream: Stream) -> str:
        said.append(f"mark on {stream.name}")
        return f"mark on {stream.name}"

    monkeypatch.setattr(clocks, "stream_mark", mark)
    return state


def new_call(host_blocking: bool = False) -> CollectiveCall:
    spec = OperatorSpec(
        name="allreduce_",
        redispatch=lambda *_: None,
        group=1,
        sizes=lambda _: (4, 4, None),
        returns_work=True,
        point_to_point=False,
        host_blocking=host_blocking,
        peer=-1,
        tag=-1,
    )
    return CollectiveCall(spec, GROUP, 4, 4, torch.float32, 0, -1, 0, 0)


def issue(cuda: Any, work: Any, *, host_blocking: bool = False, device: torch.device = DEVICE) -> CollectiveCall | None:
    """One serialised collective, in the order of the kernel; None where it was let pass."""
    serialiser, call = StreamSerialiser(cuda.compute), new_call(host_blocking)
    serialised = serialiser.before(call, SimpleNamespace(device=device))  # type: ignore[arg-type]
    cuda.said.append("issued")
    if serialised:
        assert serialiser.after(call, work)
    return call if serialised else None


def test_an_asynchronous_collective_on_the_compute_stream_is_followed_by_a_wait_for_its_work(cuda: Any) -> None:
    issue(cuda, Work(cuda.said))
    assert cuda.said == ["mark on compute", "issued", "current stream waits for the work", "mark on compute"]


def test_a_collective_on_a_side_stream_waits_for_compute_and_compute_waits_for_it(cuda: Any) -> None:
    cuda.current = cuda.side
    call = issue(cuda, Work(cuda.said))
    assert cuda.said == [
        "side waits for compute",
        "mark on side",
        "issued",
        "current stream waits for the work",
        "mark on side",
        "compute waits for side",
    ]
    assert call is not None
    assert (call.start, call.end) == ("mark on side", "mark on side")


def test_a_synchronous_collective_of_nccl_has_no_work_and_is_ordered_all_the_same(cuda: Any) -> None:
    cuda.current = cuda.side
    issue(cuda, None)
    assert cuda.said == ["side waits for compute", "mark on side", "issued", "mark on side", "compute waits for side"]


def test_a_barrier_is_not_waited_for_because_that_would_block_the_host(cuda: Any) -> None:
    issue(cuda, Work(cuda.said), host_blocking=True)
    assert "current stream waits for the work" not in cuda.said


def test_while_a_graph_is_captured_nothing_is_added(cuda: Any) -> None:
    cuda.capturing = True
    cuda.current = cuda.side
    assert issue(cuda, Work(cuda.said)) is None
    assert cuda.said == ["issued"]
    assert StreamSerialiser(cuda.compute).before_batch() is None


def test_a_collective_on_another_device_is_left_alone(cuda: Any) -> None:
    assert issue(cuda, Work(cuda.said), device=torch.device("cuda", 1)) is None
    assert cuda.said == ["issued"]


def test_a_batch_on_a_side_stream_is_ordered_with_compute_on_both_sides(cuda: Any) -> None:
    cuda.current = cuda.side
    order_after = StreamSerialiser(cuda.compute).before_batch()
    assert order_after is not None
    cuda.said.append("posted")
    order_after()
    assert cuda.said == ["side waits for compute", "posted", "compute waits for side"]


def test_a_batch_on_the_compute_stream_needs_no_waits_between_streams(cuda: Any) -> None:
    order_after = StreamSerialiser(cuda.compute).before_batch()
    assert order_after is not None
    order_after()
    assert cuda.said == []


class _Works:
    """A work whose wait ends as it is told to."""

    def __init__(self, ends_with: Exception | None) -> None:
        self._ends_with = ends_with
        self.timeouts: list[float] = []

    def wait(self, timeout: Any) -> None:
        self.timeouts.append(timeout.total_seconds())
        if self._ends_with is not None:
            raise self._ends_with


def test_on_the_host_a_collective_is_waited_for_with_patience_and_its_time_kept() -> None:
    call, work = new_call(), _Works(None)
    serialiser = HostSerialiser(7.0)
    assert serialiser.before(call, None)
    assert serialiser.after(call, work)  # type: ignore[arg-type]
    assert work.timeouts == [7.0]
    assert isinstance(call.start, int)
    assert isinstance(call.end, int)
    assert call.start <= call.end


def test_on_the_host_a_collective_that_fails_at_once_is_its_owners_to_notice_and_not_stuck() -> None:
    call = new_call()
    assert HostSerialiser(7.0).after(call, _Works(RuntimeError("a peer died")))  # type: ignore[arg-type]


def test_on_the_host_a_collective_that_outlasts_the_patience_is_stuck_and_has_no_end() -> None:
    call = new_call()
    assert not HostSerialiser(0.0).after(call, _Works(RuntimeError("timed out")))  # type: ignore[arg-type]
    assert call.end is None


def test_a_completed_work_may_be_waited_for_again() -> None:
    work = CompletedWork()
    assert work.wait()
    assert work.wait(timeout=1.0)
    assert work.is_completed()


def test_an_error_in_a_wait_is_kept_and_does_not_escape(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stream: Any) -> None:
        raise RuntimeError("no such stream")

    gate, call = Gate(capacity=1), new_call()
    call.serialiser = StreamSerialiser(cuda.compute)
    assert call.serialiser.before(call, SimpleNamespace(device=DEVICE))  # type: ignore[arg-type]
    monkeypatch.setattr(clocks, "stream_mark", fail)
    monkeypatch.setattr(torch.distributed.Work, "unbox", staticmethod(lambda work: work))
    gate.after_call(call, None)
    assert "no such stream" in str(gate.last_error)


def test_a_collective_that_cannot_be_serialised_is_counted_and_not_marked(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sequential step of a job on CUDA, while a graph is captured."""
    cuda.capturing = True
    tensor = SimpleNamespace(device=DEVICE, is_cuda=True, dtype=torch.float32)
    spec = new_call().spec
    spec = OperatorSpec(**{**vars(spec), "sizes": lambda _: (4, 4, tensor)})
    monkeypatch.setattr("overlap_callbacks.gate.gate.unbox_group", lambda group: group)
    monkeypatch.setattr(Group, "of", lambda group, dimensions: GROUP)
    gate = Gate()
    gate.begin_step(sequential=True, expected=ExpectedSequence([("allreduce_", "0")]), compute_stream=cuda.compute)
    assert gate.before_call(spec, ([tensor], "0")) is None
    log = gate.end_step()
    assert gate.last_error is None, repr(gate.last_error)
    assert (log.let_pass, [c.start for c in log.collectives]) == (1, [None])
