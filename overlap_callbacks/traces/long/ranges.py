"""Finds what torch's ranges tell of the kernels of a long trace that were launched in them.

It goes through the time of the host: launches and ranges in order of their starts, a part at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.table import Indices, Kind, StringTable
from overlap_callbacks.traces.collective_ranges import RangeDetail, last_begun
from overlap_callbacks.traces.collectives import CollectiveInfo
from overlap_callbacks.traces.copies import CopiesInRanges
from overlap_callbacks.traces.device_events import DeviceEvents
from overlap_callbacks.traces.long import columns
from overlap_callbacks.traces.long.columns import Rows, RowsFile
from overlap_callbacks.traces.long.joining import Names
from overlap_callbacks.traces.long.rows import KERNEL, RANGE
from overlap_callbacks.traces.long.spill import Spill
from overlap_callbacks.traces.metadata import told_by_ranges


class RangeReader:
    """Adds to kernels what torch's ranges, else their names, tell of their collectives.

    Args:
        names: what the names of kernels tell.
        kinds: takes the kinds of collectives, and numbers them.
        first_info: number of the first of ``infos``.

    Attributes:
        copies: the copies that are the work of collectives.
    """

    def __init__(self, names: Names, kinds: StringTable, first_info: int) -> None:
        self._names, self._kinds, self._first_info = names, kinds, first_info
        self._infos: dict[CollectiveInfo, int] = {}
        self._by_name: Counter[int] = Counter()
        self._first_place: dict[int, int] = {}
        self.copies = CopiesInRanges()

    @property
    def infos(self) -> tuple[CollectiveInfo, ...]:
        """What ranges and names tell, by the numbers from ``first_info`` on."""
        return tuple(self._infos)

    @property
    def by_name(self) -> list[tuple[int, int]]:
        """Names that alone tell the collectives of kernels, in the order of the file, and of how many kernels."""
        return [(name, self._by_name[name]) for name in sorted(self._by_name, key=self._first_place.__getitem__)]

    def read(self, parts: Iterable[Rows], events: DeviceEvents, spill: Spill) -> RowsFile:
        """The kernels with what was told, in any order.

        Args:
            parts: the kernels with their launches, a part at a time.
            events: what was collected, for what numbers stand for.
            spill: the ranges, which are deleted.
        """
        found, asking = spill.folder.file(KERNEL), spill.folder.file(KERNEL)
        of_copies = events.operators if events.operators.num_taken else events.annotations
        has_copies = bool(self._names.within_device.any()) and of_copies.num_taken > 0
        computing: set[int] = set()
        for rows in parts:
            self._names.apply(rows)
            computing.update(distinct_values(rows["lane"][rows["kind"] == Kind.COMPUTE]).tolist())
            asks = self._asks(rows) & (events.annotations.num_taken > 0)
            if has_copies:
                asks |= self._may_be_copies(rows)
            asks &= rows["launched"] >= 0
            asking.append(rows[asks])
            rest = rows[~asks]
            nothing = np.full(len(rest), -1, dtype=np.int64)
            self._tell(rest, nothing, nothing, ())
            found.append(rest)
        annotations = Ranges(spill.annotations)
        operators = Ranges(spill.operators) if of_copies is events.operators else annotations
        in_annotations, in_operators = (
            np.array([*map(ranges.thread_number, events.threads), -1], dtype=np.int64)
            for ranges in (events.annotations, of_copies)
        )
        details, details_of_copies = events.annotations.details, of_copies.details
        held = np.empty(0, KERNEL)
        left = len(asking)
        for part in asking.in_order("launched"):
            left -= len(part)
            rows = np.concatenate((held, part))
            more = True
            while more:
                # Ranges may be many more than kernels that ask for them.
                until_ns = min(ranges.reach(int(rows["launched"][-1])) for ranges in {annotations, operators})
                known = int(np.searchsorted(rows["launched"], until_ns, side="right"))
                now, more = rows[:known], known < len(rows)
                around = _around(operators.held, now, in_operators)
                waits = np.zeros(known, dtype=bool)
                if has_copies:
                    # All that was launched in a range is looked at together, so what lies in one that is open is held.
                    if left or more:
                        waits = np.append(operators.held["end"] > until_ns, False)[around] & self._may_be_copies(now)
                    found_now = np.flatnonzero(~waits)
                    self._find_copies(now, found_now, around, operators.held, details_of_copies, computing)
                in_range = _around(annotations.held, now, in_annotations)
                detail, num_bytes = (
                    np.append(annotations.held[column], -1)[in_range].astype(np.int64)
                    for column in ("detail", "num_bytes")
                )
                done = now[~waits]
                self._tell(done, detail[~waits], num_bytes[~waits], details)
                found.append(done)
                kept = distinct_values(around[waits])
                for ranges in {annotations, operators}:
                    ranges.forget(until_ns, kept if ranges is operators else distinct_values(in_range[waits]))
                rows = np.concatenate((now[waits], rows[known:]))
            held = rows
        for file in (spill.annotations, spill.operators):
            file.delete()
        return found

    def _asks(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows communicate by their names, and do not tell how."""
        found: npt.NDArray[np.bool_] = self._names.communicates[rows["name"]] & (rows["info"] < 0)
        return found

    def _may_be_copies(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows may be copies of collectives, or their kernels."""
        found: npt.NDArray[np.bool_] = self._is_copy(rows) | (rows["kind"] == Kind.COMMUNICATION)
        return found

    def _is_copy(self, rows: Rows) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self._names.within_device[rows["name"]] & (rows["kind"] == Kind.COPY)
        return found

    def _find_copies(
        self,
        rows: Rows,
        wanted: Indices,
        around: Indices,
        ranges: Rows,
        details: tuple[RangeDetail, ...],
        computing: set[int],
    ) -> None:
        """Find the copies among some rows that are the work of a collective.

        Args:
            rows: the rows.
            wanted: places of those to look at: all that was launched in a range, or nothing of it.
            around: in which range each row was launched, -1 for none; shape (n,).
            ranges: the ranges.
            details: what ranges have in common.
            computing: the streams that compute.
        """
        mine = wanted[self._may_be_copies(rows[wanted])]
        is_copy = self._is_copy(rows)[mine]
        alone = is_copy & ~np.isin(rows["lane"][mine], list(computing))
        rows["copied"][mine] = self.copies.add(is_copy, alone, around[mine], ranges["detail"], details)

    def _tell(self, rows: Rows, detail: Indices, num_bytes: Indices, details: tuple[RangeDetail, ...]) -> None:
        """Set what is told of the rows that do not tell it themselves.

        Args:
            rows: the rows.
            detail: index into ``details`` of the range in which each was launched, -1 for none; shape (n,).
            num_bytes: size of the range's collective; shape (n,).
            details: what ranges have in common.
        """
        mine = np.flatnonzero(self._asks(rows))
        name = rows["name"][mine].astype(np.int64)
        told = told_by_ranges(name, detail[mine], num_bytes[mine], self._names.clean, details)
        numbers = [self._infos.setdefault(info, len(self._infos)) for info in told.infos]
        kinds = [self._kinds[info.kind] for info in told.infos]
        is_by_name = np.array([info.by_name for info in told.infos], dtype=bool)
        rows["info"][mine] = self._first_info + np.array(numbers, dtype=np.int64)[told.info]
        rows["metadata"][mine] = np.array(kinds, dtype=np.int64)[told.info]
        rows["num_bytes"][mine] = told.num_bytes
        untold, count = np.unique(name[is_by_name[told.info]], return_counts=True)
        for number, times in zip(untold.tolist(), count.tolist(), strict=True):
            self._by_name[number] += times
            first = int(rows["place"][mine][name == number].min())
            self._first_place[number] = min(first, self._first_place.get(number, first))


class Ranges:
    """Ranges of the host, read as time goes on.

    Args:
        file: the ranges, which are deleted meanwhile.

    Attributes:
        held: those that were read and not forgotten.
    """

    def __init__(self, file: RowsFile) -> None:
        self._parts = file.in_order("start")
        self._ahead = np.empty(0, RANGE)
        self.held = np.empty(0, RANGE)

    def reach(self, time_ns: int) -> int:
        """Read the ranges that begin up to a time, or a part of them. Returns the time up to which all were read."""
        found = [self.held]
        number = 0
        while True:
            if not len(self._ahead):
                self._ahead = next(self._parts, np.empty(0, RANGE))
            if not len(self._ahead) or int(self._ahead["start"][0]) > time_ns:
                break
            if number >= columns.AT_ONCE:
                time_ns = int(self._ahead["start"][0]) - 1
                break
            place = int(np.searchsorted(self._ahead["start"], time_ns, side="right"))
            found.append(self._ahead[:place])
            number += place
            self._ahead = self._ahead[place:]
        self.held = np.concatenate(found)
        return time_ns

    def forget(self, time_ns: int, but: Indices) -> None:
        """Forget the ranges that tell nothing of launches after a time, but for some.

        Those are the ones that have ended by then; but the last one of each thread to begin by then tells that launches
        after its end lie in none.

        Args:
            time_ns: the time.
            but: places of those to keep; -1 stands for none.
        """
        held = self.held
        begun = np.flatnonzero(held["start"] <= time_ns)
        begun = begun[np.lexsort((held["end"][begun], held["start"][begun], held["thread"][begun]))]
        thread = held["thread"][begun]
        kept = held["end"] > time_ns
        kept[begun[np.append(thread[1:] != thread[:-1], True)] if len(begun) else begun] = True
        kept[but[but >= 0]] = True
        self.held = held[kept]


def _around(ranges: Rows, rows: Rows, thread_of: Indices) -> Indices:
    start_ns, end_ns, of_thread = (ranges[name].astype(np.int64) for name in ("start", "end", "thread"))
    return last_begun(start_ns, end_ns, of_thread, rows["launched"], thread_of[rows["thread"]])
