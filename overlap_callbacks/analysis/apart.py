"""Whether a run differs from another one, or from several: the comparison of ``show A B`` and ``check --against``.

Against one run the unit is the window. Windows of one run follow each other, and step times drift, so the windows'
correlation widens the interval. How much one run of a job differs from the next, on another host say, is not in it.
Against several runs the unit is the run: the interval is that of one more run of the same job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import (
    LOG,
    MIN_WINDOWS,
    ONE_LOOK,
    Floats,
    Interval,
    Pooling,
    Scale,
    difference,
    errors_of,
    half_width_factor,
    pool,
    pooled_error,
    relative_change,
    t_quantile,
)

# How many windows and runs are proposed at most.
_MOST_WINDOWS, _MOST_RUNS = 2000, 50


def level(windows: Sequence[Estimate], scale: Scale = LOG, pooling: Pooling = ONE_LOOK) -> Estimate | None:
    """The mean of a run's windows, as ``pool`` has it, with the error of windows that are correlated.

    From ``MIN_WINDOWS`` on, windows are the units: their number is that of as many independent ones, by the first
    autocorrelation (an AR(1) process) or by all, if that is the wider interval.
    """
    values = np.array([window.value for window in windows], dtype=np.float64)
    if not len(values) or not np.isfinite(values).all() or (scale is LOG and values.min() <= 0):
        return None
    mean = float(values.mean())
    spread = values / mean - 1 if scale is LOG else values - mean
    found = pool(windows, scale, point=mean, deviations=spread, pooling=pooling)
    if found is None or len(values) < MIN_WINDOWS:
        return found and msgspec.structs.replace(found, num_blocks=len(values))
    error, degrees = map(float, mean_error(spread, *errors_of(windows, scale), pooling.confidence))
    half = error * float(half_width_factor(degrees, len(values), pooling, alone=True))
    return _estimate(scale.to(mean), scale.back, half, found, error, degrees)


def mean_error(spread: Floats, variances: Floats, degrees: Floats, confidence: float) -> tuple[Floats, Floats]:
    """The standard error of a run's mean, and its degrees of freedom: those of the wider interval.

    By the windows' own errors (``pooled_error``), or by their scatter as units that are correlated.

    Args:
        spread: how far each window is from the mean; windows in their order along the last axis.
        variances: of each window's own error; NaN if not known.
        degrees: degrees of freedom of these.
        confidence: of the intervals.
    """
    independent = _independent(spread)
    with np.errstate(all="ignore"):
        errors = np.sqrt(spread.var(axis=-1, ddof=1) / independent)
        known, freedom = pooled_error(spread, variances, degrees)
        of_known = known * t_quantile(freedom, confidence)
        wider = ~(of_known >= errors * t_quantile(independent - 1, confidence))
    return np.where(wider, errors, known), np.where(wider, independent - 1, freedom)


def _independent(spread: Floats) -> Floats:
    """How many independent windows tell as much of the mean as these; at least 2."""
    number = spread.shape[-1]
    # By lag, from 0 on; by Fourier transforms, padded so that the last windows do not meet the first ones.
    seen = np.fft.irfft(np.abs(np.fft.rfft(spread, 2 * number)) ** 2, 2 * number)[..., :number]
    with np.errstate(all="ignore"):
        seen = np.where(seen[..., :1] > 0, seen / seen[..., :1], 0.0)
    # The first one is too low: by 1/n for the mean, which is estimated too, and 3r/n (Marriott and Pope, 1954).
    first = np.maximum(seen[..., 1] + (1 + 3 * seen[..., 1]) / number, 0.0)
    of_first = (1 + first) / np.maximum(1 - first, 1 / number)
    # Sums of neighbours while they are positive, none above that before (Geyer, 1992).
    even = number - number % 2
    pairs = np.minimum.accumulate(seen[..., 0:even:2] + seen[..., 1:even:2], axis=-1)
    of_pairs = 2 * np.maximum(pairs, 0.0).sum(axis=-1) - 1
    return np.asarray(np.clip(number / np.maximum(of_first, of_pairs), 2.0, number))


def change(
    baselines: Sequence[Estimate], run: Estimate, scale: Scale = LOG, pooling: Pooling = ONE_LOOK
) -> Estimate | None:
    """How much a run differs from one or more others.

    Args:
        baselines: the level of each.
        run: that of the run.
        scale: ``LOG`` for a relative change, the run over the mean of the baselines, less one; ``PLAIN`` for a
            difference.
        pooling: confidence, and whether the interval holds at all looks at the growing run.

    Returns:
        The change, with Welch's interval; None if there is no baseline, or a time is not positive.
    """
    if not baselines:
        return None
    mean = math.fsum([each.value for each in baselines]) / len(baselines)
    relative = scale is LOG
    if relative and not (mean > 0 and run.value > 0 and all([each.value > 0 for each in baselines])):
        return None
    back = math.expm1 if relative else float
    center = math.log(run.value) - math.log(mean) if relative else run.value - mean
    if len(baselines) > 1:
        half = float(half_of_runs(len(baselines), *_scatter(baselines, run, scale), pooling))
        return _estimate(center, back, half, run)
    parts = [(each.standard_error, each.degrees_of_freedom) for each in (*baselines, run)]
    known = [(error**2, degrees) for error, degrees in parts if error is not None and degrees is not None]
    if len(known) < 2:  # in records of earlier versions
        return relative_change(baselines[0], run) if relative else difference(baselines[0], run)
    error, degrees = map(float, together(*known))
    half = error * float(half_width_factor(degrees, run.num_blocks, pooling, alone=True))
    return _estimate(center, back, half, run, error, degrees)


def _estimate(
    center: float,
    back: Callable[[float], float],
    half: float,
    of: Estimate,
    error: float | None = None,
    degrees: float | None = None,
) -> Estimate:
    width = half if math.isfinite(half) else None
    return Interval(center, width, back, of.num_steps, of.num_blocks, standard_error=error, degrees=degrees).estimate()


def half_of_runs(number: int, between: Any, more: tuple[Any, Any], pooling: Pooling) -> Any:
    """Half the width of the interval of one more run after so many: of its own scatter, and of their mean's.

    Where it is noisier than they, the rest is added as is, so that baselines that agree by chance narrow nothing.
    """
    widths = [
        np.sqrt(variance) * t_quantile(degrees, pooling.confidence)
        for variance, degrees in ((between * (1 + 1 / number), number - 1), more)
    ]
    return np.hypot(*widths)


def _scatter(baselines: Sequence[Estimate], run: Estimate, scale: Scale) -> tuple[float, tuple[float, float]]:
    """The variance between runs, and how much larger a run's own is, with its degrees of freedom.

    The run may have fewer windows than the others, or noisier ones.
    """
    between = float(np.var([scale.to(each.value) for each in baselines], ddof=1))
    known = [each.standard_error**2 for each in baselines if each.standard_error is not None]
    usual = math.fsum(known) / len(known) if known else 0.0
    own = 0.0 if run.standard_error is None else run.standard_error**2
    return between, (max(own - usual, 0.0), run.degrees_of_freedom or 1.0)


def together(*parts: tuple[Any, Any]) -> tuple[Any, Any]:
    """The standard error of a difference, and its degrees of freedom (Satterthwaite), from variances and theirs."""
    variance = np.asarray(sum([part for part, _ in parts]))
    with np.errstate(all="ignore"):
        degrees = 1 / sum([(part / variance) ** 2 / degrees for part, degrees in parts])
        return np.sqrt(variance), np.where(variance > 0, degrees, parts[0][1])


def would_do(baselines: Sequence[Estimate], run: Estimate, half: float, pooling: Pooling = ONE_LOOK) -> int | None:
    """How many windows of each run, or baselines if there are several, narrow a relative change to +-``half``.

    Returns:
        The number; None if it is more than anybody measures, or unknown.
    """
    if len(baselines) > 1:
        scatter = _scatter(baselines, run, LOG)
        numbers = range(len(baselines) + 1, _MOST_RUNS + 1)
        return next((number for number in numbers if half_of_runs(number, *scatter, pooling) <= half), None)
    parts = [(one.standard_error, one.degrees_of_freedom, one.num_blocks) for one in (*baselines, run)]
    known = [
        (error**2 * windows, (degrees + 1) / windows, windows)
        for error, degrees, windows in parts
        if error is not None and degrees is not None and windows
    ]
    if len(known) < len(parts):
        return None

    def of_windows(number: int) -> float:
        error, degrees = together(*[(one / number, max(number * each - 1, 1.0)) for one, each, _ in known])
        return float(error * half_width_factor(degrees, number, pooling, alone=True))

    least = max(MIN_WINDOWS, 1 + min([windows for *_, windows in known]))
    return next((number for number in range(least, _MOST_WINDOWS + 1) if of_windows(number) <= half), None)
