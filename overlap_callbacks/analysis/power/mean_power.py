"""Mean power of a mode over its blocks: its error, from the energy counter, and whether two methods agree.

For the counter, only reads within a block count, from the first whose value cannot precede it: interpolating over an
edge would mix in the power of the other mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from overlap_callbacks.analysis.power.readings import Floats, Readings, Segment, rows_within
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import SourceInfo
from overlap_callbacks.analysis.statistics import MIN_BLOCKS, Interval, Sample, interval_of

# A mean with a larger error is not reported: a fraction, at 95 % confidence.
MAX_ERROR = 0.02
# Minimum error assumed for any mean: sensors round, and their calibration drifts between two readings.
MIN_ERROR = 0.005

# Energy by the counter over energy by power readings. Outside these bounds the counter is not used: some counters do
# not move, some have another unit.
_PLAUSIBLE_RATIO = (0.1, 10.0)
# If the two differ by more, one of them is wrong, and it is unknown which.
_MAX_DIFFERENCE = 0.05
# Maximum error of each for a comparison.
_MAX_DOUBT = 0.1
# A difference counts from this multiple of the one expected at 95 % confidence.
_BEYOND_CHANCE = 1.5


class MeanPower(NamedTuple):
    """Mean power of a mode by one method.

    Attributes:
        power_w: over the time of the measured blocks.
        error: maximum relative error for these steps, at 95 % confidence.
        weighted, weights: of each block, power times weight, and weight; 0 if it was not measured; shape (B,).
        num_steps, measured_s: of the measured blocks.
    """

    power_w: float
    error: float
    weighted: Floats
    weights: Floats
    num_steps: int
    measured_s: float

    @property
    def is_known(self) -> bool:
        """Whether its error is small enough to report it."""
        return self.error <= MAX_ERROR


def mean_power(segments: Sequence[Segment], weighted: Floats, weights: Floats, error: float) -> MeanPower | None:
    """The mean over blocks, with fields as in ``MeanPower``; None if no block was measured."""
    measured = [segment for segment, weight in zip(segments, weights.tolist(), strict=True) if weight > 0]
    if not measured:
        return None
    return MeanPower(
        power_w=float(weighted.sum() / weights.sum()),
        error=max(error, MIN_ERROR),
        weighted=weighted,
        weights=weights,
        num_steps=sum(segment.num_steps for segment in measured),
        measured_s=sum(segment.duration_s for segment in measured),
    )


def spread_over_blocks(weighted: Floats, weights: Floats) -> float:
    """Half the width of the 95 % interval over blocks, as a fraction; 0 with too few blocks."""
    interval = _over_blocks(weighted, weights, 0)
    return 0.0 if interval is None or interval.half_width is None else interval.half_width


def _over_blocks(weighted: Floats, weights: Floats, num_steps: int) -> Interval | None:
    measured = weights > 0
    rows = np.stack([weighted[measured], weights[measured]], axis=1)
    return interval_of(lambda means: math.log(means[0] / means[1]), Sample(rows, num_steps), scale=math.exp)


def estimate_w(found: MeanPower) -> Estimate:
    """Mean power with its interval over blocks."""
    interval = _over_blocks(found.weighted, found.weights, found.num_steps)
    num_blocks = int((found.weights > 0).sum())
    if interval is None:  # zero power
        return Estimate(found.power_w, None, None, found.num_steps, num_blocks)
    if interval.half_width is None:  # too few blocks to show their spread: use the measurement's own error
        half_w = found.error * found.power_w
        return Estimate(found.power_w, found.power_w - half_w, found.power_w + half_w, found.num_steps, num_blocks)
    return interval.estimate(found.error)


def estimate_j(found: MeanPower, segments: Sequence[Segment]) -> Estimate:
    """Energy of a step with its interval: mean power times the mean time of all steps, measured or not.

    A sensor measures the long blocks, with slow steps, which may draw less power: so the interval is joint.
    """
    times_s = np.array([segment.duration_s for segment in segments])
    num_steps = np.array([float(segment.num_steps) for segment in segments])
    total_steps = int(num_steps.sum())
    value = found.power_w * float(times_s.sum()) / total_steps
    rows = np.stack([found.weighted, found.weights, times_s, num_steps], axis=1)
    interval = interval_of(
        lambda means: math.log(means[0] / means[1] * means[2] / means[3]), Sample(rows, total_steps), scale=math.exp
    )
    num_measured = int((found.weights > 0).sum())
    if interval is not None and interval.half_width is None and num_measured == len(rows):
        half_j = found.error * value  # the power is of these very steps, and their time is exact
        return Estimate(value, value - half_j, value + half_j, total_steps, len(rows))
    if interval is None or num_measured < 2:
        return Estimate(value, None, None, total_steps, len(rows))
    return interval.estimate(found.error)


# -- two methods


class Agreement(NamedTuple):
    """How the counter compares with power readings: why its energy is implausible, and why neither is used."""

    counter_problems: tuple[str, ...] = ()
    disagreement: str = ""


def compare(
    by_mode: Mapping[Mode, tuple[MeanPower | None, MeanPower | None]],
    readings: Readings,
    source: SourceInfo,
    interval_s: float,
) -> Agreement:
    """Compare mean power by readings and by the counter, in each mode, otherwise over the window."""
    if source.energy_lag_s is None or source.averaging_s is None:  # no counter, or power is derived from it
        return Agreement()
    pairs = [
        (f"in {mode.value} steps", counted.power_w, sampled.power_w, math.hypot(counted.error, sampled.error))
        for mode, (sampled, counted) in by_mode.items()
        if sampled is not None and counted is not None and sampled.power_w > 0
    ]
    pairs = [pair for pair in pairs if pair[-1] <= _MAX_DOUBT]
    if not pairs:
        window = _over_window(readings, source.energy_lag_s, interval_s)
        pairs = [] if window is None else [("over the window", *window)]
    problems, disagreements = [], []
    for where, counted_w, sampled_w, doubt in pairs:
        ratio = counted_w / sampled_w
        if not _PLAUSIBLE_RATIO[0] <= ratio <= _PLAUSIBLE_RATIO[1]:
            problems.append(
                f"the energy counter is not used: {where} it gave {ratio:.2g} times the energy that the readings of "
                "power do [OC420]"
            )
        elif abs(ratio - 1) > max(_MAX_DIFFERENCE, _BEYOND_CHANCE * doubt):
            disagreements.append(
                f"{where} the energy counter gives {counted_w:.4g} W and the readings of power {sampled_w:.4g} W, and "
                "which of the two is wrong is not known"
            )
    return Agreement(tuple(problems), disagreements[0] if disagreements and not problems else "")


def _over_window(readings: Readings, lag_s: float, interval_s: float) -> tuple[float, float, float] | None:
    """Mean power by the counter and by readings over the window, and the error of their ratio; None if unknown."""
    known = np.flatnonzero(~np.isnan(readings.power_w))
    if len(known) < 20 or np.isnan(readings.energy_j).any():  # NaN: the counter was reset
        return None
    times_s, power_w = readings.time_ns[known] / 1e9, readings.power_w[known]
    gaps_s, span_s = np.diff(times_s), float(times_s[-1] - times_s[0])
    if not span_s > 0:
        return None
    shares = np.convolve(gaps_s, (0.5, 0.5)) / span_s
    mean_w = float(power_w @ shares)
    if not mean_w > 0:
        return None
    counted_w = float(np.diff(readings.energy_j[known[[0, -1]]])[0]) / span_s
    chance = math.sqrt(float((np.diff(power_w) ** 2).mean() * (shares**2).sum()) / 2)
    # While readings are missing, power may be anything that it is elsewhere.
    unread_s = float(np.maximum(gaps_s - 2 * interval_s, 0).sum())
    unread = unread_s / span_s * float(np.ptp(power_w)) / 2
    doubt = (2 * chance + unread) / mean_w + (lag_s + interval_s) / span_s
    return counted_w, mean_w, doubt


# -- by the energy counter

# A counter updates at times of its own, so the age of a value is anything up to its period. The difference of two such
# ages has a standard deviation of the period over the square root of 6. Ticks come at random times, so the differences
# of a mode's blocks are independent.
_AGES = 1 / math.sqrt(6)
_TWO_SIGMA = 1.96
# If blocks begin at the same phase of the counter's period, the first and the last read of a block have certain ages,
# equal in all blocks, and are left out. The mean of these phases, as points on the unit circle, is then longer than
# this.
_ONE_PLACE = 0.6
# 95th percentile of the observed over the expected spread with so few blocks.
_SPREAD = 1.7
# How much more the part of a block that no two reads span differs from the rest than blocks differ from each other.
_UNSEEN = 3.0
# Number of positions at which the energy of whole steps is compared.
_PLACES = 33
# Between two reads energy is assumed to grow evenly. The error in a block, as a share of the time between two reads and
# of half the swing of power.
_BETWEEN = 0.5
# Half the swing of power, assumed if no reading shows it.
_ANY_SWING = 0.5
# Maximum ratio of the sensor's averaging time to step time for which readings show the swing of power within steps.
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
        elif gap_s > step_s / 2:  # the phase of the reads is lost: leave out the rest of a step
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
    # If blocks differ by more than noise explains, power wanders, also in the part between no two reads.
    wander = math.sqrt(max(0.0, spread_over_blocks(weighted, weights) ** 2 - (_SPREAD * by_chance) ** 2))
    unseen = _UNSEEN * math.sqrt(max(0.0, 1 - seen_s / total_s)) * wander
    error = math.hypot(by_chance, unseen) + left_out_s * half_swing / total_s
    return mean_power(segments, weighted, weights, error)


def _is_in_step(segments: Sequence[Segment], lag_s: float) -> bool:
    """Whether blocks begin, or end, at the same phase of the counter's period."""
    edges_ns = np.array([(segment.start_ns, segment.end_ns) for segment in segments], dtype=np.float64)
    places = np.exp(2j * np.pi * edges_ns / (lag_s * 1e9))
    return len(segments) >= MIN_BLOCKS and bool((abs(places.mean(axis=0)) > _ONE_PLACE).any())


def _reads(readings: Readings, segment: Segment, lag_s: float) -> tuple[Floats, Floats]:
    """Times in seconds from the segment's start, and joules, of the reads that belong to this segment only."""
    low, high = np.searchsorted(
        readings.time_ns, (segment.start_ns + round(lag_s * 1e9), segment.end_ns + 1), side="left"
    )
    times_s = (readings.time_ns[low:high] - segment.start_ns) / 1e9
    return times_s, readings.energy_j[low:high]


def _over_whole_steps(times_s: Floats, energy_j: Floats, segment: Segment) -> float | None:
    """Mean power over whole steps; None if the reads do not span one."""
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
    # A mean over part of the step shows less than the full swing.
    return float((power_w.max() - power_w.min()) / 2 / power_w.mean()) / (1 - window_s / step_s)
