"""Rhythms of a job are found in its step times with their cost, and only if there are any."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from overlap_callbacks.analysis.results.window import Rhythm
from overlap_callbacks.analysis.rhythms import find_rhythms, rhythm_sentence

Floats = npt.NDArray[np.float64]
STEPS = np.array([step for step in range(20, 5000) if (step - 20) % 500 >= 65])[:4096]


def noise(seed: int, number: int = len(STEPS), deviation: float = 0.01) -> Floats:
    return np.exp(np.random.default_rng(seed).normal(0, deviation, number))


def told(step_ms: Floats, steps: npt.NDArray[np.int64] = STEPS) -> list[tuple[int, int]]:
    return [(rhythm.period, rhythm.phase) for rhythm in find_rhythms(steps, step_ms)]


@pytest.mark.parametrize("period", [2, 3, 4, 8, 10, 50, 64])
@pytest.mark.parametrize("extra", [-0.02, 0.03, 0.5, 3.0])
def test_a_rhythm_is_found_with_its_period_its_phase_and_what_it_costs(period: int, extra: float) -> None:
    hits = STEPS % period == period - 1
    found = find_rhythms(STEPS, 300 * noise(period) * (1 + extra * hits))
    if period == 2 and extra < 0:  # of two steps that take turns, the longer one is told
        assert [(r.period, r.phase) for r in found] == [(2, 0)]
        return
    (rhythm,) = found
    assert (rhythm.period, rhythm.phase) == (period, period - 1)
    assert rhythm.extra_ms == pytest.approx(300 * extra, rel=0.1, abs=1.5)
    assert rhythm.step_ms == pytest.approx(300, rel=0.01)
    assert (rhythm.hits(STEPS) == hits).all()


def test_three_rhythms_come_by_what_they_explain() -> None:
    step_ms = 100 * noise(1) * (1 + 0.1 * (STEPS % 4 == 1)) + 60 * (STEPS % 10 == 7) + 300 * (STEPS % 50 == 12)
    assert told(step_ms) == [(50, 12), (10, 7), (4, 1)]
    assert len(find_rhythms(STEPS, step_ms, max_rhythms=1)) == 1


def test_if_every_fourth_step_is_longer_and_every_eighth_more_so_both_are_reported() -> None:
    step_ms = 100 * noise(2) + 20 * (STEPS % 4 == 3) + 30 * (STEPS % 8 == 7)
    assert sorted(told(step_ms)) == [(4, 3), (8, 7)]


@pytest.mark.parametrize("number", [0, 1, 9, 20, 40])
def test_few_steps_show_no_rhythm(number: int) -> None:
    assert told(100 * noise(0, number) * (1 + (STEPS[:number] % 8 == 3)), STEPS[:number]) == []


def test_identical_or_unknown_steps_have_no_rhythm() -> None:
    assert told(np.full(len(STEPS), 100.0)) == []
    assert told(np.full(len(STEPS), np.nan)) == []
    assert told(np.zeros(len(STEPS))) == []


def test_unknown_times_are_no_part_of_a_rhythm() -> None:
    step_ms = 100 * noise(3) * (1 + 0.2 * (STEPS % 8 == 3))
    step_ms[::11] = np.nan
    step_ms[5::97] = 0.0
    assert told(step_ms) == [(8, 3)]


def test_a_rhythm_that_has_ended_is_dropped_and_one_that_has_begun_is_reported_in_full() -> None:
    late = np.arange(len(STEPS)) >= 3200
    hits = STEPS % 8 == 3
    assert told(100 * noise(4) * (1 + 0.2 * (hits & ~late))) == []
    (begun,) = find_rhythms(STEPS, 100 * noise(4) * (1 + 0.2 * (hits & late)))
    assert (begun.period, begun.phase) == (8, 3)
    assert begun.extra_ms == pytest.approx(20, rel=0.1)


def autoregressive(seed: int, number: int, correlation: float) -> Floats:
    values = np.random.default_rng(seed).normal(0, 0.01, number)
    values[1:] *= np.sqrt(1 - correlation**2)
    for index in range(1, number):
        values[index] += correlation * values[index - 1]
    return np.exp(values)


def noisy(kind: str, seed: int) -> Floats:
    chance, number = np.random.default_rng(seed), 1024
    if kind == "stalls":
        return noise(seed, number) * (1 + (chance.random(number) < 0.02))
    if kind == "heavy tails":
        return noise(seed, number) * np.exp((chance.random(number) < 0.05) * chance.exponential(0.3, number))
    if kind == "drift":
        return noise(seed, number) * np.linspace(1, 1.3, number)
    return autoregressive(seed, number, float(kind))


@pytest.mark.parametrize("kind", ["stalls", "heavy tails", "drift", "0.5", "0.9"])
def test_noise_has_no_rhythm(kind: str) -> None:
    assert sum(bool(told(noisy(kind, seed), STEPS[:1024])) for seed in range(1000, 1060)) <= 1


def test_with_correlated_steps_a_rhythm_is_not_reported_at_half_its_period() -> None:
    steps = STEPS[:300]
    found = [told(autoregressive(seed, 300, 0.9) * (1 + 0.015 * (steps % 4 == 1)), steps) for seed in range(40)]
    assert sum(rhythms[:1] == [(4, 1)] for rhythms in found) >= 39


def test_a_rhythm_is_reported_with_its_steps() -> None:
    assert (
        rhythm_sentence(Rhythm(8, 3, 150.0, 308.0))
        == "every 8th step takes 150.0 ms longer, in both modes (steps 3, 11, 19, ...)"
    )
    assert rhythm_sentence(Rhythm(2, 0, -1.5, 10.0)).startswith("every other step takes 1.50 ms shorter")
    assert "(steps 50, 100, 150, ...)" in rhythm_sentence(Rhythm(50, 0, 600.0, 310.0))
    assert [rhythm_sentence(Rhythm(p, 1, 1.0, 9.0)).split()[1] for p in (3, 11, 21, 32, 63)] == [
        "3rd", "11th", "21st", "32nd", "63rd",
    ]  # fmt: skip
