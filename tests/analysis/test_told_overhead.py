"""What a report says that its window cost."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.arms import arm_report_of
from overlap_callbacks.analysis.figures import figure_sums
from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.headline import summary
from overlap_callbacks.analysis.measuring_cost import cost_of_run
from overlap_callbacks.analysis.results.arm import ComparedArm
from overlap_callbacks.analysis.results.estimate import Estimate
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


def test_a_ranks_measured_loss_replaces_the_computed_one():
    seen = {"usual_step_ms": 125.0, "report_cpu_ms": 5000.0}
    found = report_of(rank_window(0, lost_ms=1500.0, **seen), rank_window(1, lost_ms=1750.0, **seen))
    assert found.lost_ms == 1750.0
    assert found.measurement_overhead == pytest.approx(1750 / (500 * 125))
    # An estimate may be negative by chance: it is reported as it is, with its interval.
    by_chance = report_of(rank_window(lost_ms=-20.0, lost_low_ms=-80.0, lost_high_ms=40.0, **seen))
    between_ms = 500 * 125
    assert by_chance.measurement_overhead == pytest.approx(-20 / between_ms)
    assert by_chance.measurement_overhead_ci_low == pytest.approx(-80 / between_ms)
    assert by_chance.measurement_overhead_ci_high == pytest.approx(40 / between_ms)
    assert by_chance.lost_high_ms == 40.0
    assert "Measuring cost not resolved (below 0.06%)" in summary(by_chance)
    flat = by_chance.metrics()
    assert flat["overlap/measurement_overhead_ci_low"] < flat["overlap/measurement_overhead"] < 0
    # For a rank that has seen nothing, it is computed; the largest of all is reported.
    assert report_of(rank_window(0, lost_ms=900.0, usual_step_ms=100.0), rank_window(1)).lost_ms == pytest.approx(1000)


def test_an_observed_cost_is_reported_even_without_a_step_that_counts():
    found = report_of(rank_window(timed=(), profiled=(), lost_ms=1500.0, usual_step_ms=100.0))
    assert found.measurement_overhead == pytest.approx(0.03)
    assert report_of(rank_window(timed=(), profiled=())).measurement_overhead is None


def test_words_say_the_interval_or_that_the_cost_is_not_resolved():
    assert PLAIN.measuring_cost(Estimate(0.021, 0.014, 0.028, 65, 1)) == "2.10% of training (1.40 to 2.80)"
    assert PLAIN.measuring_cost(Estimate(0.01, -0.02, 0.04, 65, 1)) == "not resolved (below 4.00%)"
    assert PLAIN.measuring_cost(Estimate(0.01, None, None, 65, 1)) == "1.00% of training"
    assert PLAIN.measuring_cost(Estimate(0.3, -1.0, 1.7, 65, 1)) == "not resolved"
    assert PLAIN.measuring_cost(Estimate(0.9, 0.2, 1.7, 65, 1)) == "90.00% of training (at least 20.00)"


def test_the_cost_of_a_run_is_the_mean_of_its_windows_and_its_interval_that_of_independent_ones():
    seen = {"usual_step_ms": 125.0, "lost_ms": 625.0, "lost_low_ms": 0.0, "lost_high_ms": 1250.0}
    windows = [report_of(rank_window(window=number, first_step=20 + 500 * number, **seen)) for number in range(4)]
    found = cost_of_run(windows, 500)
    assert found is not None
    assert (found.value, found.ci_low, found.ci_high) == pytest.approx((0.01, 0.005, 0.015))
    # Windows with other arms cost as much.
    sums = figure_sums(rank_window())
    arms = [arm_report_of(window, ComparedArm("other", True), sums) for window in windows[1::2]]
    with_arms = cost_of_run([*windows[::2], *arms], 500)
    assert with_arms is not None
    assert (with_arms.value, with_arms.ci_low, with_arms.ci_high) == pytest.approx((0.01, 0.005, 0.015))
    every_second = cost_of_run(windows[::2], 500)
    assert every_second is not None
    assert every_second.value == pytest.approx(0.01 * 2 / 3)
