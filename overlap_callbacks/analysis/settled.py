"""The settled difference between the modes: its value once a mode has lasted.

Effects that follow the mode slowly (clocks, heat, caches) show only partly in blocks of a few steps. But the modes of
all steps are known. So the logarithm of a step's time is fitted as

    window's own line + a S + b h(tau),

where S is 1 in sequential steps, and h is S filtered with a time constant of tau steps. Before the first step the job
ran overlapped, so h starts at 0. The settled difference is a + b. Noise is first-order autoregressive.

Each tau and each autocorrelation of a grid is a least-squares problem. Only the normal equations are kept, so that
windows can be added one by one, in constant memory.
"""

from __future__ import annotations

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
from overlap_callbacks.analysis.statistics import t_quantile

Array = npt.NDArray[np.float64]

# Time constants, in steps. From ``_TOO_LONG`` on a window does not show where the difference settles.
CONSTANTS = (0.5, 1, 1.5, 2, 3, 4, 5, 6.5, 8, 10, 12, 14, 17, 20, 30, 50)
_TOO_LONG = 20
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
# No mode makes steps a thousand times longer: a fit that says so is meaningless.
_MOST = math.log(1000)
# A settled interval within this of the short blocks' value agrees with it.
_ONE_POINT = 0.01
# A step counts unless it exceeds the estimate from others of its window by this much, and by this many robust standard
# deviations.
_LONGER, _DEVIATIONS = math.log(1.1), 5.0
# The state columns used for that estimate.
_JUDGED_BY = [CONSTANTS.index(constant) for constant in (1, 5, 17)]
# No memory and one constant, two, one and the square of its state: their columns in addition to S.
_CHOSEN = ((), *[(column,) for column in range(1, len(CONSTANTS) + 1)])
_BENT = tuple([(column, len(CONSTANTS) + column) for column in range(1, CONSTANTS.index(6.5) + 2)])
_PAIRS = tuple(itertools.combinations(range(1, CONSTANTS.index(_TOO_LONG) + 2), 2))


class _Fits(NamedTuple):
    """Least squares of S and up to two states, at one autocorrelation, for each choice of states.

    Attributes:
        rss: residual sum of squares; shape (choices,).
        beta: coefficients of S and of the states, 0 for those that a choice lacks; shape (choices, 3).
        solved: the same for a right side of ones: their sum is the settled difference's variance; same shape.
    """

    rss: Array
    beta: Array
    solved: Array

    @classmethod
    def of(cls, gram: Array, choices: Sequence[Sequence[int]]) -> _Fits:
        """Fit each choice of states to normal equations whose last column is the dependent variable."""
        columns = np.array([(0, *choice, *[-1] * (2 - len(choice))) for choice in choices])
        used = columns >= 0
        both = used[:, :, None] & used[:, None, :]
        equations = np.where(both, gram[columns[:, :, None], columns[:, None, :]], 0.0)
        right = np.where(used, gram[columns, -1], 0.0)
        inverse = np.linalg.pinv(equations, rcond=1e-9, hermitian=True)  # states of similar constants are nearly equal
        beta = np.einsum("kij,kj->ki", inverse, right)
        return cls(gram[-1, -1] - (right * beta).sum(axis=1), beta, np.einsum("kij,kj->ki", inverse, used * 1.0))

    def allowed(self, criterion: float, best: float) -> tuple[Array, Array]:
        """Lowest and highest settled difference that fits no worse than the best fit by more than the criterion.

        For a choice that allows none, they are infinite with swapped signs; shape (choices,).
        """
        room = criterion - (self.rss - best)
        half = np.sqrt(np.maximum(room, 0.0) * self.solved.sum(axis=1))
        theta = self.beta.sum(axis=1)
        return np.where(room > 0, theta - half, np.inf), np.where(room > 0, theta + half, -np.inf)


class SettledFit:
    """The settled difference over the windows of a run, added one by one."""

    def __init__(self) -> None:
        num_rhos, num_states = len(AUTOCORRELATIONS), len(CONSTANTS)
        # Normal equations of S, the states, their squares and the logarithm of the time, by autocorrelation.
        self._gram = np.zeros((num_rhos, 2 * num_states + 2, 2 * num_states + 2))
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
        states, steps = _states(sequential), np.flatnonzero(counted)
        if not len(steps):
            return
        hits = [rhythm.hits(series.first_step + steps) for rhythm in rhythms]
        hits = [hit for hit in hits if hit.any() and not hit.all()]
        lines = np.stack([np.ones(len(steps)), steps - steps.mean(), *hits], axis=1)
        rows = np.hstack(
            [sequential[steps, None], states[steps], states[steps] ** 2, np.log(times_ms[steps, None]), lines]
        )
        usual = _usual(np.hstack([rows[:, :1], states[steps][:, _JUDGED_BY], lines]), rows[:, -1 - lines.shape[1]])
        rows, steps, num_lines = rows[usual], steps[usual], lines.shape[1]
        if len(set(sequential[steps])) < 2 or len(steps) <= num_lines + 2 or short <= -1:
            return
        whitened, log_scales = _whitened(rows, np.diff(steps))
        values, lines_of = whitened[:, :, :-num_lines], np.linalg.qr(whitened[:, :, -num_lines:])[0]
        values = values - lines_of @ (lines_of.transpose(0, 2, 1) @ values)
        gram = values.transpose(0, 2, 1) @ values
        self._gram += gram
        self._log_scales += log_scales
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
        if not self._num_windows or freedom < 1:
            return None
        fits = [_Fits.of(gram, _CHOSEN) for gram in self._gram]
        best_of = np.array([each.rss.min() for each in fits])
        if not best_of.min() > _LEAST_NOISE * freedom:
            return None
        at = int((self._freedom * np.log(best_of) + 2 * self._log_scales).argmin())
        fit, best = fits[at], float(best_of[at])
        constant = int(fit.rss.argmin())
        constant_steps = (0.0, *CONSTANTS)[constant]
        noise = best / freedom
        inflation, degrees = self._inflation(at, constant, fit, noise)
        shows = fit.rss[0] - best > _MEMORY_SHOWS * noise
        noise *= inflation
        criterion = float(t_quantile(degrees)) ** 2 * noise
        pairs, bent = _Fits.of(self._gram[at], _PAIRS), _Fits.of(self._gram[at], _BENT)
        sure = fit.rss[0] - best > _MEMORY_SURE * noise
        one_does_not_do = (
            constant_steps >= _TOO_LONG
            or best - float(pairs.rss.min()) > _TWO_BETTER * noise
            or best - float(bent.rss.min()) > _BENT_BETTER * noise
        )
        ends = [each.allowed(criterion, min(best, float(each.rss.min()))) for each in (fit, pairs, bent)]
        low = max(-_MOST, min(float(lows.min()) for lows, _ in ends))
        high = min(_MOST, max(float(highs.max()) for _, highs in ends))
        theta, short = float(fit.beta[constant].sum()), self._short_sum / self._num_windows
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
        )
        if sure and (one_does_not_do or not found.resolved):
            grows = fit.beta[constant, 1] * theta > 0 and low * high > 0
            least = math.expm1(low if low > 0 else high) if grows else None
            return msgspec.structs.replace(found, verdict=Verdict.NOT_SETTLED, at_least=least)
        near = max(short - low, high - short) <= math.log1p(_ONE_POINT)
        if shows and found.resolved and not near:
            return msgspec.structs.replace(found, verdict=Verdict.SETTLED)
        return found

    def _inflation(self, at: int, constant: int, fit: _Fits, noise: float) -> tuple[float, float]:
        """How much more the windows vary than their steps imply, as a factor of the variance; and degrees of freedom.

        A variance between windows, if any, is added to that of the steps; Satterthwaite's degrees of freedom, at least
        ``_LEAST_FREEDOM``: by chance, two windows differ by more than their steps imply in a third of all runs, and one
        degree would then make the interval several times as wide.
        """
        steps, windows = self._freedom - 3, self._num_windows - 1
        if not windows:
            return 1.0, steps
        v, beta = fit.solved[constant], fit.beta[constant]
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


def _states(sequential: npt.NDArray[np.bool_]) -> Array:
    """The state that follows the mode, for each time constant; shape (number of steps, number of constants)."""
    kept = np.exp(-1 / np.array(CONSTANTS))
    states, state = np.empty((len(sequential), len(CONSTANTS))), np.zeros(len(CONSTANTS))
    for step, mode in enumerate(sequential):
        state = mode + (state - mode) * kept
        states[step] = state
    return states


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
