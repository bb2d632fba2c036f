"""Mean power of a mode from power readings, if no energy counter is accurate enough.

A reading is late, by an unknown part of the time that it covers. So a block's readings are taken from a time that is
whole steps before its end: then every part of a step has equal weight.

Readings come at random times, one in each interval, so power that varies within steps is known to ``s / sqrt(n)``. But
a sensor that samples only part of the time may stay in phase with training, and see the same part of each step however
many readings there are. This aliasing cannot be detected from the readings, so the sampled step phases must be
balanced, and differences between blocks count as error.

A driver may average for longer than tables say; then readings mix the modes. A reading that covers the time from
``d + w`` to ``d`` before it follows the share of sequential time in that range: covered times that the table allows are
compared with longer ones, by least squares.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.power.mean_power import MeanPower, mean_power, spread_over_blocks
from overlap_callbacks.analysis.power.readings import Floats, Readings, Rows, Segment, Times, hold, rows_within
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import SourceInfo

# Ticks come at random times, one in each interval, so up to two intervals may separate them. A thread may also wake
# late.
_MAX_GAP = 2.0
_LATE_S = 0.02
# With fewer degrees of freedom within blocks, all readings of the mode are compared with each other.
_FEW = 3
# Number of sensor update phases that are tried within its period.
_OFFSETS = 8
_TWO_SIGMA = 1.96
# The mean step phase of a block's readings, as points on the unit circle, is longer than this only if the sensor is in
# phase with training.
_ONE_PLACE = 0.6


Places = npt.NDArray[np.complex128]


class Unmeasured(enum.Enum):
    """Why a block gives no power."""

    SHORT = enum.auto()  # shorter than the time that a reading covers
    GAP = enum.auto()  # readings are missing
    CHANCE = enum.auto()  # no tick came


@dataclass
class SampledPower:
    """Result of a mode's readings: the mean, the readings that belong to it and how long each is held; shape (n,).

    ``num_readings`` are in the mean; ``unmeasured``: why blocks gave nothing.
    """

    mean: MeanPower | None = None
    power_w: Floats = field(default_factory=lambda: np.empty(0))
    seconds: Floats = field(default_factory=lambda: np.empty(0))
    num_readings: int = 0
    unmeasured: list[Unmeasured] = field(default_factory=list)


def sampled_power(
    readings: Readings, segments: Sequence[Segment], source: SourceInfo, interval_s: float
) -> SampledPower:
    """Power of a mode from its readings; ``segments`` are its blocks."""
    found = SampledPower()
    weighted, weights = np.zeros(len(segments)), np.zeros(len(segments))
    of_blocks: list[Floats] = []
    held_w, held_s = [], []
    of_steps: list[Places] = []
    window_s, left_out_s, total_s = 0.0, 0.0, 0.0
    clear_ns = round((source.averaging_s or 0.0) * 1e9)
    for place, segment in enumerate(segments):
        begin_ns, whole = _first_of_whole_steps(segment, clear_ns)
        if begin_ns is None:
            found.unmeasured.append(Unmeasured.SHORT)
            continue
        if _has_gap(readings, segment.start_ns + clear_ns, segment.end_ns, interval_s, source.averaging_s is None):
            found.unmeasured.append(Unmeasured.GAP)
            continue
        held = hold(readings, segment, readings.power_w, readings.since_ns)
        held_w.append(readings.power_w[held.rows])
        held_s.append(held.seconds)
        rows, amounts = _taken(readings, segment, begin_ns, source.averaging_s is None)
        if not len(rows):
            found.unmeasured.append(Unmeasured.CHANCE)
            continue
        power_w, length_s = readings.power_w[rows], segment.duration_s
        taken_s = (segment.end_ns - begin_ns) / 1e9 if source.averaging_s is not None else float(amounts.sum())
        weight = length_s / taken_s
        weighted[place], weights[place] = float(power_w @ amounts) * weight, float(amounts.sum()) * weight
        of_blocks.append(power_w)
        found.num_readings += len(rows)
        window_s, total_s = window_s + taken_s, total_s + length_s
        if not whole or source.averaging_s is None:
            left_out_s += max(0.0, length_s - taken_s)
        of_steps.append(_places_in_steps(readings.time_ns[rows], segment, source.renewed_s))
    if held_w:
        found.power_w, found.seconds = np.concatenate(held_w), np.concatenate(held_s)
    if not of_blocks:
        return found
    power_w = np.concatenate(of_blocks)
    if source.averaging_s is None:
        # The counter itself is better than power derived from it.
        error = math.inf if source.has_energy or len(power_w) < 2 else 0.0
    else:
        error = (
            math.inf
            if _is_in_step(of_steps)
            else _chance(of_blocks, of_steps, 1 - window_s / total_s, 2 * source.renewed_s / interval_s)
        )
    if left_out_s and power_w.mean() > 0:
        error += left_out_s / total_s * float(power_w.max() - power_w.min()) / 2 / float(power_w.mean())
    found.mean = mean_power(segments, weighted, weights, max(error, spread_over_blocks(weighted, weights)))
    return found


def _first_of_whole_steps(segment: Segment, clear_ns: int) -> tuple[int | None, bool]:
    """From when on readings of a block count, and whether whole steps lie between that and its end.

    None if the block is too short. Less than a step is enough if it is most of the block: steps may be long.
    """
    if not clear_ns:
        return segment.start_ns, True
    clear = segment.start_ns + clear_ns
    starts_ns = segment.starts_ns
    after = starts_ns[starts_ns >= clear]
    if len(after):
        return int(after[0]), True
    return (clear, False) if segment.end_ns - clear >= clear - segment.start_ns else (None, False)


def _taken(readings: Readings, segment: Segment, begin_ns: int, since_last: bool) -> tuple[Rows, Floats]:
    """The readings of a block that count, and the weight of each."""
    if since_last:  # each is the mean of its own time
        rows = rows_within(readings, segment.start_ns, segment.end_ns, readings.power_w, readings.since_ns)
        return rows, (readings.time_ns[rows] - readings.since_ns[rows]) / 1e9
    low, high = np.searchsorted(readings.time_ns, (begin_ns, segment.end_ns))
    rows = np.arange(low, high)
    rows = rows[(readings.since_ns[rows] >= segment.start_ns) & ~np.isnan(readings.power_w[rows])]
    return rows, np.ones(len(rows))


def _has_gap(readings: Readings, start_ns: int, end_ns: int, interval_s: float, since_last: bool) -> bool:
    """Whether readings are missing between two times, so that the power is unknown."""
    if since_last:  # a reading covers all the time since the previous one
        return False
    low, high = np.searchsorted(readings.time_ns, (start_ns, end_ns))
    times_ns = readings.time_ns[low:high][~np.isnan(readings.power_w[low:high])]
    gaps_ns = np.diff(np.concatenate(([start_ns], times_ns, [end_ns])))
    return bool((gaps_ns > (_MAX_GAP * interval_s + _LATE_S) * 1e9).any())


def _places_in_steps(times_ns: Times, segment: Segment, renewed_s: float) -> Places:
    """Possible step phases of the sensor's samples, as points on the unit circle; shape (_OFFSETS, n)."""
    bounds_ns = np.concatenate((segment.starts_ns, [segment.end_ns])).astype(np.float64)
    renewed_ns = renewed_s * 1e9
    offsets_ns = np.arange(_OFFSETS)[:, None] / _OFFSETS * renewed_ns
    looked_ns = times_ns[None, :] - ((times_ns[None, :] + offsets_ns) % renewed_ns if renewed_ns else 0.0 * offsets_ns)
    places: Places = np.exp(2j * np.pi * np.interp(looked_ns, bounds_ns, np.arange(len(bounds_ns))))
    return places


def _is_in_step(of_steps: Sequence[Places]) -> bool:
    """Whether the sensor samples the same phase of the steps in each block."""
    held = [abs(places.mean(axis=1)) for places in of_steps if places.shape[1] >= _FEW]
    return bool(held) and float(np.mean(held, axis=0).max()) > _ONE_PLACE


def _chance(of_blocks: Sequence[Floats], of_steps: Sequence[Places], left_out: float, most: float) -> float:
    """Maximum deviation of the mean of readings from mean power, at 95 % confidence, as a fraction.

    No readings count in ``left_out``, a share of the blocks' time. One value of the sensor gives up to ``most``
    readings.
    """
    power_w = np.concatenate(of_blocks)
    mean_w = float(power_w.mean())
    if len(power_w) < 2 or not mean_w > 0:
        return math.inf
    variance, freedom = _variance(of_blocks)
    if not variance:
        return 0.0
    from scipy.special import stdtrit  # takes half a second to import

    # Consecutive equal readings are one value of the sensor: n is (sum of w)^2 / (sum of w^2) for w readings per value.
    often = np.minimum(np.concatenate([_runs(block) for block in of_blocks]), max(1.0, most))
    # A longer run consists of several equal values.
    independent = len(power_w) * float(often.sum() / (often**2).sum())
    by_chance = float(stdtrit(freedom, 0.975)) * math.sqrt(variance / independent)
    # Power that oscillates once per step, with this variance, has an amplitude of sqrt(2) times its root.
    spread = math.sqrt(float(np.mean([block.var() for block in of_blocks])))
    in_step = math.sqrt(2) * spread * float(abs(np.concatenate(of_steps, axis=1).mean(axis=1)).max())
    unseen = _TWO_SIGMA * left_out * spread / math.sqrt(len(of_blocks))
    return math.hypot(max(by_chance, in_step), unseen) / mean_w


def _runs(power_w: Floats) -> Floats:
    changes = np.flatnonzero(np.diff(power_w)) + 1
    return np.diff(np.concatenate(([0], changes, [len(power_w)]))).astype(np.float64)


def _variance(of_blocks: Sequence[Floats]) -> tuple[float, int]:
    """Variance of a reading around the power of its time, and its degrees of freedom.

    Slowly varying power is known better than its variance says, because readings follow it: then half of the mean
    square of the differences between consecutive readings is used.
    """
    freedom = sum(len(power_w) - 1 for power_w in of_blocks)
    if freedom < _FEW:
        power_w = np.concatenate(of_blocks)
        return float(power_w.var(ddof=1)), len(power_w) - 1
    around_mean = sum(float(((power_w - power_w.mean()) ** 2).sum()) for power_w in of_blocks) / freedom
    in_a_row = sum(float((np.diff(power_w) ** 2).sum()) for power_w in of_blocks) / (2 * freedom)
    return min(around_mean, in_a_row), freedom


# -- the time that a sensor really covers, from how its readings follow changes of mode

# Possible averaging times of a sensor, in seconds, and possible delays.
_WINDOWS_S = (0.001, 0.025, 0.05, 0.1, 0.15, 0.22, 0.3, 0.4, 0.5, 0.63, 0.8, 1.0, 1.25, 1.6, 2.0, 2.5, 3.2)
_DELAYS_S = (0.0, 0.05, 0.1, 0.2)
# Consecutive readings are correlated, so parts of the window are compared: a longer time must fit nearly all better.
_PARTS = 8
# With fewer changes of mode a slow sensor looks like a drift of power.
_MIN_CHANGES = 3
_MIN_READINGS_OF_PART = 3
# In standard errors over the parts. A longer time is reported only if it fits better by the first than all that the
# table allows; of those within the second of the best, the longest is chosen.
_SURELY, _ABOUT = 3.0, 2.0


def covered_s(readings: Readings, stretches: Sequence[Segment], source: SourceInfo) -> float | None:
    """The time that a reading covers, if the readings show a longer one than the table has; else None.

    ``stretches``: all of the window in one mode, including warm-up steps.
    """
    known_s = source.averaging_s
    in_order = [stretch.mode for stretch in sorted(stretches, key=lambda stretch: stretch.start_ns)]
    if known_s is None or sum(one is not other for one, other in pairwise(in_order)) < _MIN_CHANGES:
        return None
    begin_ns, end_ns = min(s.start_ns for s in stretches), max(s.end_ns for s in stretches)
    is_within = (begin_ns <= readings.time_ns) & (readings.time_ns <= end_ns)
    known = np.flatnonzero(is_within & ~np.isnan(readings.power_w))
    if len(known) < _PARTS * _MIN_READINGS_OF_PART:
        return None
    times_s, power_w = readings.time_ns[known] / 1e9, readings.power_w[known]
    if np.ptp(power_w) == 0:  # only rounding could fit better or worse
        return None
    edges_s, sequential_s = _sequential(stretches)
    tried = [(late + window, late, window) for window in _WINDOWS_S for late in _DELAYS_S]
    squares: dict[float, Floats] = {}
    allowed: Floats | None = None
    for covered, late, window in sorted(tried):
        until = np.interp(times_s - late, edges_s, sequential_s)
        share = (until - np.interp(times_s - late - window, edges_s, sequential_s)) / window
        found = np.array([part.sum() for part in np.array_split(_residuals(power_w, share) ** 2, _PARTS)])
        if covered <= known_s:
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
        length_s = (stretch.end_ns - stretch.start_ns) / 1e9 if stretch.mode is Mode.SEQUENTIAL else 0.0
        edges_s += [stretch.start_ns / 1e9, stretch.end_ns / 1e9]
        total_s += [total_s[-1], total_s[-1] + length_s]
    return np.array(edges_s), np.array(total_s)


def _residuals(power_w: Floats, share: Floats) -> Floats:
    """Residuals of a straight line through the readings, over the share of sequential time that each covers."""
    centred = share - share.mean()
    spread = float(centred @ centred)
    slope = float(centred @ power_w) / spread if spread > 0 else 0.0
    residuals: Floats = power_w - power_w.mean() - slope * centred
    return residuals


def _is_above(differences: Floats, errors: float) -> bool:
    """Whether the mean is above zero by this many standard errors."""
    error = float(differences.std(ddof=1)) / np.sqrt(len(differences))
    return bool(differences.mean() > errors * error)
