"""The time that training loses to a window: until steps are back to normal, and nothing that is not ours."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import pytest

from overlap_callbacks.gate.switches import FunctionSwitch
from overlap_callbacks.instruments import clocks
from overlap_callbacks.instruments.profiler import Profile
from overlap_callbacks.monitor.background.order_check import Decision, Ruling
from overlap_callbacks.monitor.background.parts import stretch_steps
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.placement import PhaseBalance
from overlap_callbacks.monitor.window_cost import (
    MAX_STEPS_AFTER,
    NORMAL_STEPS,
    STEPS_BEFORE,
    StepPace,
    UsualStep,
    WindowCost,
)
from overlap_callbacks.monitor.window_runner import WindowRunner
from tests.monitor.fakes import Bench
from tests.monitor.jobs import tiny_schedule

MS = 1_000_000
STEP = UsualStep(mean_ns=10.0 * MS, shortest_ns=9 * MS, longest_ns=12 * MS)
WINDOW_MS, WINDOW_STEPS = 700, 40  # 300 ms more than its steps take


class Clock:
    """The host's clock, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 0
        monkeypatch.setattr(clocks, "now", lambda: self.ns)

    def steps(self, cost: WindowCost, *lengths_ms: float) -> None:
        for length_ms in lengths_ms:
            self.ns += int(length_ms * MS)
            cost.step_began(self.ns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def closed(clock: Clock, usual: UsualStep | None = STEP) -> WindowCost:
    """The cost of a window whose last step has ended, and whose next one begins at once."""
    return after_window(clock, [WINDOW_MS / WINDOW_STEPS] * WINDOW_STEPS, usual=usual)


def after_window(
    clock: Clock, lengths_ms: list[float], usual: UsualStep | None = STEP, own_ms: dict[int, float] | None = None
) -> WindowCost:
    """The same, of a window whose steps have these lengths, with our own work in some of them."""
    cost = WindowCost(clock.ns, usual)
    for number, length_ms in enumerate(lengths_ms):
        if number:
            cost.window_step_began(clock.ns)
        cost.enter(clock.ns)
        own_ns = int((own_ms or {}).get(number, 0.0) * MS)
        clock.ns += own_ns
        cost.leave(clock.ns)
        clock.ns += int(length_ms * MS) - own_ns
    cost.window_closed(clock.ns, len(lengths_ms))
    cost.step_began(clock.ns)
    return cost


def told_ms(cost: WindowCost, report_cpu_ms: float = 0.0) -> float | None:
    """What the steps before a window tell of its cost: those of the window are too few here."""
    told = cost.lost((), report_cpu_ms)
    if told is None:
        return None
    assert (told.low_ms, told.high_ms) == (None, None)
    return told.ms


# -- how long a step usually takes


def test_the_usual_step_is_the_mean_without_an_evaluation_between_two_steps() -> None:
    lengths = [10, 10, 10, 90] * 16  # they swing: the median says nothing of their sum
    usual = UsualStep.of(list(itertools.accumulate(lengths, initial=0)))
    assert usual == UsualStep(mean_ns=30.0, shortest_ns=10, longest_ns=90)
    assert UsualStep.of(list(itertools.accumulate([*lengths, 30_000], initial=0))) == usual


def test_of_the_first_steps_of_a_job_the_later_half_counts_and_of_too_few_none_does() -> None:
    begins = list(itertools.accumulate([500, 100, 50, 20, 10, 10, 10, 10], initial=0))
    assert UsualStep.of(begins, of_new_job=True) == UsualStep(mean_ns=10.0, shortest_ns=10, longest_ns=10)
    assert UsualStep.of(begins[:4]) is None


# -- what is lost


def test_slower_steps_after_a_window_count_until_they_are_back_to_normal(clock: Clock) -> None:
    cost = closed(clock)
    clock.steps(cost, 60, 40)  # the reporting thread reads the profile
    cost.work_done()
    clock.steps(cost, 22)  # and something of that is left
    assert not cost.await_settled(0)
    clock.steps(cost, *[10] * NORMAL_STEPS)
    assert cost.await_settled(0)
    assert told_ms(cost, 80.0) == pytest.approx(300 + 50 + 30 + 12)  # its CPU time is not counted again
    assert not cost.over  # the report is still to be made
    cost.work_began()
    clock.steps(cost, 30)
    cost.work_done(finished=True)
    clock.steps(cost, *[10] * (NORMAL_STEPS + 1))
    assert cost.over
    assert cost.cost_after_report_ms == pytest.approx(20)
    clock.steps(cost, 500)
    assert cost.cost_after_report_ms == pytest.approx(20)  # nothing of this is ours


def test_usual_steps_while_our_thread_works_do_not_end_the_looking(clock: Clock) -> None:
    cost = closed(clock)
    clock.steps(cost, *[10] * 20)  # our thread waits for its turn, say
    assert not cost.await_settled(0)
    clock.steps(cost, 60)
    cost.work_done(finished=True)
    clock.steps(cost, *[10] * (NORMAL_STEPS - 1))
    assert not cost.over
    clock.steps(cost, 10)
    assert cost.over
    assert told_ms(cost, 0.0) == pytest.approx(300 + 50)


def test_an_evaluation_after_a_window_is_not_what_the_window_cost(clock: Clock) -> None:
    cost = closed(clock)
    clock.ns += 30 * MS
    cost.work_done(finished=True)
    clock.steps(cost, 30_000, *[10] * NORMAL_STEPS)
    told = told_ms(cost, 0.0)
    assert told is not None
    assert 300 + 30 <= told <= 300 + 30 + 2 * 12  # what we worked in it, and no more than two steps


@pytest.mark.parametrize("place", [0, 5, WINDOW_STEPS - 1])
def test_an_evaluation_in_a_window_is_not_what_the_window_cost(clock: Clock, place: int) -> None:
    lengths_ms = [WINDOW_MS / WINDOW_STEPS] * WINDOW_STEPS
    lengths_ms[place] += 30_000
    told = told_ms(after_window(clock, lengths_ms))
    assert told is not None
    assert 300 <= told <= 300 + 2 * WINDOW_MS / WINDOW_STEPS


def test_a_window_cut_short_by_the_end_of_the_job_has_no_cost(clock: Clock) -> None:
    for usual in (STEP, None):
        cost = WindowCost(clock.ns, usual)
        clock.ns += 50 * MS
        cost.window_closed(clock.ns, num_steps=3, job_ends=True)
        assert told_ms(cost, 80.0) is None
        assert cost.over
        assert cost.cost_after_report_ms == 0.0


def test_the_total_cost_of_windows_is_right_even_if_step_times_swing(clock: Clock) -> None:
    """What the budget adds up is no less than what windows cost, though each is known only roughly."""
    draw = random.Random(0)

    def swinging() -> int:
        return draw.choice((10, 10, 10, 100)) * MS

    pace, all_ms, extra_ms, step, windows = StepPace(), 0.0, 7, 0, 300
    for _ in range(windows):
        for _ in range(STEPS_BEFORE + 1):
            pace.step_began(step, clock.ns)
            clock.ns += swinging()
            step += 1
        pace.step_began(step, clock.ns)
        cost = pace.window_opens(clock.ns)
        for number in range(WINDOW_STEPS):
            if number:
                step += 1
                cost.window_step_began(clock.ns)
            clock.ns += swinging() + extra_ms * MS
        pace.window_closed(cost, clock.ns, step, WINDOW_STEPS, is_reported=True)
        cost.work_done(finished=True)
        while not cost.over:
            step += 1
            pace.step_began(step, clock.ns)
            clock.ns += swinging()
        step += 2  # what comes next is no step in a row
        all_ms += max(0.0, told_ms(cost) or 0.0)
    assert all_ms >= windows * WINDOW_STEPS * extra_ms


def test_the_librarys_work_in_a_window_is_counted_in_full_however_long_it_takes(clock: Clock) -> None:
    lengths_ms = [WINDOW_MS / WINDOW_STEPS] * WINDOW_STEPS
    lengths_ms[3] += 30_000
    assert told_ms(after_window(clock, lengths_ms, own_ms={3: 30_000})) == pytest.approx(300 + 30_000)


def test_sequential_steps_far_longer_than_usual_count_in_full(clock: Clock) -> None:
    lengths_ms = [10.0, *[10.0, 80.0, 80.0, 10.0] * 2]
    assert told_ms(after_window(clock, lengths_ms)) == pytest.approx(4 * 70)


def test_steps_that_run_ahead_of_the_device_again_give_back_what_the_window_took(clock: Clock) -> None:
    cost = closed(clock)
    cost.work_done(finished=True)
    clock.steps(cost, 1, 1, 1, *[10] * NORMAL_STEPS)  # the host does not wait until the device's queue is full
    assert cost.over
    assert told_ms(cost, 0.0) == pytest.approx(300 - 27)


def test_where_steps_were_not_seen_to_settle_the_reporting_threads_time_counts_whole(clock: Clock) -> None:
    cost = closed(clock)
    clock.steps(cost, 60)
    cost.work_done()
    assert told_ms(cost, 80.0) == pytest.approx(300 + 80)
    assert cost.cost_after_report_ms == 0.0
    clock.steps(cost, *[20] * 5)
    assert cost.cost_after_report_ms == pytest.approx(20)


def test_a_job_whose_pace_has_changed_is_not_looked_at_for_ever(clock: Clock) -> None:
    for work, most in ((True, 20), (False, MAX_STEPS_AFTER)):
        cost = closed(clock)
        if work:
            cost.work_done(finished=True)
        count = 0
        while not cost.over:
            clock.steps(cost, 20)
            count += 1
        assert count <= most


def test_without_steps_before_it_a_window_has_no_cost_and_no_wait(clock: Clock) -> None:
    cost = closed(clock, None)
    assert cost.over
    assert cost.is_stalled
    assert told_ms(cost, 80.0) is None
    assert cost.cost_after_report_ms == 0.0


def test_a_job_that_no_longer_steps_is_not_waited_for(clock: Clock) -> None:
    cost = closed(clock)
    assert not cost.is_stalled
    clock.ns += 2000 * MS
    assert cost.is_stalled


# -- which steps are looked at


def asked(runner: WindowRunner, bench: Bench, steps: range, clock: Clock) -> list[int]:
    """The steps that the monitor hands to the runner; each takes 10 ms."""
    handed = []
    for step in steps:
        clock.ns += 10 * MS
        if step >= runner.next_step:
            handed.append(step)
            runner.begin(step)
        if runner.in_step:
            runner.end()
        for cost in bench.reporter.costs:
            cost.work_done(finished=True)
    return handed


def test_between_windows_a_step_is_one_comparison_except_next_to_windows(clock: Clock) -> None:
    granted = Ruling(Decision.GRANTED)
    schedule = tiny_schedule(every_n_steps=1000, first_step=100)
    bench = Bench(granted, granted, config=MonitorConfig(schedule=schedule))
    runner = WindowRunner(bench.slot, bench.ring)
    handed = asked(runner, bench, range(1400), clock)
    window = schedule.placed(PhaseBalance().place(schedule, 100, "", 1))
    after = 1 + max(step for step in range(100, 1100) if window.plan(step) is not None)
    # Up to the first window, each step may be the one after which the first steps are looked at.
    expected = {*range(after), *range(1100 - STEPS_BEFORE, 1101)}
    assert expected <= set(handed)
    settling = [step for step in handed if step not in expected and step % stretch_steps(schedule)]
    assert settling[: NORMAL_STEPS + 1] == list(range(after, after + NORMAL_STEPS + 1))
    assert max(step for step in settling if step < 1000) < after + 8
    assert [cost.usual for cost in bench.reporter.costs] == [UsualStep(10.0 * MS, 10 * MS, 10 * MS)] * 2
    assert all(cost.over for cost in bench.reporter.costs)
    assert all(told_ms(cost, 0.0) == 0.0 for cost in bench.reporter.costs)


@pytest.mark.parametrize("kept_ms", [4, 30])
def test_what_a_kept_arm_does_to_the_steps_after_a_window_is_not_what_it_cost(clock: Clock, kept_ms: int) -> None:
    arm = FunctionSwitch("arm", lambda: None, lambda: None, only_between_steps=True)
    schedule = tiny_schedule(every_n_steps=1000, first_step=100)
    bench = Bench(Ruling(Decision.GRANTED), config=MonitorConfig(schedule=schedule))
    runner = WindowRunner(bench.slot, bench.ring)

    def keep(step: int) -> None:
        if bench.reporter.costs:
            bench.switch.use(arm)
            bench.switch.turn(on=True)
            clock.ns += (kept_ms - 10) * MS  # of the next step

    with mock.patch.object(bench.slot.keeping, "between_steps", keep):
        asked(runner, bench, range(400), clock)
    (cost,) = bench.reporter.costs
    assert cost.over
    assert told_ms(cost, 0.0) == 0.0


def test_the_time_to_stop_the_profiler_counts_in_full(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Profile.stop

    def stop_slowly(profile: Profile, **options: Any) -> bool:
        clock.ns += 5000 * MS
        return stop(profile, **options)

    monkeypatch.setattr(Profile, "stop", stop_slowly)
    schedule = tiny_schedule(every_n_steps=1000, first_step=100, profiled_steps=2)
    bench = Bench(Ruling(Decision.GRANTED), config=MonitorConfig(schedule=schedule))
    runner = WindowRunner(bench.slot, bench.ring)
    asked(runner, bench, range(400), clock)
    (cost,) = bench.reporter.costs
    assert cost.over
    assert told_ms(cost, 0.0) == pytest.approx(5000)


def test_the_next_window_ends_the_looking_and_knows_the_usual_step_of_the_one_before() -> None:
    pace = StepPace()
    for step in range(10):
        pace.step_began(step, step * 10 * MS)
    first = pace.window_opens(90 * MS)
    pace.window_closed(first, 400 * MS, step=14, num_steps=6, is_reported=True)
    pace.step_began(15, 410 * MS)
    second = pace.window_opens(410 * MS)
    assert first.over
    assert second.usual == first.usual is not None


def test_steps_with_a_gap_between_them_are_no_steps_in_a_row() -> None:
    pace = StepPace()
    for step in range(10):
        pace.step_began(step, step * 10 * MS)
    pace.step_began(50, 9000 * MS)
    assert pace.window_opens(9000 * MS).usual is None


def window_left_out(pace: StepPace, at_ms: float, lengths_ms: list[float], own_ms: float) -> None:
    """A window of the pace that is left out, with our own work in its first step."""
    cost = pace.window_opens(int(at_ms * MS))
    now_ns = int(at_ms * MS)
    cost.enter(now_ns)
    cost.leave(now_ns + int(own_ms * MS))
    now_ns += int(own_ms * MS)
    for length_ms in lengths_ms:
        now_ns += int(length_ms * MS)
        cost.window_step_began(now_ns)
    pace.window_closed(cost, now_ns, step=10 + len(lengths_ms), num_steps=len(lengths_ms) + 1, is_reported=False)


def test_the_cost_of_a_skipped_window_comes_with_the_next_report() -> None:
    pace = StepPace()
    for step in range(10):
        pace.step_began(step, step * 10 * MS)
    window_left_out(pace, 90.0, [13.0], own_ms=40.0)  # before there is any report
    reported = pace.window_opens(10_000 * MS)
    pace.window_closed(reported, 10_000 * MS, step=20, num_steps=0, is_reported=True)
    assert told_ms(reported) == pytest.approx(43.0)
    assert reported.cost_after_report_ms == 0.0
    window_left_out(pace, 20_000.0, [12.0, 9.0], own_ms=30.0)
    assert reported.cost_after_report_ms == pytest.approx(31.0)
    window_left_out(pace, 30_000.0, [8.0], own_ms=5.0)  # steps that are shorter by chance take nothing back
    assert reported.cost_after_report_ms == pytest.approx(36.0)
