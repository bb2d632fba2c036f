"""How many kernels were launched on a stream and had not started yet: how far the host runs ahead of the device."""

from __future__ import annotations

import msgspec
import numpy as np

from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable


class Queue(msgspec.Struct, frozen=True):
    """The queue of one stream.

    Attributes:
        lane: number of the stream in the table.
        num_launched: rows of the stream whose launch is known.
        longest: most rows that waited at one time.
        mean: mean number of waiting rows over the span.
        delay_ns: mean time from launch to start.
    """

    lane: int
    num_launched: int
    longest: int
    mean: float
    delay_ns: float


class QueueSums:
    """The queues of streams, added up over pieces of a profile.

    Args:
        begin_ns, end_ns: the span of the profile: from the first row's start to the last one's end.
    """

    def __init__(self, begin_ns: int, end_ns: int) -> None:
        self._begin_ns, self._end_ns = begin_ns, end_ns
        self._sums: dict[int, _Sums] = {}

    def add(self, start_ns: Indices, launched_ns: Indices, lane: Indices) -> None:
        """Add rows whose launches are known, in any order.

        Args:
            start_ns: when each started; shape (n,).
            launched_ns: when each was launched, not after its start; shape (n,).
            lane: the stream of each; shape (n,).
        """
        waiting_ns = start_ns - np.clip(launched_ns, self._begin_ns, start_ns)
        for number in distinct_values(lane).tolist():
            rows = np.flatnonzero(lane == number)
            sums = self._sums.setdefault(number, _Sums())
            sums.num_launched += len(rows)
            sums.waiting_ns += int(waiting_ns[rows].sum())
            sums.delay_ns += int((start_ns - launched_ns)[rows].sum())

    def add_changes(self, times_ns: Indices, change: Indices, lane: Indices) -> None:
        """Add launches (1) and starts (-1) of the rows, none of them before those that were added earlier."""
        order = np.lexsort((change, times_ns))  # at the same time, starts come before launches
        for number in distinct_values(lane).tolist():
            rows = order[lane[order] == number]
            sums = self._sums.setdefault(number, _Sums())
            waiting = sums.waiting + np.cumsum(change[rows])
            sums.waiting, sums.longest = int(waiting[-1]), max(sums.longest, int(waiting.max()))

    @property
    def queues(self) -> tuple[Queue, ...]:
        """The queues, in order of the numbers of their streams."""
        span_ns = self._end_ns - self._begin_ns
        return tuple(
            [
                Queue(
                    lane=lane,
                    num_launched=sums.num_launched,
                    longest=sums.longest,
                    mean=sums.waiting_ns / span_ns if span_ns > 0 else 0.0,
                    delay_ns=sums.delay_ns / sums.num_launched,
                )
                for lane, sums in sorted(self._sums.items())
            ]
        )


class _Sums(msgspec.Struct):
    """Of one stream: rows, time that they waited within the span, time from launch to start, and how many waited."""

    num_launched: int = 0
    waiting_ns: int = 0
    delay_ns: int = 0
    waiting: int = 0
    longest: int = 0


def queues(kernels: KernelTable, launched_ns: Indices) -> tuple[Queue, ...]:
    """The queues of all streams that have rows with a known launch, in order of their numbers.

    The span is that of the profile: from the first row's start to the last one's end.

    Args:
        kernels: the whole profile, of one device.
        launched_ns: when each row was launched, -1 if unknown; shape (n,).
    """
    if not len(kernels):
        return ()
    sums = QueueSums(int(kernels.intervals.start_ns.min()), int(kernels.intervals.end_ns.max()))
    rows = np.flatnonzero(launched_ns >= 0)
    start, lane = kernels.intervals.start_ns[rows], kernels.lane[rows]
    launched = np.minimum(launched_ns[rows], start)
    sums.add(start, launched, lane)
    sums.add_changes(np.concatenate((start, launched)), np.repeat((-1, 1), len(rows)), np.concatenate((lane, lane)))
    return sums.queues
