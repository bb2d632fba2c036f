"""Configurations of a study together: means, extremes, and pairs that differ in one factor."""

from __future__ import annotations

import math

import numpy as np
import pytest

from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import difference, mean_of, relative_change
from overlap_callbacks.analysis.study import (
    BATCH,
    LONGER,
    POWER_CAP,
    PRECISION,
    SLOWDOWN,
    STEP,
    families,
    last_rows,
    overall,
    pairs,
)
from tests.experiments.study_page.studies import configuration, estimate, factors, figures, of_rows, row


def test_a_mean_over_configurations_by_hand() -> None:
    # Half widths 0.03 and 0.04: those of the sum are 0.05, of the mean 0.025.
    mean = mean_of([estimate(0.1, 0.03), estimate(0.3, 0.04)])
    assert (mean.value, mean.ci_low, mean.ci_high) == pytest.approx((0.2, 0.175, 0.225))
    assert mean.num_steps == 32


def test_one_configuration_without_an_interval_leaves_the_mean_without() -> None:
    mean = mean_of([estimate(0.1), estimate(0.3, None)])
    assert mean.value == pytest.approx(0.2)
    assert (mean.ci_low, mean.ci_high) == (None, None)


def test_a_difference_takes_the_side_of_each_interval_that_matters() -> None:
    base, other = Estimate(0.10, 0.07, 0.20, 8, 4), Estimate(0.50, 0.46, 0.90, 8, 4)
    change = difference(base, other)
    assert change.value == pytest.approx(0.40)
    # Lower: 0.04 below the other and 0.10 above the base. Upper: 0.40 above the other and 0.03 below the base.
    assert change.ci_low == pytest.approx(0.40 - math.hypot(0.04, 0.10))
    assert change.ci_high == pytest.approx(0.40 + math.hypot(0.40, 0.03))


def test_a_relative_change_is_a_difference_of_logarithms() -> None:
    base, other = Estimate(100.0, 90.0, 110.0, 8, 4), Estimate(150.0, 150.0, 150.0, 8, 4)
    change = relative_change(base, other)
    assert change is not None
    assert (change.value, change.ci_low, change.ci_high) == pytest.approx((0.5, 150 / 110 - 1, 150 / 90 - 1))
    assert relative_change(estimate(0.0), estimate(1.0)) is None


def test_the_interval_of_a_mean_holds_the_truth_as_often_as_it_says() -> None:
    # Five configurations of known figures, each measured in eight blocks: Student's interval with 7 degrees of freedom.
    generator, held, trials, truth = np.random.default_rng(1), 0, 2000, np.array([0.0, 0.1, 0.2, 0.3, 0.4])
    blocks = truth[None, :, None] + generator.normal(0, [[[0.01], [0.02], [0.03], [0.04], [0.05]]], (trials, 5, 8))
    means, halves = blocks.mean(axis=2), 2.3646 * blocks.std(axis=2, ddof=1) / math.sqrt(8)
    for values, widths in zip(means, halves, strict=True):
        mean = mean_of([estimate(float(value), float(half)) for value, half in zip(values, widths, strict=True)])
        assert mean.ci_low is not None
        assert mean.ci_high is not None
        held += mean.ci_low <= truth.mean() <= mean.ci_high
    assert 0.94 <= held / trials <= 0.99


def test_extremes_name_their_configurations() -> None:
    _, rows = of_rows([row(configuration(batch=batch), figures(0.1 * batch, None)) for batch in (2, 1, 3)])
    found = overall(rows, SLOWDOWN)
    assert found is not None
    assert (found.number, found.most.configuration.batch, found.least.configuration.batch) == (3, 3, 1)
    assert overall(rows, LONGER) is None


def test_a_row_that_is_not_finite_does_not_count() -> None:
    rows = [row(configuration(batch=1), figures(math.nan)), row(configuration(batch=2), figures(0.2))]
    found = overall(rows, SLOWDOWN)
    assert found is not None
    assert (found.number, found.mean.value) == (1, pytest.approx(0.2))


def test_of_several_rows_of_a_configuration_the_last_that_was_measured_counts() -> None:
    one, two = configuration(batch=1), configuration(batch=2)
    start, _ = of_rows([row(two), row(one)])
    rows = [
        row(one, figures(0.1)),
        row(one, figures(0.2)),
        row(one, failure="late"),
        row(two, failure="first"),
        row(two),
    ]
    kept = last_rows(start, rows)
    assert [found.configuration for found in kept] == [two, one]
    assert kept[1].figures == figures(0.2)


def test_pairs_differ_in_one_factor_only_and_start_from_the_plain_one() -> None:
    _, rows = factors()
    by_precision = pairs(rows, PRECISION)
    assert {(pair.base.model, pair.base.precision, pair.other.precision) for pair in by_precision} == {
        (model, "fp32", other) for model in ("gpt3-xl", "gpt3-2.7b") for other in ("tf32", "fp16", "bf16")
    }
    assert [(pair.base.power_cap_w, pair.other.power_cap_w) for pair in pairs(rows, POWER_CAP)] == [
        (None, 500.0), (None, 400.0), (None, 300.0)
    ]  # fmt: skip
    assert pairs(rows, BATCH) == []
    capped = pairs(rows, POWER_CAP)[-1].changes
    assert capped[SLOWDOWN].value == pytest.approx(0.36 - 0.20)  # in points
    assert capped[STEP].value == pytest.approx(0.46)  # relative


def test_a_failed_configuration_is_in_no_family() -> None:
    rows = [row(configuration(batch=1), figures()), row(configuration(batch=2), failure="out of memory")]
    assert families(rows, BATCH) == []
