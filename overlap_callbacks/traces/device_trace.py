"""Makes a trace of the events of a file with kernels of a device: each kernel with its launch, step and collective."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.issued import COPIED
from overlap_callbacks.analysis.kernels.table import (
    Indices,
    KernelTable,
    Kind,
    LaunchShape,
    as_communication,
    collectives_of,
    may_communicate,
    step_of,
    step_of_kernels,
    within_device,
)
from overlap_callbacks.traces.checks import ambiguous_collectives, copying_collectives, foreign_events
from overlap_callbacks.traces.collect import Numbers
from overlap_callbacks.traces.collectives import UNKNOWN, CollectiveInfo, Collectives, RangeDetail, hints_from_ranges
from overlap_callbacks.traces.columns import Array, derived, release, taken
from overlap_callbacks.traces.device_events import DeviceEvents
from overlap_callbacks.traces.event_columns import time_problems
from overlap_callbacks.traces.host_ranges import last_begun, launched_in
from overlap_callbacks.traces.trace import Launches, Trace, bounds_of, steps_of, trace_with_head

# Columns by their names; shape (n,) each.
_Columns = dict[str, Array]


def trace_of_device(
    path: Path,
    events: DeviceEvents,
    told: Sequence[str],
    head: dict[str, Any],
    *,
    is_cut: bool = False,
    steps: re.Pattern[str] | None = None,
) -> Trace:
    """The trace of a file with kernels of a device.

    Args:
        path: the file.
        events: its events.
        told: what is wrong with the file, in words.
        head: the fields of the document around the events.
        is_cut: whether the file ends before its events do.
        steps: finds the names of steps; None for ``ProfilerStep#``.
    """
    found, infos, details = steps_of(events.notes, steps), events.metadata.infos, tuple(events.details)
    rows = _in_order(events.rows.finished())
    _join_launches(rows, events.launches.finished())
    texts = _name_kinds(rows, events)
    annotations, operators = events.annotations.finished(), events.operators.finished()
    problems = [*told, *time_problems(events.rows)]
    if events.launches.untimed:
        problems.append(
            f"{events.launches.untimed} launches have no time that can be read: their kernels count in no step"
        )
    asking = np.flatnonzero((rows["kind"] == Kind.COMMUNICATION) & (rows["info"] < 0))
    _ask_ranges(rows, asking, annotations, texts, details, infos)
    problems += ambiguous_collectives(rows["name"][asking], rows["info"][asking], texts, tuple(infos))
    if found and not events.launches:
        problems.append("the file holds no launches: kernels count in the step that the host was in when they started")
    if events.foreign:
        problems.append(f"{foreign_events(events.foreign)} are left out: what they do is not known")
    kernels = _table(rows, texts, events, bounds_of(found))
    ranges = operators if events.operators else annotations
    copies = _copies_of_collectives(kernels, rows, ranges, details, infos)
    problems += copying_collectives(copies.untold)
    for column, value in (("info", copies.info), ("num_bytes", UNKNOWN), ("sequence", UNKNOWN)):
        _assign(rows, column, copies.rows, value)
    kinds = [info.kind for info in infos]
    of_row = zip(copies.rows.tolist(), copies.info.tolist(), strict=True)
    kernels = as_communication(kernels, {row: kinds[info] for row, info in of_row})
    collectives = Collectives.of(rows.pop("info"), rows.pop("num_bytes"), rows.pop("sequence"), tuple(infos))
    range_of = None
    if events.ranges:
        range_of = launched_in(events.ranges.finished(), rows["thread"], rows["launched"], events.training_thread)
    launches = Launches(
        rows["launched"], _waits(events.waits.finished(), rows, kernels), events.streams, len(events.waits) > 0,
        range_of, events.range_names,
    )  # fmt: skip
    release()
    return trace_with_head(
        path, head, kernels, rows["device"], found, collectives, problems, is_cut=is_cut, launches=launches
    )


def _in_order(rows: _Columns) -> _Columns:
    """The rows device by device, in order of their starts."""
    device = rows["device"]
    if device.min(initial=0) == device.max(initial=0):
        order = np.argsort(rows["start"], kind="stable")
    else:
        order = np.lexsort((rows["start"], device))
    numbers = ("shape", "lane", "device")  # those that a table has
    return {name: taken(rows.pop(name), order, np.int64 if name in numbers else None) for name in [*rows]}


def _join_launches(rows: _Columns, launches: _Columns) -> None:
    """Add columns for the call that launched each row: ``launched``, ``returned`` and ``thread``; -1 where unknown.

    Of several launches with one number the first in the file counts, and none if that one has no time.
    """
    order = np.argsort(launches["correlation"], kind="stable")
    numbers = launches["correlation"][order]
    order, padded = np.append(order, -1), np.append(numbers, np.uint64(0))

    def launch_of(wanted: Array) -> Array:
        place = np.searchsorted(numbers, wanted)
        return np.where((padded[place] == wanted) & (wanted != 0), order[place], -1)

    launch = derived(launch_of, rows.pop("correlation"))
    for name, of_launch in (("launched", "start"), ("returned", "end"), ("thread", "thread")):
        rows[name] = derived(np.append(launches[of_launch], -1).__getitem__, launch)


def _name_kinds(rows: _Columns, events: DeviceEvents) -> tuple[str, ...]:
    """Clean the names, and set what rows do: by their names, or by metadata of a collective where these tell nothing.

    Not all kernels with such metadata communicate: those that copy a collective's tensors have it too, but the rules
    know their names.

    Returns:
        The distinct names.
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


def _ask_ranges(
    rows: _Columns,
    asking: Indices,
    ranges: _Columns,
    texts: Sequence[str],
    details: Sequence[RangeDetail],
    infos: Numbers[CollectiveInfo],
) -> None:
    """Set what torch's ranges, else names, tell of the collectives of some rows.

    Args:
        rows: all rows.
        asking: which of them to ask for; shape (m,).
        ranges: torch's ranges of collectives.
        texts: the names of kernels.
        details: what ranges have in common.
        infos: numbers what collectives have in common.
    """
    within = last_begun(ranges, rows["launched"][asking], rows["thread"][asking])
    detail, num_bytes = (np.append(ranges[column], -1)[within] for column in ("detail", "num_bytes"))
    hints = hints_from_ranges(rows["name"][asking], detail, num_bytes, texts, details, infos)
    _assign(rows, "info", asking, hints.info)
    _assign(rows, "num_bytes", asking, hints.num_bytes)


def _assign(rows: _Columns, column: str, places: Indices, values: Array | int) -> None:
    """Set some values of a column, which may be mapped and so cannot be written."""
    if len(places):
        rows[column] = rows[column].copy()
        rows[column][places] = values


def _table(
    rows: _Columns, texts: tuple[str, ...], events: DeviceEvents, bounds: Sequence[tuple[int, int]]
) -> KernelTable:
    """The table of kernels.

    Args:
        rows: the rows.
        texts: their names.
        events: what numbers stand for.
        bounds: host start and end of each step.
    """
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
        launches=tuple([shape if isinstance(shape, LaunchShape) else None for shape in shapes]),
        without_launch=without_launch,
        from_graph=nowhere,
    )


class _Copies(NamedTuple):
    """The copies within the device that are the work of collectives without a kernel.

    Attributes:
        rows: the copies that communicate; shape (m,).
        info: number of what is known of the collective of each; shape (m,).
        untold: how many collectives of each name launched such copies where the file does not tell whether they
            communicate.
    """

    rows: Indices
    info: Indices
    untold: Counter[str]


def _copies_of_collectives(
    kernels: KernelTable,
    rows: _Columns,
    ranges: _Columns,
    details: Sequence[RangeDetail],
    infos: Numbers[CollectiveInfo],
) -> _Copies:
    """Which copies within the device are the work of a collective.

    Live, the gate's log tells which collectives have no kernel. A file has no such log. But torch's operator of each
    collective (``record_param_comms``) lies around its launches, and tells kind and group.

    A collective's copies communicate if it launched no kernel, copy engines can do it, its group has more than one
    rank, and the copies ran on streams that never compute. A collective on a group of one rank copies, but communicates
    nothing. Copies whose launch is not in the file stay copies. If the launch of a communication kernel is missing, it
    may be that collective's, so the file does not tell.

    Args:
        kernels: the whole file.
        rows: its columns ``launched`` and ``thread``.
        ranges: torch's operators of collectives, those that describe theirs; or its ranges of collectives, which do not
            tell the group.
        details: what ranges have in common.
        infos: numbers what collectives have in common.
    """
    within, told, untold = within_device(kernels), Counter[str](), Counter[str]()
    nothing = np.empty(0, dtype=np.int64)
    if not within.any() or not len(ranges["start"]):
        return _Copies(nothing, nothing, untold)
    communicates, in_steps = kernels.kind == Kind.COMMUNICATION, kernels.step >= 0
    # Those launched before the file began are in no step.
    missing = communicates & kernels.without_launch & (in_steps if in_steps.any() else True)
    asking = np.flatnonzero(within | communicates)
    around = last_begun(ranges, rows["launched"][asking], rows["thread"][asking])
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


def _waits(calls: _Columns, rows: _Columns, kernels: KernelTable) -> Intervals:
    """When the host waited for the device, in ascending order of the ends.

    It does so in calls that are made for it, and in those of copies that return after the copy has ended.
    """
    launched_ns, returned_ns = rows["launched"], rows["returned"]
    blocking = (kernels.kind == Kind.COPY) & (launched_ns >= 0) & (returned_ns >= kernels.intervals.end_ns)
    start = np.concatenate((calls["start"], launched_ns[blocking]))
    end = np.concatenate((calls["end"], returned_ns[blocking]))
    order = np.argsort(end, kind="stable")
    return Intervals(derived(np.asarray, start[order]), derived(np.asarray, end[order]))
