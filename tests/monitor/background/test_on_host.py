"""Collectives of a library of the host (Gloo) in a live job on a device, whose profile has no ranges of the host."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import RankWindow
from overlap_callbacks.gate.collectives import Collective, Group
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.monitor.background.measurement import measure
from tests.analysis.kernels.test_table import event, gpu_kernel, launch
from tests.columns import EPOCH_NS
from tests.monitor.background.test_profile_figures import ALL_REDUCE, LOG, MS, ORDER, STEP_NS, closed
from tests.samples import aggregate_windows

GLOO = Group("1", "optimizer", (0, 1), "gloo")


@pytest.fixture(autouse=True)
def _device_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("overlap_callbacks.monitor.background.profile_figures.chip_of", lambda stream: None)


def step_events(number: int, resumed_ms: float = 13.05, also: tuple[tuple[float, str], ...] = ()) -> list[Any]:
    """5 ms of compute from 0.2 ms on, and 5.9 ms of it once the host goes on; each is launched as it starts.

    ``also`` are kernels and copies of 0.05 ms that the host launches, by their time and name.
    """
    start, first = number * STEP_NS, 1000 * (number + 1)
    overlapped = ORDER[number] == "O"
    at = 1.0 if overlapped else resumed_ms + 6.0
    rows = [(0.2, 5.0, "gemm", 7), (resumed_ms + 0.05, resumed_ms + 5.95, "gemm", 7), (at, at + 0.5, ALL_REDUCE, 20)]
    rows += [(at, at + 0.05, name, 9) for at, name in also]
    events = []
    for place, (begin, end, name, stream) in enumerate(rows):
        began, ended = start + round(begin * MS), start + round(end * MS)
        events.append(launch(began - 50_000, first + place))
        if name.startswith("Memcpy"):
            events.append(event(name, "gpu_memcpy", began, ended, correlation=first + place, resource=stream))
        else:
            events.append(gpu_kernel(name, began, ended, first + place, stream=stream))
    return events


def call(number: int, issued_ms: float, ms: float | None, group: Group = GLOO, shift_ns: int = 0) -> Collective:
    """An all-reduce of a CPU tensor; with an end, as the serialiser leaves it, if ``ms`` are given."""
    offset_ns = time.time_ns() - time.perf_counter_ns()
    issued_ns = EPOCH_NS + number * STEP_NS + round(issued_ms * MS) - offset_ns + shift_ns
    end_ns = None if ms is None else issued_ns + round(ms * MS)
    start_ns = None if ms is None else issued_ns
    return Collective("allreduce_", group, 4, 4, torch.float32, 0, -1, 0, issued_ns, start_ns, end_ns)


def measured(calls: Callable[[int, bool], list[Collective]], pending: Any = None, **options: Any) -> RankWindow:
    """A window whose steps issue ``calls(number, sequential)`` besides those of NCCL; the last may be ``pending``."""
    window = closed(lambda: [found for number in range(len(ORDER)) for found in step_events(number, **options)])
    steps = [
        replace(
            step,
            log=StepLog(
                (*copy.deepcopy(LOG.collectives), *calls(step.profile_index, step.plan.mode is Mode.SEQUENTIAL)),
                0,
                None,
            ),
        )
        for step in window.steps
    ]
    if pending is not None:
        steps[-1] = replace(steps[-1], end=pending)
    window.steps = steps
    return measure(window, rank=0, backend="nccl")


def waiting(number: int, sequential: bool) -> list[Collective]:
    return [call(number, 5.0, 8.0 if sequential else None)]


def exposed_ms(found: RankWindow, mode: Mode = Mode.OVERLAPPED) -> list[float]:
    return [block.exposed_on_host_ms for block in found.profiled if block.mode is mode]


def test_what_the_device_waits_for_is_exposed_communication_on_the_host() -> None:
    found = measured(waiting)
    assert found.problems == ()
    assert exposed_ms(found) == pytest.approx([8.0] * 4, abs=0.1)
    assert exposed_ms(found, Mode.SEQUENTIAL) == pytest.approx([8.0] * 4, abs=0.1)
    # The other figures are those of the same profile without Gloo.
    without = measured(lambda number, sequential: [])
    assert exposed_ms(without) == [0.0] * 4
    for mine, other in zip(found.profiled, without.profiled, strict=True):
        for name in ("compute_ms", "comm_ms", "comm_busy_ms", "hidden_comm_ms", "idle_ms"):
            assert getattr(mine, name) == getattr(other, name)


def test_a_collective_of_tensors_on_the_device_begins_once_the_device_comes_to_it() -> None:
    # Issued while the device has compute until 5 ms; the host goes on at 13 ms.
    def calls(number: int, sequential: bool) -> list[Collective]:
        (early,) = waiting(number, sequential)
        return [msgspec.structs.replace(early, issued_ns=early.issued_ns - round(3.8 * MS), on_device=True)]

    assert exposed_ms(measured(calls)) == pytest.approx([8.0] * 4, abs=0.1)
    assert exposed_ms(measured(calls, resumed_ms=10.0)) == pytest.approx([5.0] * 4, abs=0.1)


def test_marks_that_the_device_did_not_pass_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors on the device: their marks are events, which raise while they are pending.
    class Pending:
        def query(self) -> bool:
            return False

        def elapsed_time(self, other: Any) -> float:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")

    monkeypatch.setattr("overlap_callbacks.monitor.background.measurement._READY_TIMEOUT_S", 0.0)
    last = len(ORDER) - 1

    def calls(number: int, sequential: bool) -> list[Collective]:
        mark: Any = Pending()
        found = waiting(number, sequential)
        return [msgspec.structs.replace(one, start=mark, end=mark) for one in found] if number == last else found

    found = measured(calls, pending=Pending())
    assert [problem for problem in found.problems if "did not finish a step" in problem]
    assert max(exposed_ms(found)) == pytest.approx(8.0, abs=0.1)


def test_the_report_says_that_it_bounds_the_steps() -> None:
    report = aggregate_windows([measured(waiting)], world_size=1, every_n_steps=1000)
    assert report.exposed_on_host_ms is not None
    assert report.exposed_on_host_ms.value == pytest.approx(8.0, abs=0.1)
    parts = report.step_parts()
    assert parts is not None
    assert parts[0].on_host_ms == pytest.approx(8.0, abs=0.1)
    assert parts[0].idle_ms == pytest.approx(0.1, abs=0.1)
    other = aggregate_windows([measured(lambda number, sequential: [])], world_size=1, every_n_steps=1000)
    assert other.exposed_on_host_ms is None
    assert "overlap/exposed_on_host_ms" not in other.metrics()


def test_it_is_no_longer_than_until_the_host_goes_on() -> None:
    assert exposed_ms(measured(waiting, resumed_ms=10.0)) == pytest.approx([5.0] * 4, abs=0.1)


def test_what_runs_in_the_background_holds_nobody_up() -> None:
    also = tuple([(5.2 + 0.1 * number, "gemm") for number in range(77)])
    found = measured(waiting, also=also)
    assert max(exposed_ms(found)) < 0.4  # from the issue to the next launch, and from the last one to the end
    # Copies of Gloo's own are no sign that the host goes on.
    copies = ((6.0, "Memcpy DtoH (Device -> Pageable)"), (12.0, "Memcpy HtoD (Pageable -> Device)"))
    assert exposed_ms(measured(waiting, also=copies)) == pytest.approx([8.0] * 4, abs=0.1)


@pytest.mark.parametrize(
    "calls",
    [
        lambda number, sequential: [call(number, 5.0, None)],  # nothing tells how long they take
        lambda number, sequential: [call(number, 5.0, 0.01 if sequential else None)],  # a barrier of microseconds
        lambda number, sequential: [call(number, 0.3, 4.0 if sequential else None)],  # while the device computes
        lambda number, sequential: [call(number, 5.0, 8.0 if sequential else None, Group("1", "own", (0,), "gloo"))],
        lambda number, sequential: [call(number, 5.0, 8.0 if sequential else None, shift_ns=10**12)],  # a clock was set
    ],
)
def test_no_false_alarm(calls: Callable[[int, bool], list[Collective]]) -> None:
    assert max(exposed_ms(measured(calls))) < 0.05
