"""Estimates with 95% confidence intervals, computed over blocks of steps rather than over single steps.

Step times are autocorrelated: clocks, other tenants and the order of the data change them for many steps at a time. An
interval over single steps would be too narrow, and up to one window in four would report a difference that is not
there. So the unit is the block: each block gives one mean, of logarithms if the quantity is a ratio, and the interval
is Welch's over the block means. If a figure combines several quantities (equations 4 and 5), their block means are
combined by the delta method, with Satterthwaite's degrees of freedom. For a difference of two means that is exactly
Welch's interval.

An interval can be given a least width, which the run's earlier windows tell
(``overlap_callbacks.analysis.earlier_windows``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.results.estimate import Estimate

CONFIDENCE = 0.95

_Columns = TypeVar("_Columns", bound=tuple[float, ...])

# Of a figure that may be of any size and sign.
UNBOUNDED = (-math.inf, math.inf)

# Two groups of OSSO. The spread of fewer blocks of a mode is not known well enough for an interval.
MIN_BLOCKS = 4


@dataclass(frozen=True)
class Sample:
    """Quantities that were measured together, block by block.

    Attributes:
        blocks: block means, shape (number of blocks, number of quantities).
        num_steps: counted steps in those blocks.
        columns: the named tuple whose fields are the quantities; None if they have no names.
    """

    blocks: npt.NDArray[np.float64]
    num_steps: int
    columns: Callable[..., Any] | None = None

    @classmethod
    def of_rows(cls, columns: type[_Columns], rows: Sequence[_Columns], num_steps: int) -> Sample:
        """A sample of named quantities.

        Args:
            columns: the named tuple.
            rows: the block means, one named tuple per block.
            num_steps: counted steps in those blocks.
        """
        width = len(columns._fields)  # type: ignore[attr-defined]
        return cls(np.array(rows, dtype=np.float64).reshape(-1, width), num_steps, columns)

    def named(self, means: npt.NDArray[np.float64]) -> Any:
        """Means of the quantities, shape (number of quantities,), under their names if they have any."""
        return means if self.columns is None else self.columns(*means)


@dataclass(frozen=True)
class Interval:
    """An estimate on the scale on which its interval is symmetric.

    Attributes:
        center: the figure on that scale.
        half_width: half the width of its interval; None where there are too few blocks for one.
        scale: increasing function from that scale to the figure's own.
        num_steps, num_blocks: that it rests on.
        bounds: the least and the most that the figure can be.
    """

    center: float
    half_width: float | None
    scale: Callable[[float], float]
    num_steps: int
    num_blocks: int
    bounds: tuple[float, float] = UNBOUNDED

    def estimate(self, least_half_width: float = 0.0) -> Estimate:
        """The figure on its own scale.

        Args:
            least_half_width: of the interval, if there is one.
        """
        low = high = None
        if self.half_width is not None:
            half = max(self.half_width, least_half_width)
            with np.errstate(all="ignore"):  # what is beyond a float's range gives no interval
                low, high = _finite(self.scale, [self.center - half]), _finite(self.scale, [self.center + half])
        if low is None or high is None:
            low = high = None
        return bounded(Estimate(self.scale(self.center), low, high, self.num_steps, self.num_blocks), self.bounds)


def bounded(estimate: Estimate, bounds: tuple[float, float]) -> Estimate:
    """An estimate of what lies between two bounds: what is beyond them is cut off.

    An interval that is symmetric about its estimate may reach beyond what can be. To cut it there changes nothing about
    how often it holds the truth.
    """
    low, high = bounds

    def cut(value: float) -> float:
        return min(max(value, low), high)

    inside = low <= estimate.value <= high
    if inside and (estimate.ci_low is None or estimate.ci_high is None):
        return estimate
    ci_low, ci_high = (None if end is None else cut(end) for end in (estimate.ci_low, estimate.ci_high))
    return Estimate(cut(estimate.value), ci_low, ci_high, estimate.num_steps, estimate.num_blocks)


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
    """Estimate a function of the means of independent samples.

    Args:
        combine: takes the means of each sample (its named tuple, or an array of shape (quantities,)) and returns the
            figure on the scale on which its interval is symmetric: logarithms for ratios.
        samples: independent of each other; the quantities within one sample may be correlated.
        scale: increasing function from that scale to the figure's own, e.g. ``math.expm1``.
        min_blocks: minimum number of blocks that each sample needs for an interval.
        confidence: of the interval. More than the usual one where several intervals are to hold together.

    Returns:
        The estimate. None if a sample is empty or the figure is undefined (not finite): a figure that was not measured
        is absent.
    """
    if any(not len(sample.blocks) for sample in samples):
        return None
    half = None
    with np.errstate(all="ignore"):  # what is beyond a float's range gives no figure, or no interval
        means = [sample.blocks.mean(axis=0) for sample in samples]
        center = _combined(combine, samples, means)
        if center is None:
            return None
        if all(len(sample.blocks) >= min_blocks for sample in samples):
            half = _half_width(combine, samples, means, confidence)
    num_steps = sum(sample.num_steps for sample in samples)
    num_blocks = sum(len(sample.blocks) for sample in samples)
    return Interval(center, half, scale, num_steps, num_blocks)


def pool(
    windows: Sequence[Estimate],
    *,
    logs: bool = False,
    change: bool = False,
    bounds: tuple[float, float] = UNBOUNDED,
) -> Estimate | None:
    """One figure for a run: the mean of its windows' estimates. The unit of the interval is the window.

    A single window keeps its own interval, as far as the figure can be.

    Args:
        windows: the figure's estimate in each window.
        logs: take the mean of logarithms, as within a window. For times, whose interval must not reach below zero.
        change: the figure is a ratio less one. Its mean is that of the ratio's logarithm, so that its interval stays
            above -1.
        bounds: the least and the most that the figure can be.
    """
    if len(windows) == 1:
        return bounded(windows[0], bounds)
    values = np.array([window.value for window in windows], dtype=np.float64).reshape(-1, 1)
    scale: Callable[[float], float] = float
    if change and bool((values > -1).all()):
        values, scale = np.log1p(values), math.expm1
    elif logs and bool((values > 0).all()):
        values, scale = np.log(values), math.exp
    sample = Sample(values, num_steps=sum([window.num_steps for window in windows]))
    pooled = estimate(lambda means: float(means[0]), sample, min_blocks=2, scale=scale)
    return None if pooled is None else bounded(pooled, bounds)


def pool_changes(windows: Sequence[Estimate]) -> Estimate | None:
    """``pool`` of a ratio less one."""
    return pool(windows, change=True, bounds=(-1.0, math.inf))


def inverted_change(ratio: Estimate) -> Estimate:
    """Of a over b, less one, that of b over a."""

    def turn(value: float | None) -> float | None:
        return None if value is None or value <= -1 else 1 / (1 + value) - 1

    value, low, high = turn(ratio.value), turn(ratio.ci_high), turn(ratio.ci_low)
    if low is None or high is None:
        low = high = None
    return Estimate(ratio.value if value is None else value, low, high, ratio.num_steps, ratio.num_blocks)


def _combined(
    combine: Callable[..., float], samples: Sequence[Sample], means: Sequence[npt.NDArray[np.float64]]
) -> float | None:
    return _finite(combine, [sample.named(mean) for sample, mean in zip(samples, means, strict=True)])


def _finite(function: Callable[..., float], arguments: Sequence[Any]) -> float | None:
    try:
        value = float(function(*arguments))
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _half_width(
    combine: Callable[..., float],
    samples: Sequence[Sample],
    means: Sequence[npt.NDArray[np.float64]],
    confidence: float,
) -> float | None:
    from scipy.special import stdtrit  # takes half a second to import, so only where a window was measured

    parts: list[tuple[float, int]] = []  # of the variance, with their degrees of freedom
    for position, sample in enumerate(samples):
        blocks = sample.blocks
        gradient = _gradient(combine, samples, means, position)
        if gradient is None:
            return None
        used = gradient != 0  # quantities that the figure does not use may be undefined
        covariance = np.atleast_2d(np.cov(blocks[:, used], rowvar=False, ddof=1)) if used.any() else np.zeros((0, 0))
        parts.append((float(gradient[used] @ covariance @ gradient[used]) / len(blocks), len(blocks) - 1))
    variance = sum([part for part, _ in parts])
    if variance <= 0.0:
        return 0.0
    if not math.isfinite(variance):
        return None
    # Of shares: squares of the parts themselves may be out of a float's range.
    degrees = 1.0 / sum([(part / variance) ** 2 / freedom for part, freedom in parts])
    return float(stdtrit(degrees, 0.5 + confidence / 2)) * math.sqrt(variance)


def _gradient(
    combine: Callable[..., float],
    samples: Sequence[Sample],
    means: Sequence[npt.NDArray[np.float64]],
    position: int,
) -> npt.NDArray[np.float64] | None:
    """Central differences of the figure with respect to the means of one sample; None if one of them is undefined."""
    gradient = np.zeros(len(means[position]))
    for i, mean in enumerate(means[position]):
        if not math.isfinite(mean):
            continue  # this mean is undefined; the figure is defined, so it does not use it
        step = 1e-6 * max(abs(mean), 1e-3)
        sides = []
        for sign in (1, -1):
            moved = list(means)
            moved[position] = means[position].copy()
            moved[position][i] += sign * step
            sides.append(_combined(combine, samples, moved))
        if sides[0] is None or sides[1] is None:
            return None
        gradient[i] = (sides[0] - sides[1]) / (2 * step)
    return gradient
