"""Windows that cost too much are skipped, and no more of them than need be."""

from __future__ import annotations

import msgspec

from overlap_callbacks import OverlapReport
from overlap_callbacks.analysis.aggregate import aggregate_windows
from overlap_callbacks.analysis.results.report import Estimate
from overlap_callbacks.monitor.background.budget import WindowBudget
from tests.samples import window as rank_window


def report(window: int, cost: float | None, step_ms: float | None = 20.0) -> OverlapReport:
    made = aggregate_windows([rank_window()], world_size=1, every_n_steps=500)
    step = None if step_ms is None else Estimate(step_ms, None, None, 1, 1)
    return msgspec.structs.replace(made, window=window, measurement_overhead=cost, e2e_overlapped_ms=step)


def test_a_window_of_three_times_the_budget_has_two_skipped_after_it() -> None:
    budget = WindowBudget(0.01)
    budget.record(report(4, 0.0299))
    skipped = [window for window in range(5, 9) if budget.reason_to_skip(window) is not None]
    assert skipped == [5, 6]
    assert "one window in 3 is measured" in str(budget.reason_to_skip(5))
    assert budget.reason_to_skip(None) is None  # a mode pinned by hand has no budget


def test_a_window_within_the_budget_skips_none_and_without_one_nothing_is_too_expensive() -> None:
    for max_overhead, cost in ((0.01, 0.01), (0.01, None), (None, 0.9)):
        budget = WindowBudget(max_overhead)
        budget.record(report(0, cost))
        assert budget.reason_to_skip(1) is None


def test_the_step_time_is_that_of_the_last_window_that_has_one() -> None:
    budget = WindowBudget(None)
    assert budget.step_s == 0
    budget.record(report(0, None, step_ms=25.0))
    budget.record(report(1, None, step_ms=None))
    assert budget.step_s == 0.025
