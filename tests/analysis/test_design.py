"""The weight of each block in the mean of its mode: least squares, and plain means where nothing else differs."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from scipy import stats

from overlap_callbacks.analysis.design import NUM_COVARIATES, covariates_of, design_of, rank_weights
from overlap_callbacks.analysis.figures import figures_of
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import RankWindow, Rhythm, TimedBlock
from tests.analysis.test_aggregate import rank_window

OV, SEQ = Mode.OVERLAPPED, Mode.SEQUENTIAL
TIMED, PROFILED = "OSOSOSOSSOSOSOSO", "OSOSSOSO"
EVERY_7TH = Rhythm(7, 2, 50.0, 100.0)


def modes(order: str) -> list[Mode]:
    return [OV if letter == "O" else SEQ for letter in order]


def timed(order: str, step_ms, first_step: int = 40, without=()) -> RankWindow:
    """A window of blocks of one uncounted and two counted steps; ``step_ms`` tells the time of each step."""
    blocks = []
    for number, arm in enumerate(modes(order)):
        steps = tuple(first_step + 3 * number + place for place in (1, 2))
        steps = tuple(step for step in steps if step not in without)
        if steps:
            blocks.append(TimedBlock(arm, number, tuple(step_ms(arm, step) for step in steps), steps))
    return rank_window(timed=tuple(blocks), profiled=(), rhythms=(EVERY_7TH,))


def plain(order: str, num_steps=None, covariates=None):
    number = len(order)
    columns = np.zeros((number, NUM_COVARIATES)) if covariates is None else covariates
    return design_of(modes(order), range(number), num_steps or [2] * number, columns)


@pytest.mark.parametrize("order", ["OSSO", PROFILED])
def test_without_anything_besides_the_mode_means_are_plain(order: str) -> None:
    assert plain(order).weights == pytest.approx([2 / len(order)] * len(order))


@pytest.mark.parametrize("seed", range(3))
def test_with_few_blocks_the_interval_is_welch_s(seed: int) -> None:
    # Five blocks have no trend.
    values = np.random.default_rng(seed).normal(5, [1, 3, 1, 3, 1], size=5)
    design = plain("OSOSO")
    ov, seq = design.covariances(values[:, None])
    welch = stats.ttest_ind(values[::2], values[1::2], equal_var=False)
    assert design.degrees == pytest.approx([2, 1])
    assert design.means(values[:, None])[:, 0] == pytest.approx([values[::2].mean(), values[1::2].mean()])
    difference = values[::2].mean() - values[1::2].mean()
    assert float(ov[0, 0] + seq[0, 0]) == pytest.approx((difference / welch.statistic) ** 2)


def test_the_difference_of_the_modes_is_that_of_the_least_squares_with_missing_steps_and_a_rhythm() -> None:
    chance = np.random.default_rng(4)
    num_steps = [2, 2, 1, 2, 2, 2, 2, 1, 2, 2, 2, 2, 2, 2, 2, 2]
    covariates = np.zeros((16, NUM_COVARIATES))
    covariates[:, 0] = chance.random(16)
    values = chance.normal(size=(16, 3))
    design = plain(TIMED, num_steps, covariates)
    place, arms = np.linspace(-1, 1, 16), np.array([letter == "O" for letter in TIMED], dtype=float)
    columns = np.column_stack([arms, *[place**power for power in range(4)], covariates[:, 0]])
    root = np.sqrt(num_steps)[:, None]
    slope = np.linalg.lstsq(columns * root, values * root, rcond=None)[0][0]
    means = design.means(values)
    assert means[0] - means[1] == pytest.approx(slope)
    own = design.of_mode
    assert [float(design.weights[part].sum()) for part in own] == pytest.approx([1, 1])
    # Both are taken at the same trend and the same share of hits.
    for column in columns.T[1:]:
        assert design.weights[own[0]] @ column[own[0]] == pytest.approx(design.weights[own[1]] @ column[own[1]])
    assert design.degrees.sum() == pytest.approx(16 - columns.shape[1])


def test_a_drift_of_any_cubic_form_changes_neither_the_difference_nor_its_interval() -> None:
    def step_ms(arm: Mode, step: int) -> float:
        place = (step - 40) / 48
        return (100.0 if arm is OV else 110.0) * np.exp(0.3 * place - 0.5 * place**2 + 0.4 * place**3)

    speedup = figures_of([timed(TIMED, step_ms)])["speedup_vs_sequential"]
    assert speedup.value == pytest.approx(0.1, abs=2e-3)
    assert speedup.ci_high - speedup.ci_low < 0.01


def test_a_rhythm_that_is_known_changes_neither_the_difference_nor_the_width_much() -> None:
    def step_ms(arm: Mode, step: int) -> float:
        return (100.0 if arm is OV else 110.0) * (1.5 if step % 7 == 2 else 1.0)

    window = timed(TIMED, step_ms)
    known = figures_of([window])["speedup_vs_sequential"]
    assert known.value == pytest.approx(0.1, abs=0.005)
    assert known.ci_high - known.ci_low < 0.02
    unknown = figures_of([msgspec.structs.replace(window, rhythms=())])["speedup_vs_sequential"]
    assert unknown.ci_high - unknown.ci_low > 0.1


def test_a_rhythm_in_one_mode_is_indistinguishable_from_the_mode_and_stays() -> None:
    covariates = np.zeros((16, NUM_COVARIATES))
    covariates[:, 0] = [letter == "O" for letter in TIMED]
    assert plain(TIMED, covariates=covariates).weights == pytest.approx(plain(TIMED).weights)


def test_columns_leave_degrees_of_freedom() -> None:
    covariates = np.random.default_rng(0).random((6, NUM_COVARIATES))
    assert plain("OSSOOS", covariates=covariates).degrees.sum() == pytest.approx(2)


def test_covariates_are_shares_of_hits_and_of_kinds() -> None:
    block = TimedBlock(OV, 0, (1.0,) * 4, steps=(9, 10, 11, 16), kinds=(0, 0, 2, 0))
    assert covariates_of(block, (EVERY_7TH, Rhythm(2, 0, 1.0, 1.0))) == (0.5, 0.5, 0.0, 0.0, 0.25, 0.0)
    of_old_record = TimedBlock(OV, 0, (1.0,) * 4)
    assert covariates_of(of_old_record, (EVERY_7TH,)) == (0.0,) * NUM_COVARIATES
    assert covariates_of(block, (Rhythm(0, 0, 1.0, 1.0),)) == (0.0, 0.0, 0.0, 0.0, 0.25, 0.0)  # of a damaged record


def test_blocks_of_one_mode_alone_weigh_by_their_steps() -> None:
    blocks = [TimedBlock(OV, number, (1.0,) * steps) for number, steps in enumerate((1, 3))]
    assert rank_weights(blocks, [1, 3], ()) == pytest.approx([0.25, 0.75])
    assert rank_weights([], [], ()) == []
