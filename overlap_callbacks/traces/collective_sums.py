"""Adds up the collectives of one device of a trace, by kind and process group, over the pieces of its time."""

from __future__ import annotations

import numpy as np

from overlap_callbacks.analysis.bus_bandwidth import bus_factor
from overlap_callbacks.analysis.exact_sums import sums_by
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.traces.collectives import UNKNOWN, CollectiveInfo
from overlap_callbacks.traces.figures import CollectiveFigures
from overlap_callbacks.traces.trace import Trace

_NEVER = np.iinfo(np.int64).max


class CollectiveSums:
    """The collectives of one device.

    Args:
        head: the trace, with any rows or none.
    """

    def __init__(self, head: Trace) -> None:
        infos = [known._replace(by_name=False) for known in head.collectives.infos]
        infos += [CollectiveInfo(kind) for kind in head.kernels.collectives]  # of which nothing else is known
        distinct = {known: number for number, known in enumerate(dict.fromkeys(infos))}
        self._infos, self._num_known = list(distinct), len(head.collectives.infos)
        self._number_of = np.array([distinct[known] for known in infos], dtype=np.int64)
        # Time, hidden time, time of those whose size is known, and their bytes. These may be too great for 64 bits.
        self._sums = [[0] * len(distinct) for _ in range(4)]
        self._count, self._num_sized = (np.zeros(len(distinct), dtype=np.int64) for _ in range(2))
        self._first, self._num_rows = np.full(len(distinct), _NEVER), 0

    def add(self, trace: Trace) -> None:
        """Add the rows of a piece."""
        kernels, size = trace.kernels, len(self._infos)
        rows = np.flatnonzero(kernels.kind == Kind.COMMUNICATION)
        info, num_bytes, _ = trace.collectives.of_rows(rows)
        number = self._number_of[np.where(info >= 0, info, self._num_known + kernels.collective[rows])]
        times_ns = kernels.intervals.durations_ns[rows]
        hidden_ns = kernels.intervals[rows].covered_ns(kernels.of(Kind.COMPUTE))
        every, sized = np.ones(len(rows), dtype=bool), (num_bytes != UNKNOWN) & (times_ns > 0)
        parts = ((every, times_ns), (every, hidden_ns), (sized, times_ns), (sized, num_bytes))
        for total, (part, values) in zip(self._sums, parts, strict=True):
            total[:] = map(int.__add__, total, sums_by(number[part], values[part], size))
        self._count += np.bincount(number, minlength=size)
        self._num_sized += np.bincount(number[sized], minlength=size)
        found, first = np.unique(number, return_index=True)
        self._first[found] = np.minimum(self._first[found], self._num_rows + first)
        self._num_rows += len(rows)

    @property
    def figures(self) -> tuple[CollectiveFigures, ...]:
        """The figures, those with the most time first."""
        order = np.argsort(self._first, kind="stable")
        rows = [self._figures(i) for i in order[self._count[order] > 0].tolist()]
        return tuple(sorted(rows, key=lambda row: -row.time_ms))

    def _figures(self, number: int) -> CollectiveFigures:
        known = self._infos[number]
        time_ns, hidden_ns, sized_ns, num_bytes = (total[number] for total in self._sums)
        bandwidth = num_bytes / sized_ns if num_bytes and sized_ns else None  # bytes per ns, i.e. GB/s
        factor = bus_factor(known.kind, known.size)
        return CollectiveFigures(
            collective=known.kind,
            group=known.group,
            description=known.description,
            group_size=known.size,
            count=int(self._count[number]),
            bytes=num_bytes if self._num_sized[number] else None,
            time_ms=time_ns / 1e6,
            hidden_ms=hidden_ns / 1e6,
            algorithm_bandwidth_gb_s=bandwidth,
            bus_bandwidth_gb_s=bandwidth * factor if bandwidth is not None and factor is not None else None,
        )
