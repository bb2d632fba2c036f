"""Makes a trace of the events of a file with kernels of a device: each kernel with its launch, step and collective."""

from __future__ import annotations

import dataclasses
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.copies import as_communication
from overlap_callbacks.analysis.kernels.table import Indices, KernelTableBuilder, Kind, device_kernels
from overlap_callbacks.traces.collective_ranges import CollectiveRanges
from overlap_callbacks.traces.collectives import Collectives
from overlap_callbacks.traces.copies import copies_of_collectives
from overlap_callbacks.traces.device_events import DeviceEvents
from overlap_callbacks.traces.doubts import KernelFacts, copied, foreign_events, untold
from overlap_callbacks.traces.host_ranges import HostRanges, launched_in
from overlap_callbacks.traces.launches import Launches, launches_of, waits_of
from overlap_callbacks.traces.metadata import annotated
from overlap_callbacks.traces.steps import bounds_of, steps_of
from overlap_callbacks.traces.times import EventTimes
from overlap_callbacks.traces.trace import Trace, trace_with_head

NO_LAUNCHES = "the file holds no launches: kernels count in the step that the host was in when they started"


def trace_of_device(
    path: Path,
    collected: DeviceEvents,
    told: Sequence[str],
    head: dict[str, Any],
    *,
    is_cut: bool = False,
    steps: re.Pattern[str] | None = None,
) -> Trace:
    """The trace of a file with kernels of a device.

    Args:
        path: the file.
        collected: its events. Some are forgotten, so that their memory is free.
        told: what is wrong with the file, in words.
        head: the fields of the document around the events.
        is_cut: whether the file ends before its events do.
        steps: finds the names of steps; None for ``ProfilerStep#``.
    """
    problems = list(told)
    found = steps_of(collected.notes, steps)
    rows = collected.rows
    rows.clean_names()
    usable = set_times(rows, collected.times, problems)
    known = collected.known.collectives()
    _apply_metadata(rows, known)
    has_launches = len(collected.launch_correlation) > 0
    problems += launch_problems(collected)
    launched_ns, returned_ns, thread = _launches(collected)
    collected.forget_times()

    def threads_in(ranges: CollectiveRanges | HostRanges) -> Indices:
        """The thread that launched each row, by its number among those of some ranges; -1 if unknown."""
        return np.array([*map(ranges.thread_number, collected.threads), -1], dtype=np.int64)[thread]

    in_annotations = threads_in(collected.annotations)
    by_range = annotated(rows, known, launched_ns, in_annotations, collected.annotations)
    problems += untold(rows, by_range)
    kinds = np.array([rows.collectives[info.kind] for info in by_range.infos], dtype=np.int64)
    np.frombuffer(rows.collective, dtype=np.int64)[by_range.rows] = kinds[by_range.info]
    collectives = known.with_others(by_range)
    if found and not has_launches:
        problems.append(NO_LAUNCHES)
    if collected.foreign:
        problems.append(f"{foreign_events(collected.foreign)} are left out: what they do is not known")
    kernels = device_kernels(rows, launched_ns if has_launches else None, bounds_of(found))
    ranges = collected.operators if len(collected.operators) else collected.annotations
    copies = copies_of_collectives(kernels, launched_ns, threads_in(ranges), ranges)
    problems += copied(copies.untold)
    communicating = copies.communicating
    of_row = zip(communicating.rows.tolist(), communicating.info.tolist(), strict=True)
    kernels = as_communication(kernels, {row: communicating.infos[info].kind for row, info in of_row})
    collectives = collectives.with_others(communicating)
    device = np.array(collected.devices, dtype=np.int64)
    waits = waits_of(collected.wait_times.bounds(), launched_ns, returned_ns, kernels)
    launches = Launches(
        launched_ns, waits, collected.streams, len(collected.wait_times) > 0,
        _range_of(collected, launched_ns, threads_in(collected.ranges), problems), tuple(collected.ranges.names),
    )  # fmt: skip
    if not usable.all():
        kept = np.flatnonzero(usable)
        kernels, device, launches = kernels[kept], device[kept], launches[kept]
        collectives = collectives.of_kernels(kept)
    facts = KernelFacts.of(kernels)
    trace = trace_with_head(path, head, facts, kernels, device, found, collectives, problems, is_cut=is_cut)
    return dataclasses.replace(trace, launches=launches)


def launch_problems(collected: DeviceEvents) -> Iterator[str]:
    """What is wrong with the launches of a file, in words."""
    if untimed := collected.launch_times.num_untimed:
        yield f"{untimed} launches have no time that can be read: their kernels count in no step"


def _apply_metadata(rows: KernelTableBuilder, known: Collectives) -> None:
    """Count kernels with metadata of a collective as communication if no rule knows their names.

    Not all kernels with such metadata communicate: those that copy a collective's tensors have it too, but the rules
    know their names.
    """
    if not len(known):
        return
    names, kinds = np.frombuffer(rows.name, dtype=np.int64), np.frombuffer(rows.kind, dtype=np.int8)
    texts = rows.names.texts
    unknown = [number for number in distinct_values(names[known.rows]).tolist() if no_rule_knows(texts[number])]
    counts = (kinds[known.rows] == Kind.COMPUTE) & np.isin(names[known.rows], unknown)
    kinds[known.rows[counts]] = Kind.COMMUNICATION


def no_rule_knows(name: str) -> bool:
    """Whether a kernel's name tells nothing: then metadata of a collective decides whether it communicates."""
    return name_rules.family_of(name) == name_rules.OTHER


def set_times(rows: KernelTableBuilder, times: EventTimes, problems: list[str]) -> npt.NDArray[np.bool_]:
    """Set the rows' times. Returns which rows have one; shape (n,)."""
    start, end, impossible, negative = times.bounds()
    rows.start, rows.end = array("q", start.tobytes()), array("q", end.tobytes())
    problems += time_problems(negative, times.unread + int(impossible.sum()))
    return ~impossible


def time_problems(negative: int, unread: int) -> Iterator[str]:
    """What is wrong with the times of events, in words.

    Args:
        negative: number of negative durations.
        unread: number of events without a time that can be read.
    """
    if negative:
        yield f"{negative} events have negative durations, and count as of no length"
    if unread:
        yield f"{unread} events have no time that can be read, and are left out"


def _launches(collected: DeviceEvents) -> tuple[Indices, Indices, Indices]:
    """Begin and end of the call that launched each kernel, and the number of its thread; -1 where unknown."""
    wanted = np.array(collected.rows.correlation, dtype=np.uint64)
    launched_ns, returned_ns, thread = (np.full(len(wanted), -1, dtype=np.int64) for _ in range(3))
    launch = launches_of(wanted, np.array(collected.launch_correlation, dtype=np.uint64))
    times_ns, ends_ns, impossible, _ = collected.launch_times.bounds()
    known = (launch >= 0) & ~np.append(impossible, True)[launch]
    launch = launch[known]
    launched_ns[known], returned_ns[known] = times_ns[launch], ends_ns[launch]
    thread[known] = np.array(collected.launch_thread, dtype=np.int64)[launch]
    return launched_ns, returned_ns, thread


def _range_of(collected: DeviceEvents, launched_ns: Indices, thread: Indices, problems: list[str]) -> Indices | None:
    """In which range of the host each kernel was launched, -1 if in none; None of a file without ranges.

    Args:
        collected: the events.
        launched_ns: when each row was launched, -1 if unknown; shape (n,).
        thread: the thread that launched it, as the ranges number them; shape (n,).
        problems: what is wrong so far; what is found is added.
    """
    ranges = collected.ranges
    if not len(ranges) or not len(collected.threads):
        return None
    if ranges.left_out:
        problems.append(f"{ranges.left_out} ranges of the host are left out: there are too many")
    return launched_in(ranges.columns(), thread, launched_ns, collected.training_thread)
