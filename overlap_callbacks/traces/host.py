"""Reads a CPU job: the operators of the training thread compute, the ranges of communication libraries communicate."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.host import own_time, uncounted_note
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind, StringTable, collectives_of, step_of
from overlap_callbacks.traces import columns
from overlap_callbacks.traces.checks import MAX_SUSPECTS, foreign_events, likeness
from overlap_callbacks.traces.collect import (
    ENQUEUED,
    FOREIGN,
    LAUNCH,
    NOTE,
    OLD_RANGE,
    OPERATOR,
    UNKNOWN_CATEGORY,
    ArgsReader,
    EventCollector,
    NumbersBy,
    launches_kernel,
    short_name,
)
from overlap_callbacks.traces.collectives import Collectives
from overlap_callbacks.traces.columns import Array, Column, derived, parts, release, taken
from overlap_callbacks.traces.events import Args, Event, time_problems
from overlap_callbacks.traces.files import TraceError
from overlap_callbacks.traces.stream import EventStream
from overlap_callbacks.traces.trace import Trace, bounds_of, steps_of, trace_of

_MAX_OTHER_RANGES = 4096


class HostEvents(EventCollector):
    """The operators of all host threads, and the ranges of communication libraries on the host.

    Attributes:
        ranges, range_names: ranges of communication libraries, and their distinct names.
        enqueued: number of collectives that the host only enqueued, as those of NCCL.
        launched: number of kernel launches.
        other_ranges: names of other ranges, some thousands at most.
    """

    def __init__(self, steps: re.Pattern[str] | None = None, *, exact: bool = False) -> None:
        super().__init__(steps, exact=exact, name="i", thread="i")
        self.ranges = self._events(name="i")
        self.range_names = StringTable()
        self.enqueued = self.launched = 0
        self.other_ranges: set[str] = set()
        self._of_kernel: NumbersBy[str | None] = NumbersBy(launches_kernel)

    def _collect(self, args_of: ArgsReader) -> None:
        notes, operators = self._durations(NOTE), [*self._durations(OPERATOR), *self._durations(OLD_RANGE)]
        is_step = self._is_step
        steps = [event for event in (*notes, *operators) if is_step[event.name]]
        if steps:
            self._note(steps)
            operators = [event for event in operators if not is_step[event.name]]
        operators = self.rows.keep([event for event in operators if event.name is not None])
        names = map(self._name_of.__getitem__, [event.name for event in operators])
        self.rows.label(name=names, thread=self._threads_of(operators))
        for event in notes:
            if event.name is not None and not is_step[event.name]:
                self._add_range(event, event.name)
        self.launched += sum([self._of_kernel[event.name] for event in self._durations(LAUNCH)])
        # An event of an unknown category that names a device is of one.
        unknown = self._durations(UNKNOWN_CATEGORY)
        for event, args in zip(unknown, args_of(unknown, Args), strict=True):
            if args is not None and type(args.device) is int:
                self.foreign[event.cat or ""] += 1
        for event in self._durations(FOREIGN):
            self.foreign[event.cat or ""] += 1

    def _add_range(self, event: Event, name: str) -> None:
        if name.startswith(ENQUEUED):
            self.enqueued += 1
        elif name_rules.is_communication(name):
            if self.ranges.keep([event]):
                self.ranges.label(name=[self.range_names[short_name(name)]])
        elif len(self.other_ranges) < _MAX_OTHER_RANGES:
            self.other_ranges.add(short_name(name))


def trace_of_host(stream: EventStream, events: HostEvents, pattern: re.Pattern[str] | None) -> Trace:
    """The trace of a file without kernels of a device: the operators of the training thread are its compute.

    Args:
        stream: the file, all of which was read.
        events: its events.
        pattern: matches the names of steps; None for ``ProfilerStep#``.

    Raises:
        TraceError: the file is not one of a CPU job either.
    """
    _refuse(events, stream)
    steps = steps_of(events.notes, pattern)
    operators, ranges = events.rows.finished(), events.ranges.finished()
    (called, of_called), (ranged, of_ranged) = (
        names.renamed(safe_text.clean) for names in (events.names, events.range_names)
    )
    kernels = _Kernels(bounds_of(steps))
    mine = np.flatnonzero(operators["thread"] == _training_thread(events, operators["thread"]))
    order = mine[np.argsort(operators["start"][mine], kind="stable")]
    calls = Intervals(taken(operators["start"], order), taken(operators["end"], order))
    kernels.add_operators(calls, derived(of_called.__getitem__, taken(operators["name"], order)), called.texts)
    kernels.add_ranges(Intervals(ranges["start"], ranges["end"]), of_ranged[ranges["name"]], ranged.texts)
    table = kernels.table((*called.texts, *ranged.texts))
    problems = [*time_problems(events.rows), *time_problems(events.ranges)]
    problems.append("no kernels of a device: operators of the training thread count as compute")
    if events.enqueued:
        problems.append("the file has NCCL's collectives but no kernels of their device: they are left out")
    if kernels.num_crossing:
        problems.append(
            f"{kernels.num_crossing} operators of the training thread overlap without nesting: their self time is not "
            "sure"
        )
    if note := uncounted_note(kernels.uncounted):
        problems.append(note)
    device, collectives = np.zeros(len(table), dtype=np.int64), Collectives.none(len(table))
    return trace_of(stream, table, device, steps, collectives, problems, likely=lambda: _likely_ranges(events))


def _refuse(events: HostEvents, stream: EventStream) -> None:
    """Raise a TraceError for a file that is neither of a known device nor of a CPU job."""
    path = stream.path
    if events.foreign:
        raise TraceError(
            f"{path} is of a device that is not known: it holds no kernels, but {foreign_events(events.foreign)}; "
            "devices of NVIDIA, AMD and Intel and CPU jobs are read"
        )
    # What a file holds of the host would pass for a CPU job. Kineto writes it first.
    if stream.is_cut and _is_of_device(events, stream.head):
        raise TraceError(f"{path} is cut off before its first kernel of the device")
    if events.launched:
        raise TraceError(
            f"{path} holds the launches of {count(events.launched, 'kernel')} of a device, but not the kernels: let "
            "the device finish before the profiler stops, and see that no other profiler has the device"
        )
    if events.rows or events.ranges:
        return
    if stream.is_cut:
        raise TraceError(f"{path} is cut off before its first kernel or operator")
    if not stream.num_events:
        raise TraceError(f"{path} holds no events")
    raise TraceError(
        f"{path} holds {count(stream.num_events, 'event')}, but no kernel and no operator of torch: give a trace that "
        "torch.profiler wrote, or the SQLite export of Nsight Systems"
    )


def _is_of_device(events: HostEvents, head: dict[str, Any]) -> bool:
    """Whether a file without kernels looks like one of a job on devices."""
    info = head.get("distributedInfo")
    backend = info.get("backend") if isinstance(info, dict) else None
    return bool(head.get("deviceProperties") or "nccl" in str(backend) or events.enqueued or events.launched)


def _likely_ranges(events: HostEvents) -> list[str]:
    """The host's ranges that sound most like communication."""
    return sorted(filter(likeness, events.other_ranges), key=lambda name: (-likeness(name), name))[:MAX_SUSPECTS]


def _training_thread(events: HostEvents, thread: Array) -> int:
    """The thread that has the steps, else most operators, given the thread of each operator; -1 for none."""
    of_steps = Counter(note.thread for note in events.notes).most_common(1)
    if of_steps:
        return events.threads[of_steps[0][0]]
    return int(np.argmax(np.bincount(thread))) if len(thread) else -1


class _Kernels:
    """The kernels of a CPU job: the self time of each operator in pieces, and the ranges that communicate.

    Args:
        bounds: start and end of each step.

    Attributes:
        num_crossing: number of operators that end after the one in which they began.
    """

    def __init__(self, bounds: Sequence[tuple[int, int]]) -> None:
        self._bounds = bounds
        self._columns = {name: Column() for name in ("start", "end", "name", "call", "step")}
        self._kind = Column(np.uint8)
        # Times that count: in which something computes, communicates, or waits for communication.
        self._counted_start, self._counted_end = Column(), Column()
        self._span: tuple[int, int] | None = None
        self.num_crossing = self._num_calls = self._num_names = 0

    def add_operators(self, calls: Intervals, name: Array, texts: Sequence[str]) -> None:
        """Add the operators of the training thread in order of their starts; ``name`` is an index into ``texts``."""
        for part in _between_gaps(calls):
            now = calls[part]
            self.num_crossing += _crossing(now)
            pieces, owner, waiting = own_time(now, name[part], texts)
            step = step_of(now.start_ns, self._bounds)
            self._append(pieces, Kind.COMPUTE, name[part][owner], part.start + owner, step[owner])
            self._count(waiting)
            release()
        self._num_calls, self._num_names = len(calls), len(texts)
        if len(calls):
            self._span = int(calls.start_ns[0]), int(calls.end_ns.max())

    def add_ranges(self, ran: Intervals, name: Array, texts: Sequence[str]) -> None:
        """Add those of the ranges that communicate, by their cleaned names."""
        communicates = np.array([name_rules.is_communication(text) for text in texts], dtype=bool)
        mine = np.flatnonzero(communicates[name])
        call, step = self._num_calls + np.arange(len(mine)), step_of(ran.start_ns[mine], self._bounds)
        self._append(ran[mine], Kind.COMMUNICATION, self._num_names + name[mine], call, step)

    def table(self, names: tuple[str, ...]) -> KernelTable:
        """The table in order of the starts; ``names`` are those of operators, then of ranges."""
        start_ns = self._columns.pop("start").finished()
        order = np.argsort(start_ns, kind="stable")
        rows = {name: taken(column.finished(), order) for name, column in self._columns.items()}
        kind, nothing = taken(self._kind.finished(), order), np.zeros(len(order), dtype=np.int64)
        collective, collectives = collectives_of(rows["name"], names, kind == Kind.COMMUNICATION)
        return KernelTable(
            intervals=Intervals(taken(start_ns, order), rows["end"]),
            kind=kind,
            name=rows["name"],
            step=rows["step"],
            call=rows["call"],
            names=names,
            shape=nothing,
            shapes=("",),
            collective=derived(np.asarray, collective),
            collectives=collectives,
            lane=nothing,
            launches=(None,),
            without_launch=np.zeros(len(order), dtype=bool),
            from_graph=np.zeros(len(order), dtype=bool),
        )

    @property
    def uncounted(self) -> tuple[float, ...]:
        """The share of each step, or of a file without steps, that nothing covers."""
        if self._span is None:
            return ()
        spans = np.array(self._bounds or [self._span], dtype=np.int64)
        whole = Intervals(spans[:, 0], spans[:, 1])
        start_ns, end_ns = self._counted_start.finished(), self._counted_end.finished()
        order = np.argsort(start_ns, kind="stable")
        covered_ns, until_ns = np.zeros(len(whole), dtype=np.int64), np.iinfo(np.int64).min
        for part in parts(len(order)):
            rows = order[part]
            covered_ns += whole.covered_ns(Intervals(np.maximum(start_ns[rows], until_ns), end_ns[rows]))
            until_ns = max(until_ns, int(end_ns[rows].max()))
        return tuple((1 - covered_ns / np.maximum(whole.durations_ns, 1)).tolist())

    def _append(self, ran: Intervals, kind: Kind, name: Indices, call: Indices, step: Indices) -> None:
        rows = {"start": ran.start_ns, "end": ran.end_ns, "name": name, "call": call, "step": step}
        for column, values in rows.items():
            self._columns[column].append(values)
        self._kind.append(np.full(len(ran), kind))
        self._count(ran)

    def _count(self, ran: Intervals) -> None:
        self._counted_start.append(ran.start_ns)
        self._counted_end.append(ran.end_ns)


def _between_gaps(calls: Intervals) -> Iterator[slice]:
    """Parts of one thread's calls, which are in order of their starts, with no call open in between."""
    first, size = 0, columns.AT_ONCE
    while first < len(calls):
        last = min(first + size, len(calls))
        if last < len(calls):
            latest_ns = np.maximum.accumulate(calls.end_ns[first:last])
            gaps = np.flatnonzero(latest_ns <= calls.start_ns[first + 1 : last + 1])
            if not len(gaps):  # then a part grows until there is one
                size *= 2
                continue
            last = first + int(gaps[-1]) + 1
        yield slice(first, last)
        first, size = last, columns.AT_ONCE


def _crossing(calls: Intervals) -> int:
    """How many calls of one thread end after the call in which they began."""
    order = np.lexsort((-calls.end_ns, calls.start_ns))
    start, end = calls.start_ns[order], calls.end_ns[order]
    latest = np.maximum.accumulate(end)[:-1]
    return int(((start[1:] < latest) & (end[1:] > latest)).sum())
