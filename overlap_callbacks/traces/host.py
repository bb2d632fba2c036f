"""Reads a CPU job: the training thread's operators are compute, ranges of communication libraries are communication."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.host import own_time, uncounted_note
from overlap_callbacks.analysis.kernels.impossible import at_no_time, repeated
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
    EventCollector,
    Memo,
    launches_kernel,
    short_name,
)
from overlap_callbacks.traces.collectives import Collectives
from overlap_callbacks.traces.columns import Array, Column, cuts, derived, parts, release, taken
from overlap_callbacks.traces.events import Args, Event
from overlap_callbacks.traces.files import TraceError, foreign_kind, pieces
from overlap_callbacks.traces.stream import EventStream
from overlap_callbacks.traces.trace import Trace, bounds_of, steps_of, trace_of

_MAX_OTHER_RANGES = 4096
# Operators per piece of a file to check for their process and rank.
_ASKED = 64

# Start and end of each step.
_Bounds = Sequence[tuple[int, int]]


class HostEvents(EventCollector):
    """The operators of all host threads, and the ranges of communication libraries on the host.

    Attributes:
        ranges, range_names: ranges of communication libraries, and their distinct names.
        enqueued: number of collectives that the host only enqueued, such as NCCL's.
        launched: number of kernel launches.
        other_ranges: names of other ranges, a few thousand at most.
    """

    def __init__(self, steps: re.Pattern[str] | None = None, *, exact: bool = False) -> None:
        super().__init__(steps, exact=exact, name="i", thread="i")
        self.ranges = self._events(name="i")
        self.range_names = StringTable()
        self.enqueued = self.launched = 0
        self.other_ranges: set[str] = set()
        self._of_kernel: Memo[str | None, bool] = Memo(launches_kernel)

    def _collect(self, stream: EventStream) -> None:
        notes, operators = self._durations(NOTE), [*self._durations(OPERATOR), *self._durations(OLD_RANGE)]
        is_step = self._is_step
        steps = [event for event in (*notes, *operators) if is_step[event.name]]
        if steps:
            self._note(steps, stream)
            operators = [event for event in operators if not is_step[event.name]]
        operators = self.rows.keep([event for event in operators if event.name is not None])
        for event in operators[:: max(1, len(operators) // _ASKED)]:
            self._note_place(event, stream)
        names = map(self._name_of.__getitem__, [event.name for event in operators])
        self.rows.label(name=names, thread=self._threads_of(operators))
        for event in notes:
            if event.name is not None and not is_step[event.name]:
                self._add_range(event, event.name, stream)
        self.launched += sum([self._of_kernel[event.name] for event in self._durations(LAUNCH)])
        # An event of an unknown category with a device belongs to that device.
        unknown = self._durations(UNKNOWN_CATEGORY)
        for event, args in zip(unknown, stream.args_of(unknown, Args), strict=True):
            if args is not None and type(args.device) is int:
                self.foreign[event.cat or ""] += 1
        for event in self._durations(FOREIGN):
            self.foreign[event.cat or ""] += 1

    def _add_range(self, event: Event, name: str, stream: EventStream) -> None:
        if name.startswith(ENQUEUED):
            self.enqueued += 1
        elif name_rules.is_communication_range(name):
            if self.ranges.keep([event]):
                self.ranges.label(name=[self.range_names[short_name(name)]])
                self._note_place(event, stream)
        elif len(self.other_ranges) < _MAX_OTHER_RANGES:
            self.other_ranges.add(short_name(name))


def trace_of_host(stream: EventStream, events: HostEvents, pattern: re.Pattern[str] | None) -> Trace:
    """The trace of a file without device kernels; the training thread's operators are its compute.

    Raises:
        TraceError: the file is not one of a CPU job either.
    """
    _refuse(events, stream)
    operators, ranges = events.rows.finished(), events.ranges.finished()
    begun = operators["start"], ranges["start"]
    operators, untimed = _with_time(operators, *begun)
    steps, warnings = steps_of(events.notes, pattern, events.ended_ns(operators["start"]))
    ranges, more = _with_time(ranges, *begun)
    ranges, repeats = _once(ranges)
    if repeats:
        warnings.append(f"{repeats} ranges are in the file more than once, and count once [OC750]")
    (called, of_called), (ranged, of_ranged) = (
        names.renamed(safe_text.clean) for names in (events.names, events.range_names)
    )
    mine = np.flatnonzero(operators["thread"] == _training_thread(events, operators["thread"]))
    order = mine[np.argsort(operators["start"][mine], kind="stable")]
    calls = Intervals(taken(operators["start"], order), taken(operators["end"], order))
    table, doubtful = _kernels_of(
        calls, derived(of_called.__getitem__, taken(operators["name"], order)),
        Intervals(ranges["start"], ranges["end"]), of_ranged[ranges["name"]],
        (called.texts, ranged.texts), bounds_of(steps),
    )  # fmt: skip
    problems = ["no kernels of a device: operators of the training thread count as compute [OC746]"]
    if events.enqueued:
        problems.append("the file has NCCL's collectives but no kernels of their device: they are left out [OC747]")
    problems += doubtful
    device, collectives = np.zeros(len(table), dtype=np.int64), Collectives.none(len(table))
    untimed += more + events.rows.untimed + events.ranges.untimed
    if untimed:
        where = "; any step may lack them" if steps else ""
        warnings.append(f"{untimed} operators and ranges have no time and are left out{where} [OC748]")
    return trace_of(
        stream, table, device, steps, collectives, problems, likely=lambda: _likely_ranges(events), warnings=warnings,
        lacking=frozenset({-1}) if untimed else frozenset(),
    )  # fmt: skip


def _with_time(rows: dict[str, Array], *begun: Array) -> tuple[dict[str, Array], int]:
    """The rows that have a time, and the number of the others; ``begun`` are times of all on their clock."""
    wrong = at_no_time(rows["start"], *begun)
    if not wrong.any():
        return rows, 0
    kept = np.flatnonzero(~wrong)
    return {name: taken(column, kept) for name, column in rows.items()}, int(wrong.sum())


def _once(ranges: dict[str, Array]) -> tuple[dict[str, Array], int]:
    """The ranges without those that repeat others, and the number of these."""
    order = np.argsort(ranges["start"], kind="stable")
    start, end, name = (ranges[column][order] for column in ("start", "end", "name"))
    again = repeated(np.zeros_like(name), Intervals(start, end), name, np.zeros(len(name), dtype=np.uint64))
    kept = np.delete(order, again)
    return {name: taken(column, kept) for name, column in ranges.items()} if len(again) else ranges, len(again)


def _refuse(events: HostEvents, stream: EventStream) -> None:
    """Raise a TraceError for a file that is neither of a known device nor of a CPU job."""
    path = stream.path
    if events.foreign:
        raise TraceError(
            f"{path} is of a device that is not known: it holds no kernels, but {foreign_events(events.foreign)}; "
            "devices of NVIDIA, AMD and Intel and CPU jobs are read"
        )
    # Kineto writes the host's events first, so a truncated file of a device job could pass for a CPU job.
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
    kind = foreign_kind(next(pieces(path, []), b""))
    if kind:
        raise TraceError(f"{path}{kind}")
    raise TraceError(
        f"{path} holds {count(stream.num_events, 'event')}, but no kernel and no operator of torch: give a trace that "
        "torch.profiler wrote, or the SQLite export of Nsight Systems"
    )


def _is_of_device(events: HostEvents, head: dict[str, Any]) -> bool:
    """Whether a file without kernels looks like that of a device job."""
    info = head.get("distributedInfo")
    backend = info.get("backend") if isinstance(info, dict) else None
    return bool(head.get("deviceProperties") or "nccl" in str(backend) or events.enqueued or events.launched)


def _likely_ranges(events: HostEvents) -> list[str]:
    """The host's ranges whose names are most like communication."""
    return sorted(filter(likeness, events.other_ranges), key=lambda name: (-likeness(name), name))[:MAX_SUSPECTS]


def _training_thread(events: HostEvents, thread: Array) -> int:
    """The thread with most steps that has operators, else with most operators, given each operator's thread; -1 for
    none.
    """
    for name, _ in Counter(note.thread for note in events.notes).most_common():
        if (thread == events.threads[name]).any():
            return events.threads[name]
    return int(np.argmax(np.bincount(thread))) if len(thread) else -1


def _kernels_of(
    calls: Intervals, called: Array, ran: Intervals, ranged: Array, names: tuple[tuple[str, ...], ...], bounds: _Bounds
) -> tuple[KernelTable, list[str]]:
    """The kernels of a CPU job by start, and what is doubtful about them.

    Args:
        calls: the training thread's operators, by start.
        called: index of each operator's name.
        ran: ranges of the host; those count whose names communicate.
        ranged: index of each range's name.
        names: of operators, and of ranges.
        bounds: start and end of each step.
    """
    rows, kinds = {name: Column() for name in ("start", "end", "name", "call", "step")}, Column(np.uint8)

    def add(ran: Intervals, kind: Kind, name: Indices, call: Indices, step: Indices) -> None:
        for column, values in zip(rows.values(), (ran.start_ns, ran.end_ns, name, call, step), strict=True):
            column.append(values)
        kinds.append(np.full(len(ran), kind))

    def last_gap(first: int, last: int) -> int:
        gaps = np.flatnonzero(np.maximum.accumulate(calls.end_ns[first:last]) <= calls.start_ns[first + 1 : last + 1])
        return first + int(gaps[-1]) + 1 if len(gaps) else 0

    num_crossing = 0
    for part in cuts(len(calls), columns.AT_ONCE, last_gap):
        now, name = calls[part], called[part]
        num_crossing += _crossing(now)
        pieces, owner, waiting = own_time(now, name, names[0])
        step, nothing = step_of(now.start_ns, bounds), np.zeros(len(waiting), dtype=np.int64)
        add(pieces, Kind.COMPUTE, name[owner], part.start + owner, step[owner])
        add(waiting, Kind.OTHER, nothing, nothing, nothing)  # this time counts, but without a row
        release()
    communicates = np.array([name_rules.is_communication_range(text) for text in names[1]], dtype=bool)
    mine = np.flatnonzero(communicates[ranged])
    call = len(calls) + np.arange(len(mine))
    add(ran[mine], Kind.COMMUNICATION, len(names[0]) + ranged[mine], call, step_of(ran.start_ns[mine], bounds))
    found, kind = {name: column.finished() for name, column in rows.items()}, kinds.finished()
    order = np.argsort(found["start"], kind="stable")
    problems = []
    if num_crossing:
        problems.append(
            f"{num_crossing} operators of the training thread overlap without nesting: their self time is not sure "
            "[OC749]"
        )
    if len(calls):
        spans = bounds or [(int(calls.start_ns[0]), int(calls.end_ns.max()))]
        note = uncounted_note(_uncounted(found["start"], found["end"], order, spans))
        problems += [note] if note else []
    order = order[kind[order] != Kind.OTHER]
    in_order = {name: taken(column, order) for name, column in found.items()}
    return _table(in_order, taken(kind, order), (*names[0], *names[1])), problems


def _table(rows: dict[str, Array], kind: Array, names: tuple[str, ...]) -> KernelTable:
    collective, collectives = collectives_of(rows["name"], names, kind == Kind.COMMUNICATION)
    nothing, nowhere = np.zeros(len(kind), dtype=np.int64), np.zeros(len(kind), dtype=bool)
    return KernelTable(
        intervals=Intervals(rows["start"], rows["end"]),
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
        without_launch=nowhere,
        from_graph=nowhere,
    )


def _uncounted(start_ns: Array, end_ns: Array, order: Indices, spans: _Bounds) -> list[float]:
    """The fraction of each span in which nothing counts, given the times that count and their order by start."""
    whole = Intervals(*np.array(spans, dtype=np.int64).T)
    covered_ns, until_ns = np.zeros(len(whole), dtype=np.int64), np.iinfo(np.int64).min
    for part in parts(len(order)):
        rows = order[part]
        covered_ns += whole.covered_ns(Intervals(np.maximum(start_ns[rows], until_ns), end_ns[rows]))
        until_ns = max(until_ns, int(end_ns[rows].max()))
    shares: list[float] = (1 - covered_ns / np.maximum(whole.durations_ns, 1)).tolist()
    return shares


def _crossing(calls: Intervals) -> int:
    """Number of calls of one thread that end after the call in which they began."""
    order = np.lexsort((-calls.end_ns, calls.start_ns))
    start, end = calls.start_ns[order], calls.end_ns[order]
    latest = np.maximum.accumulate(end)[:-1]
    return int(((start[1:] < latest) & (end[1:] > latest)).sum())
