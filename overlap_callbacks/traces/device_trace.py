"""Makes a trace from the events of a file with device kernels: each kernel with its launch, step and collective.

Torch's ranges around launches show which collective a kernel runs. Other ranges of the host name a part of the program:
modules of a model (``with_modules=True`` or ``with_stack=True`` of torch's profiler), ranges of users'
``record_function`` or NVTX, and torch's own, such as ``Optimizer.step#AdamW.step``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.intervals import Intervals, distinct_values
from overlap_callbacks.analysis.kernels.device_time import waited_for
from overlap_callbacks.analysis.kernels.impossible import at_no_time
from overlap_callbacks.analysis.kernels.issued import COPIED
from overlap_callbacks.analysis.kernels.table import (
    Indices,
    KernelTable,
    Kind,
    as_communication,
    collectives_of,
    is_copy,
    launches_of,
    may_communicate,
    step_of,
    step_of_kernels,
    within_device,
)
from overlap_callbacks.traces.checks import ambiguous_collectives, copying_collectives, cut_splits, foreign_events
from overlap_callbacks.traces.collect import Numbers
from overlap_callbacks.traces.collectives import (
    ALL_TO_ALL,
    UNKNOWN,
    CollectiveInfo,
    Collectives,
    joint_transfers,
)
from overlap_callbacks.traces.columns import Array, Column, derived, parts, release, taken
from overlap_callbacks.traces.device_events import DeviceEvents
from overlap_callbacks.traces.doubts import Doubts
from overlap_callbacks.traces.events import MAX_TIME_NS
from overlap_callbacks.traces.files import Document, TraceError
from overlap_callbacks.traces.merged import are_joined
from overlap_callbacks.traces.reductions import repeated_reductions
from overlap_callbacks.traces.trace import HostCalls, Launches, Trace, bounds_of, steps_of, trace_of

# Columns by their names; shape (n,) each.
_Columns = dict[str, Array]


def trace_of_device(document: Document, events: DeviceEvents, steps: re.Pattern[str] | None = None) -> Trace:
    """The trace of a file with kernels of a device; ``steps`` matches the names of steps."""
    rows, calls, infos = _in_order(events.rows.finished()), events.launches.finished(), events.metadata.infos
    ended_ns = events.ended_ns(rows["start"])
    found, of_steps = steps_of(events.notes, steps, ended_ns)
    bounds = bounds_of(found)
    if are_joined(calls["correlation"], rows["correlation"]):
        raise TraceError(
            f"{document.path} was joined of traces of several ranks, and nothing tells them apart: many launches and "
            "kernels have numbers that others have too; give the files that were joined"
        )
    has_row = _join_launches(rows, calls)
    release()
    doubts = Doubts(found, bounds)
    captures = doubts.of_launches(calls, has_row, rows, events, document)
    release()
    rows = doubts.once(doubts.with_time(rows, events))
    release()
    texts = _name_kinds(rows, events)
    doubts.shorten(rows, texts, calls, events, ended_ns)
    release()
    annotations, operators = events.annotations.finished(), events.operators.finished()
    problems = [*doubts.problems]
    if events.launches.untimed:
        problems.append(
            f"{events.launches.untimed} launches have no time that can be read: their kernels count in no step [OC742]"
        )
    asking = np.flatnonzero((rows["kind"] == Kind.COMMUNICATION) & (rows["info"] < 0))
    _ask_ranges(rows, asking, annotations, texts, events)
    problems += ambiguous_collectives(rows["name"][asking], rows["info"][asking], texts, tuple(infos))
    problems += cut_splits(tuple(infos))
    if found and not events.launches:
        problems.append(
            "the file holds no launches: kernels count in the step that the host was in when they started [OC743]"
        )
    if events.foreign:
        problems.append(f"{foreign_events(events.foreign)} are left out: what they do is not known [OC744]")
    kernels = _table(rows, texts, events, bounds)
    copies = _copies_of_collectives(kernels, rows, operators if events.operators else annotations, events)
    problems += copying_collectives(copies.untold)
    for column, value in (("info", copies.info), ("num_bytes", UNKNOWN), ("sequence", UNKNOWN)):
        _assign(rows, column, copies.rows, value)
    kinds = [info.kind for info in infos]
    of_row = zip(copies.rows.tolist(), copies.info.tolist(), strict=True)
    kernels = as_communication(kernels, {row: kinds[info] for row, info in of_row})
    collectives = Collectives(
        rows["info"], rows["num_bytes"], rows["sequence"], tuple(infos),
        *_joint_transfers(kernels, rows, operators if events.operators else annotations, infos),
    )  # fmt: skip
    range_of = None
    if events.ranges:
        range_of = launched_in(events.ranges.finished(), rows["thread"], rows["launched"], events.training_thread)
    launches = Launches(
        rows["launched"], _waits(events.waits.finished(), rows, kernels), events.streams, len(events.waits) > 0,
        range_of, events.range_names, captures, _calls_on_host(events, rows["launched"], kernels, doubts),
    )  # fmt: skip
    reductions = repeated_reductions(kernels, rows, events.marks.finished(), tuple(infos), bounds)
    release()
    trace = trace_of(
        document, kernels, rows["device"], found, collectives, problems, launches=launches,
        warnings=[*doubts.warnings, *of_steps], lacking=doubts.lacking, recorded=frozenset(events.recorded),
    )  # fmt: skip
    late = [row for row in doubts.shortened if kernels.kind[row] == Kind.COMMUNICATION]
    return dataclasses.replace(trace, reductions=reductions, overlong=tuple(kernels.intervals.start_ns[late].tolist()))


def _calls_on_host(events: DeviceEvents, launched_ns: Array, kernels: KernelTable, doubts: Doubts) -> HostCalls | None:
    """The host libraries' collectives, each until the last kernel ends at most; None without any."""
    found = events.on_host.finished()
    start_ns, end_ns = found["start"], np.minimum(found["end"], kernels.intervals.end_ns.max(initial=0))
    timeless = at_no_time(start_ns, launched_ns)
    if untimed := events.on_host.untimed + int(timeless.sum()):
        doubts.warnings.append(f"{untimed} collectives of the host have no time and are left out [OC745]")
    wanted = np.flatnonzero(~timeless & (end_ns > start_ns))
    if not len(wanted):
        return None
    ran = Intervals(start_ns[wanted], end_ns[wanted])
    waited = waited_for(ran, (launched_ns[part][kernels.kind[part] != Kind.COPY] for part in parts(len(launched_ns))))
    return HostCalls(ran, waited, found["name"][wanted], tuple(map(safe_text.clean, events.on_host_numbers)))


def _in_order(rows: _Columns) -> _Columns:
    """The rows by device and start."""
    device = rows["device"]
    if device.min(initial=0) == device.max(initial=0):
        order = np.argsort(rows["start"], kind="stable")
    else:
        order = np.lexsort((rows["start"], device))
    numbers = ("shape", "lane", "device")  # those in a table
    return {name: taken(rows.pop(name), order, np.int64 if name in numbers else None) for name in [*rows]}


def _join_launches(rows: _Columns, launches: _Columns) -> Array:
    """Add columns for the call that launched each row: ``launched``, ``returned`` and ``thread``; -1 where unknown.

    Of several launches with one number the first in the file counts, even without a time. Returns whether each launch
    has a row; shape (launches,).
    """
    order = np.argsort(launches["correlation"], kind="stable")
    numbers = launches["correlation"][order]
    order, padded = np.append(order, -1), np.append(numbers, np.uint64(0))

    def launch_of(wanted: Array) -> Array:
        place = np.searchsorted(numbers, wanted)
        return np.where((padded[place] == wanted) & (wanted != 0), order[place], -1)

    launch = derived(launch_of, rows["correlation"])
    has_row = np.zeros(len(padded), dtype=bool)
    has_row[launch] = True
    has_row[order[1:-1][numbers[1:] == numbers[:-1]]] = True  # preceded by one with the same number
    for name, of_launch in (("launched", "start"), ("returned", "end"), ("thread", "thread")):
        rows[name] = derived(np.append(launches[of_launch], -1).__getitem__, launch)
    return has_row[:-1]


def _name_kinds(rows: _Columns, events: DeviceEvents) -> tuple[str, ...]:
    """Clean the names, set the kinds of rows, and return the distinct names.

    A row of unknown family communicates if it has a collective's metadata. Other rows go by name alone, since kernels
    that copy a collective's tensors have its metadata too.
    """
    names, number = events.names.renamed(safe_text.clean)
    communicates = np.array([name_rules.is_communication(text) for text in names.texts], dtype=bool)
    unknown = np.array([name_rules.family_of(text) == name_rules.OTHER for text in names.texts], dtype=bool)

    def kind_of(kind: Array, name: Array, info: Array) -> Array:
        computes = kind == Kind.COMPUTE
        by_name = (computes | (kind == Kind.COPY)) & communicates[name]
        return np.where(by_name | (computes & unknown[name] & (info >= 0)), Kind.COMMUNICATION, kind)

    rows["name"] = derived(number.__getitem__, rows["name"])
    rows["kind"] = derived(kind_of, rows["kind"], rows["name"], rows["info"], dtype=np.uint8)
    return names.texts


def _ask_ranges(rows: _Columns, asking: Indices, ranges: _Columns, texts: Sequence[str], events: DeviceEvents) -> None:
    """Set the collective of some rows, by torch's ranges around their launches, else by name.

    Copies get no size: several may be one collective.
    """
    details, infos, name = tuple(events.details), events.metadata.infos, rows["name"][asking]
    within = _last_begun(ranges, rows["launched"][asking], rows["thread"][asking])
    detail, num_bytes = (np.append(ranges[column], -1)[within] for column in ("detail", "num_bytes"))
    # Kernels of one name in ranges of one kind need one look. The number after the last detail means no range.
    detail = np.where(detail >= 0, detail, len(details))
    distinct, place = np.unique(detail * len(texts) + name, return_inverse=True)
    numbers, has_size = np.empty(len(distinct), dtype=np.int64), np.zeros(len(distinct), dtype=bool)
    for i, number in enumerate(distinct.tolist()):
        of_detail, text = number // len(texts), texts[number % len(texts)]
        kind = name_rules.collective_of(details[of_detail].name) if of_detail < len(details) else name_rules.OTHER
        by_name = kind == name_rules.OTHER
        numbers[i] = infos[CollectiveInfo(name_rules.collective_of(text) if by_name else kind, by_name=by_name)]
        has_size[i] = not by_name and not is_copy(text)
    place = place.reshape(-1)
    _assign(rows, "info", asking, numbers[place])
    _assign(rows, "num_bytes", asking, np.where(has_size[place], num_bytes, UNKNOWN))


def _assign(rows: _Columns, column: str, places: Indices, values: Array | int) -> None:
    """Set values of a column, which may be mapped read-only, at ascending positions."""
    old, new, values = rows[column], Column(rows[column].dtype), np.broadcast_to(values, len(places))
    if not len(places):
        return
    for part in parts(len(old)):
        now, mine = old[part].copy(), slice(*np.searchsorted(places, (part.start, part.stop)).tolist())
        now[places[mine] - part.start] = values[mine]
        new.append(now)
        release()
    rows[column] = new.finished()


def _table(
    rows: _Columns, texts: tuple[str, ...], events: DeviceEvents, bounds: Sequence[tuple[int, int]]
) -> KernelTable:
    """The table of kernels; ``bounds`` are the start and end of each step on the host."""
    ran, launched_ns = Intervals(rows["start"], rows["end"]), rows["launched"]
    nowhere = np.zeros(len(ran), dtype=bool)
    if events.launches:
        step, without_launch = step_of_kernels(launched_ns, ran, rows["lane"], bounds), launched_ns < 0
    else:
        step, without_launch = derived(functools.partial(step_of, bounds=bounds), ran.start_ns), nowhere
    kinds = [info.kind for info in events.metadata.infos]
    communicates = rows["kind"] == Kind.COMMUNICATION
    collective, collectives = collectives_of(rows["name"], texts, communicates, rows["info"], kinds)
    shapes = tuple(events.shapes) or ("",)
    return KernelTable(
        intervals=ran,
        kind=rows["kind"],
        name=rows["name"],
        step=derived(np.asarray, step),
        call=derived(np.asarray, np.arange(len(ran))),
        names=texts,
        shape=rows["shape"],
        shapes=tuple(map(str, shapes)),
        collective=derived(np.asarray, collective),
        collectives=collectives,
        lane=rows["lane"],
        launches=launches_of(shapes),
        without_launch=without_launch,
        from_graph=nowhere,
    )


class _Copies(NamedTuple):
    """The copies within the device that do the work of collectives without a kernel.

    Attributes:
        rows: the copies that communicate; shape (m,).
        info: number of the ``CollectiveInfo`` of each; shape (m,).
        untold: by name, the number of collectives whose copies may communicate or not.
    """

    rows: Indices
    info: Indices
    untold: Counter[str]


def _copies_of_collectives(kernels: KernelTable, rows: _Columns, ranges: _Columns, events: DeviceEvents) -> _Copies:
    """Find the copies within the device that do a collective's work.

    Live, the gate's log has the collectives without a kernel. In a file, torch's operator (``record_param_comms``)
    around the launches gives kind and group.

    The copies communicate if the collective launched no kernel, copy engines can do it, its group has more than one
    rank, and they ran on streams that never compute. On a group of one rank they do not communicate. If a communication
    kernel's launch is missing, none is certain: the kernel may be the collective's.
    """
    details, infos = tuple(events.details), events.metadata.infos
    within, told, untold = within_device(kernels), Counter[str](), Counter[str]()
    nothing = np.empty(0, dtype=np.int64)
    if not within.any() or not len(ranges["start"]):
        return _Copies(nothing, nothing, untold)
    communicates, in_steps = kernels.kind == Kind.COMMUNICATION, kernels.step >= 0
    # Kernels launched before the file began are in no step.
    missing = communicates & kernels.without_launch & (in_steps if in_steps.any() else True)
    asking = np.flatnonzero(within | communicates)
    around = _last_begun(ranges, rows["launched"][asking], rows["thread"][asking])
    within, apart = within[asking], may_communicate(kernels)[asking]
    copies = np.flatnonzero(within & (around >= 0) & ~np.isin(around, around[~within]))
    copies = copies[np.argsort(around[copies], kind="stable")]
    found, first = np.unique(around[copies], return_index=True)
    info_of = np.full(len(asking), -1, dtype=np.int64)
    for place, mine in zip(found.tolist(), np.split(copies, first)[1:], strict=True):
        about = details[int(ranges["detail"][place])]
        info = about.info or CollectiveInfo(name_rules.collective_of(about.name))
        if info.size == 1:
            continue
        if info.kind in COPIED and info.size is not None and apart[mine].all():
            info_of[mine] = infos[info]
            told[info.kind] += 1
        else:
            untold[info.kind if about.info is not None else about.name] += 1
    if missing.any():
        return _Copies(nothing, nothing, untold + told)
    kept = np.flatnonzero(info_of >= 0)
    return _Copies(asking[kept], info_of[kept], untold)


def _joint_transfers(
    kernels: KernelTable, rows: _Columns, ranges: _Columns, infos: Iterable[CollectiveInfo]
) -> tuple[Array, Array] | tuple[()]:
    """The kernels of all-to-alls with several of them, see ``Collectives``; empty without any."""
    of_kind = np.array([info.kind == ALL_TO_ALL for info in infos], dtype=bool)
    if not of_kind.any():
        return ()
    mine = np.flatnonzero((kernels.kind == Kind.COMMUNICATION) & np.append(of_kind, False)[rows["info"]])
    mine = mine[~kernels[mine].named(is_copy)]  # each peer has its own copies
    around = _last_begun(ranges, rows["launched"][mine], rows["thread"][mine])
    info, sequence, lane = (rows[name][mine] for name in ("info", "sequence", "lane"))
    groups: Numbers[tuple[Any, ...]] = Numbers()
    group = np.array([groups[known[:6] + known[8:]] for known in infos], dtype=np.int64)[info]  # whatever the splits
    of_mine, whole_ns = joint_transfers(info, group, sequence, lane, around, kernels.intervals[mine])
    if not len(whole_ns):
        return ()
    rows["joint"] = derived(lambda info: np.full(len(info), -1), rows["info"])
    _assign(rows, "joint", mine, of_mine)
    return rows["joint"], whole_ns


def _waits(calls: _Columns, rows: _Columns, kernels: KernelTable) -> Intervals:
    """When the host waited for the device, in order of the ends: in calls for it, and in copies that block."""
    launched_ns, returned_ns = rows["launched"], rows["returned"]
    blocking = (kernels.kind == Kind.COPY) & (launched_ns >= 0) & (returned_ns >= kernels.intervals.end_ns)
    start = np.concatenate((calls["start"], launched_ns[blocking]))
    end = np.concatenate((calls["end"], returned_ns[blocking]))
    order = np.argsort(end, kind="stable")
    return Intervals(derived(np.asarray, start[order]), derived(np.asarray, end[order]))


# -- ranges of the host


def _last_begun(ranges: Mapping[str, Array], launched_ns: Indices, thread: Indices) -> Indices:
    """Position of each launch's range, -1 for none: its thread's last to begin before it, if still open; shape (n,).

    ``ranges`` has columns ``start``, ``end`` and ``thread``. Time and thread of a launch are -1 if unknown.
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
    """The name of the innermost range around each launch, -1 for none; a column of shape (n,).

    A thread without a range, such as autograd's, works for the training thread, whose range counts.

    ``ranges`` has columns ``start``, ``end``, ``thread`` and ``name``. Thread and time of a launch, and the training
    thread, are -1 if unknown.
    """
    names = Column()
    for part in parts(len(thread)):
        times_ns, of_thread = launched_ns[part], thread[part]
        # Far more ranges may exist than are open in this time.
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
    """The name of a thread's innermost open range at each time, -1 for none; shape (n,)."""
    found = np.full(len(time_ns), -1, dtype=np.int64)
    for number in distinct_values(ranges["thread"]).tolist():
        rows = np.flatnonzero(thread == number)
        own = np.flatnonzero(ranges["thread"] == number)
        if len(rows):
            place = _innermost(ranges["start"][own], ranges["end"][own], time_ns[rows])
            found[rows] = np.where(place >= 0, ranges["name"][own[place]], -1)
    return found


def _innermost(start_ns: Indices, end_ns: Indices, time_ns: Indices) -> Indices:
    """The range that contains each time: the open one that began last; -1 for none.

    Ranges of one thread nest, except in damaged files; earlier ranges do not matter.
    """
    order = np.lexsort((-end_ns, start_ns))
    start_ns, end_ns = start_ns[order], end_ns[order]
    # The previous range that ends later; all ranges between end no later than this one.
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
