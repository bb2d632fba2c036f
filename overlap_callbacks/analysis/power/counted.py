"""Mean power of a mode by the device's energy counter, pooled over the mode's blocks.

Only reads within a block count, from the first one whose value cannot be from before it. Interpolating over an edge
would mix in the power of the other mode.

Reads do not come at a block's edges. What they leave out there may draw more or less than the rest: power swings with
the step. So a block's power is taken over whole steps: over all times ``x`` at which both are known, the mean of the
energy from ``x`` to the same place of a later step, over the mean of the time between the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from overlap_callbacks.analysis.power.mean_power import MeanPower, mean_power, spread_over_blocks
from overlap_callbacks.analysis.power.readings import Floats, Readings, Segment, rows_within
from overlap_callbacks.analysis.results.power import SourceInfo
from overlap_callbacks.analysis.statistics import MIN_BLOCKS

# A counter is renewed at times of its own, so the age of a read's value is anything up to its period. The difference of
# two such ages has a standard deviation of the period over the square root of 6. Ticks come at random times, so the
# differences of a mode's blocks are independent.
_AGES = 1 / math.sqrt(6)
_TWO_SIGMA = 1.96
# Where blocks begin at the same place of the counter's period, the first and the last read of a block are of certain
# ages, the same in all blocks, and are left out. The mean of these places, as points on the unit circle, is longer than
# this then.
_ONE_PLACE = 0.6
# 95th percentile of the observed over the expected spread of so few blocks.
_SPREAD = 1.7
# How much more the part of a block that no two reads span differs from the rest than blocks do from each other.
_UNSEEN = 3.0
# Places at which the energy of whole steps is compared.
_PLACES = 33
# Between two reads energy is taken to grow evenly. What that does to a block, as a share of the time between two reads
# and of half the swing of power.
_BETWEEN = 0.5
# Half the swing of power that is assumed where no reading shows it.
_ANY_SWING = 0.5
# The sensor's averaging time over a step's, up to which readings show the swing of power within steps.
_SHOWS_SWING = 0.5


def counted_power(readings: Readings, segments: Sequence[Segment], source: SourceInfo) -> MeanPower | None:
    """Mean power of a mode by the counter; None if the reads span none of its blocks."""
    lag_s = source.energy_lag_s
    if lag_s is None:
        return None
    weighted, weights = np.zeros(len(segments)), np.zeros(len(segments))
    ages_s, between_s, left_out_s, seen_s = 0.0, 0.0, 0.0, 0.0
    in_step = _is_in_step(segments, lag_s)
    for place, segment in enumerate(segments):
        times_s, energy_j = _reads(readings, segment, lag_s)
        if in_step and len(times_s) >= 4:
            times_s, energy_j = times_s[1:-1], energy_j[1:-1]
        span_s = float(times_s[-1] - times_s[0]) if len(times_s) > 1 else 0.0
        if span_s <= 2 * lag_s or np.isnan(energy_j).any():  # NaN: the counter was reset
            continue
        length_s = segment.duration_s
        whole_w = _over_whole_steps(times_s, energy_j, segment)
        step_s, gap_s = length_s / segment.num_steps, span_s / (len(times_s) - 1)
        if whole_w is None:
            left_out_s += max(0.0, length_s - span_s)
        elif gap_s > step_s / 2:  # where in the steps the reads came is lost: the rest of a step is left out
            left_out_s += max(0.0, min(length_s - span_s, step_s / 2))
        else:
            between_s += (_BETWEEN * gap_s * length_s / span_s) ** 2
        power_w = float(energy_j[-1] - energy_j[0]) / span_s if whole_w is None else whole_w
        weighted[place], weights[place] = power_w * length_s, length_s
        seen_s += span_s
        ages_s += (length_s * lag_s / span_s) ** 2
    total_s = float(weights.sum())
    if not total_s:
        return None
    half_swing = _half_swing(readings, segments, source)
    by_age = _TWO_SIGMA * _AGES * math.sqrt(ages_s) / total_s
    by_chance = math.hypot(by_age, _TWO_SIGMA * half_swing * math.sqrt(between_s) / total_s)
    # Blocks that differ by more than chance explains have a power that wanders, also in the part between no two reads.
    wander = math.sqrt(max(0.0, spread_over_blocks(weighted, weights) ** 2 - (_SPREAD * by_chance) ** 2))
    unseen = _UNSEEN * math.sqrt(max(0.0, 1 - seen_s / total_s)) * wander
    error = math.hypot(by_chance, unseen) + left_out_s * half_swing / total_s
    return mean_power(segments, weighted, weights, error)


def _is_in_step(segments: Sequence[Segment], lag_s: float) -> bool:
    """Whether blocks begin, or end, at the same place of the counter's period."""
    edges_ns = np.array([(segment.start_ns, segment.end_ns) for segment in segments], dtype=np.float64)
    places = np.exp(2j * np.pi * edges_ns / (lag_s * 1e9))
    return len(segments) >= MIN_BLOCKS and bool((abs(places.mean(axis=0)) > _ONE_PLACE).any())


def _reads(readings: Readings, segment: Segment, lag_s: float) -> tuple[Floats, Floats]:
    """Times in seconds, from the segment's start, and joules of the reads that are of the segment alone."""
    low, high = np.searchsorted(
        readings.time_ns, (segment.start_ns + round(lag_s * 1e9), segment.end_ns + 1), side="left"
    )
    times_s = (readings.time_ns[low:high] - segment.start_ns) / 1e9
    return times_s, readings.energy_j[low:high]


def _over_whole_steps(times_s: Floats, energy_j: Floats, segment: Segment) -> float | None:
    """Mean power over whole steps; None where the reads do not span one."""
    bounds_s = np.concatenate((segment.starts_ns - segment.start_ns, [segment.end_ns - segment.start_ns])) / 1e9
    number = np.arange(len(bounds_s))
    first, last = np.interp((times_s[0], times_s[-1]), bounds_s, number)
    num_whole = math.floor(last - first + 1e-9)
    if not num_whole:
        return None
    places = np.linspace(first, max(first, last - num_whole), _PLACES)
    begin_s, end_s = np.interp(places, number, bounds_s), np.interp(places + num_whole, number, bounds_s)
    used_j = np.interp(end_s, times_s, energy_j) - np.interp(begin_s, times_s, energy_j)
    return float(used_j.sum() / (end_s - begin_s).sum())


def _half_swing(readings: Readings, segments: Sequence[Segment], source: SourceInfo) -> float:
    """Half of the difference between the highest and the lowest power within a mode, over its mean."""
    step_s = min(segment.duration_s / segment.num_steps for segment in segments)
    rows = [rows_within(readings, s.start_ns, s.end_ns, readings.power_w, readings.since_ns) for s in segments]
    within = np.concatenate(rows)
    power_w = readings.power_w[within]
    if len(power_w) < 2 or not power_w.mean() > 0:
        return _ANY_SWING
    window_s = source.window_s
    if source.averaging_s is None:
        window_s = float(np.median(readings.time_ns[within] - readings.since_ns[within])) / 1e9
    if window_s is None or window_s > _SHOWS_SWING * step_s:  # a mean over most of a step does not show its swing
        return _ANY_SWING
    # A mean over a part of the step shows less of the swing than there is.
    return float((power_w.max() - power_w.min()) / 2 / power_w.mean()) / (1 - window_s / step_s)
