"""Cuts a device's kernels into pieces of time to add figures up over, as a long trace does not fit in memory.

Nothing runs at the bounds of a piece. Each step is in one piece, and a piece ends with the last kernel of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import Intervals, distinct_values
from overlap_callbacks.analysis.kernels.device_time import LastRows
from overlap_callbacks.analysis.kernels.table import Indices, Kind
from overlap_callbacks.traces import columns
from overlap_callbacks.traces.columns import cuts, derived, release
from overlap_callbacks.traces.trace import Trace

_NEVER = np.iinfo(np.int64).min


class Span(NamedTuple):
    """A span of time on the clock of the file."""

    start_ns: int
    end_ns: int


class Piece(msgspec.Struct, frozen=True):
    """A piece of a device's time.

    Attributes:
        trace: the rows of the piece; their indices refer to the whole trace's names, steps and so on.
        begin_ns: the last end of earlier rows; for the first piece, its first start.
        before: the last earlier rows.
        is_whole: whether it has all rows of the device.
    """

    trace: Trace
    begin_ns: int
    before: LastRows
    is_whole: bool


class Device:
    """The kernels of one device of a trace.

    Attributes:
        steps: indices of the steps that have kernels, ascending.
        communicates: whether any kernel communicates.
        span: from the first start to the last end; None without rows.
        ran: the same for rows that took time; None without any.
        launches_known: whether the launch of any row is known.
        at_least: least number of rows of a piece, but for the last. A file without steps is one piece if its columns
            are in memory, so that it has a critical path.
    """

    def __init__(self, trace: Trace, number: int) -> None:
        self.trace, self.number = trace, number
        kernels, launches = trace.kernels, trace.launches
        start_ns, end_ns = kernels.intervals.start_ns, kernels.intervals.end_ns
        took_time = end_ns > start_ns
        self.communicates = bool((kernels.kind == Kind.COMMUNICATION).any())
        self.span = Span(int(start_ns[0]), int(end_ns.max())) if len(kernels) else None
        self.ran = (
            Span(int(start_ns[np.argmax(took_time)]), int(end_ns.max(where=took_time, initial=_NEVER)))
            if took_time.any()
            else None
        )
        self.launches_known = launches is not None and bool((launches.launched_ns >= 0).any())
        # The last row of each step, -1 without rows; and the last row of each row's call.
        self._last_row = np.full(len(trace.steps) + 1, -1, dtype=np.int64)
        self._last_row[kernels.step] = np.arange(len(kernels))  # for equal indices, the last one counts
        self._last_row = self._last_row[:-1]
        self.steps = tuple(np.flatnonzero(self._last_row >= 0).tolist())
        self.at_least = columns.AT_ONCE if self.steps else columns.MAX_IN_MEMORY
        self._last_of_call: Indices | None = None
        if trace.on_host:
            last = np.zeros(int(kernels.call.max(initial=-1)) + 1, dtype=np.int64)
            last[kernels.call] = np.arange(len(kernels))
            self._last_of_call = derived(last.__getitem__, kernels.call)
        release()

    def pieces(self) -> Iterator[Piece]:
        """The pieces, in order of time."""
        number = len(self.trace.kernels)
        begin_ns, before = self.ran.start_ns if self.ran is not None else 0, LastRows.none()
        for rows in cuts(number, self.at_least, self._last_cut):
            trace = self.trace.part(rows.start, rows.stop)
            intervals = trace.kernels.intervals
            end_ns = int(intervals.end_ns.max())
            if trace.launches is not None:
                waits = trace.launches.waits
                mine = slice(*np.searchsorted(waits.end_ns, (begin_ns, end_ns), side="right").tolist())
                trace = dataclasses.replace(trace, launches=msgspec.structs.replace(trace.launches, waits=waits[mine]))
            yield Piece(trace, begin_ns, before, is_whole=rows == slice(0, number))
            before = _last_rows(before, intervals, trace.kernels.lane)
            begin_ns = end_ns
            release()

    def _last_cut(self, first: int, last: int) -> int:
        """The last row between ``first`` and ``last`` before which a piece may end; 0 for none.

        There, nothing runs, all steps so far have ended, and the last row to end is of a step, so the next step's time
        begins. Before the first step and after the last, it may be any row.
        """
        kernels, rows = self.trace.kernels, slice(first, last)
        step, end_ns = kernels.step[rows], kernels.intervals.end_ns[rows]
        start_ns = kernels.intervals.start_ns[first : last + 1]
        ended_ns = np.maximum.accumulate(end_ns)
        took_time = end_ns > start_ns[:-1]

        def latest_ns(counts: npt.NDArray[np.bool_]) -> Indices:
            return np.maximum.accumulate(np.where(counts, end_ns, _NEVER))

        places = np.arange(first, last)
        outside = places >= self._last_row.max(initial=-1)  # true for a trace without steps
        if self.steps:
            outside |= ended_ns <= self.trace.steps[self.steps[0]].start_ns
        fits = (ended_ns == latest_ns(took_time & (step >= 0))) | (outside & (ended_ns == latest_ns(took_time)))
        # The last row of all steps up to the latest that has begun.
        last_rows = np.concatenate(([-1], np.maximum.accumulate(self._last_row)))
        fits &= last_rows[np.maximum.accumulate(step) + 1] <= places
        if self._last_of_call is not None:
            fits &= np.maximum.accumulate(self._last_of_call[rows]) <= places
        fits &= ended_ns <= start_ns[1:]
        found = np.flatnonzero(fits)
        return first + int(found[-1]) + 1 if len(found) else 0


def devices_of(trace: Trace) -> list[Device]:
    """The devices of a trace; one if it has no kernels."""
    some_lack = not trace.lacks and any([step.cut for step in trace.steps])
    return [
        Device(_without_steps(of_device, number) if some_lack else of_device, number)
        for number, of_device in (trace.by_device() or {0: trace}).items()
    ]


def _without_steps(trace: Trace, number: int) -> Trace:
    """The trace of one of several devices, marked if none of its steps is whole, though those of others are."""
    if trace.whole[:-1][[i for i in distinct_values(trace.kernels.step).tolist() if i >= 0]].any():
        return trace
    warning = f"device {number} has no step that is known to be whole: it is in no mean [OC741]"
    return dataclasses.replace(
        trace, lacks="lacks kernels", warnings=(*trace.warnings, warning), problems=(warning, *trace.problems)
    )


def _last_rows(before: LastRows, ran: Intervals, lane: Indices) -> LastRows:
    """The row of each stream that ended last, of those before and some more."""
    took_time = ran.durations_ns > 0
    intervals, lane = before.intervals.with_others(ran[took_time]), np.concatenate((before.lane, lane[took_time]))
    # Of rows that end together, the one that started first counts.
    order = np.lexsort((-intervals.start_ns, intervals.end_ns, lane))
    is_last = np.append(lane[order][1:] != lane[order][:-1], True) if len(order) else np.zeros(0, dtype=bool)
    return LastRows(intervals[order[is_last]], lane[order[is_last]])
