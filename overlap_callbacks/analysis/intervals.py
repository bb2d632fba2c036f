"""Interval algebra on arrays: union, cover and self time, without a Python loop over intervals.

Times are whole nanoseconds: floats would lose hundreds of nanoseconds of an absolute time.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Nanoseconds = npt.NDArray[np.int64]
# Intervals processed at a time.
_AT_ONCE = 2**16


class Intervals(msgspec.Struct, frozen=True, dict=True):
    """Intervals [start, end), in any order, shape (n,); they may overlap.

    ``disjoint`` is whether they are known to be a union: ascending, not empty, without overlap.
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

    def __getitem__(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp] | slice) -> Intervals:
        return Intervals(self.start_ns[rows], self.end_ns[rows])

    def with_others(self, *others: Intervals) -> Intervals:
        all_ = (self, *others)
        return Intervals(
            np.concatenate([part.start_ns for part in all_]), np.concatenate([part.end_ns for part in all_])
        )

    @property
    def durations_ns(self) -> Nanoseconds:
        return self.end_ns - self.start_ns

    @property
    def sum_ns(self) -> int:
        """Sum of the lengths: time covered twice counts twice. Exact for any length."""
        return sum_of(self.durations_ns)

    @property
    def busy_ns(self) -> int:
        """Length of the union: time covered twice counts once."""
        return self.union().sum_ns

    def union(self) -> Intervals:
        """The same points as disjoint ascending intervals, without empty and inverted ones."""
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

    def union_by(self, group: npt.NDArray[np.int64]) -> tuple[Intervals, npt.NDArray[np.int64]]:
        """The union of each group on its own.

        Args:
            group: number of the group of each interval; shape (n,).

        Returns:
            The intervals of all unions, group by group in ascending order, and the group of each.
        """
        if len(group) and (group == group[0]).all():  # faster
            union = self.union()
            return union, np.full(len(union), group[0])
        real = self.end_ns > self.start_ns
        start, end, group = self.start_ns[real], self.end_ns[real], group[real]
        if not len(start):
            return Intervals.empty(), np.empty(0, dtype=np.int64)
        order = np.lexsort((start, group))
        start, end, group = start[order], end[order], group[order]
        begins = np.concatenate(([True], group[1:] != group[:-1]))
        end = _latest_so_far(end, begins)
        begins[1:] |= start[1:] > end[:-1]
        lasts = np.append(np.flatnonzero(begins)[1:] - 1, len(start) - 1)
        return Intervals(start[begins], end[lasts]), group[begins]

    def after_earlier(self, group: npt.NDArray[np.int64]) -> Intervals:
        """Of each interval the part that those of its group do not cover that begin earlier; some are empty.

        The parts of a group are its union. ``group`` as in ``union_by``.
        """
        if not len(self):
            return self
        order = np.lexsort((self.start_ns, group))
        start, end = self.start_ns[order], np.maximum(self.start_ns, self.end_ns)[order]
        is_first = np.concatenate(([True], np.diff(group[order]) != 0))
        latest = np.concatenate((start[:1], _latest_so_far(end, is_first)[:-1]))
        since = np.empty_like(start)
        since[order] = np.minimum(np.where(is_first, start, np.maximum(start, latest)), end)
        return Intervals(since, np.maximum(self.start_ns, self.end_ns))

    def intersection(self, other: Intervals) -> Intervals:
        """The points that lie in both, as disjoint intervals in ascending order."""
        mine, theirs = self.union(), other.union()
        times = np.concatenate((mine.start_ns, theirs.start_ns, mine.end_ns, theirs.end_ns))
        steps = np.repeat((1, -1), len(mine) + len(theirs))
        order = np.lexsort((steps, times))  # at equal times, ends come before beginnings
        begins = np.flatnonzero(np.cumsum(steps[order]) == 2)
        return Intervals(times[order][begins], times[order][begins + 1]).union()

    def thinned(self, max_intervals: int) -> Intervals:
        """The union as at most ``max_intervals`` intervals, by closing the smallest gaps.

        Raises:
            ValueError: ``max_intervals`` is below 1.
        """
        if max_intervals < 1:
            raise ValueError(f"max_intervals must be at least 1, got {max_intervals}")
        union = self.union()
        if len(union) <= max_intervals:
            return union
        gaps = union.start_ns[1:] - union.end_ns[:-1]
        num_gaps = max_intervals - 1
        kept = np.sort(np.argpartition(-gaps, num_gaps - 1)[:num_gaps]) if num_gaps else np.empty(0, dtype=np.intp)
        return Intervals(
            np.append(union.start_ns[:1], union.start_ns[kept + 1]),
            np.append(union.end_ns[kept], union.end_ns[-1:]),
            disjoint=True,
        )

    def covered_ns(self, by: Intervals) -> Nanoseconds:
        """How much of each interval the union of ``by`` covers, in nanoseconds; shape (n,)."""
        union = by.union()
        if not len(union):
            return np.zeros(len(self), dtype=np.int64)
        before = union._lengths_before

        def covered_until(time_ns: Nanoseconds) -> Nanoseconds:
            index = np.searchsorted(union.start_ns, time_ns, side="right")
            last = np.maximum(index - 1, 0)
            beyond_last = np.minimum(time_ns - union.end_ns[last], 0)
            return before[index] + np.where(index > 0, beyond_last, 0)

        covered = np.empty(len(self), dtype=np.int64)
        for first in range(0, len(self), _AT_ONCE):  # there may be millions, each with several temporary numbers
            part = slice(first, first + _AT_ONCE)
            start_ns, end_ns = self.start_ns[part], self.end_ns[part]
            covered[part] = np.where(end_ns > start_ns, covered_until(end_ns) - covered_until(start_ns), 0)
        return covered

    @cached_property
    def _lengths_before(self) -> Nanoseconds:
        """Total length of the intervals before each interval of a union, and of all of them; shape (n + 1,)."""
        return np.concatenate(([0], np.cumsum(self.durations_ns)))


def _latest_so_far(end_ns: Nanoseconds, begins: npt.NDArray[np.bool_]) -> Nanoseconds:
    """The latest of the ends up to each, in its group; ``begins`` marks the first of each group. Shapes (n,), n > 0."""
    # Those of a later group rank above all of the groups before.
    by_end = np.argsort(end_ns, kind="stable")
    rank = np.empty(len(end_ns), dtype=np.int64)
    rank[by_end] = np.arange(len(end_ns))
    latest = np.maximum.accumulate((np.cumsum(begins) - 1) * len(end_ns) + rank) % len(end_ns)
    latest_ns: Nanoseconds = end_ns[by_end[latest]]
    return latest_ns


def self_segments(intervals: Intervals) -> tuple[Intervals, npt.NDArray[np.intp]]:
    """Cut the nested calls of one thread into pieces, in each of which one call is the innermost.

    Returns:
        The pieces, in ascending order, and for each piece the row of ``intervals`` that it belongs to. The sum of the
        pieces of a row is the call's self time.
    """
    count = len(intervals)
    if not count:
        return Intervals.empty(), np.empty(0, dtype=np.intp)
    start, end = intervals.start_ns, intervals.end_ns
    by_start = np.lexsort((-end, start))
    # At equal times, ends come before beginnings; inner calls end first, outer ones begin first.
    times = np.concatenate((end, start))
    begins = np.repeat((False, True), count)
    rows = np.tile(np.arange(count), 2)
    tie = np.concatenate((-start, -end))
    equals = np.concatenate((-np.arange(count), np.arange(count)))  # if calls are equal, the later row is the inner one
    order = np.lexsort((equals, tie, begins, times))
    # A call of zero length would end before it begins; without self time, it is left out.
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
    """Row of each call's caller, -1 for none: the last call one level up that began before it.

    ``depth`` is the nesting level of each call, from 1; ``by_start`` has the calls in order of their start.
    """
    parent = np.full(len(depth), -1, dtype=np.intp)
    count = len(by_start)
    # The calls are sorted by level, then by start, so one search finds every call's last predecessor one level up.
    level = depth[by_start]
    place = level * (count + 1) + np.arange(count)
    order = np.argsort(place)
    above = np.searchsorted(place[order], place - (count + 1)) - 1
    nested = (above >= 0) & (level[order[above]] == level - 1)
    parent[by_start[nested]] = by_start[order[above[nested]]]
    return parent


# -- sums that are exact even where 64 bits overflow: a damaged file may have times of any size


def sum_of(values: Nanoseconds) -> int:
    """The sum of up to 2**31 values."""
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFF_FFFF).sum())


def sums_by(group: Nanoseconds, values: Nanoseconds, num_groups: int) -> list[int]:
    """The sum of the values of each of ``num_groups`` groups; of up to 2**31 values. Shapes (n,)."""
    if num_groups == 1:
        return [sum_of(values)]
    order = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(num_groups), side="right")
    values = values[order]
    high, low = (
        np.diff(np.concatenate(([0], np.cumsum(part)))[np.concatenate(([0], ends))])
        for part in (values >> 32, values & 0xFFFF_FFFF)
    )
    return [(most << 32) + rest for most, rest in zip(high.tolist(), low.tolist(), strict=True)]


def distinct_values(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The distinct values of an array of shape (n,), ascending.

    ``np.unique`` without counts would import ``numpy.ma`` to check for masks.
    """
    if len(values):  # columns of files mostly repeat the value before
        values = values[np.concatenate(([True], values[1:] != values[:-1]))]
    return np.unique(values, return_counts=True)[0]
