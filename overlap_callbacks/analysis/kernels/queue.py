"""How many kernels were launched on a stream and had not started yet: how far the host runs ahead of the device."""

from __future__ import annotations

import msgspec
import numpy as np

from overlap_callbacks.analysis.distinct import distinct_values
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


def queues(kernels: KernelTable, launched_ns: Indices) -> tuple[Queue, ...]:
    """The queues of all streams that have rows with a known launch, in order of their numbers.

    The span is that of the profile: from the first row's start to the last one's end.

    Args:
        kernels: the whole profile, of one device.
        launched_ns: when each row was launched, -1 if unknown; shape (n,).
    """
    if not len(kernels):
        return ()
    begin, end = int(kernels.intervals.start_ns.min()), int(kernels.intervals.end_ns.max())
    found = []
    for lane in distinct_values(kernels.lane[launched_ns >= 0]).tolist():
        rows = np.flatnonzero((kernels.lane == lane) & (launched_ns >= 0))
        start = kernels.intervals.start_ns[rows]
        launched = np.minimum(launched_ns[rows], start)
        waiting_ns = start - np.clip(launched, begin, start)
        times, change = np.concatenate((start, launched)), np.repeat((-1, 1), len(rows))
        order = np.lexsort((change, times))  # at the same time, starts come before launches
        found.append(
            Queue(
                lane=lane,
                num_launched=len(rows),
                longest=max(int(np.cumsum(change[order]).max()), 0),
                mean=int(waiting_ns.sum()) / (end - begin) if end > begin else 0.0,
                delay_ns=float((start - launched).mean()),
            )
        )
    return tuple(found)
