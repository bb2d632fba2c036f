"""What a profile's numbers of kernels show about its steps."""

from __future__ import annotations

import numpy as np
import pytest

from overlap_callbacks.analysis.kernels.step_counts import StepCounts, compare_counts, kinds_by_number
from overlap_callbacks.analysis.results.mode import Mode

WHOLE, CUT = ("clip", "adamw", "adamw"), ("gemm", "gemm", "norm")


def compared(*counts: int, order: str = "OSSO", cut: int = 0) -> StepCounts:
    """Steps 1, 3, 5, ... have these counts; between them are warm-up steps. Modes as ``order`` repeats.

    Args:
        counts: numbers of kernels.
        order: of the modes.
        cut: number of steps at the end that do not end with the kernels that end the others.
    """
    arms = [order[number % len(order)] for number in range(len(counts))]
    steps = [2 * number + 1 for number in range(len(counts))]
    by_arm = {
        mode: [step for step, arm in zip(steps, arms, strict=True) if arm == letter]
        for mode, letter in ((Mode.OVERLAPPED, "O"), (Mode.SEQUENTIAL, "S"))
    }
    tails = {step: CUT if number >= len(counts) - cut else WHOLE for number, step in enumerate(steps)}
    return compare_counts(dict(zip(steps, counts, strict=True)), by_arm, tails)


def test_steps_that_agree_within_two_percent_match() -> None:
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
    assert compared(*counts, cut=sum(count < 100 for count in counts)).truncated


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


def test_a_last_step_that_is_shorter_and_ends_as_the_others_do_is_odd_and_no_truncation() -> None:
    assert compared(100, 100, 100, 100, 100, 100, 100, 97) == StepCounts(odd=frozenset({15}))
    assert compared(100, 100, 100, 100, 100, 100, 96, 97) == StepCounts(odd=frozenset({13, 15}))


def test_either_of_two_steps_of_a_mode_may_be_the_odd_one() -> None:
    assert compared(210, 200, 200, 200) == StepCounts(varying=True)  # the first step logs
    assert compared(200, 210, 200, 200) == StepCounts(varying=True)
    assert compared(210, 200, 200, 200, cut=1).truncated


def test_numbers_that_vary_by_chance_are_no_truncation() -> None:
    chance = np.random.default_rng(0)
    for _ in range(300):
        assert not compared(*(round(count) for count in chance.normal(1000, 15, size=8))).truncated


# -- kinds of steps


def kinds(*counts: int, order: str = "OSSO", given: tuple[int, ...] = ()) -> list[int]:
    """The kinds of steps with these counts; ``given`` by what they communicate."""
    by_arm = {
        mode: [step for step in range(len(counts)) if order[step % len(order)] == letter]
        for mode, letter in ((Mode.OVERLAPPED, "O"), (Mode.SEQUENTIAL, "S"))
    }
    found = kinds_by_number(dict(enumerate(counts)), by_arm, dict(enumerate(given or (0,) * len(counts))))
    return [found[step] for step in range(len(counts))]


def test_steps_with_other_numbers_of_kernels_that_both_modes_have_are_of_another_kind() -> None:
    assert kinds(100, 100, 300, 300, 100, 101, 100, 101) == [0, 0, 1, 1, 0, 0, 0, 0]
    assert kinds(*[100] * 8) == [0] * 8


def test_a_number_that_one_mode_has_makes_no_kind() -> None:
    assert kinds(100, 100, 100, 100, 100, 100, 100, 300) == [0] * 8
    # The modes may differ from each other.
    assert kinds(100, 150, 150, 100, 100, 150, 150, 100) == [0] * 8


def test_numbers_that_vary_by_chance_make_no_kinds() -> None:
    assert kinds(100, 120, 140, 160, 110, 130, 150, 170) == [0] * 8
    assert kinds(100, 100, 120, 120, 140, 140, 160, 160, order="OS") == [0] * 8


def test_kinds_that_communicate_differently_are_parted_each_on_its_own() -> None:
    assert kinds(100, 100, 50, 50, 300, 300, 50, 50, order="OS", given=(0, 0, 1, 1, 0, 0, 1, 1)) == [
        0, 0, 1, 1, 2, 2, 1, 1,
    ]  # fmt: skip
