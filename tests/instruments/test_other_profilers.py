"""Our profile beside a profiler of the user's that has a schedule. Where they met, torch raised or crashed."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.autograd.profiler

from overlap_callbacks.instruments.other_profilers import other_profilers
from overlap_callbacks.instruments.profiler import Profile
from tests.distributed import run_alone

NUM_STEPS = 14
# wait 0, 6, 12; warm-up 1-2, 7-8; active 3-5, 9-11
SCHEDULE = {"wait": 1, "warmup": 2, "active": 3, "repeat": 2}


def train_beside_a_schedule(watched_since: int, begin: int, end: int, ours_is_inside: bool) -> dict[str, Any]:
    """Profile the steps from ``begin`` to ``end`` while a profiler with a schedule is at work.

    Args:
        watched_since: the step from which on other profilers are watched.
        begin, end: the bounds of our profile.
        ours_is_inside: whether ours begins and ends before the user's ``step()``, else after it.
    """
    cycles: list[int] = []
    ours: list[Profile] = []
    gave_way = []

    def toggle(step: int) -> None:
        if step == end and ours:
            gave_way.append(not ours[0].stop())
        elif step == begin and Profile.available():
            ours.append(Profile(on_cuda=False))
            ours[0].start()

    def keep(theirs: Any) -> None:
        cycles.append(sum(event.name == "aten::cos" for event in theirs.events()))

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(**SCHEDULE),
        on_trace_ready=keep,
    ) as theirs:
        for step in range(NUM_STEPS):
            if step == watched_since:
                other_profilers.watch()
            if ours_is_inside:
                toggle(step)
            torch.cos(torch.ones(4))
            theirs.step()
            if not ours_is_inside:
                toggle(step)
    other_profilers.unwatch()
    return {"cycles": cycles, "given_up": not ours or gave_way != [False], "available": Profile.available()}


@pytest.mark.parametrize("ours_is_inside", [True, False])
@pytest.mark.parametrize(
    ("begin", "end"),
    [(0, 2), (0, 3), (0, 12), (1, 2), (1, 7), (2, 4), (3, 4), (4, 7), (5, 9), (6, 8), (7, 8), (8, 13)],
)
def test_a_users_schedule_keeps_every_cycle_and_the_library_gives_way(
    begin: int, end: int, ours_is_inside: bool
) -> None:
    found = run_alone(train_beside_a_schedule, 0, begin, end, ours_is_inside)
    assert found == {"cycles": [3, 3], "given_up": True, "available": True}


@pytest.mark.parametrize(("begin", "end"), [(2, 3), (2, 7)])
def test_an_unseen_preparation_is_repeated(begin: int, end: int) -> None:
    found = run_alone(train_beside_a_schedule, 2, begin, end, True)
    assert found["cycles"] == [3, 3]


def test_ours_is_kept_where_nothing_of_theirs_is_prepared() -> None:
    found = run_alone(train_beside_a_schedule, 0, 12, 13, True)
    assert found == {"cycles": [3, 3], "given_up": False, "available": True}


def profile_on_another_thread(schedule: bool) -> tuple[list[int], bool]:
    """Ours runs on this thread; the user's starts and ends on another one meanwhile."""
    ours = Profile(on_cuda=False)
    ours.start()
    cycles: list[int] = []

    def profile() -> None:
        def keep(theirs: Any) -> None:
            cycles.append(sum(event.name == "aten::cos" for event in theirs.events()))

        planned = torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1) if schedule else None
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], schedule=planned, on_trace_ready=keep
        ) as theirs:
            for _ in range(3):
                torch.cos(torch.ones(4))
                if schedule:
                    theirs.step()

    thread = threading.Thread(target=profile)
    thread.start()
    thread.join()
    return cycles, ours.stop()


@pytest.mark.parametrize(("schedule", "operators"), [(True, 2), (False, 3)])
def test_a_profiler_on_another_thread_keeps_its_events_too(schedule: bool, operators: int) -> None:
    assert run_alone(profile_on_another_thread, schedule) == ([operators], False)


def test_torch_is_restored_when_the_last_watcher_leaves() -> None:
    names = ("_prepare_profiler", "_enable_profiler")
    before = [getattr(torch.autograd.profiler, name) for name in names]
    other_profilers.watch()
    profile = Profile(on_cuda=False)
    profile.start()
    profile.stop()
    assert [getattr(torch.autograd.profiler, name) for name in names] != before
    other_profilers.unwatch()
    assert [getattr(torch.autograd.profiler, name) for name in names] == before


def start_of_theirs_that_fails() -> bool:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no profiler here")

    torch.autograd.profiler._enable_profiler = fail
    other_profilers.watch()
    with warnings.catch_warnings(), contextlib.closing(_Unwatch()):
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="no profiler here"):
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]).start()
    torch.autograd.profiler._set_is_profiler_enabled(False)
    return Profile.available()


def test_a_profiler_of_theirs_that_fails_to_start_raises_what_torch_raises() -> None:
    # On its own: in torch 2.8, one that was prepared and not started keeps all others of its process from starting.
    assert run_alone(start_of_theirs_that_fails)


class _Unwatch:
    def close(self) -> None:
        other_profilers.unwatch()


def theirs_beside_steps_that_we_leave_out() -> int:
    """How many operators of three steps another profiler records that starts within the first of them."""
    ours = Profile(on_cuda=False)
    ours.start()
    ours.begin_step(record=False)
    theirs = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    theirs.start()
    torch.cos(torch.ones(4))
    ours.end_step()
    for _ in range(2):
        ours.begin_step(record=False)
        torch.cos(torch.ones(4))
        ours.end_step()
    theirs.stop()
    assert not ours.stop()
    return sum(event.name == "aten::cos" for event in theirs.events())


def test_steps_that_our_profile_leaves_out_are_whole_in_theirs() -> None:
    assert run_alone(theirs_beside_steps_that_we_leave_out) == 3
