"""Finds in which range of the host a kernel was launched.

Torch's ranges around the launches of collectives tell what these are. Others name a part of the program: the modules of
a model (``with_modules=True`` or ``with_stack=True`` of torch's profiler), what a user has named by ``record_function``
or NVTX, and torch's own, such as ``Optimizer.step#AdamW.step``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.table import Indices
from overlap_callbacks.traces.columns import Array, Column, parts, release
from overlap_callbacks.traces.event_columns import MAX_TIME_NS


def last_begun(ranges: Mapping[str, Array], launched_ns: Indices, thread: Indices) -> Indices:
    """In which range each launch was made: the last one of its thread to begin before it, if it had not ended.

    Args:
        ranges: columns ``start``, ``end`` and ``thread``; shape (ranges,) each.
        launched_ns: when each launch was made, -1 if unknown; shape (n,).
        thread: by which thread, -1 if unknown; shape (n,).

    Returns:
        The place of the range, -1 for none; shape (n,).
    """
    start_ns, end_ns, of_thread = ranges["start"], ranges["end"], ranges["thread"]
    order = np.lexsort((end_ns, start_ns, of_thread))
    calls = np.argsort(thread, kind="stable")
    numbers = np.arange(int(of_thread.max(initial=-1)) + 2)
    first_range, first_call = np.searchsorted(of_thread[order], numbers), np.searchsorted(thread[calls], numbers)
    found = np.full(len(launched_ns), -1, dtype=np.int64)
    for number in np.flatnonzero((np.diff(first_range) > 0) & (np.diff(first_call) > 0)).tolist():
        own = order[first_range[number] : first_range[number + 1]]
        mine = calls[first_call[number] : first_call[number + 1]]
        times_ns = launched_ns[mine]
        place = np.searchsorted(start_ns[own], times_ns, side="right") - 1
        last = own[np.maximum(place, 0)]
        found[mine] = np.where((place >= 0) & (times_ns >= 0) & (times_ns < end_ns[last]), last, -1)
    return found


def launched_in(ranges: Mapping[str, Array], thread: Indices, launched_ns: Indices, training: int) -> Array:
    """The name of the innermost range in which each launch was made, -1 for none; a column of shape (n,).

    A thread without a range, such as autograd's, works for the training thread: its launches count for the range that
    this one was in.

    Args:
        ranges: columns ``start``, ``end``, ``thread`` and ``name``; shape (ranges,) each.
        thread: the thread of each launch, -1 if unknown; shape (n,).
        launched_ns: when each was made, -1 if unknown; shape (n,).
        training: number of the training thread; -1 for none.
    """
    names = Column()
    for part in parts(len(thread)):
        times_ns, of_thread = launched_ns[part], thread[part]
        # There may be many more ranges than those that are open in this time.
        known_ns = times_ns[times_ns >= 0]
        first_ns, last_ns = known_ns.min(initial=MAX_TIME_NS), known_ns.max(initial=-1)
        wanted = (ranges["start"] <= last_ns) & (ranges["end"] > first_ns)
        open_then = {name: column[wanted] for name, column in ranges.items()}
        found = _innermost_by_thread(open_then, of_thread, times_ns)
        if training >= 0:
            without = np.flatnonzero((times_ns >= 0) & (found < 0) & (of_thread != training))
            found[without] = _innermost_by_thread(open_then, np.full(len(without), training), times_ns[without])
        names.append(found)
        release()
    return names.finished()


def _innermost_by_thread(ranges: Mapping[str, Array], thread: Indices, time_ns: Indices) -> Indices:
    """The name of the innermost range that was open at a time on a thread, -1 for none; shape (n,)."""
    found = np.full(len(time_ns), -1, dtype=np.int64)
    for number in distinct_values(ranges["thread"]).tolist():
        rows = np.flatnonzero(thread == number)
        own = np.flatnonzero(ranges["thread"] == number)
        if len(rows):
            place = _innermost(ranges["start"][own], ranges["end"][own], time_ns[rows])
            found[rows] = np.where(place >= 0, ranges["name"][own[place]], -1)
    return found


def _innermost(start_ns: Indices, end_ns: Indices, time_ns: Indices) -> Indices:
    """Which of some ranges is the innermost that holds each time: of the open ones the last to begin; -1 for none.

    One thread's ranges nest, but for damaged files. The answer does not depend on ranges that have ended before.
    """
    order = np.lexsort((-end_ns, start_ns))
    start_ns, end_ns = start_ns[order], end_ns[order]
    # The last range before each one that ends later. What lies between ends no later than it.
    before = np.arange(len(order)) - 1
    while True:
        ended = (before >= 0) & (end_ns[before] <= end_ns)
        if not ended.any():
            break
        before[ended] = before[before[ended]]
    found = np.searchsorted(start_ns, time_ns, side="right") - 1
    while True:
        ended = (found >= 0) & (end_ns[found] <= time_ns)
        if not ended.any():
            break
        found[ended] = before[found[ended]]
    return np.where(found >= 0, order[found], -1)
