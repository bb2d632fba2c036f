"""What the numbers of kernels tell of a profile's steps."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.kernels.step_counts import StepCounts, compare_counts
from overlap_callbacks.analysis.results.mode import Mode


def compared(*counts: int, order: str = "OSSO") -> StepCounts:
    """Steps 1, 3, 5, ... have these counts; between them are warm-up steps. Modes as ``order`` repeats."""
    arms = [order[number % len(order)] for number in range(len(counts))]
    steps = [2 * number + 1 for number in range(len(counts))]
    by_arm = {
        mode: [step for step, arm in zip(steps, arms, strict=True) if arm == letter]
        for mode, letter in ((Mode.OVERLAPPED, "O"), (Mode.SEQUENTIAL, "S"))
    }
    return compare_counts(dict(zip(steps, counts, strict=True)), by_arm)


def test_steps_that_agree_within_two_percent_are_alike() -> None:
    assert compared(1000, 1010, 1000, 1015, 1020, 1005, 1001, 1000) == StepCounts()


def test_the_modes_may_differ_from_each_other() -> None:
    assert compared(100, 150, 150, 100, 100, 150, 150, 100) == StepCounts()


@pytest.mark.parametrize(
    "counts",
    [
        (100, 100, 100, 100, 100, 100, 100, 60),  # the last step is cut
        (100, 100, 100, 100, 100, 100, 60, 0),
        (100, 100, 100, 100, 100, 60, 0, 0),
        (100, 100, 40, 0, 0, 0, 0, 0),  # most steps are lost
        (100, 0, 0, 0),
        (100, 100, 100, 60),  # one profiled group
        (100, 100, 100, 100, 100, 100, 70, 60),  # some buffers filled up earlier than others
    ],
)
def test_a_profile_that_lost_its_tail_is_truncated(counts: tuple[int, ...]) -> None:
    assert compared(*counts).truncated


def test_odd_steps_elsewhere_are_left_out() -> None:
    assert compared(100, 100, 100, 150, 100, 100, 100, 100) == StepCounts(odd=frozenset({7}))
    assert compared(60, 100, 100, 100, 100, 100, 100, 60) == StepCounts(odd=frozenset({1, 15}))
    assert compared(100, 100, 0, 100, 100, 100, 100, 100) == StepCounts(odd=frozenset({5}))


def test_a_last_step_with_more_kernels_is_odd_and_no_truncation() -> None:
    assert compared(100, 100, 100, 100, 100, 100, 100, 150) == StepCounts(odd=frozenset({15}))


def test_where_most_steps_differ_that_is_the_jobs_way() -> None:
    assert compared(100, 120, 140, 160, 110, 130, 150, 170) == StepCounts(varying=True)


def test_without_kernels_or_steps_nothing_is_said() -> None:
    assert compared() == StepCounts()
    assert compared(0, 0, 0, 0) == StepCounts()
    assert compared(100) == StepCounts()
