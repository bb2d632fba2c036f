from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import RankWindow, TimedBlock
from overlap_callbacks.analysis.statistics import (
    CHANGE,
    MIN_BLOCKS,
    PLAIN,
    Pooling,
    Sample,
    estimate,
    half_width_factor,
    inverted_change,
    pool,
    windows_differ,
)
from overlap_callbacks.monitor.schedule import Part, Schedule
from tests.samples import aggregate_windows
from tests.toggling import at_night


def sample(*columns, num_steps=None) -> Sample:
    blocks = np.array(columns, dtype=np.float64).T
    return Sample(blocks, num_steps=len(blocks) if num_steps is None else num_steps)


def first(means) -> float:
    return means[0]


def difference(a, b) -> float:
    return a[0] - b[0]


def half_width(found: Estimate) -> float:
    assert found.ci_low is not None
    assert found.ci_high is not None
    return (found.ci_high - found.ci_low) / 2


# -- Welch


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("blocks_a", "blocks_b"), [(4, 4), (8, 8), (5, 17), (30, 4)])
def test_the_interval_of_a_difference_of_two_means_is_welch_s(blocks_a, blocks_b, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(4.6, 0.02, blocks_a), rng.normal(4.7, 0.3, blocks_b)
    found = estimate(difference, sample(a), sample(b))
    welch = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert found.value == pytest.approx(a.mean() - b.mean(), abs=1e-12)
    assert found.ci_low == pytest.approx(welch.low, abs=1e-6)
    assert found.ci_high == pytest.approx(welch.high, abs=1e-6)


def test_the_interval_of_one_mean_is_student_s():
    # Mean 5, standard deviation 2, four blocks: standard error 1; the 97.5 % quantile of t with 3 degrees is 3.18245.
    a = 5 + np.array([-1, -1, 1, 1]) * math.sqrt(3)
    found = estimate(first, sample(a))
    assert found.value == pytest.approx(5)
    assert (found.ci_low, found.ci_high) == pytest.approx((5 - 3.18245, 5 + 3.18245), abs=1e-5)


def test_one_constant_sample_adds_nothing_to_the_width():
    a = np.array([1.0, 1.2, 0.9, 1.3])
    alone = estimate(first, sample(a))
    with_constant = estimate(difference, sample(a), sample([0.5] * 6))
    assert half_width(with_constant) == pytest.approx(half_width(alone), rel=1e-6)


def test_samples_without_any_spread_have_an_interval_of_no_width():
    found = estimate(difference, sample([2.0] * 4), sample([0.5] * 4))
    assert (found.value, found.ci_low, found.ci_high) == (1.5, 1.5, 1.5)


def test_the_scale_is_applied_to_the_value_and_both_bounds():
    a = np.log([100.0, 102.0, 98.0, 101.0])
    plain, scaled = estimate(first, sample(a)), estimate(first, sample(a), scale=math.exp)
    assert scaled.value == pytest.approx(np.prod([100.0, 102.0, 98.0, 101.0]) ** 0.25)  # the geometric mean
    assert scaled.ci_low == pytest.approx(math.exp(plain.ci_low))
    assert scaled.ci_high == pytest.approx(math.exp(plain.ci_high))


def test_steps_and_blocks_of_all_samples_are_counted():
    found = estimate(difference, sample([1, 2, 3, 4], num_steps=8), sample([1, 2, 3, 4, 5], num_steps=13))
    assert (found.num_steps, found.num_blocks) == (21, 9)


# -- the delta method


def test_a_ratio_of_correlated_quantities_has_the_delta_method_s_interval():
    rng = np.random.default_rng(3)
    common = rng.normal(0, 1, 12)
    a, b = 20 + common + rng.normal(0, 0.3, 12), 50 + 2 * common + rng.normal(0, 0.5, 12)
    found = estimate(lambda m: m[0] / m[1], sample(a, b))
    (var_a, cov), (_, var_b) = np.cov(a, b)
    ratio = a.mean() / b.mean()
    variance = (var_a - 2 * ratio * cov + ratio**2 * var_b) / b.mean() ** 2 / 12
    assert found.value == pytest.approx(ratio)
    assert half_width(found) == pytest.approx(stats.t.ppf(0.975, 11) * math.sqrt(variance), rel=1e-5)


def test_a_nonlinear_combination_of_three_samples_has_satterthwaite_s_degrees_of_freedom():
    rng = np.random.default_rng(4)
    step, ov, iso = rng.normal(4.6, 0.05, 8), rng.normal(4.1, 0.1, 4), rng.normal(4.0, 0.02, 6)
    found = estimate(
        lambda s, o, i: math.exp(s[0]) - math.exp(o[0]) + math.exp(i[0]), sample(step), sample(ov), sample(iso)
    )
    # The slope of exp is exp, so each sample adds (exp(mean))^2 var / n.
    parts = [math.exp(x.mean()) ** 2 * x.var(ddof=1) / len(x) for x in (step, ov, iso)]
    degrees = sum(parts) ** 2 / (parts[0] ** 2 / 7 + parts[1] ** 2 / 3 + parts[2] ** 2 / 5)
    assert found.value == pytest.approx(math.exp(step.mean()) - math.exp(ov.mean()) + math.exp(iso.mean()))
    assert half_width(found) == pytest.approx(stats.t.ppf(0.975, degrees) * math.sqrt(sum(parts)), rel=1e-5)


def test_the_interval_s_width_is_that_of_the_figure_s_scatter_in_a_large_simulation():
    def combine(a, b):
        return a[0] * math.exp(b[0]) / (1 + a[1])

    rng = np.random.default_rng(5)
    mean_a, cov_a, mean_b, std_b, blocks = [3.0, 1.0], [[0.04, 0.02], [0.02, 0.05]], 0.5, 0.1, 2000
    a = rng.multivariate_normal(mean_a, cov_a, blocks)
    b = rng.normal(mean_b, std_b, blocks)
    found = estimate(combine, Sample(a, blocks), sample(b))
    # The figure of 20 000 repetitions of the experiment. The spread of the mean of so many blocks is normal.
    many_a = rng.multivariate_normal(mean_a, np.array(cov_a) / blocks, 20_000)
    many_b = rng.normal(mean_b, std_b / math.sqrt(blocks), 20_000)
    scatter = np.std(many_a[:, 0] * np.exp(many_b) / (1 + many_a[:, 1]))
    assert half_width(found) == pytest.approx(1.96 * scatter, rel=0.1)  # of 2000 blocks, a variance is good to 3 %


# -- what is undefined is absent


def test_an_empty_sample_gives_no_estimate():
    empty = Sample(np.empty((0, 1)), 0)
    assert estimate(first, empty) is None
    assert estimate(difference, sample([1.0, 2.0]), empty) is None


@pytest.mark.parametrize(
    "combine",
    [
        lambda m: math.log(m[0]),  # raises ValueError
        lambda m: 1 / float(m[0]),  # raises ZeroDivisionError
        lambda m: math.exp(m[0] + 1000),  # raises OverflowError
        lambda m: m[0] / m[0],  # NaN, as NumPy divides
        lambda m: 1 / m[0],  # infinite
    ],
)
def test_an_undefined_figure_gives_no_estimate(combine):
    assert estimate(combine, sample([-1.0, 1.0, -2.0, 2.0])) is None


def test_an_undefined_quantity_that_the_figure_uses_gives_no_estimate():
    assert estimate(lambda m: m[0] + m[1], sample([1.0] * 5, [1.0, math.nan, 1.0, 1.0, 1.0])) is None


def test_an_undefined_quantity_that_the_figure_does_not_use_does_no_harm():
    # As without communication: its logarithm is undefined, the compute time beside it is not.
    a = np.array([1.0, 1.1, 1.2, 1.05])
    alone, beside = estimate(first, sample(a)), estimate(first, sample(a, [math.nan] * 4))
    assert beside.value == alone.value
    assert beside.ci_low == pytest.approx(alone.ci_low)
    assert beside.ci_high == pytest.approx(alone.ci_high)


def test_a_figure_at_the_edge_of_its_domain_has_a_value_but_no_interval():
    found = estimate(lambda m: math.sqrt(m[0]), sample([-1.0, 1.0, -2.0, 2.0]))
    assert (found.value, found.ci_low, found.ci_high) == (0.0, None, None)


def test_bounds_that_the_scale_cannot_hold_are_both_absent():
    found = estimate(first, sample([690.0, 700.0, 708.0, 710.0]), scale=math.exp)
    assert found.value == pytest.approx(math.exp(702.0))
    assert (found.ci_low, found.ci_high) == (None, None)


@pytest.mark.parametrize(("size", "has_interval"), [(1e-100, True), (1e100, True), (1e307, False)])
def test_figures_at_the_ends_of_a_float_s_range_have_an_interval_or_none_and_no_error(size, has_interval):
    found = estimate(lambda means: float(means[0]), Sample(size * np.array([[1.0], [2.0], [4.0], [5.0]]), 4))
    assert found.value == pytest.approx(3 * size)
    assert (found.ci_low is not None) == has_interval
    if has_interval:
        expected = estimate(lambda means: float(means[0]), Sample(np.array([[1.0], [2.0], [4.0], [5.0]]), 4))
        assert found.ci_high == pytest.approx(expected.ci_high * size)


def test_too_few_blocks_in_any_sample_give_a_value_without_an_interval():
    enough, few = sample(np.arange(MIN_BLOCKS, dtype=float)), sample(np.arange(MIN_BLOCKS - 1, dtype=float))
    assert estimate(difference, enough, enough).ci_low is not None
    for samples in ((enough, few), (few, enough)):
        found = estimate(difference, *samples)
        assert found.value == pytest.approx(samples[0].blocks.mean() - samples[1].blocks.mean())
        assert (found.ci_low, found.ci_high) == (None, None)


def test_fewer_blocks_suffice_where_the_caller_says_so():
    assert estimate(first, sample([1.0, 2.0]), min_blocks=2).ci_low is not None
    assert estimate(first, sample([1.0]), min_blocks=2).ci_low is None


# -- over a run


def window_of(value, low=None, high=None, num_steps=32) -> Estimate:
    return Estimate(value, low, high, num_steps=num_steps, num_blocks=16)


def known(value, error=0.1, degrees=11.0) -> Estimate:
    """A window's estimate with its standard error on a plain scale."""
    half = float(stats.t.ppf(0.975, degrees)) * error
    return Estimate(value, value - half, value + half, 32, 16, error, degrees)


def test_windows_that_agree_have_the_blocks_of_all_for_their_error():
    found = pool([known(1.0), known(1.02)])
    assert found.value == pytest.approx(1.01)
    # They differ by less than their errors: all variance is within windows.
    assert found.standard_error == pytest.approx(0.1 / math.sqrt(2), rel=1e-5)
    assert found.degrees_of_freedom == pytest.approx(22)
    assert half_width(found) == pytest.approx(stats.t.ppf(0.975, 22) * 0.1 / math.sqrt(2))
    assert (found.num_steps, found.num_blocks) == (64, 2)


def test_what_windows_differ_by_beyond_their_errors_is_added():
    found = pool([known(1.0), known(3.0)])
    within, beyond = 0.01, 2.0 - 0.01  # the variance between 1 and 3 is 2
    variance = (within + beyond) / 2
    degrees = variance**2 / ((within / 2) ** 2 / 22 + (beyond / 2) ** 2 / 1)
    assert found.standard_error == pytest.approx(math.sqrt(variance), rel=1e-5)
    assert found.degrees_of_freedom == pytest.approx(degrees, rel=1e-5)


def test_windows_without_intervals_are_the_units_from_the_fourth_on():
    values = [1.0, 3.0, 2.0, 2.5]
    assert pool([window_of(value) for value in values[:3]]).ci_low is None
    found = pool([window_of(value) for value in values])
    error = float(np.std(values, ddof=1)) / 2
    assert half_width(found) == pytest.approx(stats.t.ppf(0.975, 3) * error)


def test_a_record_of_an_earlier_version_has_its_errors_from_its_intervals():
    degrees = 14  # of 16 blocks
    half = float(stats.t.ppf(0.975, degrees)) * 0.1
    old = [window_of(value, value - half, value + half) for value in (1.0, 1.02)]
    found, expected = pool(old), pool([known(1.0, degrees=degrees), known(1.02, degrees=degrees)])
    assert (found.standard_error, found.degrees_of_freedom) == (expected.standard_error, expected.degrees_of_freedom)
    assert half_width(found) == pytest.approx(half_width(expected))
    # An end that was cut where the figure cannot be says nothing.
    cut = [window_of(value, 0.95, value + half) for value in (1.0, 1.02)]
    assert half_width(pool(cut)) == pytest.approx(half_width(pool(old)))


@pytest.mark.parametrize("num_windows", [1, 2, 12, 200])
def test_the_interval_for_all_looks_is_that_of_the_mixture_of_t(num_windows):
    degrees, mixed = 11.0 * num_windows, 0.2
    share = mixed / (mixed + num_windows)
    root = (0.07**2 * share) ** (1 / (degrees + 1))  # of whole windows
    factor = float(half_width_factor(degrees, num_windows, Pooling(all_looks=True)))
    assert factor == pytest.approx(math.sqrt(degrees * (1 - root) / (root - share)))
    # At its edge, the likelihood ratio of the mixture to no effect is one over its level.
    ratio = factor**2 / degrees
    shrunk = share * ratio
    log_ratio = 0.5 * math.log(share) + (degrees + 1) / 2 * (math.log1p(ratio) - math.log1p(shrunk))
    assert log_ratio == pytest.approx(-math.log(0.07))
    assert 1.5 < factor / stats.t.ppf(0.975, degrees) < 1.8


@pytest.mark.parametrize(("number", "wider"), [(4, 1.8), (12, 1.7656)])
def test_of_few_windows_alone_the_interval_for_all_looks_is_at_most_so_many_times_as_wide(number, wider):
    windows = [window_of(1 + 0.1 * (place % 2)) for place in range(number)]
    ratio = half_width(pool(windows, pooling=Pooling(all_looks=True))) / half_width(pool(windows))
    assert ratio == pytest.approx(wider, abs=0.002)


def test_two_windows_that_differ_have_an_interval_for_all_looks():
    windows = [known(1.0), known(9.0)]
    one, all_looks = (half_width(pool(windows, pooling=Pooling(all_looks=looks))) for looks in (False, True))
    assert all_looks == pytest.approx(1.8 * one)


def test_windows_differ_where_their_errors_do_not_explain_it():
    assert not windows_differ([known(1.0), known(1.1), known(0.95)], PLAIN)
    assert windows_differ([known(1.0), known(1.1), known(2.0)], PLAIN)
    assert not windows_differ([window_of(1.0), window_of(9.0)], PLAIN)  # nothing is known of their errors
    chance = np.random.default_rng(1)
    alarms = [windows_differ([known(float(value)) for value in chance.normal(1, 0.1, 6)], PLAIN) for _ in range(400)]
    assert sum(alarms) <= 12


def test_a_single_window_keeps_its_own_interval():
    alone = window_of(0.1, 0.05, 0.15)
    assert pool([alone]) == alone


def test_a_ratio_is_pooled_by_its_logarithm_so_that_no_interval_is_below_minus_one():
    # Half as long in one window, twice as long in the other: as long on average, whatever is divided by what.
    windows = [window_of(value) for value in (-0.5, 1.0) * 2]
    found = pool(windows, CHANGE)
    assert found.value == pytest.approx(0.0)
    assert -1 < found.ci_low < -0.6
    assert pool(windows).ci_low < -1
    turned = inverted_change(found)
    assert (turned.value, turned.ci_low) == pytest.approx((0.0, 1 / (1 + found.ci_high) - 1))


def test_the_point_of_a_run_may_be_another_than_the_mean_of_its_windows():
    found = pool([known(1.0), known(1.02)], point=1.5)
    assert (found.value, (found.ci_low + found.ci_high) / 2) == pytest.approx((1.5, 1.5))


@pytest.mark.parametrize("bounds", [(0.0, math.inf), (0.0, 3.5), (-math.inf, math.inf)])
def test_an_interval_ends_where_the_figure_cannot_be(bounds):
    free = pool([known(1.0), known(3.0)])
    found = pool([known(1.0), known(3.0)], bounds=bounds)
    assert (found.ci_low, found.ci_high) == (max(free.ci_low, bounds[0]), min(free.ci_high, bounds[1]))
    assert found.value == 2.0
    # Also of the one window of a record of an earlier version.
    assert pool([window_of(2.0, -75.0, 90.0)], bounds=(0.0, math.inf)) == window_of(2.0, 0.0, 90.0)


def test_a_run_without_windows_has_no_figure():
    assert pool([]) is None


# -- intervals that hold: A/A windows, and slowdowns of known size

STEP_MS, NOISE = 100.0, 0.02

# Correlation of neighbouring steps, drift over the timed part, and a heavy tail (one step in twenty is up to twice as
# slow).
CASES = {
    "independent": (0.0, 0.0, False),
    "autocorrelated": (0.5, 0.0, False),
    "drift": (0.0, 0.05, False),
    "autocorrelated and heavy-tailed": (0.5, 0.0, True),
}
SEEDS = {name: 2024 + number for number, name in enumerate(CASES)}

# True coverage is 0.95 to 0.98 (``benchmarks/intervals.py``). The share among 2000 windows scatters by 0.005, so that a
# sound interval falls below 0.935 in less than one seed of a hundred, and one over single steps is far below.
NUM_WINDOWS, MIN_COVERAGE = 2000, 0.935

SCHEDULE = Schedule()
PLANS = SCHEDULE.part(Part.TIMED)
COUNTED = [
    [plan.offset for plan in PLANS if plan.counted and plan.block == block] for block in range(SCHEDULE.timed_blocks)
]
ARMS = [PLANS[offsets[0]].arm for offsets in COUNTED]
IN_SEQUENTIAL = np.array([plan.arm is Mode.SEQUENTIAL for plan in PLANS])


def simulate(case: str, num_windows: int) -> np.ndarray:
    """Logarithms of the step times of whole windows, the warm-up steps included; shape (windows, steps)."""
    correlation, drift, heavy_tail = CASES[case]
    rng = np.random.default_rng(SEEDS[case])
    shocks = rng.normal(0, NOISE, (num_windows, len(PLANS)))
    log_ms = np.empty_like(shocks)
    log_ms[:, 0] = shocks[:, 0]
    for step in range(1, len(PLANS)):
        log_ms[:, step] = correlation * log_ms[:, step - 1] + math.sqrt(1 - correlation**2) * shocks[:, step]
    log_ms += math.log(STEP_MS) + drift * np.arange(len(PLANS)) / (3 * SCHEDULE.timed_blocks)
    if heavy_tail:
        log_ms += (rng.random(log_ms.shape) < 0.05) * rng.exponential(0.2, log_ms.shape)
    return log_ms


def contains(log_ms: np.ndarray, slowdown: float) -> np.ndarray:
    """Whether the interval of each window's report holds the slowdown that its sequential steps were given."""
    step_ms = np.exp(log_ms + math.log1p(slowdown) * IN_SEQUENTIAL)
    held = []
    for times in step_ms:
        blocks = tuple(
            TimedBlock(arm, block, tuple(times[offsets].tolist()))
            for block, (arm, offsets) in enumerate(zip(ARMS, COUNTED, strict=True))
        )
        window = RankWindow(0, 0, 20, len(times), True, "gloo", "cpu", wall_ms=float(times.sum()), timed=blocks)
        figure = aggregate_windows([window], world_size=1, every_n_steps=500).speedup_vs_sequential
        held.append(figure.ci_low <= slowdown <= figure.ci_high)
    return np.array(held)


@pytest.mark.parametrize("case", at_night(CASES, ("independent", "autocorrelated")))
def test_an_interval_holds_the_truth_in_95_of_100_windows(case):
    log_ms = simulate(case, NUM_WINDOWS)
    without = contains(log_ms, 0.0)
    assert without.mean() >= MIN_COVERAGE
    # Logarithms make a slowdown a shift, which moves the interval along: of the same noise, each window holds it or not
    # whatever its size.
    some = slice(0, 200)
    for slowdown in (0.01, 0.20):
        assert contains(log_ms[some], slowdown).tolist() == without[some].tolist()
