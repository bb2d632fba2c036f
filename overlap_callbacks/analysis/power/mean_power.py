"""Mean power of a mode over its blocks, how well it is known, what follows from it, and whether two methods agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from overlap_callbacks.analysis.power.readings import Floats, Readings, Segment
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import SourceInfo
from overlap_callbacks.analysis.statistics import Interval, Sample, interval_of

# A figure that is known less well than this is none: a fraction, at 95 % confidence.
MAX_ERROR = 0.02
# No figure is taken to be known better: sensors round, and their calibration drifts between two readings.
MIN_ERROR = 0.005

# Energy by the counter over energy by the readings of power. Outside these bounds the counter is not used: some
# counters stand still, some count in another unit.
_PLAUSIBLE_RATIO = (0.1, 10.0)
# Where the two differ by more, one of them is wrong, and it is unknown which.
_MAX_DIFFERENCE = 0.05
# Both are known to so much at most, or they are not compared.
_MAX_DOUBT = 0.1
# A difference counts from this multiple of the one expected at 95 % confidence.
_BEYOND_CHANCE = 1.5


class MeanPower(NamedTuple):
    """Mean power of a mode by one method.

    Attributes:
        power_w: over the time of the measured blocks.
        error: how far it may be from the truth of these steps, at 95 % confidence, as a fraction.
        weighted, weights: of each block, power times weight, and weight; 0 where it was not measured; shape (B,).
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
        """Whether it is known well enough to be a figure."""
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
    """Half the width of the 95 % interval over blocks, as a fraction; 0 where there are too few blocks for one."""
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
    if interval is None:  # a power of zero
        return Estimate(found.power_w, None, None, found.num_steps, num_blocks)
    if interval.half_width is None:  # too few blocks to show their spread: what is known of the measuring itself
        half_w = found.error * found.power_w
        return Estimate(found.power_w, found.power_w - half_w, found.power_w + half_w, found.num_steps, num_blocks)
    return interval.estimate(found.error)


def estimate_j(found: MeanPower, segments: Sequence[Segment]) -> Estimate:
    """Energy of a step with its interval: mean power times the mean time of all steps, measured or not.

    The blocks that a sensor measures are the long ones, with slow steps. The interval is joint, as slow steps may draw
    less.
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
        half_j = found.error * value  # the steps are those whose power is known, and their time is exact
        return Estimate(value, value - half_j, value + half_j, total_steps, len(rows))
    if interval is None or num_measured < 2:
        return Estimate(value, None, None, total_steps, len(rows))
    return interval.estimate(found.error)


# -- two methods


class Agreement(NamedTuple):
    """How the energy counter compares with the readings of power.

    Attributes:
        counter_problems: why the counter's energy cannot be true; empty if it can.
        disagreement: why neither is used; empty where they agree, or cannot be compared.
    """

    counter_problems: tuple[str, ...] = ()
    disagreement: str = ""


def compare(
    by_mode: Mapping[Mode, tuple[MeanPower | None, MeanPower | None]],
    readings: Readings,
    source: SourceInfo,
    interval_s: float,
) -> Agreement:
    """Compare the counter with the readings of power, in each mode, or else over the window.

    ``by_mode`` has the mean power by readings and by the counter.
    """
    if source.energy_lag_s is None or source.averaging_s is None:  # without a counter, or power is made from it
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
                "power do"
            )
        elif abs(ratio - 1) > max(_MAX_DIFFERENCE, _BEYOND_CHANCE * doubt):
            disagreements.append(
                f"{where} the energy counter gives {counted_w:.4g} W and the readings of power {sampled_w:.4g} W, and "
                "which of the two is wrong is not known"
            )
    return Agreement(tuple(problems), disagreements[0] if disagreements and not problems else "")


def _over_window(readings: Readings, lag_s: float, interval_s: float) -> tuple[float, float, float] | None:
    """Mean power by the counter and by readings over the window, and their doubt; None where readings are missing."""
    known = np.flatnonzero(~np.isnan(readings.power_w) & ~np.isnan(readings.energy_j))
    if len(known) < 20 or len(known) < len(readings):
        return None
    times_s = readings.time_ns / 1e9
    span_s = float(times_s[-1] - times_s[0])
    if np.diff(times_s).max() > 3 * interval_s or not span_s > 0:
        return None
    power_w = readings.power_w
    mean_w = float(power_w.mean())
    if not mean_w > 0:
        return None
    counted_w = float(readings.energy_j[-1] - readings.energy_j[0]) / span_s
    chance = math.sqrt(float((np.diff(power_w) ** 2).mean()) / 2 / len(power_w)) / mean_w
    doubt = 2 * chance + (lag_s + interval_s) / span_s
    return (counted_w, mean_w, doubt) if doubt <= _MAX_DOUBT else None
