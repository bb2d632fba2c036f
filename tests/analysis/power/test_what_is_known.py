"""What is not known well enough is no figure: gaps, blocks without readings, sources that disagree."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.power.readings import Reading, Readings
from tests.analysis.power.test_device import S, figures_of, info, mode_of, read, segment, ticks


@pytest.mark.parametrize(("gap_s", "measured"), [(0.2, True), (0.3, False), (1.0, False)])
def test_nothing_is_held_over_a_gap_of_more_than_two_intervals(gap_s, measured) -> None:
    times = [t for t in ticks(0, 10) if not 2.05 < t < 1.99 + gap_s]
    readings = read(times, lambda t: 500.0 if t < 2.05 else 200.0)  # 500 W would be held over the gap
    figures = figures_of(readings, segment(0, 4), segment(5, 10), failed=3)
    found = mode_of(figures)
    assert (found.num_steps, found.peak_w) == ((2, 500) if measured else (1, 200))
    assert measured or found.avg_w == pytest.approx(200)
    assert figures.problems == ("3 readings of power failed [OC417]",)
    assert figures.failed == 3


def test_a_mode_all_of_whose_blocks_have_gaps_says_so() -> None:
    readings = read([t for t in ticks(0, 10) if not 2.05 < t < 3.0], lambda t: 200.0)
    found = mode_of(figures_of(readings, segment(0, 4)))
    assert found.avg_w is None
    assert found.missing == "readings of power are missing in each of these blocks for longer than two intervals"


def test_the_energy_of_a_step_is_that_of_all_steps_not_of_those_that_were_measured() -> None:
    # The sensor needs 0.5 s: only the blocks of slow steps have a reading.
    readings = Readings.of([Reading(round(t * S), averaging_s=0.5, power_w=300.0) for t in ticks(0, 20)])
    slow = [segment(2 * n, 2 * n + 1.2, steps=2) for n in range(4)]
    fast = [segment(9 + n, 9.4 + n, steps=2) for n in range(4)]
    found = mode_of(figures_of(readings, *slow, *fast, source=info(averaging_s=0.5)))
    assert (found.num_steps, found.energy_steps) == (8, 16)
    assert found.avg_w == pytest.approx(300)
    assert found.energy_per_step_j == pytest.approx(300 * (4 * 1.2 + 4 * 0.4) / 16)


def test_neither_the_counter_nor_readings_that_differ_by_more_than_5_percent_are_used() -> None:
    readings = read(ticks(0, 10), lambda t: 250.0, energy_j=lambda t: 275.0 * t)
    figures = figures_of(readings, segment(0, 5, steps=5), source=info(energy_lag_s=0.01))
    found = mode_of(figures)
    assert (found.avg_w, found.energy_per_step_j, found.peak_w) == (None, None, None)
    assert (found.counted_w, found.sampled_w) == pytest.approx((275, 250))
    assert found.missing == (
        "in overlapped steps the energy counter gives 275 W and the readings of power 250 W, and which of the two is "
        "wrong is not known"
    )


def test_a_smaller_difference_does_not_matter() -> None:
    readings = read(ticks(0, 10), lambda t: 250.0, energy_j=lambda t: 260.0 * t)
    found = mode_of(figures_of(readings, segment(0, 5, steps=5), source=info(energy_lag_s=0.01)))
    assert (found.energy_per_step_j, found.sampled_energy_per_step_j) == pytest.approx((260, 250))


def test_watts_and_joules_have_intervals_over_blocks() -> None:
    watts = [300.0, 303.0, 297.0, 300.0]
    readings = read(ticks(0, 4), lambda t: watts[min(3, int(t))])
    found = mode_of(figures_of(readings, *[segment(n + 0.05, n + 0.95, steps=3) for n in range(4)]))
    assert found.avg_w == pytest.approx(300)
    # Student's t of three degrees of freedom, of a standard error of 1.22 W.
    assert (found.avg_w_ci_low, found.avg_w_ci_high) == pytest.approx((296.1, 303.9), abs=0.05)
    assert (found.energy_per_step_j_ci_low, found.energy_per_step_j_ci_high) == pytest.approx((88.8, 91.2), abs=0.05)
