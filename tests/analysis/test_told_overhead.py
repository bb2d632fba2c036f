"""What a report says that its window cost."""

from __future__ import annotations

import pytest

from tests.analysis.test_aggregate import rank_window, report_of


def test_the_overhead_is_the_extra_time_of_the_window_over_the_time_to_the_next():
    # 65 steps of 100 ms would take 6500 ms; 1000 ms more, over 500 steps of 100 ms.
    assert report_of(rank_window()).measurement_overhead == pytest.approx(1000 / 50_000)
    # The job waits for its slowest rank.
    slowest = report_of(rank_window(0), rank_window(1, wall_ms=9000.0))
    assert slowest.measurement_overhead == pytest.approx(2500 / 50_000)
    assert report_of(rank_window(wall_ms=6000.0)).measurement_overhead == 0.0


def test_what_the_reporting_thread_takes_from_later_steps_is_part_of_the_overhead():
    assert report_of(rank_window(report_cpu_ms=1500.0)).measurement_overhead == pytest.approx(2500 / 50_000)
    # A window that took no longer than its steps makes up for none of it.
    assert report_of(rank_window(wall_ms=6000.0, report_cpu_ms=1500.0)).measurement_overhead == pytest.approx(0.03)


def test_what_a_rank_has_seen_training_lose_takes_the_place_of_what_would_be_worked_out():
    seen = {"usual_step_ms": 125.0, "report_cpu_ms": 5000.0}
    found = report_of(rank_window(0, lost_ms=1500.0, **seen), rank_window(1, lost_ms=1750.0, **seen))
    assert found.lost_ms == 1750.0
    assert found.measurement_overhead == pytest.approx(1750 / (500 * 125))
    assert report_of(rank_window(lost_ms=-20.0, **seen)).measurement_overhead == 0.0
    # Of a rank that has seen nothing it is worked out, and the dearest of all is told.
    assert report_of(rank_window(0, lost_ms=900.0, usual_step_ms=100.0), rank_window(1)).lost_ms == pytest.approx(1000)


def test_without_a_step_that_counts_a_cost_that_was_seen_is_told_all_the_same():
    found = report_of(rank_window(timed=(), profiled=(), lost_ms=1500.0, usual_step_ms=100.0))
    assert found.measurement_overhead == pytest.approx(0.03)
    assert report_of(rank_window(timed=(), profiled=())).measurement_overhead is None
