"""Assigns readings to segments, i.e. to stretches of time in one mode.

A reading covers the time from its ``since_ns`` to its ``time_ns``: the sensor's averaging window lies somewhere in it.
It belongs to a segment only if all the time that it covers lies within the segment: an average over two modes is the
value of neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.power.readings import Floats, Readings, Times
from overlap_callbacks.analysis.results.mode import Mode


@dataclass(frozen=True)
class Segment:
    """A stretch of time in one mode: the counted steps of a block, or its warm-up.

    Attributes:
        start_ns, end_ns: when the device began the first step and finished the last one, as of
            ``time.perf_counter_ns``.
        arm: the side of the comparison on which the segment counts.
        num_steps: number of steps in it.
        step_starts_ns: when each of them began; empty if they are taken to be equally long.
        counted: whether the steps count; those of a warm-up do not.
        profiled: whether they ran under the profiler.
        length_s: how long the steps took by the device's own clock; None for the time between the two bounds. These
            are as close together as the bounds of host time allow.
        position: place of its first step among the counted steps of the block, from 0.

    Raises:
        ValueError: the segment ends before it starts, or has no step.
    """

    start_ns: int
    end_ns: int
    arm: Mode
    num_steps: int
    step_starts_ns: tuple[int, ...] = ()
    length_s: float | None = None
    counted: bool = True
    profiled: bool = False
    position: int = 0

    def __post_init__(self) -> None:
        if self.end_ns <= self.start_ns:
            raise ValueError(f"end_ns must be after start_ns ({self.start_ns}), got {self.end_ns}")
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")

    @property
    def duration_s(self) -> float:
        """Length, in seconds."""
        return (self.end_ns - self.start_ns) / 1e9 if self.length_s is None else self.length_s

    @property
    def starts_ns(self) -> Times:
        """When each step began; shape (num_steps,)."""
        if self.step_starts_ns:
            return np.array(self.step_starts_ns, dtype=np.int64)
        step_ns = (self.end_ns - self.start_ns) / self.num_steps
        return self.start_ns + np.round(np.arange(self.num_steps) * step_ns).astype(np.int64)


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


def rows_within(
    readings: Readings, start_ns: int, end_ns: int, values: Floats, since_ns: Times
) -> npt.NDArray[np.intp]:
    """Indices of the readings that have a value and of which all the time that they cover lies between two times.

    Args:
        readings: all readings, in order of time.
        start_ns: the first time.
        end_ns: the second time.
        values: a column of the readings; NaN where a reading has no value; shape (len(readings),).
        since_ns: start of the time that each value covers; shape (len(readings),).
    """
    low, high = np.searchsorted(readings.time_ns, (start_ns, end_ns), side="left")
    high += np.count_nonzero(readings.time_ns[high:] == end_ns)  # a reading at the very end belongs to it
    rows = np.arange(low, high)
    within: npt.NDArray[np.intp] = rows[(since_ns[rows] >= start_ns) & ~np.isnan(values[rows])]
    return within


def hold(readings: Readings, segment: Segment, values: Floats, since_ns: Times) -> HeldReadings:
    """The readings of a segment that have a value, and for how long each of them is held.

    A value is held from the start of the time that it covers until the time that the next reading covers. The first and
    the last reading of a segment are extended to the segment's edges.

    Args:
        readings: all readings, in order of time.
        segment: the segment.
        values: a column of the readings; NaN where a reading has no value; shape (len(readings),).
        since_ns: start of the time that each value covers; shape (len(readings),).
    """
    rows = rows_within(readings, segment.start_ns, segment.end_ns, values, since_ns)
    if not len(rows):
        return HeldReadings(rows, np.empty(0))
    # A value is held until the time that the next reading covers, however far back that reaches.
    changes = np.maximum(readings.time_ns[rows[:-1]], since_ns[rows[1:]])
    edges = np.concatenate(([segment.start_ns], changes, [segment.end_ns]))
    lengths_ns = np.diff(edges)
    is_held = lengths_ns > 0  # a momentary reading at the very end belongs to the next segment, if to any
    return HeldReadings(rows[is_held], lengths_ns[is_held] / 1e9)
