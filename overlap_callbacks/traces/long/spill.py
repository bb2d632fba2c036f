"""Writes what was collected of a trace to files, once it is too much for memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.kernels.table import Indices
from overlap_callbacks.traces.collective_ranges import CollectiveRanges
from overlap_callbacks.traces.collectives import UNKNOWN
from overlap_callbacks.traces.device_events import DeviceEvents
from overlap_callbacks.traces.host_events import HostEvents
from overlap_callbacks.traces.long import columns
from overlap_callbacks.traces.long.columns import Folder, RowsFile
from overlap_callbacks.traces.long.rows import KERNEL, LAUNCH, OPERATOR, RANGE, WAIT, filled


class Spill:
    """The files of one trace.

    Args:
        folder: takes the files.
        with_ranges: whether to keep the ranges of the host that have names.

    Attributes:
        kernels, launches, annotations, operators, waits: what was written.
        ranges: the ranges of the host that have names; None if they are not kept.
    """

    def __init__(self, folder: Folder, *, with_ranges: bool = False) -> None:
        self.folder = folder
        self.ranges = folder.file(RANGE) if with_ranges else None
        self.kernels, self.launches = folder.file(KERNEL), folder.file(LAUNCH)
        self.annotations, self.operators = folder.file(RANGE), folder.file(RANGE)
        self.waits = folder.file(WAIT)
        self._num_rows = 0

    def take(self, events: DeviceEvents) -> None:
        """Write what was collected, which the collector then forgets.

        Raises:
            TraceError: the files cannot be written.
        """
        self._take_kernels(events)
        self._take_launches(events)
        _take_ranges(self.annotations, events.annotations)
        _take_ranges(self.operators, events.operators)
        start_ns, end_ns, possible = events.wait_times.take()
        self.waits.append(filled(WAIT, start=start_ns, end=end_ns)[possible])
        ranges = events.ranges.take()
        if self.ranges is not None:
            self.ranges.append(
                filled(RANGE, start=ranges.start_ns, end=ranges.end_ns, thread=ranges.thread, detail=ranges.name)
            )

    def _take_kernels(self, events: DeviceEvents) -> None:
        start_ns, end_ns, possible = events.times.take()
        taken, known = events.take_rows(), events.known.take()
        taken["metadata"] = taken.pop("collective")
        for first in range(0, len(start_ns), columns.AT_ONCE):  # at first there are as many as memory holds
            part = slice(first, first + columns.AT_ONCE)
            rows = filled(
                KERNEL, start=start_ns[part], end=end_ns[part], launched=-1, returned=-1, num_bytes=UNKNOWN,
                sequence=UNKNOWN, info=-1, copied=-1, thread=-1, step=-1, before=-1,
                **{name: column[part] for name, column in taken.items()},
            )  # fmt: skip
            rows["place"] = self._num_rows + np.arange(len(rows))
            mine = slice(*np.searchsorted(known.rows, (first, first + len(rows))).tolist())
            for name in ("info", "num_bytes", "sequence"):
                rows[name][known.rows[mine] - first] = getattr(known, name)[mine]
            self._num_rows += len(rows)
            self.kernels.append(rows[possible[part]])

    def _take_launches(self, events: DeviceEvents) -> None:
        start_ns, end_ns, possible = events.launch_times.take()
        correlation, thread = events.take_launches()
        rows = filled(LAUNCH, correlation=correlation, start=start_ns, end=end_ns, thread=thread)
        for name in ("start", "end", "thread"):  # it stays the first with its number
            rows[name][~possible] = -1
        self.launches.append(rows)


class HostSpill:
    """The files of the trace of a CPU job.

    Args:
        folder: takes the files.

    Attributes:
        operators, ranges: what was written; ranges have no thread.
        num_operators: of each thread, by its number.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.operators, self.ranges = folder.file(OPERATOR), folder.file(OPERATOR)
        self.num_operators: Counter[int] = Counter()

    def take(self, events: HostEvents) -> None:
        """Write what was collected, which the collector then forgets.

        Raises:
            TraceError: the files cannot be written.
        """
        times, of_ranges = events.times.take(), events.range_times.take()
        name, thread, range_name = events.take()
        _take_operators(self.operators, times, name, thread)
        _take_operators(self.ranges, of_ranges, range_name, np.zeros_like(range_name))
        self.num_operators.update(thread.tolist())


def _take_operators(
    file: RowsFile, times: tuple[Indices, Indices, npt.NDArray[np.bool_]], name: Indices, thread: Indices
) -> None:
    start_ns, end_ns, possible = times
    place = len(file) + np.arange(len(name))
    file.append(filled(OPERATOR, place=place, start=start_ns, end=end_ns, name=name, thread=thread)[possible])


def _take_ranges(file: RowsFile, ranges: CollectiveRanges) -> None:
    file.append(filled(RANGE, **ranges.take()))
