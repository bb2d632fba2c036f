"""Windows that cost too much are skipped, and no more of them than need be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, cycle, repeat

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_callbacks import OverlapReport, Schedule
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.monitor.background.budget import WindowBudget
from tests.samples import aggregate_windows
from tests.samples import window as rank_window

EVERY_N_STEPS = 500
STEP_S = 0.02
INTERVAL_S = EVERY_N_STEPS * STEP_S

_MADE = aggregate_windows([rank_window()], world_size=1, every_n_steps=EVERY_N_STEPS)


def report(window: int, cost: float | None, step_ms: float | None = 20.0) -> OverlapReport:
    step = None if step_ms is None else Estimate(step_ms, None, None, 1, 1)
    lost_ms = None if cost is None else cost * INTERVAL_S * 1e3
    return msgspec.structs.replace(
        _MADE, window=window, measurement_overhead=cost, lost_ms=lost_ms, e2e_overlapped_ms=step
    )


class Clock:
    """The host's clock, moved by hand."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> int:
        return round(self.s * 1e9)


def test_a_window_of_three_times_the_budget_has_two_skipped_after_it() -> None:
    clock = Clock()
    budget = WindowBudget(0.01, clock)
    opened_ns = clock()
    clock.s += 0.0299 * INTERVAL_S  # the window takes time itself
    budget.record(report(4, 0.0299), opened_ns)
    skipped = []
    for window in range(5, 9):
        clock.s += INTERVAL_S
        if budget.skip(window) is not None:
            skipped.append(window)
            assert "one window in 3 is measured" in str(budget.skip(window))
    assert skipped == [5, 6]
    assert budget.skip(None) is None  # a mode pinned by hand has no budget


@pytest.mark.parametrize("cost", [0.02, 0.059, 0.4, 1.7])
def test_it_says_when_the_next_window_comes_and_which_budget_would_bring_it_sooner(cost: float) -> None:
    schedule = Schedule(every_n_steps=EVERY_N_STEPS)

    def first_measured(max_overhead: float | None) -> tuple[int, str]:
        """First step of the next window that is not left out, and what is said of the first that is."""
        clock, said = Clock(), ""
        budget = WindowBudget(max_overhead, clock)
        opened_s = clock.s
        budget.record(report(0, cost), clock())
        for window in range(1, 10_000):
            # A window whose cost is longer than what lies between two takes longer itself.
            clock.s = opened_s + cost * INTERVAL_S + window * INTERVAL_S
            step = 20 + window * EVERY_N_STEPS
            if budget.skip(window) is None:
                assert budget.postponed(schedule, step) == ""
                return step, said
            said = said or budget.postponed(schedule, step)
        raise AssertionError("no window is measured")

    comes, said = first_measured(0.005)
    assert comes > 520
    match = re.fullmatch(
        r"the budget postpones the next window to about step ([\d,]+): a window is charged .* of training time and "
        r"max_overhead allows 0\.50%, so one window in \d+ is measured; max_overhead=(\S+) would "
        r"bring it at step 1,020 \[OC116\]",
        said,
    )
    assert match is not None, said
    about, budget = match.groups()
    assert abs(int(about.replace(",", "")) - comes) <= EVERY_N_STEPS
    assert first_measured(None if budget == "None" else float(budget))[0] <= 1020


def test_a_window_within_the_budget_skips_none_and_without_one_nothing_is_too_expensive() -> None:
    for max_overhead, cost in ((0.01, 0.0099), (None, 0.9)):
        clock = Clock()
        budget = WindowBudget(max_overhead, clock)
        opened_ns = clock()
        clock.s += cost * INTERVAL_S + INTERVAL_S
        budget.record(report(0, cost), opened_ns)
        assert budget.skip(1) is None


def test_a_cost_that_is_not_resolved_is_charged_half_of_the_way_to_its_upper_end() -> None:
    for cost, upper, charged in ((-0.01, 0.03, 0.01), (-0.03, 0.01, 0.0)):
        clock = Clock()
        budget = WindowBudget(0.01, clock)
        made = msgspec.structs.replace(
            report(0, cost), measurement_overhead_ci_high=upper, lost_high_ms=upper * INTERVAL_S * 1e3
        )
        budget.record(made, clock())
        clock.s += charged * INTERVAL_S + 0.99 * (charged / 0.01) * INTERVAL_S
        assert (budget.skip(1) is not None) == (charged > 0)
        clock.s += 0.02 * INTERVAL_S
        assert budget.skip(1) is None


def test_windows_trials_of_arms_and_delayed_collectives_are_paid_from_one_budget() -> None:
    clock = Clock()
    budget = WindowBudget(0.01, clock)
    opened_s = clock.s
    costs_s = (0.3, 0.2, 0.1)
    budget.record(report(0, costs_s[0] / INTERVAL_S), clock())
    budget.charge(1, clock(), costs_s[1])  # as an arm's trial
    budget.charge(2, clock(), costs_s[2])  # as a causal window
    paid_after_s = sum(costs_s) + sum(costs_s) / 0.01
    clock.s = opened_s + paid_after_s - 1e-3
    assert budget.skip(3) is not None
    clock.s = opened_s + paid_after_s + 1e-3
    assert budget.skip(4) is None
    assert budget.charged_s == pytest.approx(sum(costs_s))


def test_the_step_time_is_that_of_the_last_window_that_has_one() -> None:
    budget = WindowBudget(None)
    assert budget.step_s == 0
    budget.record(report(0, None, step_ms=25.0), 0)
    budget.record(report(1, None, step_ms=None), 0)
    assert budget.step_s == 0.025


def test_no_window_is_measured_while_the_cost_of_the_one_before_is_not_known() -> None:
    clock = Clock()
    budget = WindowBudget(0.01, clock)
    budget.await_cost(0, clock(), 500.0)
    assert "not known yet" in str(budget.skip(1))
    budget.record(report(0, 0.0), clock())
    budget.give_up(0)  # it is known
    assert budget.skip(1) is None
    unlimited = WindowBudget(None, clock)
    unlimited.await_cost(0, clock(), 500.0)
    assert unlimited.skip(1) is None


def test_a_window_of_unknown_cost_is_charged_its_whole_duration() -> None:
    clock = Clock()
    budget = WindowBudget(0.5, clock)
    unknown = report(0, None)
    budget.record(unknown, clock())
    clock.s += 3 * unknown.wall_ms / 1e3 - 0.01
    assert "is not known" in str(budget.skip(1))
    clock.s += 0.02
    assert budget.skip(1) is None


def test_a_window_whose_report_is_lost_is_paid_for_as_if_it_had_cost_all_of_its_time() -> None:
    clock = Clock()
    budget = WindowBudget(0.01, clock)
    opened_ns = clock()
    clock.s += 2.0
    budget.await_cost(0, opened_ns, 2000.0)
    budget.give_up(0)
    assert "is not known" in str(budget.skip(1))
    clock.s += 199.0
    assert budget.skip(1) is not None
    clock.s += 1.1
    assert budget.skip(1) is None


def test_what_a_window_cost_after_its_report_is_paid_for_once() -> None:
    clock = Clock()
    budget = WindowBudget(0.01, clock)
    budget.record(report(0, 0.005), clock(), late_ms=lambda: 0.010 * INTERVAL_S * 1e3)
    clock.s += 1.1 * INTERVAL_S
    assert budget.skip(1) is not None
    clock.s += INTERVAL_S
    assert budget.skip(2) is None
    # The next window tells it too, and that is all that it tells.
    budget.record(report(2, 0.010), clock())
    assert budget.skip(3) is None


def test_what_a_window_cost_while_the_next_one_was_measured_is_paid_for_too() -> None:
    clock, late_ms = Clock(), [0.0]
    budget = WindowBudget(0.01, clock)
    budget.record(report(0, 0.0), clock(), late_ms=lambda: late_ms[0])
    assert budget.skip(1) is None
    late_ms[0] = 0.010 * INTERVAL_S * 1e3
    budget.record(report(1, 0.010), clock())
    clock.s += 0.9 * INTERVAL_S
    assert budget.skip(2) is not None
    clock.s += 0.2 * INTERVAL_S
    assert budget.skip(2) is None


# -- whatever steps and windows do


LEFT_OUT_S = 0.01


def run(
    max_overhead: float,
    costs_s: Iterator[float],
    steps_s: Iterator[float],
    intervals: int,
    delays: Sequence[int] = (0,),
    *,
    lost: bool = False,
) -> None:
    """A job of windows that cost what they cost, measured or left out; asserts what ``max_overhead`` promises.

    Args:
        max_overhead: as of the monitor.
        costs_s: what each measured window costs.
        steps_s: how long each interval's steps are.
        intervals: from one window to the next.
        delays: intervals after which each measured window's report is made.
        lost: the reports of some windows are lost.
    """
    clock = Clock()
    budget = WindowBudget(max_overhead, clock)
    told_s = trained_s = 0.0
    first = last_s = None
    next_window = 0
    left_out_s = [0.0]  # since the last measured window
    unknown: list[tuple[int, OverlapReport, int, float]] = []
    delay = cycle(delays)
    for window in range(intervals):
        step_s = next(steps_s)
        opened_ns = clock()
        skip = budget.skip(window) if window >= next_window else None
        if skip is not None:
            next_window = skip.next_window
            left_out_s[0] += LEFT_OUT_S
            told_s += LEFT_OUT_S
            clock.s += LEFT_OUT_S
        elif window >= next_window:
            # All windows so far are paid for by the training since the first of them.
            assert told_s <= max_overhead * trained_s * (1 + 1e-6) + 1e-6
            last_s = next(costs_s)
            first = last_s if first is None else first
            told_s += last_s
            clock.s += last_s
            late_s, left_out_s = left_out_s[0], [0.0]
            # The fraction is of this interval's steps, which say nothing of the next ones'.
            made = report(window, last_s / (EVERY_N_STEPS * step_s), step_s * 1e3)
            budget.await_cost(window, opened_ns, last_s * 1e3)
            unknown.append((window + next(delay), made, opened_ns, last_s + late_s))
        while unknown and unknown[0][0] <= window:
            _, made, known_opened_ns, cost_s = unknown.pop()
            late = partial(lambda since_s: since_s[0] * 1e3, left_out_s)
            if lost and made.window % 3 == 2:
                budget.give_up(made.window, late)  # its time is no less than its cost
            else:
                budget.record(msgspec.structs.replace(made, lost_ms=cost_s * 1e3), known_opened_ns, late)
        clock.s += EVERY_N_STEPS * step_s
        trained_s += EVERY_N_STEPS * step_s
        assert last_s is not None
        assert told_s <= max_overhead * trained_s * (1 + 1e-6) + last_s + left_out_s[0] + 1e-6


@settings(max_examples=60, deadline=None)
@given(
    max_overhead=st.sampled_from((0.001, 0.005, 0.05, 1.0)),
    costs_s=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=8),
    steps_s=st.lists(st.floats(0.001, 10.0), min_size=1, max_size=8),
    delays=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    lost=st.booleans(),
)
def test_the_budget_is_kept_whatever_windows_cost_and_steps_take(
    max_overhead: float, costs_s: list[float], steps_s: list[float], delays: list[int], lost: bool
) -> None:
    run(max_overhead, cycle(costs_s), cycle(steps_s), 60, delays, lost=lost)


def test_the_budget_is_kept_with_steps_that_swing_tenfold_and_a_window_a_hundred_times_as_dear() -> None:
    run(0.005, repeat(0.2), cycle((0.1, 0.01, 0.01, 0.01)), intervals=400)  # measured on slow steps, paid by fast ones
    run(0.005, chain(repeat(0.05, 5), (5.0,), repeat(0.05)), repeat(STEP_S), intervals=400)
    run(0.005, chain((60.0,), repeat(0.05)), repeat(STEP_S), intervals=4000)


def test_a_window_a_hundred_times_as_dear_is_paid_back_and_then_measuring_goes_on() -> None:
    clock = Clock()
    budget = WindowBudget(0.005, clock)
    measured, asked, next_window = [], [], 0
    for window in range(400):
        skip = None
        if window >= next_window:
            asked.append(window)
            skip = budget.skip(window)
            next_window = window if skip is None else skip.next_window
        if window >= next_window:
            measured.append(window)
            cost = 0.4 if window == 3 else 0.004
            budget.record(report(window, cost), clock())
            clock.s += cost * INTERVAL_S
        clock.s += INTERVAL_S
    assert measured == [0, 1, 2, 3, *range(83, 400)]
    assert len([window for window in asked if window < 83]) < 12  # not in each of them


def test_after_many_quiet_windows_they_come_half_as_often_and_pay_for_one_at_a_change() -> None:
    """With windows that cost as much as four intervals of training pay for."""
    clock = Clock()
    budget = WindowBudget(0.01, clock)

    def measured(first: int, last: int) -> list[int]:
        found = []
        for window in range(first, last):
            clock.s += INTERVAL_S
            if budget.skip(window) is None:
                budget.record(report(window, 0.039), clock())
                found.append(window)
        return found

    usual = measured(0, 200)
    budget.note_quiet(1000)
    quiet = measured(200, 400)
    assert 0.4 * len(usual) <= len(quiet) <= 0.6 * len(usual)
    last = quiet[-1]
    clock.s -= (399 - last) * INTERVAL_S
    assert measured(last + 1, last + 3) == []
    budget.note_quiet(0)
    assert measured(last + 3, last + 8) == [last + 3, last + 7]  # at once, from what was saved; then as usual


def test_a_quiet_stretch_never_makes_measuring_exceed_the_budget() -> None:
    clock = Clock()
    budget = WindowBudget(0.01, clock)
    began_s, spent_s = clock.s + INTERVAL_S, 0.0
    for window in range(1000):
        clock.s += INTERVAL_S
        budget.note_quiet(1000 if window % 100 < 60 else 0)
        if budget.skip(window) is None:
            budget.record(report(window, 0.039), clock())
            assert spent_s <= 0.01 * (clock.s - began_s) + 1e-6
            spent_s += 0.039 * INTERVAL_S
