"""Values with confidence intervals that hold.

Step times are autocorrelated (clocks, other tenants, the order of the data), so an interval over single steps claims
too much: up to one window in four would cry wolf. The unit here is the block: each block gives one mean, of logarithms
where the quantity is a ratio, and the interval is Welch's over the block means. Where a figure combines several
quantities (equations 4 and 5), their block means are combined by the delta method, with Satterthwaite's degrees of
freedom; for a difference of two means that is Welch's interval exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.results.estimate import Estimate

CONFIDENCE = 0.95

# Two groups of OSSO: with fewer blocks of a mode, their spread says too little for an interval.
MIN_BLOCKS = 4


@dataclass(frozen=True)
class Sample:
    """Quantities that were measured together, block by block.

    Attributes:
        blocks: block means, shape (number of blocks, number of quantities).
        num_steps: counted steps in those blocks.
    """

    blocks: npt.NDArray[np.float64]
    num_steps: int


def estimate(
    combine: Callable[..., float],
    *samples: Sample,
    scale: Callable[[float], float] = float,
    min_blocks: int = MIN_BLOCKS,
) -> Estimate | None:
    """Estimate a function of the means of independent samples.

    Args:
        combine: takes one array of means, of shape (quantities,), for each sample, and gives the figure on the scale on
            which its interval is symmetric: logarithms for ratios.
        samples: independent of each other; the quantities within one may be correlated.
        scale: increasing function from that scale to the figure's own, e.g. ``math.expm1``.
        min_blocks: fewest blocks in each sample for an interval.

    Returns:
        None where a sample is empty or the figure is undefined (not finite): a figure that was not measured is absent.
    """
    if any(not len(sample.blocks) for sample in samples):
        return None
    means = [sample.blocks.mean(axis=0) for sample in samples]
    with np.errstate(all="ignore"):
        center = _finite(combine, means)
    if center is None:
        return None
    num_steps = sum(sample.num_steps for sample in samples)
    num_blocks = sum(len(sample.blocks) for sample in samples)
    low = high = None
    if all(len(sample.blocks) >= min_blocks for sample in samples):
        half = _half_width(combine, samples, means)
        if half is not None:
            low, high = _finite(scale, [center - half]), _finite(scale, [center + half])
    if low is None or high is None:
        low = high = None
    return Estimate(scale(center), low, high, num_steps, num_blocks)


def pool(windows: Sequence[Estimate], *, logs: bool = False) -> Estimate | None:
    """One figure for a run: the mean of its windows' estimates; the unit of the interval is the window.

    A single window keeps its own interval.

    Args:
        windows: an estimate of each.
        logs: mean of logarithms, as within a window: for what is a time, whose interval must not reach below zero.
    """
    if len(windows) == 1:
        return windows[0]
    values = np.array([[window.value] for window in windows], dtype=np.float64).reshape(-1, 1)
    logs = logs and bool((values > 0).all())
    sample = Sample(np.log(values) if logs else values, num_steps=sum(window.num_steps for window in windows))
    return estimate(lambda means: float(means[0]), sample, min_blocks=2, scale=math.exp if logs else float)


def _finite(function: Callable[..., float], arguments: Sequence[Any]) -> float | None:
    try:
        value = float(function(*arguments))
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _half_width(
    combine: Callable[..., float], samples: Sequence[Sample], means: Sequence[npt.NDArray[np.float64]]
) -> float | None:
    from scipy.special import stdtrit  # half a second to import: only where a window was measured

    variance = 0.0
    spread = 0.0
    for position, sample in enumerate(samples):
        blocks = sample.blocks
        gradient = _gradient(combine, means, position)
        if gradient is None:
            return None
        used = gradient != 0  # a column that the figure does not use may be undefined
        covariance = np.atleast_2d(np.cov(blocks[:, used], rowvar=False, ddof=1)) if used.any() else np.zeros((0, 0))
        part = float(gradient[used] @ covariance @ gradient[used]) / len(blocks)
        variance += part
        spread += part**2 / (len(blocks) - 1)
    if variance <= 0.0:
        return 0.0
    degrees = variance**2 / spread
    return float(stdtrit(degrees, 0.5 + CONFIDENCE / 2)) * math.sqrt(variance)


def _gradient(
    combine: Callable[..., float], means: Sequence[npt.NDArray[np.float64]], position: int
) -> npt.NDArray[np.float64] | None:
    """Central differences with respect to the means of one sample."""
    gradient = np.zeros(len(means[position]))
    for i, mean in enumerate(means[position]):
        if not math.isfinite(mean):
            continue  # undefined, so the figure, which is defined, does not use it
        step = 1e-6 * max(abs(mean), 1e-3)
        sides = []
        for sign in (1, -1):
            moved = list(means)
            moved[position] = means[position].copy()
            moved[position][i] += sign * step
            sides.append(_finite(combine, moved))
        if sides[0] is None or sides[1] is None:
            return None
        gradient[i] = (sides[0] - sides[1]) / (2 * step)
    return gradient
