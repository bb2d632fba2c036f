"""Makes of a long trace's files its devices, whose kernels come in pieces."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.copies import copy_of_collective
from overlap_callbacks.analysis.kernels.placement import StepsOnDevice, step_of
from overlap_callbacks.analysis.kernels.table import Indices, StringTable
from overlap_callbacks.traces.collectives import CollectiveInfo
from overlap_callbacks.traces.device_events import DeviceEvents
from overlap_callbacks.traces.device_trace import NO_LAUNCHES, launch_problems, time_problems
from overlap_callbacks.traces.doubts import copied, foreign_events, untold_names
from overlap_callbacks.traces.host_ranges import RangeColumns, launched_in
from overlap_callbacks.traces.launches import Launches
from overlap_callbacks.traces.long.columns import Folder, Rows, RowsFile
from overlap_callbacks.traces.long.device import DeviceOnDisk
from overlap_callbacks.traces.long.joining import Names, joined
from overlap_callbacks.traces.long.ranges import RangeReader, Ranges
from overlap_callbacks.traces.long.rows import KERNEL, WAIT
from overlap_callbacks.traces.long.spill import Spill
from overlap_callbacks.traces.long.survey import DeviceSurvey, Survey
from overlap_callbacks.traces.long.tables import Tables
from overlap_callbacks.traces.pieces import Device, DeviceInMemory, Outline
from overlap_callbacks.traces.steps import bounds_of, steps_of
from overlap_callbacks.traces.trace import Trace, trace_with_head


@dataclasses.dataclass(frozen=True)
class LongTrace:
    """A trace that is too long for memory.

    Attributes:
        head: the trace, without rows.
        devices: its devices.
    """

    head: Trace
    devices: tuple[Device, ...]


def long_trace(
    path: Path,
    events: DeviceEvents,
    spill: Spill,
    told: Sequence[str],
    head: dict[str, Any],
    *,
    is_cut: bool = False,
    steps: re.Pattern[str] | None = None,
) -> LongTrace:
    """The trace of a file with kernels of a device, all of whose events were spilled.

    Args:
        path: the file.
        events: what was collected, for what numbers stand for.
        spill: the events.
        told: what is wrong with the file, in words.
        head: the fields of the document around the events.
        is_cut: whether the file ends before its events do.
        steps: finds the names of steps; None for ``ProfilerStep#``.
    """
    found = steps_of(events.notes, steps)
    has_launches = events.num_launches_taken > 0
    records_waits = len(spill.waits) > 0
    clean, number = events.rows.names.renamed(safe_text.clean)
    names = Names(clean.texts, number)
    known = events.known.collectives()
    kinds = events.rows.collectives
    reader = RangeReader(names, kinds, len(known.infos))
    told_kernels = reader.read(joined(spill.kernels, spill.launches), events, spill)
    range_names: tuple[str, ...] = ()
    if spill.ranges is not None and events.ranges.num_taken and len(events.threads):
        told_kernels = with_ranges_of_host(told_kernels, spill.ranges, events, spill.folder)
        range_names = tuple(events.ranges.names)
    kernels = spill.folder.file(KERNEL)
    placed(told_kernels, kernels, bounds_of(found), has_launches=has_launches)
    survey = Survey(spill.folder, len(found), len(names.clean), has_launches)
    for rows in kernels:
        survey.add(rows)
    times = events.times
    problems = [*told, *time_problems(times.taken_negative, times.unread + times.taken_impossible)]
    problems += launch_problems(events)
    problems += untold_names([(names.clean[i], number) for i, number in reader.by_name])
    if found and not has_launches:
        problems.append(NO_LAUNCHES)
    if events.foreign:
        problems.append(f"{foreign_events(events.foreign)} are left out: what they do is not known")
    copies, communicate = reader.copies, survey.all_launched and len(reader.copies.infos) > 0
    problems += copied(copies.untold if survey.all_launched else copies.untold + copies.told)
    if events.ranges.left_out:
        problems.append(f"{events.ranges.left_out} ranges of the host are left out: there are too many")
    infos = (*known.infos, *reader.infos, *(copies.infos if communicate else ()))
    tables = _tables(names.clean, kinds.texts, infos, copies.infos if communicate else (), survey, events, has_launches)
    empty = np.empty(0, KERNEL)
    trace = trace_with_head(
        path, head, survey.facts(names.clean), tables.kernels(empty), np.empty(0, dtype=np.int64), found,
        tables.known(empty), problems, is_cut=is_cut,
    )  # fmt: skip
    # What the head tells of groups is known only now.
    tables = dataclasses.replace(tables, infos=trace.collectives.infos)
    nothing = Launches(
        np.empty(0, dtype=np.int64), Intervals.empty(), tables.streams, records_waits,
        np.empty(0, dtype=np.int64) if range_names else None, range_names,
    )  # fmt: skip
    trace = dataclasses.replace(trace, launches=nothing)
    waits = _waits(spill, survey, with_copies=not communicate)
    devices = [
        DeviceOnDisk(
            trace, outline_of(number, of_device, communicate, records_waits), of_device, kernels, waits, tables,
            spill.folder,
        )
        for number, of_device in sorted(survey.devices.items())
    ]  # fmt: skip
    return LongTrace(trace, tuple(devices or [DeviceInMemory(trace, 0)]))


def _tables(
    names: tuple[str, ...],
    kinds: tuple[str, ...],
    infos: tuple[CollectiveInfo, ...],
    of_copies: tuple[CollectiveInfo, ...],
    survey: Survey,
    events: DeviceEvents,
    has_launches: bool,
) -> Tables:
    """What the numbers of rows stand for.

    Args:
        names: the names of kernels.
        kinds: kinds of collectives, by their numbers in metadata.
        infos: what is known of collectives, of those of copies last.
        of_copies: those whose work copies are.
        survey: which names communicate.
        events: what was collected.
        has_launches: whether the trace holds launches.
    """
    codes, all_names = StringTable(), StringTable()
    # In the order of ``table.collectives_of``.
    kind_of = {
        (name, kind): codes[kinds[kind] or name_rules.collective_of(names[name])] for name, kind in sorted(survey.pairs)
    }
    copy_kinds = tuple([codes[info.kind] for info in of_copies])
    for name in names:
        all_names[name]
    copy_names = {
        number: all_names[copy_of_collective(names[number])]
        for number in sorted(survey.copy_names if of_copies else ())
    }
    return Tables(
        names=all_names.texts,
        shapes=tuple(events.rows.shapes),
        collectives=codes.texts,
        infos=infos,
        streams=events.streams,
        kind_of=kind_of,
        copy_kinds=copy_kinds,
        copy_names=copy_names,
        first_copy_info=len(infos) - len(of_copies),
        has_launches=has_launches,
    )


def outline_of(
    number: int, survey: DeviceSurvey, copies_communicate: bool = False, records_waits: bool = False
) -> Outline:
    """What is known of a device's kernels.

    Args:
        number: of the device.
        survey: of its kernels.
        copies_communicate: whether copies that may be the work of collectives are.
        records_waits: whether the trace records when the host waited for the device.
    """
    return Outline(
        device=number,
        steps=tuple(np.flatnonzero(survey.last_row >= 0).tolist()),
        communicates=survey.communicates or (survey.copies and copies_communicate),
        span=survey.span,
        ran=survey.ran,
        launches_known=survey.launches_known,
        records_waits=records_waits,
    )


def _waits(spill: Spill, survey: Survey, *, with_copies: bool) -> RowsFile:
    """When the host waited for the device, in order of the ends: in calls that are made for it, and in copies."""
    for file in (survey.waits, *([survey.waits_of_copies] if with_copies else [])):
        for rows in file:
            spill.waits.append(rows)
    found = spill.folder.file(WAIT)
    for rows in spill.waits.in_order("end"):
        found.append(rows)
    return found


# -- ranges of the host
# Finds in which range of the host each kernel of a long trace was launched, as ``traces/host_ranges`` does.
#
# It goes through the time of the host: launches and ranges in order of their starts, a part at a time.


def with_ranges_of_host(kernels: RowsFile, ranges: RowsFile, events: DeviceEvents, folder: Folder) -> RowsFile:
    """The kernels, each with its range, in any order.

    Args:
        kernels: the kernels with their launches; the file is deleted.
        ranges: the ranges; the file is deleted.
        events: what was collected, for what numbers stand for.
        folder: takes the file.
    """
    found, launched = folder.file(KERNEL), folder.file(KERNEL)
    for rows in kernels:
        is_known = rows["launched"] >= 0
        rows["range"] = -1
        found.append(rows[~is_known])
        launched.append(rows[is_known])
    thread_of = np.array([*map(events.ranges.thread_number, events.threads), -1], dtype=np.int64)
    opening, nothing = Ranges(ranges), np.empty(0, dtype=np.int64)
    for rows in launched.in_order("launched"):
        left = rows
        while len(left):
            # Ranges may be many more than kernels.
            until_ns = opening.reach(int(left["launched"][-1]))
            known = int(np.searchsorted(left["launched"], until_ns, side="right"))
            now, left = left[:known], left[known:]
            held = RangeColumns(*[opening.held[name].astype(np.int64) for name in ("start", "end", "thread", "detail")])
            now["range"] = launched_in(held, thread_of[now["thread"]], now["launched"], events.training_thread)
            opening.forget(until_ns, nothing)
            found.append(now)
    for file in (kernels, ranges):
        file.delete()
    return found


# -- places of kernels


# Stands for the step of a neighbour that there is none of.
_NONE = -2


def placed(kernels: RowsFile, file: RowsFile, bounds: Sequence[tuple[int, int]], *, has_launches: bool) -> None:
    """Write kernels to a file in the order of their starts, each with its step.

    Args:
        kernels: the kernels, in any order; the file is deleted.
        file: takes them.
        bounds: host start and end of each step.
        has_launches: whether the trace holds launches; without, the kernels' own starts decide.
    """
    on_device = StepsOnDevice(bounds)
    before = _Neighbours()
    any_unknown = False
    for rows in kernels.in_order("start", "place"):
        if not has_launches:
            rows["step"] = step_of(rows["start"], bounds)
        else:
            rows["step"] = step_of(rows["launched"], bounds)
            known = rows["launched"] >= 0
            any_unknown |= not bool(known.all())
            on_device.add(rows["step"].astype(np.int64), Intervals(rows["start"], rows["end"]))
            rows["before"] = before.of(rows, rows["step"].astype(np.int64), known)
        file.append(rows)
    if any_unknown and on_device.any:
        _place_unknown(file, on_device)


def _place_unknown(file: RowsFile, on_device: StepsOnDevice) -> None:
    """Place kernels without a launch: by their neighbours on their streams, else by what the device ran of steps."""
    after = _Neighbours()
    for first, last in reversed(file.bounds()):
        rows = file.read(first, last)
        known = rows["launched"] >= 0
        following = after.of(rows[::-1], rows["step"][::-1].astype(np.int64), known[::-1])[::-1]
        agree = (rows["before"] != _NONE) & (rows["before"] == following)
        found = np.where(agree, rows["before"], on_device.at(rows["start"]))
        rows["step"] = np.where(known, rows["step"], found)
        file.overwrite(first, rows)


class _Neighbours:
    """The step of the last row before each row of its stream whose launch is known, over parts of a table."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def of(self, rows: Rows, step: Indices, known: np.ndarray) -> Indices:
        """The step of the row before each of the next rows; ``_NONE`` without one. Of a known row, its own.

        Args:
            rows: the rows.
            step: their steps; shape (n,).
            known: whether the launch of each is known; shape (n,).
        """
        lane = rows["lane"].astype(np.int64)
        order = np.argsort(lane, kind="stable")
        place = np.maximum.accumulate(np.where(known[order], np.arange(len(order)), -1))
        begins = np.searchsorted(lane[order], lane[order], side="left")  # where its lane begins
        earlier = np.array([self._last.get(number, _NONE) for number in lane[order].tolist()], dtype=np.int64)
        found = np.empty(len(order), dtype=np.int64)
        found[order] = np.where(place >= begins, step[order][place], earlier)
        ends = np.flatnonzero(np.append(lane[order][1:] != lane[order][:-1], True)) if len(order) else order
        self._last.update(zip(lane[order][ends].tolist(), found[order][ends].tolist(), strict=True))
        return found
