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


def queues(kernels: KernelTable, launched_ns: Indices) -> tuple[Queue, ...]:
    """The queues of all streams that have rows with a known launch, in order of their numbers.

    The span is that of the profile: from the first row's start to the last one's end.

    Args:
        kernels: the whole profile, of one device.
        launched_ns: when each row was launched, -1 if unknown; shape (n,).
    """
    if not len(kernels):
        return ()
    begin_ns, end_ns = int(kernels.intervals.start_ns.min()), int(kernels.intervals.end_ns.max())
    span_ns, found = end_ns - begin_ns, []
    for lane in distinct_values(kernels.lane).tolist():
        rows = np.flatnonzero((kernels.lane == lane) & (launched_ns >= 0))
        if not len(rows):
            continue
        start = np.sort(kernels.intervals.start_ns[rows])
        launched = np.sort(np.minimum(launched_ns[rows], kernels.intervals.start_ns[rows]))
        # Of what starts and is launched at the same time, starts come first.
        waiting = np.arange(1, len(rows) + 1) - np.searchsorted(start, launched, side="right")
        waiting_ns = int((start - np.maximum(launched, begin_ns)).sum())
        found.append(
            Queue(
                lane=lane,
                num_launched=len(rows),
                longest=max(int(waiting.max()), 0),
                mean=waiting_ns / span_ns if span_ns > 0 else 0.0,
                delay_ns=int((start - launched).sum()) / len(rows),
            )
        )
    return tuple(found)
