"""Assigns readings to segments, i.e. to stretches of time in one mode.

Readings are held, not interpolated. A reading covers the time from its ``since_ns`` to its ``time_ns``; its value is
held from there until the time that the next reading covers. The first and the last reading of a segment are extended to
the segment's edges. A reading belongs to a segment only if all the time that it covers lies within the segment: an
average over two modes is the value of neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.power.readings import Floats, Readings, Times
from overlap_callbacks.analysis.results.mode import Mode


@dataclass(frozen=True)
class Segment:
    """A stretch of time in one mode: the counted steps of a block.

    Attributes:
        start_ns, end_ns: when the device began the first step and finished the last one, as of
            ``time.perf_counter_ns``.
        arm: the side of the comparison on which the segment counts.
        num_steps: number of steps in it.

    Raises:
        ValueError: the segment ends before it starts, or has no step.
    """

    start_ns: int
    end_ns: int
    arm: Mode
    num_steps: int

    def __post_init__(self) -> None:
        if self.end_ns <= self.start_ns:
            raise ValueError(f"end_ns must be after start_ns ({self.start_ns}), got {self.end_ns}")
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")

    @property
    def duration_s(self) -> float:
        """Length, in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True)
class HeldReadings:
    """The readings that belong to a segment, and for how long each of them is held.

    Attributes:
        rows: indices of the readings; shape (n,).
        seconds: time for which each is held; shape (n,). The sum is the segment's duration, unless there is no reading.
    """

    rows: npt.NDArray[np.intp]
    seconds: Floats

    def __len__(self) -> int:
        return len(self.rows)


def hold(readings: Readings, segment: Segment, values: Floats, since_ns: Times) -> HeldReadings:
    """The readings of a segment that have a value, and for how long each of them is held.

    Args:
        readings: all readings, in order of time.
        segment: the segment.
        values: a column of the readings; NaN where a reading has no value; shape (len(readings),).
        since_ns: start of the time that each value covers; shape (len(readings),).
    """
    low, high = np.searchsorted(readings.time_ns, (segment.start_ns, segment.end_ns), side="left")
    high += np.count_nonzero(readings.time_ns[high:] == segment.end_ns)  # a reading at the very end belongs to it
    rows = np.arange(low, high)
    rows = rows[(since_ns[rows] >= segment.start_ns) & ~np.isnan(values[rows])]
    if not len(rows):
        return HeldReadings(rows, np.empty(0))
    # A value is held until the time that the next reading covers, however far back that reaches.
    changes = np.maximum(readings.time_ns[rows[:-1]], since_ns[rows[1:]])
    edges = np.concatenate(([segment.start_ns], changes, [segment.end_ns]))
    lengths_ns = np.diff(edges)
    is_held = lengths_ns > 0  # a momentary reading at the very end belongs to the next segment, if to any
    return HeldReadings(rows[is_held], lengths_ns[is_held] / 1e9)


# The counter is refreshed at times of its own, so a difference of two reads is wrong by up to one period at each end.
# Over ten periods that is a tenth at most, and it averages out over the blocks of a mode.
_MIN_COUNTER_PERIODS = 10


def counter_energy_j(readings: Readings, segment: Segment, lag_s: float) -> float | None:
    """Energy of a segment in joules, by the device's counter; None if the reads span too little of the segment.

    Only reads within the segment count, from the first one whose value cannot be from before it. Their difference is
    scaled to the segment's length. Interpolating between the reads on both sides of an edge would mix in the power of
    the other mode.

    Args:
        readings: all readings, in order of time.
        segment: the segment.
        lag_s: how much older than the read the counter's value may be.
    """
    low, high = np.searchsorted(
        readings.time_ns, (segment.start_ns + round(lag_s * 1e9), segment.end_ns + 1), side="left"
    )
    if high - low < 2 or np.isnan(readings.energy_j[low:high]).any():  # NaN: the counter was reset
        return None
    span_s = (readings.time_ns[high - 1] - readings.time_ns[low]) / 1e9
    if span_s < max(segment.duration_s / 2, _MIN_COUNTER_PERIODS * lag_s):
        return None
    used_j = readings.energy_j[high - 1] - readings.energy_j[low]
    return float(used_j * (segment.duration_s / span_s))
