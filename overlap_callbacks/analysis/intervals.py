"""Intervals in columns: union, intersection, cover and self time, without a Python loop over intervals.

Times are integers in nanoseconds: the float of an absolute time has lost the last hundreds of nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Nanoseconds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Intervals:
    """Intervals [start, end), in any order; they may overlap.

    Attributes:
        start_ns, end_ns: arrays of shape (n,).
        disjoint: they are a union already: ascending, none empty, none reaching into another.
    """

    start_ns: Nanoseconds
    end_ns: Nanoseconds
    disjoint: bool = False

    @classmethod
    def empty(cls) -> Intervals:
        none = np.empty(0, dtype=np.int64)
        return cls(none, none)

    def __len__(self) -> int:
        return len(self.start_ns)

    def __getitem__(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Intervals:
        return Intervals(self.start_ns[rows], self.end_ns[rows])

    @property
    def durations_ns(self) -> Nanoseconds:
        """Length of each; shape (n,)."""
        return self.end_ns - self.start_ns

    @property
    def sum_ns(self) -> int:
        """Sum of the lengths: time that is covered twice counts twice. Exact, however long."""
        durations = self.durations_ns
        return (int((durations >> 32).sum()) << 32) + int((durations & 0xFFFF_FFFF).sum())

    @property
    def busy_ns(self) -> int:
        """Length of the union: time that is covered twice counts once."""
        return self.union().sum_ns

    def union(self) -> Intervals:
        """The same points as disjoint intervals in ascending order; empty and inverted intervals fall away."""
        if self.disjoint:
            return self
        start, end = self.start_ns, self.end_ns
        real = end > start
        start, end = start[real], end[real]
        if not len(start):
            return Intervals.empty()
        order = np.argsort(start, kind="stable")
        start, end = start[order], np.maximum.accumulate(end[order])
        begins = np.empty(len(start), dtype=bool)
        begins[0] = True
        np.greater(start[1:], end[:-1], out=begins[1:])
        lasts = np.append(np.flatnonzero(begins)[1:] - 1, len(start) - 1)
        return Intervals(start[begins], end[lasts], disjoint=True)

    def thinned(self, most: int) -> Intervals:
        """The union as at most ``most`` intervals: the smallest gaps between them are closed, the larger ones stay."""
        if most < 1:
            raise ValueError(f"most must be at least 1, got {most}")
        union = self.union()
        if len(union) <= most:
            return union
        gaps = union.start_ns[1:] - union.end_ns[:-1]
        kept = np.sort(np.argpartition(-gaps, most - 2)[: most - 1]) if most > 1 else np.empty(0, dtype=np.intp)
        return Intervals(
            np.append(union.start_ns[:1], union.start_ns[kept + 1]),
            np.append(union.end_ns[kept], union.end_ns[-1:]),
            disjoint=True,
        )

    def covered_ns(self, by: Intervals) -> Nanoseconds:
        """How much of each of these intervals the union of ``by`` covers; shape (n,)."""
        union = by.union()
        if not len(union):
            return np.zeros(len(self), dtype=np.int64)
        before = union._lengths_before

        def covered_until(time_ns: Nanoseconds) -> Nanoseconds:
            index = np.searchsorted(union.start_ns, time_ns, side="right")
            last = np.maximum(index - 1, 0)
            beyond_last = np.clip(time_ns - union.end_ns[last], None, 0)
            return before[index] + np.where(index > 0, beyond_last, 0)

        return np.where(self.end_ns > self.start_ns, covered_until(self.end_ns) - covered_until(self.start_ns), 0)

    @cached_property
    def _lengths_before(self) -> Nanoseconds:
        """Total length up to each interval of a union, and to its end; shape (n + 1,)."""
        return np.concatenate(([0], np.cumsum(self.durations_ns)))


def self_segments(intervals: Intervals) -> tuple[Intervals, npt.NDArray[np.intp]]:
    """Cut the nested calls of one thread into the pieces in which each is the innermost.

    Args:
        intervals: calls of one thread, each within its caller.

    Returns:
        The pieces, in ascending order, and for each the row of ``intervals`` that it belongs to. The pieces' lengths,
        summed by row, are the calls' self times.
    """
    count = len(intervals)
    if not count:
        return Intervals.empty(), np.empty(0, dtype=np.intp)
    start, end = intervals.start_ns, intervals.end_ns
    by_start = np.lexsort((-end, start))
    # At one instant: calls end before others begin, the inner ends before the outer, the outer begins before the inner.
    times = np.concatenate((end, start))
    begins = np.repeat((False, True), count)
    rows = np.tile(np.arange(count), 2)
    tie = np.concatenate((-start, -end))
    equals = np.concatenate((-np.arange(count), np.arange(count)))  # of equal calls, the later row is the inner one
    order = np.lexsort((equals, tie, begins, times))
    # A call of no length would end before it begins: leave it out, it has no self time.
    order = order[(end > start)[rows[order]]]
    times, begins, rows = times[order], begins[order], rows[order]
    depth_after = np.cumsum(np.where(begins, 1, -1))
    depth = np.zeros(count, dtype=np.int64)
    depth[rows[begins]] = depth_after[begins]
    parent = _parents(depth, by_start[(end > start)[by_start]])
    innermost = np.where(begins, rows, parent[rows])
    keep = (innermost[:-1] >= 0) & (times[1:] > times[:-1])
    return Intervals(times[:-1][keep], times[1:][keep]), innermost[:-1][keep]


def _parents(depth: npt.NDArray[np.int64], by_start: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Row of each call's caller, -1 without one: the last call one level up that began before it."""
    parent = np.full(len(depth), -1, dtype=np.intp)
    count = len(by_start)
    # Calls in order of level, and of start within it: one search finds the last of the level above for all of them.
    level = depth[by_start]
    place = level * (count + 1) + np.arange(count)
    order = np.argsort(place)
    above = np.searchsorted(place[order], place - (count + 1)) - 1
    nested = (above >= 0) & (level[order[above]] == level - 1)
    parent[by_start[nested]] = by_start[order[above[nested]]]
    return parent
