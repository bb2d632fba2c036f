"""Finds in which range of the host each kernel of a long trace was launched, as ``traces/host_ranges`` does.

It goes through the time of the host: launches and ranges in order of their starts, a part at a time.
"""

from __future__ import annotations

import numpy as np

from overlap_callbacks.traces.device_events import DeviceEvents
from overlap_callbacks.traces.host_ranges import RangeColumns, launched_in
from overlap_callbacks.traces.long.columns import Folder, RowsFile
from overlap_callbacks.traces.long.ranges import Ranges
from overlap_callbacks.traces.long.rows import KERNEL


def with_ranges_of_host(kernels: RowsFile, ranges: RowsFile, events: DeviceEvents, folder: Folder) -> RowsFile:
    """The kernels, each with its range, in any order.

    Args:
        kernels: the kernels with their launches; the file is deleted.
        ranges: the ranges; the file is deleted.
        events: what was collected, for what numbers stand for.
        folder: takes the file.
    """
    found, launched = folder.file(KERNEL), folder.file(KERNEL)
    for rows in kernels:
        is_known = rows["launched"] >= 0
        rows["range"] = -1
        found.append(rows[~is_known])
        launched.append(rows[is_known])
    thread_of = np.array([*map(events.ranges.thread_number, events.threads), -1], dtype=np.int64)
    opening, nothing = Ranges(ranges), np.empty(0, dtype=np.int64)
    for rows in launched.in_order("launched"):
        left = rows
        while len(left):
            # Ranges may be many more than kernels.
            until_ns = opening.reach(int(left["launched"][-1]))
            known = int(np.searchsorted(left["launched"], until_ns, side="right"))
            now, left = left[:known], left[known:]
            held = RangeColumns(*[opening.held[name].astype(np.int64) for name in ("start", "end", "thread", "detail")])
            now["range"] = launched_in(held, thread_of[now["thread"]], now["launched"], events.training_thread)
            opening.forget(until_ns, nothing)
            found.append(now)
    for file in (kernels, ranges):
        file.delete()
    return found
