"""Finds periodic steps of a job that take longer, or shorter, than others, from the times of steps outside windows.

A rhythm is a period and a phase. For each, the steps that it hits are compared with all others, by rank, so that a
heavy tail or a few stalls weigh no more than other slow steps. Because consecutive step times are correlated, the part
that a step shares with its neighbours is removed first: for noise in which each step depends on the previous one, the
remainders at two steps of a rhythm are independent.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.formatting import PLAIN, Style
from overlap_callbacks.analysis.results.window import Rhythm

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_PERIODS = range(2, 65)
# Start of each period's phases in an array of the phases of all periods.
_FIRST_PHASES = [0, *itertools.accumulate(_PERIODS[:-1])]
_PHASES = sum(_PERIODS)
# There are 2,079 phases, longer or shorter: in 0.4 % of jobs one exceeds this by chance.
_MIN_Z = 4.75
# Minimum hits to distinguish a period from its multiples.
_MIN_HITS = 5
# Candidates that explain equally much within this factor tie: longer steps win over shorter ones, and a short period
# over a long one.
_TIE = 1.02
# Slow changes are followed by the medians of this many consecutive steps: more than the longest period.
_TREND_STEPS = 96
# Maximum dependence of a step on its neighbours: beyond it, little would be left of a rhythm.
_MAX_CORRELATION = 0.95
# Limit, in robust standard deviations, of what a step says about its neighbours: an outlier says little.
_MAX_TOLD = 3.0
# A rhythm that is less than half as strong in one part of the steps as in the other has begun or ended if the
# difference exceeds this many standard deviations.
_CHANGED_Z = 4.0
_USUAL_STEPS = 512
_MAD_TO_SD = 1.4826


def find_rhythms(steps: Ints, step_ms: Floats, max_rhythms: int = 3) -> tuple[Rhythm, ...]:
    """The rhythms of a job, the one that explains most of the step times first.

    Args:
        steps: step numbers, ascending, without those of windows and pauses.
        step_ms: duration of each. Values that are not positive and finite are ignored.
        max_rhythms: maximum number returned.
    """
    known = np.isfinite(step_ms) & (step_ms > 0)
    steps, logs = steps[known], np.log(step_ms[known])
    if len(steps) < 2 * _MIN_HITS:
        return ()
    untold = logs - _trend(logs)
    rest = untold
    folds = _Folds(steps)
    found: list[_Found] = []
    # A rhythm may explain less than one found later, so search for more than are reported.
    for _ in range(2 * max_rhythms):
        correlation = _correlation(steps, rest)
        scores = _normal_scores(_without_neighbours(steps, rest, correlation))
        best = folds.strongest(scores, correlation, [(rhythm.period, rhythm.phase) for rhythm in found])
        if best is None:
            break
        hits = np.equal(steps % best[0], best[1])
        if _has_changed(scores, hits):
            half = len(steps) // 2
            return find_rhythms(steps[half:], np.exp(logs[half:]), max_rhythms)
        found.append(_Found(*best, hits))
        _fit(found, steps, untold, correlation)
        rest = untold - _sum(found)
        for rhythm in found:
            rest = _levelled(rest, rhythm.hits)
    usual = ~_any(found, len(steps))
    usual_ms = float(np.exp(np.median((logs[usual] if usual.any() else logs)[-_USUAL_STEPS:])))
    found.sort(key=lambda rhythm: -(rhythm.extra**2) * rhythm.hits.mean() * (1 - rhythm.hits.mean()))
    told = found[:max_rhythms]
    return tuple([Rhythm(r.period, r.phase, usual_ms * math.expm1(r.extra), usual_ms) for r in told])


@dataclass
class _Found:
    """A rhythm, the steps that it hits, and how much longer these are, as a logarithm."""

    period: int
    phase: int
    hits: Bools
    extra: float = 0.0


def _any(found: Sequence[_Found], number: int) -> Bools:
    """The steps hit by any rhythm."""
    return np.asarray(
        np.any([np.zeros(number, dtype=bool), *[rhythm.hits for rhythm in found]], axis=0), dtype=np.bool_
    )


def _sum(found: Sequence[_Found]) -> Floats:
    return np.asarray(np.sum([rhythm.extra * rhythm.hits for rhythm in found], axis=0), dtype=np.float64)


def _fit(found: Sequence[_Found], steps: Ints, untold: Floats, correlation: float) -> None:
    """How much longer than usual the steps of each rhythm are, separated from the others."""
    usual = ~_any(found, len(steps))
    for _ in range(3):
        for rhythm in found:
            others = [other for other in found if other is not rhythm]
            alone = rhythm.hits & ~_any(others, len(steps))
            if np.count_nonzero(alone) < _MIN_HITS:  # for example, every 8th step next to every 4th
                alone = rhythm.hits
            compared = usual if np.count_nonzero(usual) >= _MIN_HITS else ~rhythm.hits
            # Raw times are a poor estimate if consecutive steps are correlated: the remainder would look like another
            # rhythm.
            values = _without_neighbours(steps, untold - _sum(found), correlation)
            # Each of the other steps has 2 / (period - 1) neighbours among the hits.
            of_neighbours = 2 * correlation / (1 + correlation**2) / (rhythm.period - 1)
            rhythm.extra += float(np.median(values[alone]) - np.median(values[compared])) / (1 + of_neighbours)


class _Folds:
    """The steps folded onto the phases of all periods."""

    def __init__(self, steps: Ints) -> None:
        self._first_step = int(steps[0])
        numbers = (steps - steps[0]).astype(np.int32)  # 32 bits, because a remainder then takes half the time
        self._phases = [(numbers % period).astype(np.intp) for period in _PERIODS]
        self._counts = np.concatenate([np.bincount(of, minlength=p) for of, p in self._folds()]).astype(np.float64)
        self._shares = self._counts / len(steps)
        self._enough = (self._counts >= _MIN_HITS) & (len(steps) - self._counts >= _MIN_HITS)

    def _folds(self) -> Iterable[tuple[npt.NDArray[np.intp], int]]:
        return zip(self._phases, _PERIODS, strict=True)

    def strongest(self, scores: Floats, correlation: float, known: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
        """Period and phase that explain most, unless that is within noise.

        ``scores`` of the steps exclude what their neighbours explain; their mean is zero. ``known`` are skipped.
        """
        sums = np.concatenate([np.bincount(of, weights=scores, minlength=p) for of, p in self._folds()])
        # By generalised least squares, with the mean of all steps unknown. Hits are not neighbours, so the remainders
        # at two of them are independent.
        of_mean = (1 - correlation) ** 2 / (1 + correlation**2)
        variances = self._counts * (1 - self._shares * of_mean) * max(1e-12, float(np.mean(scores**2)))
        z = np.divide(sums, np.sqrt(variances), out=np.zeros(_PHASES), where=self._enough)
        for period, phase in known:
            first = _FIRST_PHASES[period - 2]
            # With period 2, one step is as much longer as the other is shorter.
            places = range(2) if period == 2 else [(phase - self._first_step) % period]
            z[[first + place for place in places]] = 0.0
        explained = np.where(z > 0, _TIE * z * z, z * z)
        if explained.max() <= _MIN_Z**2:
            return None
        place = int(np.flatnonzero(explained * _TIE >= explained.max())[0])
        period = _PERIODS[bisect.bisect_right(_FIRST_PHASES, place) - 1]
        first = _FIRST_PHASES[period - 2]
        phase = int(explained[first : first + period].argmax())
        return period, (phase + self._first_step) % period


def _trend(logs: Floats) -> Floats:
    """Slow changes: linear interpolation of the medians of stretches."""
    stretches = np.array_split(logs, max(1, len(logs) // _TREND_STEPS))
    ends = np.cumsum([len(stretch) for stretch in stretches])
    middles = ends - np.array([len(stretch) for stretch in stretches]) / 2
    return np.asarray(np.interp(np.arange(len(logs)) + 0.5, middles, [float(np.median(s)) for s in stretches]))


def _normal_scores(values: Floats) -> Floats:
    """The values of normal noise with the same ranks."""
    from scipy.special import ndtri  # takes half a second to import, so only if a job is measured

    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # the mean rank of equal values
    scores = np.asarray(ndtri((ranks - 0.5) / len(values)), dtype=np.float64)[places]
    return np.asarray(scores - scores.mean(), dtype=np.float64)


def _correlation(steps: Ints, rest: Floats) -> float:
    scores = _normal_scores(rest)
    both = (scores[1:] * scores[:-1])[np.diff(steps) == 1]
    found = float(both.mean()) / max(1e-12, float(np.mean(scores**2))) if len(both) else 0.0
    return min(max(found, 0.0), _MAX_CORRELATION)


def _without_neighbours(steps: Ints, rest: Floats, correlation: float) -> Floats:
    """The part of each step that its neighbours do not explain."""
    in_a_row = np.diff(steps) == 1
    deviation = _MAD_TO_SD * float(np.median(np.abs(rest - np.median(rest))))
    told = np.clip(rest, -_MAX_TOLD * deviation, _MAX_TOLD * deviation)
    sums, num_known = np.zeros(len(rest)), np.zeros(len(rest), dtype=np.int64)
    sums[1:] += in_a_row * told[:-1]
    sums[:-1] += in_a_row * told[1:]
    num_known[1:] += in_a_row
    num_known[:-1] += in_a_row
    square = correlation * correlation
    weights = np.array([0.0, correlation, correlation / (1 + square)])[num_known]
    # In units of a step with two neighbours: others are less certain.
    units = np.sqrt(np.array([(1 + square) / (1 - square), 1 + square, 1.0]))[num_known]
    return np.asarray((rest - weights * sums) / units, dtype=np.float64)


def _has_changed(scores: Floats, hits: Bools) -> bool:
    """Whether a rhythm has begun or ended during these steps: its newest quarter differs from the rest."""
    of_hits = scores[hits]
    recent = len(of_hits) // 4
    if recent < _MIN_HITS:
        return False
    before, now = float(of_hits[:-recent].mean()), float(of_hits[-recent:].mean())
    deviation = math.sqrt(1 / recent + 1 / (len(of_hits) - recent))
    weaker, stronger = sorted((before * math.copysign(1, before + now), now * math.copysign(1, before + now)))
    return abs(before - now) > _CHANGED_Z * deviation and weaker < stronger / 2


def _levelled(rest: Floats, hits: Bools) -> Floats:
    """The remainders with the hits' spread limited to that of other steps, or they would seem a rhythm again."""
    middle, others = float(np.median(rest[hits])), float(np.median(rest[~hits]))
    spread = float(np.median(np.abs(rest[hits] - middle)))
    usual_spread = float(np.median(np.abs(rest[~hits] - others)))
    if spread <= usual_spread:
        return rest
    return np.where(hits, middle + (rest - middle) * usual_spread / spread, rest)


def rhythm_sentence(rhythm: Rhythm, style: Style = PLAIN) -> str:
    """E.g. ``every 8th step takes 150.0 ms longer, in both modes (steps 3, 11, 19, ...)``."""
    first = rhythm.phase or rhythm.period
    steps = ", ".join(str(first + turn * rhythm.period) for turn in range(3))
    cost = f"{style.quantity(abs(rhythm.extra_ms), 'ms')} {'longer' if rhythm.extra_ms >= 0 else 'shorter'}"
    return f"{every_nth_step(rhythm.period)} takes {cost}, in both modes (steps {steps}, ...)"


def rhythm_note(rhythm: Rhythm) -> str:
    return f"the job has a rhythm, which is taken out of both modes: {rhythm_sentence(rhythm)} [OC342]"


def every_nth_step(period: int) -> str:
    """E.g. ``every 8th step``."""
    if period == 2:
        return "every other step"
    last = {1: "st", 2: "nd", 3: "rd"}.get(period % 10, "th")
    return f"every {period}{'th' if period % 100 in (11, 12, 13) else last} step"
