"""A report's cost of its window, and what it waits for to know it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

import msgspec
import pytest

from overlap_callbacks import Schedule
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import RankWindow
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments import clocks
from overlap_callbacks.monitor.background import reporter as reporting
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.reporter import Reporter
from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.schedule import Part, Placement
from overlap_callbacks.monitor.window import MeasuredStep
from overlap_callbacks.monitor.window_cost import UsualStep, WindowCost
from tests.samples import aggregate_windows
from tests.samples import window as rank_window

USUAL = UsualStep(mean_ns=1e6, shortest_ns=1, longest_ns=10**12)  # any step is normal


def reporter(**options: float) -> Reporter:
    channel = StoreChannel(Job(0, 2, "gloo"), "prefix", Connection(pytest.fail))
    return Reporter(
        channel, MonitorConfig(**options), run=pytest.fail, environment=pytest.fail, budget=WindowBudget(None),
        on_error=pytest.fail, on_sink_error=pytest.fail,
    )  # fmt: skip


def with_cost(reports: Reporter, own: RankWindow, cost: WindowCost, steps: Sequence[MeasuredStep]) -> RankWindow:
    """What the reporting thread does with a window that was measured."""
    reports._await_normal_steps(cost)
    return reporting._with_cost(own, cost, reports._last_cost, steps)


def closed_cost(usual: UsualStep | None = USUAL) -> WindowCost:
    cost = WindowCost(clocks.now(), usual)
    cost.window_closed(clocks.now(), num_steps=0)
    return cost


def test_a_report_waits_for_the_steps_after_its_window_and_includes_their_loss() -> None:
    cost = closed_cost()

    def train() -> None:
        while not cost.over:
            time.sleep(0.01)
            cost.step_began(clocks.now())

    steps = threading.Thread(target=train)
    steps.start()
    told = with_cost(reporter(), rank_window(report_cpu_ms=0.0), cost, ())
    cost.work_done(finished=True)
    steps.join()
    assert told.usual_step_ms == 1.0
    assert told.lost_ms is not None
    assert told.lost_ms > 3 * 8  # three steps of 10 ms where 1 ms is usual


def test_the_cost_of_a_window_after_its_report_comes_with_the_next_report() -> None:
    reports, first, second = reporter(), closed_cost(), closed_cost()
    for cost in (first, second):
        cost.end()
    first._lost_ns = 7e6
    reports._last_cost = first
    alone = second.lost((), 0.0)
    assert alone is not None
    assert with_cost(reports, rank_window(), second, ()).lost_ms == pytest.approx(7.0 + alone.ms, abs=1)


def test_a_report_does_not_wait_for_a_job_that_ends_or_stalls_or_for_ever() -> None:
    closing = reporter()
    closing._closing.set()
    short = reporter(report_timeout_s=0.3)
    for reports, cost in ((closing, closed_cost()), (short, closed_cost()), (reporter(), closed_cost(None))):
        own = rank_window(report_cpu_ms=1500.0)
        done = threading.Event()
        told: list[float | None] = []

        def report(reports=reports, own=own, cost=cost, told=told, done=done) -> None:  # type: ignore[no-untyped-def]
            told.append(with_cost(reports, own, cost, ()).lost_ms)
            done.set()

        threading.Thread(target=report, daemon=True).start()
        assert done.wait(5.0)
        # What was not seen is taken to be the reporting thread's time, whole; where nothing tells, nothing is told.
        assert told[0] == (None if cost.usual is None else pytest.approx(1500.0, abs=50.0))


def window_steps(sequential_ms: float, profiled_ms: float, pause_ms: float = 0.0) -> tuple[MeasuredStep, ...]:
    """The steps of a default window: 10 ms and a little that differs, and so much more."""
    now_ns, steps = 0, []
    schedule = Schedule().placed(Placement(timed_start=40, profiled_start=130))
    for offset in range(146):
        plan = schedule.plan(schedule.first_step + offset)
        if plan is None:  # an ordinary step, which nobody looks at
            now_ns += 11_000_000
            continue
        took_ms = 10.0 + 0.1 * math.sin(offset) + sequential_ms * (plan.arm is Mode.SEQUENTIAL)
        took_ms += profiled_ms * (plan.part is Part.PROFILED) + pause_ms * (offset == 60)
        end_ns = now_ns + round(took_ms * 1e6)
        steps.append(MeasuredStep(plan=plan, start=now_ns, end=end_ns, log=StepLog((), 0, None)))
        now_ns = end_ns + 1_000_000
    return tuple(steps)


@pytest.mark.parametrize("pause_ms", [0.0, 30_000.0])
@pytest.mark.parametrize("usual", [None, USUAL])
def test_a_windows_own_steps_give_its_cost_with_an_interval(usual: UsualStep | None, pause_ms: float) -> None:
    steps = window_steps(4.0, 2.0, pause_ms)
    cost = WindowCost(0, usual)
    cost.enter(0)
    cost.leave(50_000_000)  # our own work
    cost.window_closed(6_700 * 10**6, num_steps=65)
    cost.work_done(finished=True)
    told = with_cost(reporter(), rank_window(report_cpu_ms=0.0), cost, steps)
    true_ms = 50 + 4.0 * sum(step.plan.arm is Mode.SEQUENTIAL for step in steps)
    true_ms += 2.0 * sum(step.plan.part is Part.PROFILED for step in steps)
    assert told.usual_step_ms == pytest.approx(11.0, abs=0.1)
    assert told.lost_ms == pytest.approx(true_ms, abs=3)
    assert told.lost_low_ms is not None
    assert told.lost_high_ms is not None
    assert told.lost_low_ms <= true_ms <= told.lost_high_ms
    assert told.lost_high_ms - told.lost_low_ms < 15


def test_a_window_that_the_end_of_the_job_cut_short_has_no_cost() -> None:
    cost = WindowCost(0, USUAL)
    cost.window_closed(6_700 * 10**6, num_steps=65, job_ends=True)
    own = with_cost(reporter(), rank_window(report_cpu_ms=40.0, complete=False), cost, ())
    assert own.lost_ms is None
    report = aggregate_windows([own], world_size=1, every_n_steps=500)
    assert report.lost_ms is None
    assert report.measurement_overhead is None


def test_old_records_have_no_cost_of_this_kind() -> None:
    old = msgspec.json.decode(msgspec.json.encode(rank_window()), type=dict)
    del old["lost_ms"], old["usual_step_ms"]
    found = msgspec.convert(old, type=type(rank_window()))
    assert (found.lost_ms, found.usual_step_ms) == (None, 0.0)


def test_rank_0_gathers_before_a_rank_that_has_closed_takes_its_report_away() -> None:
    assert reporting._AFTERMATH_S < reporting.SETTLE_S
