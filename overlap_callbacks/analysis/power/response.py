"""What time a sensor really covers, by how its readings follow the changes of mode in a window.

Tables tell what a chip's sensor should do. A driver may average over a longer time all the same; then readings mix the
modes. The modes alternate, so the response is there to see: a reading that covers the time from ``d + w`` to ``d``
before it follows the share of sequential time in there. Covered times that the table allows are held against longer
ones, by least squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from overlap_callbacks.analysis.power.readings import Floats, Readings
from overlap_callbacks.analysis.power.segments import Segment
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import SourceInfo

# Times over which a sensor may average, in seconds, and how late it may be.
_WINDOWS_S = (0.001, 0.025, 0.05, 0.1, 0.15, 0.22, 0.3, 0.4, 0.5, 0.63, 0.8, 1.0, 1.25, 1.6, 2.0, 2.5, 3.2)
_LATE_S = (0.0, 0.05, 0.1, 0.2)
# Readings in a row are alike, so parts of the window are compared: a longer time must fit better in nearly all of them.
_PARTS = 8
# After fewer changes of mode a slow sensor looks like a drift of power.
_MIN_CHANGES = 3
_MIN_READINGS_OF_PART = 3
# In standard errors over the parts. A longer time is told only if it fits better by so much than all that the table
# allows; of those that fit about as well as the best, the longest is taken.
_SURELY, _ABOUT = 3.0, 2.0


def covered_s(readings: Readings, stretches: Sequence[Segment], source: SourceInfo) -> float | None:
    """The time before a reading that it may be of, where the readings show a longer one than the table has; else None.

    Args:
        readings: all readings, in order of time.
        stretches: all of the window in one mode, warm-up steps too.
        source: of the readings, as its table has it.
    """
    told_s = source.averaging_s
    in_order = [stretch.arm for stretch in sorted(stretches, key=lambda stretch: stretch.start_ns)]
    if told_s is None or sum(one is not other for one, other in pairwise(in_order)) < _MIN_CHANGES:
        return None
    begin_ns, end_ns = min(s.start_ns for s in stretches), max(s.end_ns for s in stretches)
    is_within = (begin_ns <= readings.time_ns) & (readings.time_ns <= end_ns)
    known = np.flatnonzero(is_within & ~np.isnan(readings.power_w))
    if len(known) < _PARTS * _MIN_READINGS_OF_PART:
        return None
    times_s, power_w = readings.time_ns[known] / 1e9, readings.power_w[known]
    if np.ptp(power_w) == 0:  # what would fit better or worse is rounding alone
        return None
    edges_s, sequential_s = _sequential(stretches)
    tried = [(late + window, late, window) for window in _WINDOWS_S for late in _LATE_S]
    squares: dict[float, Floats] = {}
    allowed: Floats | None = None
    for covered, late, window in sorted(tried):
        until = np.interp(times_s - late, edges_s, sequential_s)
        share = (until - np.interp(times_s - late - window, edges_s, sequential_s)) / window
        found = np.array([part.sum() for part in np.array_split(_residuals(power_w, share) ** 2, _PARTS)])
        if covered <= told_s:
            allowed = found if allowed is None or found.sum() < allowed.sum() else allowed
        elif covered not in squares or found.sum() < squares[covered].sum():
            squares[covered] = found
    if allowed is None or not squares:
        return None
    best = min(squares.values(), key=lambda found: float(found.sum()))
    if not _is_above(allowed - best, _SURELY):
        return None
    longest = max(covered for covered, found in squares.items() if not _is_above(found - best, _ABOUT))
    return longest + source.renewed_s


def _sequential(stretches: Sequence[Segment]) -> tuple[Floats, Floats]:
    """Edges of the window's stretches in seconds, and the sequential time until each."""
    edges_s, total_s = [0.0], [0.0]
    for stretch in sorted(stretches, key=lambda stretch: stretch.start_ns):
        length_s = (stretch.end_ns - stretch.start_ns) / 1e9 if stretch.arm is Mode.SEQUENTIAL else 0.0
        edges_s += [stretch.start_ns / 1e9, stretch.end_ns / 1e9]
        total_s += [total_s[-1], total_s[-1] + length_s]
    return np.array(edges_s), np.array(total_s)


def _residuals(power_w: Floats, share: Floats) -> Floats:
    """Of a straight line through the readings, over the share of sequential time that each covers."""
    centred = share - share.mean()
    spread = float(centred @ centred)
    slope = float(centred @ power_w) / spread if spread > 0 else 0.0
    residuals: Floats = power_w - power_w.mean() - slope * centred
    return residuals


def _is_above(differences: Floats, errors: float) -> bool:
    """Whether the mean is above zero by so many standard errors."""
    error = float(differences.std(ddof=1)) / np.sqrt(len(differences))
    return bool(differences.mean() > errors * error)
