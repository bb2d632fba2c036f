"""Gives out the kernels of one device of a long trace in pieces, and works out what needs all of them at once."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import msgspec
import numpy as np

from overlap_callbacks.analysis.intervals import Intervals, distinct_values
from overlap_callbacks.analysis.kernels.critical_path import LastRows
from overlap_callbacks.analysis.kernels.queue import Queue, QueueSums
from overlap_callbacks.traces.launches import Launches
from overlap_callbacks.traces.long import columns
from overlap_callbacks.traces.long.columns import Folder, Rows, RowsFile
from overlap_callbacks.traces.long.estimate import EstimateSums
from overlap_callbacks.traces.long.rows import KERNEL, NUMBER, WAIT, filled
from overlap_callbacks.traces.long.survey import DeviceSurvey
from overlap_callbacks.traces.long.tables import Tables
from overlap_callbacks.traces.pieces import Estimating, Outline, Piece
from overlap_callbacks.traces.trace import Trace

_NEVER = np.iinfo(np.int64).min


class DeviceOnDisk:
    """The kernels of one device.

    Args:
        head: the trace, without rows.
        outline: what is known of the kernels.
        survey: the same, and files of numbers.
        kernels: the kernels of all devices, in order of their starts.
        waits: when the host waited for the device, in order of the ends.
        tables: what the numbers of the rows stand for.
        folder: takes files.
    """

    def __init__(
        self,
        head: Trace,
        outline: Outline,
        survey: DeviceSurvey,
        kernels: RowsFile,
        waits: RowsFile,
        tables: Tables,
        folder: Folder,
    ) -> None:
        self.head, self.outline = head, outline
        self._survey, self._kernels, self._waits, self._tables = survey, kernels, waits, tables
        self._folder = folder
        self._at_once: int | None = None

    def pieces(self) -> Iterator[Piece]:
        """The pieces, in order of time."""
        begin_ns = self.outline.ran.start_ns if self.outline.ran is not None else 0
        before, waits = LastRows.none(), _Waits(self._waits)
        for rows in self._cut():
            end_ns = int(rows["end"].max())
            kernels, collectives = self._tables.kernels(rows), self._tables.known(rows)
            launches = None
            if not self.head.on_host:
                waiting, streams = waits.between(begin_ns, end_ns), self._tables.streams
                launches = Launches(rows["launched"].copy(), waiting, streams, self.outline.records_waits)
                if self.head.launches is not None and self.head.launches.ranges:
                    range_of, ranges = rows["range"].astype(np.int64), self.head.launches.ranges
                    launches = msgspec.structs.replace(launches, range_of=range_of, ranges=ranges)
            trace = dataclasses.replace(
                self.head, kernels=kernels, device=rows["device"].astype(np.int64), collectives=collectives,
                launches=launches,
            )  # fmt: skip
            yield Piece(trace, begin_ns, before, is_whole=len(rows) == self._survey.num_rows)
            before = _last_rows(before, kernels.intervals, kernels.lane)
            begin_ns = end_ns

    def in_one_piece(self) -> DeviceOnDisk:
        """The same device in one piece, which takes memory for all rows."""
        device = copy.copy(self)
        device._at_once = self._survey.num_rows
        return device

    def queues(self) -> tuple[Queue, ...]:
        """The queue of each stream."""
        if self.outline.span is None:
            return ()
        sums = QueueSums(*self.outline.span)
        for rows in self._of_device():
            rows = rows[rows["launched"] >= 0]  # noqa: PLW2901
            launched = np.minimum(rows["launched"], rows["start"])
            sums.add(rows["start"], launched, rows["lane"].astype(np.int64))
        for changes in self._survey.changes.in_order("time"):
            columns_ = [changes[name].astype(np.int64) for name in ("time", "change", "lane")]
            sums.add_changes(*columns_)
        return sums.queues

    def kernel_ns(self) -> float | None:
        """Median time of the rows that compute; None without any."""
        return median(self._survey.compute_ns)

    def launch_interval_ns(self) -> float | None:
        """Median time from one launch to the next; None with fewer than two."""
        launched, intervals = self._folder.file(NUMBER), self._folder.file(NUMBER)
        for rows in self._of_device():
            launched.append(filled(NUMBER, value=rows["launched"][rows["launched"] >= 0]))
        last = np.empty(0, dtype=np.int64)
        for numbers in launched.in_order("value"):
            times_ns = distinct_values(np.concatenate((last, numbers["value"])))
            intervals.append(filled(NUMBER, value=np.diff(times_ns)))
            last = times_ns[-1:]
        return median(intervals)

    def estimating(self) -> Estimating:
        """Works out the slowdown beside communication, see ``estimate``."""
        return EstimateSums(self._folder, self.head)

    def _of_device(self) -> Iterator[Rows]:
        for rows in self._kernels:
            yield rows[rows["device"] == self.outline.device]

    def _cut(self) -> Iterator[Rows]:
        """The rows of the pieces. If there is nowhere to cut, a piece grows until there is."""
        held, done = np.empty(0, KERNEL), 0
        at_once = columns.AT_ONCE if self._at_once is None else self._at_once
        enough = at_once
        for rows in self._of_device():
            held = np.concatenate((held, rows))
            if len(held) > enough:
                end = self._last_cut(held, done)
                if end:
                    yield held[:end]
                    held, done = held[end:], done + end
                # Where there is nowhere to cut, it is not looked for in each part again.
                enough = max(at_once, 0 if end else 2 * len(held))
        if len(held):
            yield held

    def _last_cut(self, rows: Rows, done: int) -> int:
        """How many rows the longest piece has that these rows begin with; 0 if they can be cut nowhere.

        A piece ends where nothing runs, all its steps have ended, and the row that ended last is of a step: there the
        time of the next step begins. Before the first step begins and after the last one, any row may have ended last.

        Args:
            rows: rows of the device, in order of their starts.
            done: number of rows of the device before.
        """
        step, end_ns = rows["step"].astype(np.int64), rows["end"]
        ended_ns = np.maximum.accumulate(end_ns)
        took_time = end_ns > rows["start"]
        of_all_ns, of_steps_ns = (
            np.maximum.accumulate(np.where(counts, end_ns, _NEVER)) for counts in (took_time, took_time & (step >= 0))
        )
        places = done + np.arange(len(rows))
        between = ended_ns == of_steps_ns
        outside = places >= self._survey.last_row.max(initial=-1)  # true of a trace without steps
        if self.outline.steps:
            outside |= ended_ns <= self.head.steps[self.outline.steps[0]].start_ns
        # The place of the last row of the steps up to the latest that has begun.
        last_row = np.concatenate(([-1], np.maximum.accumulate(self._survey.last_row)))[np.maximum.accumulate(step) + 1]
        fits = (between | (outside & (ended_ns == of_all_ns))) & (last_row <= places)
        # Of a CPU job, an operator may be open though it has no time of its own just then.
        open_ns = np.maximum.accumulate(rows["returned"]) if self.head.on_host else ended_ns
        fits[:-1] &= np.maximum(ended_ns, open_ns)[:-1] <= rows["start"][1:]
        fits[-1] = False  # what comes next is not known
        places = np.flatnonzero(fits)
        return int(places[-1]) + 1 if len(places) else 0


class _Waits:
    """When the host waited for the device, given out as time goes on.

    Args:
        file: the waits, in order of their ends.
    """

    def __init__(self, file: RowsFile) -> None:
        self._parts, self._ahead = iter(file), np.empty(0, WAIT)

    def between(self, begin_ns: int, end_ns: int) -> Intervals:
        """Those that end after one time and up to another, which is not before that of the call before."""
        found = []
        while True:
            if not len(self._ahead):
                self._ahead = next(self._parts, np.empty(0, WAIT))
            first, last = np.searchsorted(self._ahead["end"], (begin_ns, end_ns), side="right").tolist()
            found.append(self._ahead[first:last])
            self._ahead = self._ahead[last:]
            if len(self._ahead) or not last:
                break
        waits = np.concatenate(found)
        return Intervals(waits["start"].copy(), waits["end"].copy())


def _last_rows(before: LastRows, ran: Intervals, lane: np.ndarray) -> LastRows:
    """Of each stream, the row that ended last of those before and some more."""
    took_time = ran.durations_ns > 0
    intervals, lane = before.intervals.with_others(ran[took_time]), np.concatenate((before.lane, lane[took_time]))
    # Of rows that end together, the one that started first counts.
    order = np.lexsort((-intervals.start_ns, intervals.end_ns, lane))
    is_last = np.append(lane[order][1:] != lane[order][:-1], True) if len(order) else np.zeros(0, dtype=bool)
    return LastRows(intervals[order[is_last]], lane[order[is_last]])


# -- medians


_BINS = 2**12


def median(file: RowsFile) -> float | None:
    """The median of the column ``value`` of whole numbers, as NumPy defines it; None of no numbers."""
    count = len(file)
    if not count:
        return None
    middle = {(count - 1) // 2, count // 2}
    return sum(_ranked(file, rank) for rank in middle) / len(middle)


def _ranked(file: RowsFile, rank: int) -> int:
    """The number of a rank in ascending order, from zero: it is looked for in ever smaller bins."""
    low = min(int(rows["value"].min()) for rows in file)
    high = max(int(rows["value"].max()) for rows in file)
    while True:
        width = max(-(-(high - low + 1) // _BINS), 1)
        counts = np.zeros(_BINS, dtype=np.int64)
        for rows in file:
            values = rows["value"][(rows["value"] >= low) & (rows["value"] <= high)]
            counts += np.bincount((values - low) // width, minlength=_BINS)
        before = np.cumsum(counts) - counts
        found = int(np.flatnonzero(before <= rank)[-1])
        rank -= int(before[found])
        low, high = low + found * width, min(low + (found + 1) * width - 1, high)
        if width == 1:
            return low
        if counts[found] <= columns.AT_ONCE:
            parts = [rows["value"][(rows["value"] >= low) & (rows["value"] <= high)] for rows in file]
            return int(np.sort(np.concatenate(parts))[rank])
