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
# The least share of a column's square that is more than rounding.
_NEARLY_EQUAL = 1e-9
# No mode makes steps a thousand times longer: a fit that says so is meaningless.
_MOST = math.log(1000)
# A settled interval within this of the short blocks' value agrees with it.
_ONE_POINT = 0.01
# A step counts unless it exceeds the estimate from others of its window by this much, and by this many robust standard
# deviations.
_LONGER, _DEVIATIONS = math.log(1.1), 5.0
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


class _Fits(NamedTuple):
    """Least squares of S and up to two states, for each autocorrelation and each choice of states of ``_MODELS``.

    Attributes:
        deviance: minus twice the logarithm of the restricted likelihood; shape (autocorrelations, choices).
        rss: residual sum of squares; same shape.
        beta: coefficients of S and of the states, 0 for those that a choice lacks; (autocorrelations, choices, 3).
        solved: the same for a right side of ones: their sum is the settled difference's variance; same shape.
        freedom: steps less the columns of the windows' lines.
    """

    deviance: Array
    rss: Array
    beta: Array
    solved: Array
    freedom: int

    @classmethod
    def of(cls, gram: Array, log_scales: Array, freedom: int) -> _Fits:
        """Fit each choice of states to normal equations whose last column is the dependent variable."""
        first, second = _FIRST, _SECOND
        of_s = gram[:, 0] / gram[:, 0, :1]
        left = gram - gram[:, :, :1] * of_s[:, None]  # what S does not explain: of S itself, nothing
        a, b, c = left[:, first, first], left[:, first, second], left[:, second, second]
        # States of similar constants are nearly equal: the second one then says nothing more.
        alone, none = a * c - b**2 <= _NEARLY_EQUAL * a * c, a <= _NEARLY_EQUAL * gram[:, first, first]
        determinant = np.where(alone, 1.0, a * c - b**2)

        def solution(s: Array, right: Array) -> Array:
            x, y = right[:, first], right[:, second]
            of_first = np.where(none, 0.0, x / np.where(none, 1.0, a))
            of_first = np.where(alone, of_first, (c * x - b * y) / determinant)
            of_second = np.where(alone, 0.0, (a * y - b * x) / determinant)
            of_mode = s[:, None] - of_s[:, first] * of_first - of_s[:, second] * of_second
            return np.stack([of_mode, of_first, of_second], axis=2)

        beta, solved = solution(of_s[:, -1], left[:, :, -1]), solution(1 / gram[:, 0, 0], 1 - of_s)
        explained = left[:, first, -1] * beta[:, :, 1] + left[:, second, -1] * beta[:, :, 2]
        rss = np.maximum(left[:, -1, -1, None] - explained, _LEAST_NOISE)
        return cls(freedom * np.log(rss) + 2 * log_scales[:, None], rss, beta, solved, freedom)

    @property
    def best(self) -> Array:
        """The least deviance of each of ``_MODELS``."""
        return np.array([self.deviance[:, model == _MODEL_OF].min() for model in range(len(_MODELS))])

    def allowed(self, room: float) -> tuple[float, float]:
        """Lowest and highest settled difference whose deviance is at most so much above the least of its model.

        That of one constant, if it is less.
        """
        best = self.best
        limit = np.minimum(best[0], best)[_MODEL_OF] + room
        rss_room = self.rss * np.expm1(np.clip((limit - self.deviance) / self.freedom, 0, 50))
        half = np.sqrt(np.maximum(rss_room * self.solved.sum(axis=2), 0.0))
        theta, fits = self.beta.sum(axis=2), self.deviance < limit
        low, high = np.where(fits, theta - half, np.inf), np.where(fits, theta + half, -np.inf)
        return max(-_MOST, float(low.min())), min(_MOST, float(high.max()))


class SettledFit:
    """The settled difference over the windows of a run, added one by one."""

    def __init__(self) -> None:
        num_rhos, num_states = len(AUTOCORRELATIONS), len(CONSTANTS)
        # Normal equations of S, the states, their squares, the straight lines and the logarithm of the time, by
        # autocorrelation.
        num_columns = 2 * num_states + len(RAMPS) + 2
        self._gram = np.zeros((num_rhos, num_columns, num_columns))
        # Second moments over windows of (S'y, h'y, S'S, S'h, h'h), by autocorrelation and time constant.
        self._moments = np.zeros((num_rhos, num_states, 5, 5))
        self._log_scales = np.zeros(num_rhos)
        self._num_steps = self._freedom = 0
        self._short_sum = 0.0
        self._num_windows = 0
        self._runs: Counter[int] = Counter()  # lengths of stretches of sequential steps
        self._after_steps = 0

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
        states, straight = _responses(tuple(sequential.tolist()))
        steps = np.flatnonzero(counted)
        if not len(steps):
            return
        hits = [rhythm.hits(series.first_step + steps) for rhythm in rhythms]
        hits = [hit for hit in hits if hit.any() and not hit.all()]
        lines = np.stack([np.ones(len(steps)), steps - steps.mean(), *hits], axis=1)
        columns = [sequential[:, None], states, states**2, straight]
        rows = np.hstack([*[column[steps] for column in columns], np.log(times_ms[steps, None]), lines])
        usual = _usual(np.hstack([rows[:, :1], states[steps][:, _JUDGED_BY], lines]), rows[:, -1 - lines.shape[1]])
        rows, steps, num_lines = rows[usual], steps[usual], lines.shape[1]
        if len(set(sequential[steps])) < 2 or len(steps) <= num_lines + 2 or short <= -1:
            return
        whitened, log_scales = _whitened(rows, np.diff(steps))
        values, (lines_of, roots) = whitened[:, :, :-num_lines], np.linalg.qr(whitened[:, :, -num_lines:])
        values = values - lines_of @ (lines_of.transpose(0, 2, 1) @ values)
        gram = values.transpose(0, 2, 1) @ values
        self._gram += gram
        sizes = np.abs(np.diagonal(roots, axis1=1, axis2=2))
        self._log_scales += log_scales + np.log(np.maximum(sizes, 1e-9)).sum(axis=1)  # restricted likelihood
        k = len(CONSTANTS)
        s_y, h_y = gram[:, 0, -1, None], gram[:, 1 : k + 1, -1]
        s_s, s_h = gram[:, 0, 0, None], gram[:, 0, 1 : k + 1]
        h_h = gram[:, range(1, k + 1), range(1, k + 1)]
        parts = np.stack(np.broadcast_arrays(s_y, h_y, s_s, s_h, h_h), axis=2)
        self._moments += parts[:, :, :, None] * parts[:, :, None, :]
        self._num_steps += len(steps)
        self._freedom += len(steps) - num_lines
        self._short_sum += math.log1p(short)
        self._num_windows += 1
        stretches = [match.group() for match in re.finditer("o+|s+", series.modes.lower())]
        self._runs.update(len(stretch) for stretch in stretches if stretch[0] == "s")
        self._after_steps = max([self._after_steps, *map(len, stretches[1:])])

    def result(self) -> Settled | None:
        """The settled difference over the windows so far.

        None without windows, without noise to judge by, and if the steps do not contain the difference at all.
        """
        freedom = self._freedom - 3
        if not self._num_windows or freedom < 1 or not self._gram[:, 0, 0].min() > _NEARLY_EQUAL:
            return None
        fits = _Fits.of(self._gram, self._log_scales, self._freedom)
        one, pairs, bent, _ = fits.best.tolist()
        chosen = fits.deviance[:, : len(_CHOSEN)]
        if not fits.rss[:, : len(_CHOSEN)].min() > _LEAST_NOISE * freedom:
            return None
        at, constant = (int(place) for place in np.unravel_index(chosen.argmin(), chosen.shape))
        constant_steps = (0.0, *CONSTANTS)[constant]
        inflation, degrees = self._inflation(at, constant, fits)

        def deviance(chi_square: float) -> float:
            return self._freedom * math.log1p(chi_square * inflation / freedom)

        def ends(pooling: Pooling) -> tuple[float, float]:
            return fits.allowed(deviance(float(half_width_factor(degrees, self._num_windows, pooling)) ** 2))

        (low, high), (least, most) = ends(ONE_LOOK), ends(Pooling(all_looks=True))
        theta, short = float(fits.beta[at, constant].sum()), self._short_sum / self._num_windows
        if abs(theta) > _MOST:
            return None
        found = Settled(
            value=math.expm1(theta),
            ci_low=math.expm1(low),
            ci_high=math.expm1(high),
            short=math.expm1(short),
            short_steps=self._runs.most_common(1)[0][0],
            constant_steps=constant_steps,
            verdict=Verdict.SHORT,
            at_least=None,
            after_steps=self._after_steps,
            num_steps=self._num_steps,
            num_windows=self._num_windows,
            all_looks_low=math.expm1(least),
            all_looks_high=math.expm1(most),
        )
        memory = float(chosen[:, 0].min()) - one
        one_does_not_do = (
            constant_steps >= _TOO_LONG or one - pairs > deviance(_TWO_BETTER) or one - bent > deviance(_BENT_BETTER)
        )
        if memory > deviance(_MEMORY_SURE) and (one_does_not_do or not found.resolved):
            grows = fits.beta[at, constant, 1] * theta > 0 and least * most > 0
            at_least = math.expm1(least if least > 0 else most) if grows else None
            return msgspec.structs.replace(found, verdict=Verdict.NOT_SETTLED, at_least=at_least)
        near = max(short - low, high - short) <= math.log1p(_ONE_POINT)
        if memory > deviance(_MEMORY_SHOWS) and found.resolved and not near:
            return msgspec.structs.replace(found, verdict=Verdict.SETTLED)
        return found

    def _inflation(self, at: int, constant: int, fit: _Fits) -> tuple[float, float]:
        """How much more the windows vary than their steps imply, as a factor of the variance; and degrees of freedom.

        A variance between windows, if any, is added to that of the steps; Satterthwaite's degrees of freedom, at least
        ``_LEAST_FREEDOM``: by chance, two windows differ by more than their steps imply in a third of all runs, and one
        degree would then make the interval several times as wide.
        """
        steps, windows = self._freedom - 3, self._num_windows - 1
        if not windows:
            return 1.0, steps
        noise, v, beta = fit.rss[at, constant] / steps, fit.solved[at, constant], fit.beta[at, constant]
        # A window's contribution to the error of a + b is linear in its normal equations.
        q = np.array([v[0], v[1], -v[0] * beta[0], -v[0] * beta[1] - v[1] * beta[0], -v[1] * beta[1]])
        between = float(q @ self._moments[at, max(constant - 1, 0)] @ q) * self._num_windows / windows
        inflation = max(1.0, between / (noise * float(v.sum())))
        share = 1 - 1 / inflation
        return inflation, max(_LEAST_FREEDOM, 1 / (share**2 / windows + (1 - share) ** 2 / steps))


def _usual(columns: Array, log_times: Array) -> npt.NDArray[np.bool_]:
    """Which steps are not far above the estimate from the others.

    ``columns``: what step time may depend on; shape (steps, columns).
    """
    usual = np.ones(len(log_times), dtype=bool)
    for _ in range(2):  # at first, outliers pull the others up
        beyond = log_times - columns @ np.linalg.lstsq(columns[usual], log_times[usual], rcond=None)[0]
        center = np.median(beyond[usual])
        deviation = 1.4826 * np.median(np.abs(beyond[usual] - center))
        usual = beyond - center <= max(_LONGER, _DEVIATIONS * float(deviation))
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
