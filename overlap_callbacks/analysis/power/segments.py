"""Stretches of time in one mode, and what the readings say of each.

Readings are held, not interpolated. A reading speaks of the time from its ``since_ns`` to its ``time_ns``, and is held
from there until the time of which the next one speaks begins; the first and the last of a segment reach to its edges. A
reading belongs to a segment only if all the time of which it speaks lies within: what averages over two modes says
nothing of either.
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
        start_ns, end_ns: on ``time.perf_counter_ns``, when the device began the first step and had done the last.
        arm: the side of the comparison on which it counts.
        num_steps: steps that it holds.

    Raises:
        ValueError: it ends before it starts, or holds no step.
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
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True)
class HeldReadings:
    """Readings that belong to a segment, and for how long each is held.

    Attributes:
        rows: of the readings; shape (n,).
        seconds: shape (n,); they add up to the segment's duration, unless there is no reading at all.
    """

    rows: npt.NDArray[np.intp]
    seconds: Floats

    def __len__(self) -> int:
        return len(self.rows)


def hold(readings: Readings, segment: Segment, values: Floats, since_ns: Times) -> HeldReadings:
    """The readings of a segment that have a value, and how long each is held.

    Args:
        readings: in the order of time.
        segment: the stretch of time.
        values: the column that is asked for; NaN where a reading has none.
        since_ns: start of the time of which each value speaks.
    """
    low, high = np.searchsorted(readings.time_ns, (segment.start_ns, segment.end_ns), side="left")
    high += np.count_nonzero(readings.time_ns[high:] == segment.end_ns)  # a reading at the very end belongs to it
    rows = np.arange(low, high)
    rows = rows[(since_ns[rows] >= segment.start_ns) & ~np.isnan(values[rows])]
    if not len(rows):
        return HeldReadings(rows, np.empty(0))
    # From one reading to the next: the next one's own time is its own, however far it reaches back.
    changes = np.maximum(readings.time_ns[rows[:-1]], since_ns[rows[1:]])
    edges = np.concatenate(([segment.start_ns], changes, [segment.end_ns]))
    lengths_ns = np.diff(edges)
    spoke = lengths_ns > 0  # a momentary reading at the very end is of the next segment, if of any
    return HeldReadings(rows[spoke], lengths_ns[spoke] / 1e9)


# The counter is renewed at times of its own, so a difference of two reads is off by up to one such period at each end:
# over ten of them by a tenth at most, and that evens out over the blocks of a mode.
_COUNTER_PERIODS = 10


def counter_energy_j(readings: Readings, segment: Segment, lag_s: float) -> float | None:
    """Energy of a segment by the device's counter; None where its reads do not span enough of it.

    Only reads within the segment count, from the first whose value cannot be from before it, and their difference is
    scaled to the segment's length. Interpolating between the reads on both sides of an edge would mix in the power of
    the other mode.

    Args:
        readings: in the order of time.
        segment: the stretch of time.
        lag_s: how much older than the read the counter's value may be.
    """
    low, high = np.searchsorted(
        readings.time_ns, (segment.start_ns + round(lag_s * 1e9), segment.end_ns + 1), side="left"
    )
    if high - low < 2 or np.isnan(readings.energy_j[low:high]).any():  # NaN: the counter was reset
        return None
    span_s = (readings.time_ns[high - 1] - readings.time_ns[low]) / 1e9
    if span_s < max(segment.duration_s / 2, _COUNTER_PERIODS * lag_s):
        return None
    used_j = readings.energy_j[high - 1] - readings.energy_j[low]
    return float(used_j * (segment.duration_s / span_s))
