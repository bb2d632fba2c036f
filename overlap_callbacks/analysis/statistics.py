"""Estimates with 95% confidence intervals, computed over blocks of steps rather than over single steps.

Step times are autocorrelated: clocks, other tenants and the order of the data change them for many steps at a time. An
interval over single steps would be too narrow, and up to one window in four would report a difference that is not
there. So the unit is the block: each gives one mean, from which ``analysis.design`` removes other differences between
blocks. If a figure combines several quantities (equations 4 and 5), their means are combined by the delta method, with
Satterthwaite's degrees of freedom. For a difference of two plain means this is Welch's interval.

Over a run, windows are pooled. Users look after each window, so a run has two intervals: for one look, and for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.results.estimate import Estimate

CONFIDENCE = 0.95

Floats = npt.NDArray[np.float64]

UNBOUNDED = (-math.inf, math.inf)  # of a figure of any size and sign
# Two groups of OSSO. With fewer blocks of a mode the spread is too uncertain for an interval.
MIN_BLOCKS = 4


class Scale(NamedTuple):
    """The scale on which a figure's interval is symmetric: an increasing function to it, and its inverse."""

    to: Callable[[float], float]
    back: Callable[[float], float]


PLAIN = Scale(float, float)
LOG = Scale(math.log, math.exp)  # for times: their interval does not reach below zero
CHANGE = Scale(math.log1p, math.expm1)  # for a ratio minus one, whichever way round


@dataclass(frozen=True)
class Sample:
    """Quantities measured together, block by block.

    Attributes:
        blocks: block means, shape (number of blocks, number of quantities).
        num_steps: counted steps in those blocks.
        columns: the named tuple whose fields are the quantities; None if they have no names.
        adjusted: means that replace the plain ones; None for plain ones.
    """

    blocks: Floats
    num_steps: int
    columns: Callable[..., Any] | None = None
    adjusted: Adjusted | None = None

    def named(self, means: Floats) -> Any:
        """Means of the quantities, shape (number of quantities,), with their names if they have any."""
        return means if self.columns is None else self.columns(*means.tolist())

    @property
    def moments(self) -> Moments:
        """Means of the quantities, and the covariance of their errors."""
        if self.adjusted is not None:
            return self.adjusted.sums
        number = len(self.blocks)
        covariance = np.cov(self.blocks, rowvar=False, ddof=1) / number if number > 1 else np.full((1, 1), np.nan)
        return Moments(self.blocks.mean(axis=0), np.atleast_2d(covariance), number - 1)

    @property
    def log_moments(self) -> Moments:
        """The same from the blocks' logarithms, if known."""
        return self.moments if self.adjusted is None else self.adjusted.logs

    def exponential(self, means: Floats) -> Floats:
        """Convert ``log_moments`` from logarithms."""
        return means if self.adjusted is None else np.where(self.adjusted.is_log, np.exp(means), means)


class Moments(NamedTuple):
    """Means of quantities, shape (n,), the covariance of their errors, and its degrees of freedom."""

    means: Floats
    covariance: Floats
    degrees: float


class Adjusted(NamedTuple):
    """Means of quantities from which a design has removed other differences between blocks.

    From the blocks' times, and from their logarithms for the quantities that ``is_log`` names; shape (n,).
    """

    sums: Moments
    logs: Moments
    is_log: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Interval:
    """An estimate on the scale on which its interval is symmetric.

    Attributes:
        half_width: half the width of the interval; None with too few blocks.
        scale: increasing function from that scale to the figure's own.
        bounds: minimum and maximum of the figure.
        standard_error, degrees: from which the width follows.
    """

    center: float
    half_width: float | None
    scale: Callable[[float], float]
    num_steps: int
    num_blocks: int
    bounds: tuple[float, float] = UNBOUNDED
    standard_error: float | None = None
    degrees: float | None = None

    def estimate(self, least_half_width: float = 0.0) -> Estimate:
        """The figure on its own scale, with an interval of at least this half-width if there is one."""
        low = high = None
        if self.half_width is not None:
            half = max(self.half_width, least_half_width)
            with np.errstate(all="ignore"):  # values beyond a float's range give no interval
                low, high = _finite(self.scale, [self.center - half]), _finite(self.scale, [self.center + half])
        if low is None or high is None:
            low = high = None
        known = low is not None and self.standard_error is not None
        return bounded(
            Estimate(
                self.scale(self.center), low, high, self.num_steps, self.num_blocks,
                _six_digits(self.standard_error) if known else None, _six_digits(self.degrees) if known else None,
            ),
            self.bounds,
        )  # fmt: skip


def _six_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def bounded(estimate: Estimate, bounds: tuple[float, float]) -> Estimate:
    """An estimate with its interval cut off at two bounds.

    Cutting off impossible values does not change how often the interval contains the truth.
    """
    low, high = bounds

    def cut(value: float) -> float:
        return min(max(value, low), high)

    inside = low <= estimate.value <= high
    if inside and (estimate.ci_low is None or estimate.ci_high is None):
        return estimate
    ci_low, ci_high = (None if end is None else cut(end) for end in (estimate.ci_low, estimate.ci_high))
    return msgspec.structs.replace(estimate, value=cut(estimate.value), ci_low=ci_low, ci_high=ci_high)


def estimate(
    combine: Callable[..., float],
    *samples: Sample,
    scale: Callable[[float], float] = float,
    min_blocks: int = MIN_BLOCKS,
    confidence: float = CONFIDENCE,
) -> Estimate | None:
    """Estimate a function of the means of independent samples: ``interval_of`` on the figure's own scale."""
    found = interval_of(combine, *samples, scale=scale, min_blocks=min_blocks, confidence=confidence)
    return None if found is None else found.estimate()


def interval_of(
    combine: Callable[..., float],
    *samples: Sample,
    scale: Callable[[float], float] = float,
    min_blocks: int = MIN_BLOCKS,
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """Estimate a function of the means of independent samples; None if one is empty, or the result is not finite.

    The figure is that of the mean times, so that figures add up. Its interval has the width given by the blocks'
    logarithms, unless these give a different figure, because of heavy tails: then the times themselves give the width.

    Args:
        combine: takes the means of each sample (its named tuple, or an array of shape (quantities,)) and returns the
            figure on the scale on which its interval is symmetric: logarithms for ratios.
        samples: independent of each other; the quantities within one sample may be correlated.
        scale: increasing function from that scale to the figure's own, e.g. ``math.expm1``.
        min_blocks: minimum number of blocks that each sample needs for an interval.
        confidence: of the interval; higher than usual if several intervals must hold together.
    """
    if any(not len(sample.blocks) for sample in samples):
        return None
    num_steps = sum(sample.num_steps for sample in samples)
    num_blocks = sum(len(sample.blocks) for sample in samples)
    width = None
    with np.errstate(all="ignore"):  # values beyond a float's range give no figure, or no interval
        center = _finite(combine, [sample.named(sample.moments.means) for sample in samples])
        if center is None:
            return None
        if all(len(sample.blocks) >= min_blocks for sample in samples):
            width = _width(combine, samples, center, confidence)
    error, degrees, half = (None, None, None) if width is None else width
    return Interval(center, half, scale, num_steps, num_blocks, standard_error=error, degrees=degrees)


# The blocks' logarithms give the width if they give the same figure, up to this share of the width.
_MOST_APART = 0.1


def _width(
    combine: Callable[..., float], samples: Sequence[Sample], center: float, confidence: float
) -> tuple[float, float, float] | None:
    """The standard error, its degrees of freedom, and half the width."""
    if any(sample.adjusted is not None for sample in samples):

        def of_logs(*means: Floats) -> float:
            return combine(*[s.named(s.exponential(mean)) for s, mean in zip(samples, means, strict=True)])

        logs = [sample.log_moments for sample in samples]
        by_logs = _finite(of_logs, [part.means for part in logs])
        found = None if by_logs is None else _half_width(of_logs, logs, confidence)
        if by_logs is not None and found is not None and abs(center - by_logs) <= _MOST_APART * 2 * found[2]:
            return found

    def of_sums(*means: Floats) -> float:
        return combine(*[sample.named(mean) for sample, mean in zip(samples, means, strict=True)])

    return _half_width(of_sums, [sample.moments for sample in samples], confidence)


class Pooling(NamedTuple):
    """How windows are pooled: the interval is valid at one look, or at ``all_looks`` while windows are added.

    The confidence is higher than usual if several intervals must hold together.
    """

    all_looks: bool = False
    confidence: float = CONFIDENCE


ONE_LOOK = Pooling()


def pool(
    windows: Sequence[Estimate],
    scale: Scale = PLAIN,
    *,
    point: float | None = None,
    deviations: Floats | None = None,
    bounds: tuple[float, float] = UNBOUNDED,
    pooling: Pooling = ONE_LOOK,
) -> Estimate | None:
    """One figure for a run, from its windows' estimates.

    The error is estimated from the blocks of all windows, plus the windows' differences beyond it (random effects).
    Windows without their own interval are the units, from ``MIN_WINDOWS`` on. The figure is their mean on the scale,
    unless ``point`` is given; ``deviations`` are each window's contribution to that on the scale.
    """
    if not windows:
        return None
    if len(windows) == 1 and pooling == ONE_LOOK:
        return bounded(windows[0], bounds)
    values = _on_scale(windows, scale)
    if values is None:
        scale, values = PLAIN, np.array([window.value for window in windows], dtype=np.float64)
    center = None if point is None else _finite(scale.to, [point])
    spread = values if deviations is None else deviations
    variances, freedom = errors_of(windows, scale)
    error, degrees = pooled_error(spread, variances, freedom)
    alone = not np.isfinite(variances).any()
    with np.errstate(all="ignore"):
        half = float(error * half_width_factor(degrees, len(windows), pooling, alone=alone))
    interval = Interval(
        float(values.mean()) if center is None else center, half if math.isfinite(half) else None, scale.back,
        sum([each.num_steps for each in windows]), len(windows), bounds, float(error), float(degrees),
    )  # fmt: skip
    return interval.estimate()


# Minimum number of windows for an interval if their blocks give no error.
MIN_WINDOWS = 4


def pool_changes(windows: Sequence[Estimate], pooling: Pooling = ONE_LOOK) -> Estimate | None:
    return pool(windows, CHANGE, bounds=(-1.0, math.inf), pooling=pooling)


def _on_scale(windows: Sequence[Estimate], scale: Scale) -> Floats | None:
    values = [_finite(scale.to, [window.value]) for window in windows]
    return None if None in values else np.array(values, dtype=np.float64)


def errors_of(windows: Sequence[Estimate], scale: Scale) -> tuple[Floats, Floats]:
    """The variance of each window's estimate and its degrees of freedom; NaN without an interval."""
    known = [_error(window, scale) for window in windows]
    return np.array([error**2 for error, _ in known]), np.array([degrees for _, degrees in known])


def _error(window: Estimate, scale: Scale) -> tuple[float, float]:
    if window.standard_error is not None and window.degrees_of_freedom is not None:
        return window.standard_error, window.degrees_of_freedom
    if window.ci_low is None or window.ci_high is None or window.num_blocks <= 2:
        return math.nan, math.nan
    # From a record of an earlier version. One end may be cut off at the figure's bounds.
    center, low, high = (_finite(scale.to, [value]) for value in (window.value, window.ci_low, window.ci_high))
    halves = [abs(end - center) for end in (low, high) if end is not None and center is not None]
    degrees = window.num_blocks - 2.0
    return (max(halves) / t_quantile(degrees), degrees) if halves else (math.nan, math.nan)


def pooled_error(values: Floats, variances: Floats, degrees: Floats) -> tuple[Any, Any]:
    """The standard error of the mean over windows, and its degrees of freedom (Satterthwaite).

    Args:
        values: the estimate of each window, windows along the last axis.
        variances: of its error within the window; NaN if not known.
        degrees: degrees of freedom of these.
    """
    number = values.shape[-1]
    known = np.isfinite(variances)
    with np.errstate(all="ignore"):  # a damaged record; values that are not finite give no interval
        between = values.var(axis=-1, ddof=1) if number > 1 else np.zeros(values.shape[:-1])
        num_known = known.sum(axis=-1)
        within = np.where(known, variances, 0.0).sum(axis=-1) / num_known
        beyond = np.maximum(between - within, 0.0)
        variance = (within + beyond) / number
        parts = (within / number) ** 2 / np.where(known, degrees, 0.0).sum(axis=-1)
        parts = parts + (beyond / number) ** 2 / max(number - 1, 1)
        freedom = np.where(parts > 0, variance**2 / parts, np.where(known, degrees, 0.0).sum(axis=-1))
        alone = np.sqrt(between / number) if number >= MIN_WINDOWS else np.full(between.shape, np.nan)
        return np.where(num_known > 0, np.sqrt(variance), alone), np.where(num_known > 0, freedom, number - 1.0)


def half_width_factor(degrees: Any, num_windows: int, pooling: Pooling, *, alone: bool = False) -> Any:
    """Half the width of a run's interval over its standard error.

    For all looks it is a mixture of t-tests over effects of any size (Lai's, of known scale ``_MIXED`` windows), which
    contains the truth throughout with at least the wanted confidence; but at most ``_WIDEST`` times one look's.
    ``alone``: windows themselves are the units, because they have no error of their own.
    """
    one_look = t_quantile(degrees, pooling.confidence)
    if not pooling.all_looks:
        return one_look
    share = _MIXED / (_MIXED + num_windows)
    with np.errstate(all="ignore"):
        root = (((1.0 if alone else _LEVEL) * (1 - pooling.confidence)) ** 2 * share) ** (1 / (degrees + 1))
        mixture = np.sqrt(np.where(root > share, degrees * (1 - root) / (root - share), np.inf))
    return np.minimum(mixture, _WIDEST * one_look)


# Number of windows that the mixture's effect is worth: it is narrowest, relative to one look, at some 20 times that.
_MIXED = 0.2
# The mixture's level is for infinitely many looks. Looks come after whole windows only, so it may have this many times
# the level (``benchmarks/intervals.py``), but not if windows are the units: their error is from few.
_LEVEL = 1.4
# With few degrees of freedom the mixture has no end, but one look's interval is wide already: so many times as wide, it
# is wrong at some look of 200 in 0.4 % more of the runs (windows as units).
_WIDEST = 1.8


def windows_differ(windows: Sequence[Estimate], scale: Scale) -> bool:
    """Whether windows differ by more than their own errors explain, at 1 %."""
    values = _on_scale(windows, scale)
    if values is None or len(windows) < 2:
        return False
    variances, degrees = errors_of(windows, scale)
    if not np.isfinite(variances).all() or not variances.mean() > 0:
        return False
    from scipy.special import fdtrc

    ratio = values.var(ddof=1) / variances.mean()
    return bool(fdtrc(len(windows) - 1, degrees.sum(), ratio) < 0.01)


def inverted_change(ratio: Estimate) -> Estimate:
    """Convert a / b - 1 into b / a - 1."""

    def turn(value: float | None) -> float | None:
        return None if value is None or value <= -1 else 1 / (1 + value) - 1

    value, low, high = turn(ratio.value), turn(ratio.ci_high), turn(ratio.ci_low)
    if low is None or high is None:
        low = high = None
    return msgspec.structs.replace(ratio, value=ratio.value if value is None else value, ci_low=low, ci_high=high)


def _finite(function: Callable[..., float], arguments: Sequence[Any]) -> float | None:
    try:
        value = float(function(*arguments))
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _half_width(
    combine: Callable[..., float], samples: Sequence[Moments], confidence: float
) -> tuple[float, float, float] | None:
    """The delta method: the standard error, Satterthwaite's degrees of freedom, and half the width."""
    parts: list[tuple[float, float]] = []  # contributions to the variance, with their degrees of freedom
    for position, sample in enumerate(samples):
        slopes = gradient(combine, [each.means for each in samples], position)
        if slopes is None:
            return None
        used = slopes != 0  # quantities that the figure does not use may be undefined
        part = float(slopes[used] @ sample.covariance[np.ix_(used, used)] @ slopes[used]) if used.any() else 0.0
        parts.append((part, sample.degrees))
    variance = sum([part for part, _ in parts])
    if variance <= 0.0:
        return 0.0, sum([freedom for _, freedom in parts]), 0.0
    if not math.isfinite(variance):
        return None
    # From shares: squares of the contributions themselves may exceed a float's range.
    degrees = 1.0 / sum([(part / variance) ** 2 / freedom for part, freedom in parts])
    return math.sqrt(variance), degrees, t_quantile(degrees, confidence) * math.sqrt(variance)


def t_quantile(degrees: Any, confidence: float = CONFIDENCE) -> Any:
    """Half the width of an interval over its standard error, by Student's t; for a number or an array."""
    from scipy.special import stdtrit  # takes half a second to import, so only if a window was measured

    return stdtrit(degrees, 0.5 + confidence / 2)


def gradient(combine: Callable[..., float], means: Sequence[Floats], position: int) -> Floats | None:
    """Central differences of the figure with respect to the means of one sample; None if one of them is undefined."""
    slopes = np.zeros(len(means[position]))
    for i, mean in enumerate(means[position]):
        if not math.isfinite(mean):
            continue  # this mean is undefined; the figure is defined, so it does not use it
        step = 1e-6 * max(abs(mean), 1e-3)
        sides = []
        for sign in (1, -1):
            moved = list(means)
            moved[position] = means[position].copy()
            moved[position][i] += sign * step
            sides.append(_finite(combine, moved))
        if sides[0] is None or sides[1] is None:
            return None
        slopes[i] = (sides[0] - sides[1]) / (2 * step)
    return slopes


# -- combining estimates that were measured independently. Limits of sums and differences follow from the limits of
# their parts by "MOVER" (Zou and Donner, Statistics in Medicine 27, 2008): for x - y, the lower one is x - y - sqrt((x
# - l_x)^2 + (u_y - y)^2).


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of one or more figures that were measured independently."""
    number = len(estimates)
    value = math.fsum([one.value for one in estimates]) / number
    return _together(value, [_below(one) for one in estimates], [_above(one) for one in estimates], estimates, number)


def difference(base: Estimate, other: Estimate) -> Estimate:
    """Other minus base, measured independently."""
    below, above = [_below(other), _above(base)], [_above(other), _below(base)]
    return _together(other.value - base.value, below, above, (base, other))


def relative_change(base: Estimate, other: Estimate) -> Estimate | None:
    """Other over base, minus one; None unless both are positive. On the scale of logarithms it is a difference."""
    if base.value <= 0 or other.value <= 0:
        return None
    logs = difference(_log(base), _log(other))
    low, high = (None if bound is None else math.expm1(min(bound, 700)) for bound in (logs.ci_low, logs.ci_high))
    return Estimate(math.expm1(min(logs.value, 700)), low, high, logs.num_steps, logs.num_blocks)


def _log(one: Estimate) -> Estimate:
    low, high = (None if bound is None or bound <= 0 else math.log(bound) for bound in (one.ci_low, one.ci_high))
    return Estimate(math.log(one.value), low, high, one.num_steps, one.num_blocks)


def _below(one: Estimate) -> float | None:
    return None if one.ci_low is None else one.value - one.ci_low


def _above(one: Estimate) -> float | None:
    return None if one.ci_high is None else one.ci_high - one.value


def _together(
    value: float,
    below: Sequence[float | None],
    above: Sequence[float | None],
    parts: Sequence[Estimate],
    number: int = 1,
) -> Estimate:
    """A sum over ``number``: half its width is the root of the sum of squares. One-sided intervals are ignored."""
    low, high = (None if None in each else math.hypot(*filter(None, each)) / number for each in (below, above))
    steps, blocks = sum([one.num_steps for one in parts]), sum([one.num_blocks for one in parts])
    if low is None or high is None:
        return Estimate(value, None, None, steps, blocks)
    return Estimate(value, value - low, value + high, steps, blocks)
