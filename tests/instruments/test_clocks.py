"""Marks of a stream on the host's clock, with a device whose clock the test turns."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap_callbacks.instruments import clocks


class Device:
    """Passes marks at times of its own; the host's clock is a number that the test sets."""

    def __init__(self) -> None:
        self.host_ns = 0


class Event:
    """Like ``torch.Event``: passed at a host time that is not known."""

    def __init__(self, device: Device, passed_ns: int) -> None:
        self.device, self.passed_ns = device, passed_ns

    def query(self) -> bool:
        return self.device.host_ns >= self.passed_ns

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return (end.passed_ns - self.passed_ns) / 1e6


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(clocks, "now", lambda: made.host_ns)
    return made


def run(device: Device, passed_ns: list[int], lead_ns: int, look_every_ns: int) -> tuple[clocks.HostTimes, list[Event]]:
    """The host records each mark ``lead_ns`` before the device passes it, and looks at regular times."""
    times, events = clocks.HostTimes(), [Event(device, at) for at in passed_ns]
    start_ns, end_ns = passed_ns[0] - lead_ns, passed_ns[-1] + look_every_ns
    todo: list[tuple[int, Event | None]] = [(event.passed_ns - lead_ns, event) for event in events]
    todo += [(at_ns, None) for at_ns in range(start_ns, end_ns + 1, look_every_ns)]
    for at_ns, event in sorted(todo, key=lambda item: item[0]):
        device.host_ns = at_ns
        if event is None:
            times.poll()
        else:
            times.recorded(event, device.host_ns)
    return times, events


def test_a_mark_that_the_host_watches_closely_has_its_time(device: Device) -> None:
    times, events = run(device, [1_000_000, 2_500_000, 3_000_000], lead_ns=500_000, look_every_ns=1000)
    for event in events:
        earliest, latest = times.bounds(event)
        assert earliest <= event.passed_ns <= latest
        assert latest - earliest <= 1000


def test_looks_that_do_not_go_in_step_with_training_narrow_the_bounds_however_far_the_host_is_ahead(
    device: Device,
) -> None:
    # Steps of 300 ms, looks every 100.7 ms, and a host that is ahead by a second.
    passed = [300_000_000 * i for i in range(1, 66)]
    times, events = run(device, passed, lead_ns=1_000_000_000, look_every_ns=100_700_000)
    earliest, latest = times.bounds(events[0])
    assert latest - earliest < 10_000_000


def test_looks_in_step_with_training_leave_wide_bounds_and_not_a_wrong_time(device: Device) -> None:
    # The host looks once a step, always 100 ms after the device has passed the mark before: a constant phase.
    times = clocks.HostTimes()
    events = [Event(device, 300_000_000 * i) for i in range(1, 20)]
    for event in events:
        device.host_ns = event.passed_ns - 200_000_000
        times.poll()
        times.recorded(event, device.host_ns)
    device.host_ns = events[-1].passed_ns + 100_000_000
    times.poll()
    for event in events:
        earliest, latest = times.bounds(event)
        assert earliest <= event.passed_ns <= latest
        assert latest - earliest >= 100_000_000


@given(
    st.lists(st.integers(1, 10**7), min_size=1, max_size=30),
    st.integers(0, 10**7),
    st.integers(10**5, 10**7),
)
def test_the_truth_lies_within_the_bounds(gaps: list[int], lead_ns: int, look_every_ns: int) -> None:
    device = Device()
    before = clocks.now
    clocks.now = lambda: device.host_ns
    try:
        passed = [10**8 + sum(gaps[: i + 1]) for i in range(len(gaps))]
        times, events = run(device, passed, lead_ns, look_every_ns)
        for event in events:
            earliest, latest = times.bounds(event)
            assert earliest - 1 <= event.passed_ns <= latest + 1
    finally:
        clocks.now = before


def test_a_mark_that_is_passed_before_the_call_that_records_it_returns_lies_within_its_bounds(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording releases the interpreter's lock, so it may return late."""

    def record_and_be_held_up(stream: object) -> Event:
        event = Event(device, device.host_ns + 10_000)
        device.host_ns += 5_000_000
        return event

    accelerator = SimpleNamespace(mark=record_and_be_held_up)
    monkeypatch.setattr("overlap_callbacks.instruments.device.accelerator", lambda: accelerator)
    clock = clocks.StepClock()
    clock.compute_stream = SimpleNamespace(device=torch.device("cuda", 0))  # type: ignore[assignment]
    for _ in range(3):
        mark: Any = clock.mark()
        earliest, latest = clock.host_bounds_ns(mark)
        assert earliest <= mark.passed_ns <= latest
        device.host_ns += 1_000_000


@pytest.mark.parametrize("name", ["overlap-callbacks-power", "the job's own"])
def test_threads_of_our_own_and_no_others_take_the_device_whose_events_they_query(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)

    def query() -> None:
        for index in (3, 3, 1):
            clocks.prepare_own_thread(torch.device("cuda", index))
        clocks.prepare_own_thread(None)

    thread = threading.Thread(target=query, name=name)
    thread.start()
    thread.join()
    assert [device.index for device in taken] == ([3, 1] if name.startswith("overlap") else [])
    clocks.prepare_own_thread(torch.device("cuda", 3))  # on the main thread
    assert len(taken) == 2 * name.startswith("overlap")


def test_without_a_mark_there_is_no_time(device: Device) -> None:
    with pytest.raises(ValueError, match="no mark"):
        clocks.HostTimes().bounds(Event(device, 0))


def test_on_the_host_a_mark_is_its_time() -> None:
    clock = clocks.StepClock()
    mark = clock.mark()
    assert clock.host_bounds_ns(mark) == (mark, mark)
