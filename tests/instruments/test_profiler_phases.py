"""Our profile against every phase of a scheduled profiler of the user's, and beside the other ways to start one.

Whatever phase theirs is in when ours begins and ends, theirs counts the operators that it counts without the library,
nothing is raised out of its ``step()``, and torch is as it was in the end.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.autograd.profiler
import torch.autograd.profiler_legacy

from overlap_callbacks.instruments.other_profilers import other_profilers
from overlap_callbacks.instruments.profiler import Profile
from tests.distributed import run_alone

NUM_STEPS = 13
CPU = torch.profiler.ProfilerActivity.CPU


class Phases(NamedTuple):
    wait: int
    warmup: int
    active: int


class Ours(NamedTuple):
    """Ours runs from step ``begin`` to ``end``, and toggles before or after the user's ``step()``."""

    begin: int
    end: int
    after: bool


GRID = [Phases(*values) for values in itertools.product(range(6), range(6), range(1, 6))]
PLACES = [
    Ours(begin, begin + length, after)
    for begin, length, after in itertools.product(range(12), (1, 3, 6), (False, True))
    if begin + length < NUM_STEPS
]


def count_cos(theirs: Any) -> int:
    return sum(event.name == "aten::cos" for event in theirs.events() or ())


def cycles_of(phases: Phases, ours: Ours | None) -> list[int]:
    """What each cycle of the user's profiler counts, with ours beside it."""
    cycles: list[int] = []
    profile: Profile | None = None

    def toggle(step: int) -> None:
        nonlocal profile
        if ours is None:
            return
        if step == ours.begin and Profile.available():
            profile = Profile(on_cuda=False)
            profile.start()
        elif step == ours.end and profile is not None:
            profile.stop()

    with torch.profiler.profile(
        activities=[CPU],
        schedule=torch.profiler.schedule(**phases._asdict()),
        on_trace_ready=lambda theirs: cycles.append(count_cos(theirs)),
    ) as theirs:
        for step in range(NUM_STEPS):
            if ours is not None and not ours.after:
                toggle(step)
            torch.cos(torch.ones(4))
            theirs.step()
            if ours is not None and ours.after:
                toggle(step)
    return cycles


def failures(cases: list[tuple[Phases, Ours]]) -> list[str]:
    """Cases in which the user's trace is not what it is without ours, or torch is not as before."""
    found, alone = [], {phases: cycles_of(phases, None) for phases in {phases for phases, _ in cases}}
    for phases, ours in cases:
        other_profilers.watch()
        try:
            cycles: Any = cycles_of(phases, ours)
        except BaseException as error:
            cycles = repr(error)
        other_profilers.unwatch()
        if cycles != alone[phases] or not Profile.available():
            found.append(f"{phases} {ours}: {cycles} instead of {alone[phases]}, available {Profile.available()}")
            torch.autograd.profiler._set_is_profiler_enabled(False)
    return found


def pairs() -> Iterator[tuple[Phases, Ours]]:
    """Each phase's each length with each place of ours once, the rest drawn."""
    draw = random.Random(0)
    for place in PLACES[::2] + PLACES[1::2]:
        for _ in range(3):
            yield draw.choice(GRID), place


def test_every_phase_of_a_schedule_is_whole_in_pairs() -> None:
    assert run_alone(failures, list(pairs()), timeout_s=120.0) == []


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("wait", range(6))
def test_every_phase_of_a_schedule_is_whole(wait: int) -> None:
    cases = [(phases, ours) for phases in GRID if phases.wait == wait for ours in PLACES]
    assert run_alone(failures, cases, timeout_s=1500.0) == []


# -- other ways to start a profiler


def autograd_profiler() -> int:
    with torch.autograd.profiler.profile() as theirs:
        torch.cos(torch.ones(4))
    return sum(event.name == "aten::cos" for event in theirs.function_events)


def legacy_profiler() -> int:
    with torch.autograd.profiler_legacy.profile() as theirs:
        torch.cos(torch.ones(4))
    return sum(event.name == "aten::cos" for event in theirs.function_events)


def emit_itt() -> int:
    with torch.autograd.profiler.emit_itt():
        torch.cos(torch.ones(4))
    return 1


def with_memory_and_stacks() -> int:
    with torch.profiler.profile(activities=[CPU], profile_memory=True, with_stack=True, record_shapes=True) as theirs:
        torch.cos(torch.ones(4))
    return count_cos(theirs)


def execution_trace() -> int:
    observer = torch.profiler.ExecutionTraceObserver()
    with torch.profiler.profile(activities=[CPU], execution_trace_observer=observer) as theirs:
        torch.cos(torch.ones(4))
    return count_cos(theirs)


WAYS = {way.__name__: way for way in (autograd_profiler, legacy_profiler, emit_itt, with_memory_and_stacks)}
WAYS["execution_trace"] = execution_trace


def outcome_of(way: Callable[[], int], on_thread: bool) -> Any:
    """What a way to profile counts, or what it raises; on this thread or on another."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(way())
        except Exception as error:
            found.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")

    if on_thread:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    return found[0]


def beside(name: str, on_thread: bool) -> dict[str, Any]:
    """One that starts and ends while ours runs, against one without ours."""
    way = WAYS[name]
    alone = outcome_of(way, on_thread)
    ours = Profile(on_cuda=False)
    ours.start()
    torch.cos(torch.ones(4))
    with_ours = outcome_of(way, on_thread)
    kept = ours.stop()
    again = Profile(on_cuda=False)
    again.start()
    return {"alone": alone, "beside ours": with_ours, "kept": kept, "again": again.stop()}


@pytest.mark.parametrize("on_thread", [False, True], ids=["this thread", "another thread"])
@pytest.mark.parametrize("name", WAYS)
def test_other_profilers_find_the_same_as_without_the_library(name: str, on_thread: bool) -> None:
    found = run_alone(beside, name, on_thread)
    assert found["beside ours"] == found["alone"]
    assert found["again"]


def within(name: str) -> bool:
    """Whether ours would start within one of theirs."""
    available: list[bool] = []
    cos = torch.cos
    torch.cos = lambda *args: (available.append(Profile.available()), cos(*args))[1]  # type: ignore[assignment]
    outcome_of(WAYS[name], False)
    torch.cos = cos
    return any(available)


@pytest.mark.parametrize("name", WAYS)
def test_ours_does_not_start_within_one_of_theirs(name: str) -> None:
    assert not run_alone(within, name)
