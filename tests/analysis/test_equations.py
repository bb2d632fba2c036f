from __future__ import annotations

import math

import pytest

from overlap_callbacks.analysis import equations

# One step by hand: 100 ms, of which 66 ms are compute (60 ms alone) and 30 ms communication, 20 ms of it hidden behind
# 22 ms of compute.


def test_equation_1_is_the_slowdown_of_the_compute_kernels() -> None:
    assert equations.slowdown(66.0, 60.0) == pytest.approx(0.1)
    assert equations.slowdown(60.0, 60.0) == 0


def test_equation_2_is_the_share_of_compute_beside_communication() -> None:
    assert equations.overlap_ratio(22.0, 66.0) == pytest.approx(1 / 3)


def test_equations_4_and_5_take_the_slowdown_out_and_add_what_was_hidden() -> None:
    ideal_ms = equations.ideal_step_ms(100.0, 66.0, 60.0)
    assert ideal_ms == 94
    assert equations.sequential_step_ms(ideal_ms, 20.0) == 114


def test_perfect_overlap_takes_as_long_as_the_longer_of_compute_and_communication() -> None:
    assert equations.attainable_step_ms(60.0, 30.0) == 60
    assert equations.attainable_step_ms(60.0, 80.0) == 80


def test_the_share_attained_is_that_of_the_way_from_a_sequential_step_to_the_attainable_one() -> None:
    assert equations.attained_fraction(120.0, 100.0, 80.0) == pytest.approx(0.5)
    assert equations.attained_fraction(120.0, 80.0, 80.0) == 1
    assert equations.attained_fraction(120.0, 130.0, 80.0) == pytest.approx(-0.25)


@pytest.mark.parametrize("attainable_ms", [114.1, 120.0, 500.0, math.nan])
def test_of_next_to_nothing_no_share_is_attained(attainable_ms: float) -> None:
    assert math.isnan(equations.attained_fraction(120.0, 100.0, attainable_ms))
