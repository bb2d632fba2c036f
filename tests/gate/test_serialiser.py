"""The order of waits on CUDA, with streams that only write down what they are asked: no accelerator is needed."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_callbacks.gate.gate import _END, _START, Gate
from overlap_callbacks.instruments import clocks

DEVICE = torch.device("cuda", 0)


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
    monkeypatch.setattr(torch.distributed.Work, "unbox", staticmethod(lambda work: work))
    return state


def issue(cuda: Any, work: Any, *, host_blocking: bool = False, device: torch.device = DEVICE) -> list[Any] | None:
    """One serialised collective, as the kernel would run it."""
    gate = Gate(capacity=1)
    gate._compute_stream = cuda.compute
    row = [SimpleNamespace(host_blocking=host_blocking, returns_work=True), *[None] * 12]
    found = gate._before_on_cuda(row, SimpleNamespace(device=device))
    cuda.said.append("issued")
    if found is not None:
        gate._after(found, work)
    assert gate.errors == 0, gate.last_error
    return found


def test_an_asynchronous_collective_on_the_compute_stream_is_followed_by_a_wait_for_its_work(cuda: Any) -> None:
    issue(cuda, Work(cuda.said))
    assert cuda.said == ["mark on compute", "issued", "current stream waits for the work", "mark on compute"]


def test_a_collective_on_a_side_stream_waits_for_compute_and_compute_waits_for_it(cuda: Any) -> None:
    cuda.current = cuda.side
    row = issue(cuda, (None, Work(cuda.said)))
    assert cuda.said == [
        "side waits for compute",
        "mark on side",
        "issued",
        "current stream waits for the work",
        "mark on side",
        "compute waits for side",
    ]
    assert row is not None
    assert (row[_START], row[_END]) == ("mark on side", "mark on side")


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


def test_a_collective_on_another_device_is_left_alone(cuda: Any) -> None:
    assert issue(cuda, Work(cuda.said), device=torch.device("cuda", 1)) is None
    assert cuda.said == ["issued"]


def test_an_error_in_a_wait_is_counted_and_does_not_escape(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stream: Any) -> None:
        raise RuntimeError("no such stream")

    gate = Gate(capacity=1)
    gate._compute_stream = cuda.compute
    row = gate._before_on_cuda([SimpleNamespace(host_blocking=False), *[None] * 12], SimpleNamespace(device=DEVICE))
    monkeypatch.setattr(clocks, "stream_mark", fail)
    gate._after(row, None)
    assert gate.errors == 1
