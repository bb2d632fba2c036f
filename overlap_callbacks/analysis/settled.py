"""The settled difference between the modes: its value once a mode has lasted.

Effects that follow the mode slowly (clocks, heat, caches) show only partly in blocks of a few steps. But the modes of
all steps are known. So the logarithm of a step's time is fitted as

    window's own line + a S + b h(tau),

where S is 1 in sequential steps, and h is S filtered with a time constant of tau steps. Before the first step the job
ran overlapped, so h starts at 0. The settled difference is a + b. Noise is first-order autoregressive.

Each tau and each autocorrelation of a grid is a least-squares problem, compared by restricted likelihood: windows'
lines are many, and the plain one would find too little autocorrelation. Only the normal equations are kept, so that
windows can be added one by one, in constant memory.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.settled import Settled, StepSeries, Verdict
from overlap_callbacks.analysis.results.window import RankWindow, Rhythm
from overlap_callbacks.analysis.statistics import ONE_LOOK, Pooling, half_width_factor

Array = npt.NDArray[np.float64]

# Time constants, in steps. From ``_TOO_LONG`` on a window does not show where the difference settles.
CONSTANTS = (0.5, 1, 1.5, 2, 3, 4, 5, 6.5, 8, 10, 12, 14, 17, 20, 30, 50)
_TOO_LONG = 10
# The largest constant of a pair.
_PAIRED = 20
# Steps in which a response in a straight line is complete.
RAMPS = (4, 8, 12, 16, 24)
AUTOCORRELATIONS = (0.0, 0.2, 0.4, 0.6, 0.75, 0.87, 0.95)
# Chi-square at 5 %: memory shows if it improves the fit by at least this.
_MEMORY_SHOWS = 3.84
# The difference has not settled if memory is certain (two degrees of freedom at 0.1 %, because there are many looks),
# and one time constant is not enough: the best is long, or adding the square of its state, or a second constant, fits
# better (one and two degrees of freedom at 1 %).
_MEMORY_SURE, _BENT_BETTER, _TWO_BETTER = 13.8, 6.63, 9.21
# A smaller variance of logarithms is rounding: identical times are not measurements.
_LEAST_NOISE = 1e-14
_LEAST_FREEDOM = 3
# Of S and of up to two states.
_COEFFICIENTS = 3
# The least share of a column's square that is more than rounding.
_NEARLY_EQUAL = 1e-9
# No mode makes steps a thousand times longer: a fit that says so is meaningless.
_MOST = math.log(1000)
# A settled interval within this of the short blocks' value agrees with it.
_ONE_POINT = 0.01
# A step counts unless it exceeds the estimate from others of its window by this much, and by this many robust standard
# deviations.
_LONGER, _DEVIATIONS = math.log(1.1), 5.0
# The estimate is from steps of at most three medians of their mode.
_FAR_LONGER = math.log(3)
# How often it is weighted anew, by deviations of at least so much.
_REWEIGHTED, _NO_DEVIATION = 8, 1e-3
# The state columns used for that estimate.
_JUDGED_BY = [CONSTANTS.index(constant) for constant in (1, 5, 17)]
# No memory and one constant, two, one and the square of its state, and a straight line: their columns in addition to S.
_CHOSEN = [(), *[(column,) for column in range(1, len(CONSTANTS) + 1)]]
_PAIRS = list(itertools.combinations(range(1, CONSTANTS.index(_PAIRED) + 2), 2))
_BENT = [(column, len(CONSTANTS) + column) for column in range(1, CONSTANTS.index(6.5) + 2)]
_STRAIGHT = [(2 * len(CONSTANTS) + number,) for number in range(1, len(RAMPS) + 1)]
_MODELS = (_CHOSEN, _PAIRS, _BENT, _STRAIGHT)
_MODEL_OF = np.repeat(range(len(_MODELS)), [len(model) for model in _MODELS])
# 0, S itself, for none.
_FIRST, _SECOND = np.array([(*choice, 0, 0)[:2] for model in _MODELS for choice in model]).T


class StepSums(NamedTuple):
    """Normal equations of steps, which add up over windows; of one run, or of several in leading axes.

    Attributes:
        gram: of S, the states, their squares, the straight lines and the logarithm of the time, without the windows'
            lines; shape (..., autocorrelations, columns, columns).
        moments: second moments over windows of (S'y, h'y, S'S, S'h, h'h); (..., autocorrelations, constants, 5, 5).
        log_scales: sums of the logarithms of the scales of noise and lines; shape (..., autocorrelations).
        freedom: steps less the columns of the windows' lines; shape (...).
    """

    gram: Array
    moments: Array
    log_scales: Array
    freedom: Array

    @classmethod
    def zeros(cls, *runs: int) -> StepSums:
        rhos, constants = len(AUTOCORRELATIONS), len(CONSTANTS)
        columns = 2 * constants + len(RAMPS) + 2
        shapes = ((rhos, columns, columns), (rhos, constants, 5, 5), (rhos,), ())
        return cls(*[np.zeros((*runs, *shape)) for shape in shapes])

    @classmethod
    def of(
        cls, sequential: npt.NDArray[np.bool_], steps: npt.NDArray[np.intp], log_times: Array, lines: Array
    ) -> StepSums:
        """Those of a window.

        Args:
            sequential: the mode of each of its steps.
            steps: those that count.
            log_times: of these; shape (..., steps).
            lines: what else their times depend on; shape (steps, lines).
        """
        states, straight = _responses(tuple(sequential.tolist()))
        columns = np.hstack([sequential[:, None], states, states**2, straight])[steps]
        runs, times = log_times.shape[:-1], log_times.reshape(-1, len(steps)).T
        whitened, log_scales = _whitened(np.hstack([columns, times, lines]), np.diff(steps))
        values, (basis, roots) = whitened[:, :, : -lines.shape[1]], np.linalg.qr(whitened[:, :, -lines.shape[1] :])
        values = values - basis @ (basis.transpose(0, 2, 1) @ values)
        x, y = values[:, :, : columns.shape[1]], values[:, :, columns.shape[1] :]
        gram = np.empty((y.shape[2], len(x), columns.shape[1] + 1, columns.shape[1] + 1))
        gram[..., :-1, :-1] = x.transpose(0, 2, 1) @ x
        gram[..., :-1, -1] = gram[..., -1, :-1] = (x.transpose(0, 2, 1) @ y).transpose(2, 0, 1)
        gram[..., -1, -1] = (y**2).sum(axis=1).T
        of_states = range(1, len(CONSTANTS) + 1)
        s_y, h_y = gram[..., 0, -1, None], gram[..., of_states, -1]
        s_s, s_h, h_h = gram[..., 0, 0, None], gram[..., 0, of_states], gram[..., of_states, of_states]
        parts = np.stack(np.broadcast_arrays(s_y, h_y, s_s, s_h, h_h), axis=-1)
        sizes = np.abs(np.diagonal(roots, axis1=1, axis2=2))
        log_scales = log_scales + np.log(np.maximum(sizes, 1e-9)).sum(axis=1)  # of lines: restricted likelihood
        found = cls(
            gram,
            parts[..., :, None] * parts[..., None, :],
            np.repeat(log_scales[None], len(gram), axis=0),
            np.full(len(gram), len(steps) - lines.shape[1]),
        )
        return cls(*[part.reshape((*runs, *part.shape[1:])) for part in found])

    def plus(self, other: StepSums) -> StepSums:
        return StepSums(*[mine + others for mine, others in zip(self, other, strict=True)])


class _Fits(NamedTuple):
    """Least squares of S and up to two states, for each autocorrelation and each choice of states of ``_MODELS``.

    Attributes:
        deviance: minus twice the logarithm of the restricted likelihood; shape (..., autocorrelations, choices).
        rss: residual sum of squares; same shape.
        beta: coefficients of S and of the states, 0 for those that a choice lacks; shape (..., choices, 3).
        solved: the same for a right side of ones: their sum is the settled difference's variance; same shape.
        freedom: steps less the columns of the windows' lines; shape (...).
    """

    deviance: Array
    rss: Array
    beta: Array
    solved: Array
    freedom: Array

    @classmethod
    def of(cls, sums: StepSums) -> _Fits:
        gram, first, second = sums.gram, _FIRST, _SECOND
        of_s = gram[..., 0, :] / gram[..., 0, :1]
        left = gram - gram[..., :1] * of_s[..., None, :]  # what S does not explain: of S itself, nothing
        a, b, c = left[..., first, first], left[..., first, second], left[..., second, second]
        # States of similar constants are nearly equal: the second one then says nothing more.
        alone, none = a * c - b**2 <= _NEARLY_EQUAL * a * c, a <= _NEARLY_EQUAL * gram[..., first, first]
        determinant = np.where(alone, 1.0, a * c - b**2)

        def solution(s: Array, right: Array) -> Array:
            x, y = right[..., first], right[..., second]
            of_first = np.where(none, 0.0, x / np.where(none, 1.0, a))
            of_first = np.where(alone, of_first, (c * x - b * y) / determinant)
            of_second = np.where(alone, 0.0, (a * y - b * x) / determinant)
            of_mode = s[..., None] - of_s[..., first] * of_first - of_s[..., second] * of_second
            return np.stack([of_mode, of_first, of_second], axis=-1)

        beta, solved = solution(of_s[..., -1], left[..., -1]), solution(1 / gram[..., 0, 0], 1 - of_s)
        explained = left[..., first, -1] * beta[..., 1] + left[..., second, -1] * beta[..., 2]
        rss = np.maximum(left[..., -1, -1, None] - explained, _LEAST_NOISE)
        deviance = sums.freedom[..., None, None] * np.log(rss) + 2 * sums.log_scales[..., None]
        return cls(deviance, rss, beta, solved, sums.freedom)

    def best(self, model: int) -> Array:
        """The least deviance of one of ``_MODELS``; shape (...)."""
        return np.asarray(self.deviance[..., model == _MODEL_OF].min(axis=(-2, -1)))

    def allowed(self, room: Array) -> tuple[Array, Array]:
        """Lowest and highest settled difference whose deviance is at most so much above the least of its model.

        Above that of one constant, if it is less.
        """
        best = np.stack([self.best(model) for model in range(len(_MODELS))], axis=-1)
        limit = (np.minimum(best[..., :1], best) + room[..., None])[..., None, _MODEL_OF]
        more = np.expm1(np.clip((limit - self.deviance) / self.freedom[..., None, None], 0, 50))
        half = np.sqrt(np.maximum(self.rss * more * self.solved.sum(axis=-1), 0.0))
        theta, fits = self.beta.sum(axis=-1), self.deviance < limit
        low = np.where(fits, theta - half, np.inf).min(axis=(-2, -1))
        high = np.where(fits, theta + half, -np.inf).max(axis=(-2, -1))
        return np.maximum(low, -_MOST), np.minimum(high, _MOST)


class SettledNumbers(NamedTuple):
    """What the sums say of the settled difference, as logarithms; each of shape (...).

    Attributes:
        known: whether there is noise to judge by, and the steps contain the difference.
        theta: the settled difference.
        low, high: its interval at one look.
        least, most: at all looks.
        constant: time constant, in steps.
        grows: whether the difference grows along a block.
        shows, sure: whether memory shows, and for certain.
        bends: whether one time constant is not enough.
    """

    known: npt.NDArray[np.bool_]
    theta: Array
    low: Array
    high: Array
    least: Array
    most: Array
    constant: Array
    grows: npt.NDArray[np.bool_]
    shows: npt.NDArray[np.bool_]
    sure: npt.NDArray[np.bool_]
    bends: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, sums: StepSums, num_windows: int) -> SettledNumbers:
        fits, freedom = _Fits.of(sums), sums.freedom - _COEFFICIENTS
        chosen = fits.deviance[..., : len(_CHOSEN)]
        at, constant = np.divmod(chosen.reshape((*freedom.shape, -1)).argmin(axis=-1), len(_CHOSEN))

        def picked(values: Array, *places: npt.NDArray[np.intp]) -> Array:
            for place in places:
                index = place.reshape((*place.shape, *[1] * (values.ndim - place.ndim)))
                values = np.take_along_axis(values, index, place.ndim).squeeze(place.ndim)
            return values

        rss, beta, solved = (picked(values, at, constant) for values in (fits.rss, fits.beta, fits.solved))
        moments = picked(sums.moments, at, np.maximum(constant - 1, 0))
        inflation, degrees = _inflation(moments, rss / freedom, beta, solved, freedom, num_windows)

        def deviance(chi_square: Array | float) -> Array:
            return np.asarray(sums.freedom * np.log1p(chi_square * inflation / freedom))

        def ends(pooling: Pooling) -> tuple[Array, Array]:
            return fits.allowed(deviance(half_width_factor(degrees, num_windows, pooling) ** 2))

        one, pairs, bent = (fits.best(model) for model in range(3))
        memory, theta = chosen[..., 0].min(axis=-1) - one, beta.sum(axis=-1)
        constant = np.array((0.0, *CONSTANTS))[constant]
        bends = (constant >= _TOO_LONG) | (one - pairs > deviance(_TWO_BETTER)) | (one - bent > deviance(_BENT_BETTER))
        least_rss = fits.rss[..., : len(_CHOSEN)].min(axis=(-2, -1))
        return cls(
            (least_rss > _LEAST_NOISE * freedom) & (np.abs(theta) <= _MOST), theta,
            *ends(ONE_LOOK), *ends(Pooling(all_looks=True)), constant, beta[..., 1] * theta > 0,
            memory > deviance(_MEMORY_SHOWS), memory > deviance(_MEMORY_SURE), bends,
        )  # fmt: skip

    def settled(self, short: float, num_windows: int, num_steps: int, short_steps: int, after_steps: int) -> Settled:
        """Of one run, with what else is known of it; ``short`` as a logarithm."""
        found = Settled(
            value=math.expm1(self.theta),
            ci_low=math.expm1(self.low),
            ci_high=math.expm1(self.high),
            short=math.expm1(short),
            short_steps=short_steps,
            constant_steps=float(self.constant),
            verdict=Verdict.SHORT,
            at_least=None,
            after_steps=after_steps,
            num_steps=num_steps,
            num_windows=num_windows,
            all_looks_low=math.expm1(self.least),
            all_looks_high=math.expm1(self.most),
        )
        if self.sure and (self.bends or not found.resolved):
            nearer = found.all_looks_low if self.least > 0 else found.all_looks_high
            at_least = nearer if self.grows and self.least * self.most > 0 else None
            return msgspec.structs.replace(found, verdict=Verdict.NOT_SETTLED, at_least=at_least)
        near = max(short - self.low, self.high - short) <= math.log1p(_ONE_POINT)
        if self.shows and found.resolved and not near:
            return msgspec.structs.replace(found, verdict=Verdict.SETTLED)
        return found


class SettledFit:
    """The settled difference over the windows of a run, added one by one."""

    def __init__(self) -> None:
        self.sums = StepSums.zeros()
        self._num_steps = self._num_windows = self._after_steps = 0
        self._short_sum = 0.0
        self._runs: Counter[int] = Counter()  # lengths of stretches of sequential steps

    def after(self, report: OverlapReport, own: RankWindow) -> Settled | None:
        """The settled difference including this window, by this rank's data; None if the window does not count."""
        short = report.speedup_vs_sequential
        if own.series is None or short is None or not (report.valid and report.complete):
            return None
        self.add(own.series, short.value, own.rhythms)
        return self.result()

    def add(self, series: StepSeries, short: float, rhythms: Sequence[Rhythm] = ()) -> None:
        """Add a window; one without both modes is ignored.

        ``short``: the difference in its short blocks, as a fraction of an overlapped step. The extra time of steps of
        ``rhythms`` is fitted together with the window's line.
        """
        times_ms, letters = np.array(series.step_ms), np.array(list(series.modes), dtype="U1")
        counted = np.isin(letters, ("O", "S")) & (times_ms > 0) & np.isfinite(times_ms)
        sequential = np.isin(letters, ("S", "s"))
        steps = np.flatnonzero(counted)
        if not len(steps):
            return
        hits = [rhythm.hits(series.first_step + steps) for rhythm in rhythms]
        hits = [hit for hit in hits if hit.any() and not hit.all()]
        lines = np.stack([np.ones(len(steps)), steps - steps.mean(), *hits], axis=1)
        states, _ = _responses(tuple(sequential.tolist()))
        log_times = np.log(times_ms[steps])
        usual = _usual(np.hstack([sequential[steps, None], states[steps][:, _JUDGED_BY], lines]), log_times)
        steps, lines = steps[usual], lines[usual]
        if len(set(sequential[steps])) < 2 or len(steps) <= lines.shape[1] + 2 or short <= -1:
            return
        self.sums = self.sums.plus(StepSums.of(sequential, steps, log_times[usual], lines))
        self._num_steps += len(steps)
        self._short_sum += math.log1p(short)
        self._num_windows += 1
        stretches = [match.group() for match in re.finditer("o+|s+", series.modes.lower())]
        self._runs.update(len(stretch) for stretch in stretches if stretch[0] == "s")
        self._after_steps = max([self._after_steps, *map(len, stretches[1:])])

    def result(self) -> Settled | None:
        """The settled difference over the windows so far.

        None without windows, without noise to judge by, and if the steps do not contain the difference at all.
        """
        number = self._num_windows
        if not number or self.sums.freedom <= _COEFFICIENTS or not self.sums.gram[:, 0, 0].min() > _NEARLY_EQUAL:
            return None
        numbers = SettledNumbers.of(self.sums, number)
        if not numbers.known:
            return None
        short_steps = self._runs.most_common(1)[0][0]
        return numbers.settled(self._short_sum / number, number, self._num_steps, short_steps, self._after_steps)


def _inflation(
    moments: Array, noise: Array, beta: Array, solved: Array, freedom: Array, num_windows: int
) -> tuple[Array, Array]:
    """How much more the windows vary than their steps imply, as a factor of the variance; and degrees of freedom.

    A variance between windows, if any, is added to that of the steps; Satterthwaite's degrees of freedom, at least
    ``_LEAST_FREEDOM``: by chance, two windows differ by more than their steps imply in a third of all runs, and one
    degree would then make the interval several times as wide.
    """
    windows = num_windows - 1
    if not windows:
        return np.ones_like(noise), freedom
    v, w = solved[..., 0], solved[..., 1]
    # A window's contribution to the error of a + b is linear in its normal equations.
    q = np.stack([v, w, -v * beta[..., 0], -v * beta[..., 1] - w * beta[..., 0], -w * beta[..., 1]], axis=-1)
    between = np.einsum("...i,...ij,...j->...", q, moments, q) * num_windows / windows
    inflation = np.maximum(1.0, between / (noise * solved.sum(axis=-1)))
    share = 1 - 1 / inflation
    return inflation, np.maximum(_LEAST_FREEDOM, 1 / (share**2 / windows + (1 - share) ** 2 / freedom))


def _usual(columns: Array, log_times: Array) -> npt.NDArray[np.bool_]:
    """Which steps are not far above the estimate from the others.

    ``columns``: what step time may depend on, the mode first; shape (steps, columns).
    """
    usual, weights = np.ones(len(log_times), dtype=bool), np.ones(len(log_times))
    for mode in set(columns[:, 0]):
        own = columns[:, 0] == mode
        usual[own] = log_times[own] <= np.median(log_times[own]) + _FAR_LONGER

    def beyond_estimate() -> Array:
        roots = np.sqrt(weights[usual])
        fitted = np.linalg.lstsq(columns[usual] * roots[:, None], log_times[usual] * roots, rcond=None)[0]
        return np.asarray(log_times - columns @ fitted)

    for _ in range(_REWEIGHTED):  # least absolute deviations: several slow steps in a row pull least squares along
        weights = 1 / np.maximum(np.abs(beyond_estimate()), _NO_DEVIATION)
    for _ in range(2):
        beyond = beyond_estimate()
        center = np.median(beyond[usual])
        deviation = 1.4826 * np.median(np.abs(beyond[usual] - center))
        usual, weights = beyond - center <= max(_LONGER, _DEVIATIONS * float(deviation)), np.ones(len(log_times))
    return usual


@functools.lru_cache(maxsize=16)  # windows have the same modes, but for their order
def _responses(sequential: tuple[bool, ...]) -> tuple[Array, Array]:
    """The state that follows the mode, for each time constant, and in a straight line for each of ``RAMPS``.

    Shapes (number of steps, number of constants) and (number of steps, number of ramps).
    """
    kept, slopes = np.exp(-1 / np.array(CONSTANTS)), 1 / np.array(RAMPS)
    states, straight = [np.zeros(len(CONSTANTS))], [np.zeros(len(RAMPS))]
    for mode in sequential:
        states.append(mode + (states[-1] - mode) * kept)
        straight.append(np.clip(straight[-1] + (slopes if mode else -slopes), 0.0, 1.0))
    return np.array(states)[1:], np.array(straight)[1:]


def _whitened(rows: Array, gaps: npt.NDArray[np.int64]) -> tuple[Array, Array]:
    """Rows of consecutive steps, whitened for autoregressive noise, for each autocorrelation.

    Args:
        rows: shape (number of steps, number of columns).
        gaps: steps from each row to the next.

    Returns:
        The rows, of shape (autocorrelations, steps, columns), and the sum of the logarithms of their scales.
    """
    rho = np.array(AUTOCORRELATIONS)[:, None] ** gaps
    scale = np.sqrt(1 - rho**2)
    whitened = np.repeat(rows[None], len(AUTOCORRELATIONS), axis=0)
    whitened[:, 1:] = (rows[1:] - rho[:, :, None] * rows[:-1]) / scale[:, :, None]
    return whitened, np.log(scale).sum(axis=1)
