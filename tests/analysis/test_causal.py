"""Slopes and slack of delays, and which set is tested next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from overlap_callbacks.analysis.causal import (
    Response,
    Verdict,
    call_in_words,
    causal_summary,
    levels_of,
    longest_delay_ms,
    next_set,
    ranked,
    response_of,
    responses_of,
    slopes_by_name,
)
from overlap_callbacks.analysis.results.causal import CausalWindow, DelayedCall, DelayedSet

CALLS = tuple(DelayedCall("allreduce_", "data", 0, f"bucket {place}") for place in range(8))
DELAY_MS = 10.0


def window(
    slack_ms: float,
    members: Sequence[DelayedCall] = CALLS[:1],
    *,
    steps: int = 54,
    noise: float = 0.1,
    number: int = 0,
    waits_next: bool = False,
) -> CausalWindow:
    """Of steps of 100 ms that get longer by what exceeds the slack; the first is a stall.

    ``waits_next``: the next step waits for the collective.
    """
    levels = levels_of(steps, number)
    waits = (0, *levels[:-1]) if waits_next else levels
    times = [
        100 + max(0.0, level * DELAY_MS / 2 - slack_ms) + noise * (step * 7 % 5 - 2) for step, level in enumerate(waits)
    ]
    times[0] += 500
    return CausalWindow(
        window=number, first_step=0, delayed=DelayedSet(tuple(members), DELAY_MS), levels=levels, step_ms=tuple(times)
    )


def response(slack_ms: float, **options: object) -> Response:
    found = response_of([window(slack_ms, **options)])  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("slack_ms", "slope", "verdict"),
    [(0, 1, Verdict.BLOCKING), (2, 0.8, Verdict.BLOCKING), (8, 0.2, Verdict.SLACK), (50, 0, Verdict.SLACK)],
)
def test_slope_and_slack_of_a_collective(slack_ms: float, slope: float, verdict: Verdict) -> None:
    found = response(slack_ms)
    assert found.slope.value == pytest.approx(slope, abs=0.02)
    assert found.slope.ci_low < slope < found.slope.ci_high  # type: ignore[operator]
    assert found.verdict is verdict
    if 0 < slack_ms < DELAY_MS:
        assert found.slack_ms is not None
        assert found.slack_ms.value == pytest.approx(slack_ms, abs=0.2)


def test_a_delay_for_which_the_next_step_waits_is_none_of_slack() -> None:
    found = response(0, waits_next=True)
    assert found.slope.value == pytest.approx(1, abs=0.02)
    assert found.verdict is Verdict.BLOCKING


def test_noise_makes_it_inconclusive_and_not_slack() -> None:
    assert response(0, noise=10).verdict is Verdict.INCONCLUSIVE


def test_steps_that_do_not_count_leave_their_block_out() -> None:
    whole = window(0, steps=24)
    assert response_of([whole]) is not None
    times = (*whole.step_ms[:5], None, *whole.step_ms[6:])
    assert (
        response_of([CausalWindow(window=0, first_step=0, delayed=whole.delayed, levels=whole.levels, step_ms=times)])
        is None
    )


@pytest.mark.parametrize("start", range(6))
def test_each_level_is_as_often_at_each_place_of_a_block(start: int) -> None:
    levels = levels_of(72, start)
    assert levels[::2] == levels[1::2]
    places = Counter((step // 2 % 3, level) for step, level in enumerate(levels))
    assert set(places.values()) == {8}
    assert len(places) == 9
    ends = [(levels[step - 1], levels[step]) for step in range(6, 72, 6)]
    assert not {(0, 0), (2, 2)} & set(ends)


def test_a_set_is_halved_until_its_members_are_cleared_or_known() -> None:
    blocking, tested = CALLS[5], []
    windows: list[CausalWindow] = []
    while (delayed := next_set([CALLS], responses_of(windows), 100.0)) is not None:
        tested.append(len(delayed.members))
        windows.append(window(0 if blocking in delayed.members else 99, delayed.members, number=len(windows)))
    assert tested == [8, 4, 4, 2, 1, 1, 2]
    found = ranked(responses_of(windows))
    assert [of.delayed.members for of in found if of.alone and of.verdict is Verdict.BLOCKING] == [(blocking,)]
    assert {member for of in found if of.verdict is Verdict.SLACK for member in of.delayed.members} == {*CALLS} - {
        blocking
    }


@pytest.mark.parametrize(("blocking", "noise", "most"), [(10, 0.01, 12), (333, 0.001, 30)])
def test_of_500_collectives_the_one_that_blocks_is_found_in_few_windows(blocking: int, noise: float, most: int) -> None:
    # One that the profile calls exposed comes early; in steps that vary little any is found.
    calls = tuple(DelayedCall("allreduce_", "data", place) for place in range(500))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        windows: list[CausalWindow] = []
        found: list[DelayedCall] = []
        while not found and (chosen := next_set([calls], responses_of(windows), 100.0)) is not None:
            levels = levels_of(54, len(windows))
            longer_ms = [level * chosen.delay_ms / 2 * (calls[blocking] in chosen.members) for level in levels]
            step_ms = tuple((100 + np.array(longer_ms)) * np.exp(rng.normal(0, noise, 54)))
            windows.append(
                CausalWindow(window=len(windows), first_step=0, delayed=chosen, levels=levels, step_ms=step_ms)
            )
            single = [of for of in responses_of(windows) if of.alone and of.verdict is Verdict.BLOCKING]
            found = [of.delayed.members[0] for of in single]
        assert found == [calls[blocking]]
        assert len(windows) <= most


def test_all_delays_of_a_set_are_at_most_half_a_step() -> None:
    for number in (1, 2, 100, 500, 10_000):
        assert number * longest_delay_ms(100.0, number) <= 50.0


def test_each_dimension_is_tested_before_halves_of_one_and_what_is_given_up_is_halved() -> None:
    windows = [window(0, CALLS[:4])]
    others = CALLS[4:]
    following = next_set([CALLS[:4], others], responses_of(windows), 100.0)
    assert following is not None
    assert following.members == others
    following = next_set([CALLS[:4], others], responses_of(windows), 100.0, given_up={others, CALLS[4:6], CALLS[4:5]})
    assert following is not None
    assert following.members == CALLS[5:6]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (DelayedCall("_allgather_base_", "data", 0, "layers.3"), "all-gather of layers.3"),
        (DelayedCall("_allgather_base_", "data", 1, "layers.3"), "all-gather of layers.3 #2"),
        (DelayedCall("allreduce_", "data", 70), "all-reduce 71 of data"),
    ],
)
def test_a_collective_in_words(call: DelayedCall, words: str) -> None:
    assert call_in_words(call) == words


def test_what_is_inconclusive_is_tested_again_a_few_times() -> None:
    windows: list[CausalWindow] = []
    while (delayed := next_set([CALLS[:1]], responses_of(windows), 100.0)) is not None:
        windows.append(window(0, delayed.members, noise=80, number=len(windows)))
    assert len(windows) == 5


def test_intervals_widen_with_the_sets_and_the_looks() -> None:
    (alone,) = responses_of([window(0)])
    both = responses_of([window(0), window(0, CALLS[1:2])])
    again = responses_of([window(0), window(0)])
    widths = [of.slope.ci_high - of.slope.value for of in (alone, both[0], again[0])]  # type: ignore[operator]
    assert widths[0] < widths[1]
    assert again[0].slope.num_blocks == 2 * alone.slope.num_blocks


def test_names_have_the_slopes_of_verdicts_alone() -> None:
    """What is inconclusive has none, and what holds a set up is none of its members'."""
    named = [("all_reduce", call.name) for call in CALLS]
    assert slopes_by_name([window(0)]) == {named[0]: pytest.approx(1, abs=0.02)}
    assert slopes_by_name([window(3, noise=10)]) == {}
    assert slopes_by_name([window(0, CALLS)]) == {}
    # All of a set with slack have it, also one that is inconclusive alone.
    assert slopes_by_name([window(99, CALLS), window(3, noise=10)]) == dict.fromkeys(named, 0)
    # One of a name is enough to hold the step up, and all of it must have slack.
    again = DelayedCall("allreduce_", "data", 1, CALLS[0].name)
    assert slopes_by_name([window(99), window(3, [again], noise=10)]) == {}
    assert slopes_by_name([window(99), window(99, [again])]) == {named[0]: 0}
    assert slopes_by_name([window(99), window(0, [again])]) == {named[0]: pytest.approx(1, abs=0.02)}


def test_delays_follow_the_step_and_the_size_of_the_set() -> None:
    assert longest_delay_ms(100, 1) == 10
    assert longest_delay_ms(100, 50) == 1
    assert longest_delay_ms(1, 1) == 0.2
    assert longest_delay_ms(1e6, 1) == 50


def test_each_window_of_delays_has_a_line_in_the_log() -> None:
    words = causal_summary([window(0, CALLS[:2])])
    assert words.startswith("overlap window 0 (step 0), delays of 10.00 ms to 2 collectives: all-reduce of ")
    assert "; holds the step up, slope " in words
    assert causal_summary([window(0, steps=6)]).endswith(": too few of its steps count")
