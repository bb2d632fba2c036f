"""The detector of change: its rate of false alarms is in ``benchmarks/results/change.json``."""

from __future__ import annotations

import math

import numpy as np
import pytest

from overlap_callbacks.analysis.change import LEAST_VALUES, WITHIN_VALUES, Change, ChangeDetector, changes

RATE = 3000


def noise(seed: int, number: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(10.0, 1.0, number)


def test_a_step_is_found_with_its_place_and_size_and_becomes_the_past():
    values = noise(0, 400)
    values[200:] += 3.0
    (found,), _ = changes(values, RATE)
    assert 195 <= found.first <= 205
    assert 200 <= found.found <= 210
    assert (found.before, found.after) == (pytest.approx(10, abs=0.5), pytest.approx(13, abs=1.0))
    assert found.deviation == pytest.approx(1.0, abs=0.3)


def test_every_change_of_a_run_is_found_back_to_normal_too():
    values = noise(1, 600)
    values[200:400] += 4.0
    found, _ = changes(values, 100 * RATE)
    assert [round(change.first, -1) for change in found] == [200, 400]
    assert found[1].after < found[1].before


def test_outliers_are_no_change():
    values = noise(2, 400)
    values[[100, 101, 250, 399]] += 1000.0
    assert changes(values, RATE)[0] == []


def test_a_slow_wave_of_noise_widens_the_deviation():
    """Values alike their neighbours: a white detector would find a change in nearly every such run."""
    found = 0
    for seed in range(10):
        values = np.random.default_rng(seed).normal(0, 1, 300)
        for place in range(1, 300):
            values[place] = 0.6 * values[place - 1] + 0.8 * values[place]
        found += len(changes(values, 10 * RATE)[0])
    assert found <= 2


def test_the_step_that_the_detector_names_is_found_in_most_runs():
    found = 0
    for seed in range(40):
        values = noise(seed, 200 + WITHIN_VALUES)
        detector = ChangeDetector(RATE)
        before = [detector.add(value) for value in values[:200]]
        assert detector.smallest_step == pytest.approx(1.25, abs=0.4)
        step = detector.smallest_step or math.nan
        if before == [None] * 200:
            found += any(detector.add(value + step) for value in values[200:])
        else:
            found += 1  # a false alarm is not what is tested here
    assert found >= 34


def test_a_rarer_false_alarm_takes_a_larger_step():
    few, many = (changes(noise(3, 100), rate)[1] for rate in (RATE, 1000 * RATE))
    assert few < many


def test_with_few_values_nothing_is_told():
    detector = ChangeDetector(RATE)
    assert [detector.add(value) for value in [0.0] * 5 + [100.0] * (LEAST_VALUES - 6)] == [None] * (LEAST_VALUES - 1)
    assert detector.smallest_step is None


def test_values_that_do_not_vary_and_values_that_are_not_numbers():
    found, _ = changes([5.0, math.nan, math.inf] * 30 + [6.0] * 10, RATE)
    assert [(change.before, change.after) for change in found] == [(5.0, 6.0)]
    assert isinstance(found[0], Change)


@pytest.mark.parametrize(
    ("rate", "error"), [(0, ValueError), (-1, ValueError), ("1", TypeError), (math.inf, ValueError)]
)
def test_a_rate_that_is_none_is_refused(rate, error):
    with pytest.raises(error, match="values_per_false_alarm"):
        ChangeDetector(rate)


def test_memory_is_bounded():
    detector = ChangeDetector(RATE)
    for value in noise(4, 2000):
        detector.add(value)
    assert len(detector._values) <= 300
