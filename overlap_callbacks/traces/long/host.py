"""Makes of the operators of a long CPU job's trace its kernels, which come in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.host import own_time, uncounted_note
from overlap_callbacks.analysis.kernels.placement import step_of
from overlap_callbacks.analysis.kernels.table import Indices, Kind, StringTable
from overlap_callbacks.traces.collectives import UNKNOWN, Collectives
from overlap_callbacks.traces.device_trace import time_problems
from overlap_callbacks.traces.host_events import HostEvents
from overlap_callbacks.traces.host_trace import crossing, host_problems, likely_ranges, refuse, training_thread
from overlap_callbacks.traces.long import columns
from overlap_callbacks.traces.long.columns import Rows, RowsFile
from overlap_callbacks.traces.long.device import DeviceOnDisk
from overlap_callbacks.traces.long.rows import KERNEL, OPERATOR, WAIT, filled
from overlap_callbacks.traces.long.spill import HostSpill
from overlap_callbacks.traces.long.survey import Survey
from overlap_callbacks.traces.long.tables import Tables
from overlap_callbacks.traces.long.trace import LongTrace, outline_of
from overlap_callbacks.traces.pieces import Device, DeviceInMemory
from overlap_callbacks.traces.steps import bounds_of, steps_of
from overlap_callbacks.traces.stream import EventStream
from overlap_callbacks.traces.trace import trace_with_head

# Calls of communication libraries are numbered from here on, behind all operators.
_FIRST_RANGE = 2**40


def long_host_trace(
    path: Path, events: HostEvents, spill: HostSpill, stream: EventStream, pattern: re.Pattern[str] | None
) -> LongTrace:
    """The trace of a CPU job, all of whose operators were spilled.

    Args:
        path: the file.
        events: what was collected, for what numbers stand for.
        spill: the operators and ranges.
        stream: the file that was read.
        pattern: finds the names of steps; None for ``ProfilerStep#``.

    Raises:
        TraceError: the file is not one of a CPU job.
    """
    refuse(path, events, stream)
    steps = steps_of(events.notes, pattern)
    (called, of_called), (ranges, of_ranges) = (
        rows.names.renamed(safe_text.clean) for rows in (events.rows, events.ranges)
    )
    names = (*called.texts, *ranges.texts)
    problems = list(stream.problems)
    for times in (events.times, events.range_times):
        problems += time_problems(times.taken_negative, times.unread + times.taken_impossible)
    counts = [spill.num_operators[number] for number in range(len(events.threads))]
    kernels = _Kernels(spill, bounds_of(steps))
    kernels.add_operators(training_thread(events, counts), of_called, called.texts)
    kernels.add_ranges(of_ranges, ranges.texts, len(called.texts))
    problems += host_problems(events, kernels.num_crossing)
    if note := uncounted_note(kernels.uncounted()):
        problems.append(note)
    file = spill.folder.file(KERNEL)
    survey = Survey(spill.folder, len(steps), len(names), has_launches=False)
    for rows in kernels.file.in_order("start", "place"):
        file.append(rows)
        survey.add(rows)
    codes = StringTable()
    kind_of = {(name, kind): codes[name_rules.collective_of(names[name])] for name, kind in sorted(survey.pairs)}
    tables = Tables(names, (), codes.texts, (), (), kind_of, (), {}, 0, has_launches=False, on_host=True)
    facts = survey.facts(names, lambda: likely_ranges(events))
    head = trace_with_head(
        path, stream.head, facts, tables.kernels(np.empty(0, KERNEL)), np.empty(0, dtype=np.int64), steps,
        Collectives.none(), problems, is_cut=stream.is_cut, on_host=True,
    )  # fmt: skip
    waits = spill.folder.file(WAIT)
    devices: list[Device] = [
        DeviceOnDisk(head, outline_of(number, of_device), of_device, file, waits, tables, spill.folder)
        for number, of_device in survey.devices.items()
    ]
    return LongTrace(head, tuple(devices or [DeviceInMemory(head, 0)]))


class _Kernels:
    """The own times of operators and the ranges of communication libraries, in a file of kernels.

    Args:
        spill: the operators and ranges, which are deleted.
        bounds: start and end of each step.

    Attributes:
        file: the kernels.
        num_crossing: operators that overlap without nesting.
    """

    def __init__(self, spill: HostSpill, bounds: Sequence[tuple[int, int]]) -> None:
        self._spill, self._bounds = spill, bounds
        self.file = spill.folder.file(KERNEL)
        self.num_crossing = 0
        self._counted = spill.folder.file(WAIT)
        self._begin_ns: int | None = None
        self._end_ns = 0

    def add_operators(self, thread: int, number: Indices, texts: Sequence[str]) -> None:
        """Add the operators of a thread.

        Args:
            thread: its number.
            number: the number in ``texts`` of each name as it is in the file; shape (names of the file,).
            texts: the names.
        """
        own = self._spill.folder.file(OPERATOR)
        for rows in self._spill.operators:
            own.append(rows[rows["thread"] == thread])
        self._spill.operators.delete()
        for rows in _between_gaps(own):
            calls, name = Intervals(rows["start"].copy(), rows["end"].copy()), number[rows["name"]]
            self.num_crossing += crossing(calls)
            pieces, owner, waiting = own_time(calls, name, texts)
            self._append(
                pieces, call=rows["place"][owner], returned=np.maximum.accumulate(calls.end_ns)[owner],
                name=name[owner], kind=Kind.COMPUTE, step=step_of(calls.start_ns, self._bounds)[owner],
            )  # fmt: skip
            self._counted.append(filled(WAIT, start=waiting.start_ns, end=waiting.end_ns))
            self._begin_ns = int(calls.start_ns[0]) if self._begin_ns is None else self._begin_ns
            self._end_ns = max(self._end_ns, int(calls.end_ns.max()))

    def add_ranges(self, number: Indices, texts: Sequence[str], first_name: int) -> None:
        """Add the ranges that communicate.

        Args:
            number: as for ``add_operators``.
            texts: the names.
            first_name: number of the first of them among all names.
        """
        communicates = np.array([name_rules.is_communication(text) for text in texts], dtype=bool)
        for rows in self._spill.ranges:
            name = number[rows["name"]]
            mine = communicates[name]
            ran = Intervals(rows["start"][mine], rows["end"][mine])
            self._append(
                ran, call=_FIRST_RANGE + rows["place"][mine], returned=ran.end_ns, name=first_name + name[mine],
                kind=Kind.COMMUNICATION, step=step_of(ran.start_ns, self._bounds),
            )  # fmt: skip
        self._spill.ranges.delete()

    def uncounted(self) -> tuple[float, ...]:
        """The share of each step, or of the whole file if it has none, that nothing covers."""
        if self._begin_ns is None:
            return ()
        spans = np.array(self._bounds or [(self._begin_ns, self._end_ns)], dtype=np.int64)
        whole = Intervals(spans[:, 0], spans[:, 1])
        covered_ns, until_ns = np.zeros(len(whole), dtype=np.int64), np.iinfo(np.int64).min
        for rows in self._counted.in_order("start"):
            covered_ns += whole.covered_ns(Intervals(np.maximum(rows["start"], until_ns), rows["end"]))
            until_ns = max(until_ns, int(rows["end"].max()))
        return tuple((1 - covered_ns / np.maximum(whole.durations_ns, 1)).tolist())

    def _append(self, ran: Intervals, *, call: Indices, **columns_: object) -> None:
        self.file.append(
            filled(
                KERNEL, start=ran.start_ns, end=ran.end_ns, call=call, place=call, launched=-1, num_bytes=UNKNOWN,
                sequence=UNKNOWN, info=-1, copied=-1, **columns_,
            )
        )  # fmt: skip
        self._counted.append(filled(WAIT, start=ran.start_ns, end=ran.end_ns))


def _between_gaps(operators: RowsFile) -> Iterator[Rows]:
    """Operators in order of their starts, in parts at whose bounds none is open; the file is deleted."""
    held = np.empty(0, OPERATOR)
    for rows in operators.in_order("start", "place"):
        held = np.concatenate((held, rows))
        if len(held) > columns.AT_ONCE:
            gaps = np.flatnonzero(np.maximum.accumulate(held["end"])[:-1] <= held["start"][1:])
            if len(gaps):
                yield held[: gaps[-1] + 1]
                held = held[gaps[-1] + 1 :]
    if len(held):
        yield held
