"""The cost of a window to training, from contrasts within it. Pure.

The modes alternate within a window, so the extra cost of sequential steps over overlapped ones is known there, and so
is the profiler's. Steps before the window would be a worse reference: a job's pace changes by more than measuring
costs. All stretches of steps in one mode are fitted by least squares: an overlapped step, a linear trend, and the extra
time of each other kind of step. The cost is each kind's extra time multiplied by the number of such steps, the slower
steps after the window, and the library's own work on the training thread, which is measured directly.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import Floats, t_quantile

if TYPE_CHECKING:
    from overlap_callbacks.analysis.results.report import WindowReport

_MIN_FREEDOM = 3
# Noise models tried: how many steps a part of the noise lasts, and the share of that part.
_NOISE = ((1.0, 0.0), *[(lasts, share) for lasts in (2.0, 5.0, 12.0, 30.0) for share in (0.3, 0.6, 1.0)])


class Kind(enum.Enum):
    """Kinds of steps of a window other than overlapped, only timed ones."""

    OVERLAPPED = "overlapped"
    RECORDED = "recorded"
    OTHER = "sequential, or of another arm"
    PROFILED = "overlapped, under the profiler"
    OTHER_PROFILED = "sequential or of another arm, under the profiler"


class Stretch(NamedTuple):
    """Consecutive steps of one kind.

    Attributes:
        at: their middle, in steps from the window's first.
        num_known: number of steps in ``mean_ms``; others contained something foreign to the window.
        mean_ms: step time, including the time between two steps; 0 if none is known.
    """

    kind: Kind
    at: float
    num_steps: int
    num_known: int
    mean_ms: float


class StepsAfter(NamedTuple):
    """The steps after a window, until they were back to normal, and their total time."""

    num_steps: int
    total_ms: float


class LostTime(NamedTuple):
    """Time that training lost to a window, with its 95 % interval; negative if noise exceeds the cost.

    ``step_ms``: time of an overlapped step.
    """

    ms: float
    low_ms: float | None
    high_ms: float | None
    step_ms: float


def lost_time(
    stretches: Sequence[Stretch], own_ms: float, after: StepsAfter, least_after_ms: float = -math.inf
) -> LostTime | None:
    """The cost of a window; None if it has too few stretches for an interval.

    Args:
        stretches: of the window. Unmeasured steps between them cost nothing.
        own_ms: the library's own work on the training thread, which the stretches do not include.
        after: the steps after the window.
        least_after_ms: minimum loss known to have occurred after it.
    """
    known = [stretch for stretch in stretches if stretch.num_known]
    others = [kind for kind in Kind if kind is not Kind.OVERLAPPED and any(s.kind is kind for s in known)]
    if len(known) < 2 + len(others) + _MIN_FREEDOM or not any(s.kind is Kind.OVERLAPPED for s in known):
        return None
    at = np.array([stretch.at for stretch in known])
    middle, end = float(at.mean()), max(stretch.at + stretch.num_steps / 2 for stretch in stretches)
    columns = [np.ones(len(known)), at - middle]
    columns += [np.array([float(stretch.kind is kind) for stretch in known]) for kind in others]
    design = np.stack(columns, axis=1)
    wanted = np.zeros(design.shape[1])
    for place, kind in enumerate(others, start=2):
        wanted[place] = sum(stretch.num_steps for stretch in stretches if stretch.kind is kind)
    at_after = end + 0.5 + np.arange(after.num_steps, dtype=np.float64)
    usual_after = np.zeros_like(wanted)
    usual_after[:2] = after.num_steps, float((at_after - middle).sum())
    fit = _fitted(design, known, at_after)
    if fit is None:
        return None
    after_ms = after.total_ms - float(usual_after @ fit.means)
    total_ms = own_ms + float(wanted @ fit.means) + max(after_ms, least_after_ms)
    is_seen = after_ms >= least_after_ms
    half_ms = float(t_quantile(fit.freedom)) * fit.error(wanted - is_seen * usual_after, is_seen)
    return LostTime(total_ms, total_ms - half_ms, total_ms + half_ms, float(fit.means[0]))


class _Fit(NamedTuple):
    """Least squares over the stretches: a value for each column, and their covariance.

    Attributes:
        with_after: their covariance with the noise in the sum of the steps after the window.
        of_after: variance of that sum.
    """

    means: Floats
    covariance: Floats
    with_after: Floats
    of_after: float
    freedom: int

    def error(self, wanted: Floats, with_after: bool) -> float:
        """Standard error of a sum of the columns' values, with or without that of the steps after the window."""
        variance = float(wanted @ self.covariance @ wanted)
        if with_after:
            variance += self.of_after + 2 * float(wanted @ self.with_after)
        return math.sqrt(max(0.0, variance))


def _fitted(design: Floats, stretches: Sequence[Stretch], at_after: Floats) -> _Fit | None:
    """The fit under the noise model that explains the stretches best, by restricted likelihood.

    Step times wander: noise has a part that is new in each step, and one that lasts for some steps. Without the second,
    intervals are too narrow by a third or more.
    """
    freedom = len(stretches) - int(np.linalg.matrix_rank(design))
    if freedom < _MIN_FREEDOM or freedom != len(stretches) - design.shape[1]:
        return None
    sizes = [stretch.num_steps for stretch in stretches]
    places = [stretch.at - (stretch.num_steps - 1) / 2 + np.arange(stretch.num_steps) for stretch in stretches]
    at = np.concatenate([*places, at_after])
    firsts = np.cumsum([0, *sizes])[: len(sizes) + bool(len(at_after))]
    divisors = np.array([*sizes, *([1] if len(at_after) else [])], dtype=float)
    distance = abs(at[:, None] - at)
    fresh, times_ms = np.diag(1 / divisors), np.array([stretch.mean_ms for stretch in stretches])
    if len(at_after):
        fresh[-1, -1] = len(at_after)
    best, best_fit = -math.inf, None
    for lasts, share in _NOISE:
        noise = fresh
        if share:
            kept = np.add.reduceat(np.add.reduceat(np.exp(-distance / lasts), firsts, axis=0), firsts, axis=1)
            noise = (1 - share) * fresh + share * kept / divisors / divisors[:, None]
        n = len(stretches)
        solved = np.linalg.solve(noise[:n, :n], np.column_stack((design, times_ms)))
        normal = np.asarray(np.linalg.inv(design.T @ solved[:, :-1]), dtype=np.float64)
        means: Floats = normal @ (design.T @ solved[:, -1])
        rest = times_ms - design @ means
        squares = float(rest @ (solved[:, -1] - solved[:, :-1] @ means))
        variance = max(squares, np.finfo(float).tiny) / freedom
        size, size_of_normal = np.linalg.slogdet(noise[:n, :n])[1], np.linalg.slogdet(normal)[1]
        likelihood = -freedom * math.log(variance) - float(size) + float(size_of_normal)
        if likelihood > best:
            beside = noise[:n, n] if len(at_after) else np.zeros(n)
            with_after = variance * normal @ (solved[:, :-1].T @ beside)
            of_after = variance * float(noise[n, n]) if len(at_after) else 0.0
            best, best_fit = likelihood, _Fit(means, variance * normal, with_after, of_after, freedom)
    return best_fit


def cost_of_run(windows: Sequence[WindowReport], every_n_steps: int) -> Estimate | None:
    """By how much measuring lengthened training; None if no window has it.

    Random deviations of the windows' costs average out, so their intervals are treated as independent. Skipped windows
    (because of ``max_overhead``, for example) cost nothing. ``every_n_steps`` is 0 if not known.
    """
    told = [(window.first_step, cost) for window in windows if (cost := window.cost) is not None]
    if not told:
        return None
    steps, costs = [step for step, _ in told], [cost for _, cost in told]
    share = 1 / len(costs)
    if every_n_steps:
        share *= min(1.0, len(costs) * every_n_steps / (max(steps) - min(steps) + every_n_steps))
    value = share * sum(cost.value for cost in costs)
    halves = [(c.ci_high - c.ci_low) / 2 for c in costs if c.ci_low is not None and c.ci_high is not None]
    num_steps = sum(cost.num_steps for cost in costs)
    if len(halves) < len(costs):
        return Estimate(value, None, None, num_steps, len(costs))
    half = share * math.hypot(*halves)
    return Estimate(value, value - half, value + half, num_steps, len(costs))
