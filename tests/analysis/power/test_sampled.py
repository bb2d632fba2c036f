"""A sensor that covers more than its table says is seen by how its readings follow the modes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from overlap_callbacks.analysis.power.readings import Reading, Readings, Segment
from overlap_callbacks.analysis.power.sampled import covered_s
from overlap_callbacks.analysis.results.mode import Mode
from tests.analysis.power.test_device import S, figures_of, info

BLOCK_S = 0.8
SEGMENTS = [
    Segment(
        round(10 * S + number * BLOCK_S * S),
        round(10 * S + (number + 1) * BLOCK_S * S),
        Mode.SEQUENTIAL if letter == "S" else Mode.OVERLAPPED,
        4,
    )
    for number, letter in enumerate("OSSO" * 4)
]
WATTS = {Mode.OVERLAPPED: 400.0, Mode.SEQUENTIAL: 300.0}


def power(time_s: float) -> float:
    number = int((time_s - 10) // BLOCK_S)
    return WATTS[SEGMENTS[number].mode] if 0 <= number < len(SEGMENTS) else 400.0


def averaged(window_s: float, noise_w: float = 0.0, of: Callable[[float], float] = power) -> Readings:
    """What a sensor reads that averages over so long."""
    chance = np.random.default_rng(0)
    return Readings.of(
        [
            Reading(
                round(time_s * S),
                averaging_s=0.225,
                power_w=float(np.mean([of(time_s - age) for age in np.linspace(0, window_s, 50)]))
                + chance.normal(0, noise_w),
            )
            for time_s in np.arange(9, 25, 0.1) + chance.uniform(0, 0.1, 160)
        ]
    )


@pytest.mark.parametrize(("window_s", "noise_w"), [(0.5, 0.0), (0.5, 20.0), (1.0, 0.0), (1.0, 20.0), (2.0, 0.0)])
def test_a_longer_averaging_time_than_the_table_has_is_detected(window_s: float, noise_w: float) -> None:
    found = covered_s(averaged(window_s, noise_w), SEGMENTS, info(averaging_s=0.225))
    assert found is not None
    assert 0.9 * window_s <= found <= 2 * window_s


@pytest.mark.parametrize("noise_w", [0.0, 20.0, 200.0])
@pytest.mark.parametrize("window_s", [0.001, 0.1, 0.2])
def test_a_sensor_that_matches_the_table_is_accepted(window_s: float, noise_w: float) -> None:
    assert covered_s(averaged(window_s, noise_w), SEGMENTS, info(averaging_s=0.225)) is None


def test_without_a_difference_of_power_between_two_modes_no_averaging_time_is_reported() -> None:
    assert covered_s(averaged(1.0, 5.0, lambda _: 400.0), SEGMENTS, info(averaging_s=0.225)) is None
    only = [segment for segment in SEGMENTS if segment.mode is Mode.OVERLAPPED]
    assert covered_s(averaged(1.0), only, info(averaging_s=0.225)) is None
    assert covered_s(averaged(1.0), SEGMENTS, info(averaging_s=None)) is None


def test_blocks_too_short_for_such_a_sensor_have_no_figure_but_a_reason() -> None:
    figures = figures_of(averaged(1.0), *SEGMENTS, source=info(averaging_s=0.225))
    assert [mode.avg_w for mode in figures.modes] == [None, None]
    assert all("too short" in mode.missing for mode in figures.modes)
    (problem,) = figures.problems
    assert problem.startswith("the sensor covers up to 1")
    assert "and not 0.23 s as is known of this device" in problem or "and not 0.22 s" in problem
    assert figures.source.averaging_s == 0.225
