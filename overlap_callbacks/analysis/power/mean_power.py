"""Mean power of a mode over its blocks, with how well it is known, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from overlap_callbacks.analysis.power.readings import Floats
from overlap_callbacks.analysis.power.segments import Segment
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import Interval, Sample, interval_of

# A figure that is known less well than this is none: a fraction, at 95 % confidence.
MAX_ERROR = 0.02
# No figure is taken to be known better: sensors round, and their calibration drifts between two readings.
MIN_ERROR = 0.005


class MeanPower(NamedTuple):
    """Mean power of a mode by one method.

    Attributes:
        power_w: over the time of the blocks that were measured.
        error: how far it may be from the truth of these steps, at 95 % confidence, as a fraction.
        weighted: of each block, power times weight; 0 where it was not measured; shape (B,).
        weights: of each block; 0 where it was not measured; shape (B,).
        num_steps: steps in the blocks that were measured.
        measured_s: their time.
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
    """The mean over blocks; None if no block was measured.

    Args:
        segments: the blocks.
        weighted: of each, power times weight; 0 where it was not measured.
        weights: of each; 0 where it was not measured.
        error: see ``MeanPower``.
    """
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

    The blocks that a sensor measures are the long ones, and so their steps are the slow ones. The interval is joint, as
    slow steps may draw less.

    Args:
        found: mean power over these segments.
        segments: all blocks of the mode.
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
