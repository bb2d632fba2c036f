"""Reads a Kineto trace file into a ``Trace``, with the same table of kernels that a live profile gives.

A file without kernels of a device is treated as a CPU job, whose kernels are the operators of the host.
"""

from __future__ import annotations

import dataclasses
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.distinct import distinct_values
from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.copies import as_communication
from overlap_callbacks.analysis.kernels.host import host_kernels, uncounted_note
from overlap_callbacks.analysis.kernels.table import (
    Indices,
    KernelTable,
    KernelTableBuilder,
    Kind,
    device_kernels,
)
from overlap_callbacks.traces.collect import DeviceEvents, HostEvents
from overlap_callbacks.traces.collective_ranges import CollectiveRanges
from overlap_callbacks.traces.collectives import Collectives
from overlap_callbacks.traces.copies import copies_of_collectives
from overlap_callbacks.traces.doubts import copied, doubts_of, foreign_events, untold
from overlap_callbacks.traces.events import Event, ExactEvent
from overlap_callbacks.traces.files import Progress, TraceError
from overlap_callbacks.traces.host_ranges import HostRanges
from overlap_callbacks.traces.launches import Launches, waits_of
from overlap_callbacks.traces.metadata import annotated, with_groups
from overlap_callbacks.traces.steps import TraceStep, bounds_of, mark_cut, steps_of
from overlap_callbacks.traces.stream import EventStream
from overlap_callbacks.traces.suspects import MAX_SUSPECTS, likeness, suspects
from overlap_callbacks.traces.times import EventTimes, lose_nanoseconds

# Operators of the host that are kept of a file that may have kernels later.
_MAX_UNSURE_ROWS = 2**12
# No job has more: a number beyond is damage.
_MOST_RANKS = 2**31


@dataclass(frozen=True)
class Trace:
    """One trace file.

    Attributes:
        path: the file.
        kernels: its kernels; their ``step`` is an index into ``steps``.
        device: number of the device of each row of ``kernels``; shape (n,).
        steps: its steps, ascending in time. Empty if the file has none; then the whole file counts as one step.
        collectives: what is known about each communication kernel.
        on_host: whether the file has no kernels of a device and was read as a CPU job.
        rank: rank in the job; None if the file does not tell.
        world_size: ranks of the job; None if the file does not tell.
        device_names: names of the devices that the file lists, by their numbers.
        problems: what is wrong or doubtful, in words.
        warnings: those of ``problems`` that must be read before any figure.
        launches: the host's side of the kernels; None of a CPU job.
        is_cut: whether the file ends before its events do, so that it lacks kernels.
    """

    path: Path
    kernels: KernelTable
    device: Indices
    steps: tuple[TraceStep, ...]
    collectives: Collectives
    on_host: bool
    rank: int | None
    world_size: int | None
    device_names: dict[int, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    launches: Launches | None = None
    is_cut: bool = False

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that ran kernels."""
        return tuple(distinct_values(self.device).tolist())

    def by_device(self) -> dict[int, Trace]:
        """One trace per device, with the kernels of that device alone: devices do not share time."""
        devices = self.devices
        if len(devices) < 2:
            return {device: self for device in devices}
        order = np.argsort(self.device, kind="stable")
        bounds = np.searchsorted(self.device[order], [*devices, devices[-1] + 1]).tolist()
        rows = {device: order[first:last] for device, first, last in zip(devices, bounds, bounds[1:], strict=False)}
        return {
            device: dataclasses.replace(
                self,
                kernels=self.kernels[of_device],
                device=self.device[of_device],
                collectives=self.collectives.of_kernels(of_device),
                launches=None if self.launches is None else self.launches[of_device],
            )
            for device, of_device in rows.items()
        }


def read_kineto(path: str | Path, progress: Progress | None = None, steps: re.Pattern[str] | None = None) -> Trace:
    """Read a trace file of ``torch.profiler``, of any version: ``.json``, gzipped or not.

    Memory is bounded by the number of kernels in the file, not by its size. A file is read twice if it
    seems to be of a device but has no kernels, or if times that are too great for floating-point numbers come late.

    Args:
        path: the file.
        progress: called with the number of bytes read so far and the number of bytes of the file. It starts again from
            zero if the file is read a second time.
        steps: finds the names of the ranges of the host that are steps; None for torch's ``ProfilerStep#``.

    Raises:
        TraceError: the file cannot be read, is empty, or is not a trace.
    """
    file = Path(path)
    exact = of_host = False
    while True:
        collected = _collect(file, progress, steps, exact=exact, of_host=of_host)
        if collected is None:
            exact = True
            continue
        device, host, stream = collected
        if len(device.rows):
            return trace_of_device(file, device, stream.problems, stream.head, is_cut=stream.is_cut, steps=steps)
        if host is not None:
            return _trace_of_host(file, host, stream, steps)
        of_host = True


def _collect(
    path: Path, progress: Progress | None, steps: re.Pattern[str] | None, *, exact: bool, of_host: bool
) -> tuple[DeviceEvents, HostEvents | None, EventStream] | None:
    """Read a file once, for the kernels of a device, and until there are any for the operators of the host too.

    Args:
        path: the file.
        progress: as for ``read_kineto``.
        steps: finds the names of steps.
        exact: take times as text.
        of_host: read all operators, even of a file that seems to be of a device.

    Returns:
        None if times lose nanoseconds as floating-point numbers; the operators are None of a file with a device.
    """
    device, host = DeviceEvents(steps, exact=exact), HostEvents(steps, exact=exact)
    wanted = True
    stream = EventStream(path, ExactEvent if exact else Event, progress=progress)
    for number, events in enumerate(stream):
        if number == 0 and not exact and lose_nanoseconds(events):
            return None
        device.collect(events, stream.args_of)
        if wanted and (len(device.rows) or not (of_host or _may_be_of_host(stream.head, host))):
            wanted, host = False, HostEvents(steps)  # what it has is not needed
        if wanted:
            host.collect(events, stream.args_of)
        events.clear()  # their memory, which the core's cache still holds, is that of the next ones
    if not exact and (device.inexact or host.inexact):
        return None
    return device, host if wanted else None, stream


def _may_be_of_host(head: dict[str, Any], host: HostEvents) -> bool:
    """Whether a file of which no kernel was read yet may have none, by what stands before its events.

    Old files do not tell. They are held to be of a host until this would take much memory.
    """
    devices = head.get("deviceProperties")
    return not devices and ("deviceProperties" in head or len(host.rows) < _MAX_UNSURE_ROWS)


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
    usable = _set_times(rows, collected.times, problems)
    known = collected.known.collectives()
    _apply_metadata(rows, known)
    has_launches = len(collected.launch_correlation) > 0
    if untimed := collected.launch_times.num_untimed:
        problems.append(f"{untimed} launches have no time that can be read: their kernels count in no step")
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
        problems.append("the file holds no launches: kernels count in the step that the host was in when they started")
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
    trace = _trace(path, head, kernels, device, found, collectives, problems, is_cut=is_cut)
    return dataclasses.replace(trace, launches=launches)


def _trace_of_host(path: Path, collected: HostEvents, stream: EventStream, pattern: re.Pattern[str] | None) -> Trace:
    """The trace of a file without kernels of a device: the operators of the training thread are its compute.

    Raises:
        TraceError: the file is not one of a CPU job either.
    """
    _refuse(path, collected, stream)
    problems = list(stream.problems)
    steps = steps_of(collected.notes, pattern)
    for rows, times in ((collected.rows, collected.times), (collected.ranges, collected.range_times)):
        rows.clean_names()
        _set_times(rows, times, problems)  # a row without a time has no length, and so drops out
    host = _training_thread(collected)
    problems.append("no kernels of a device: operators of the training thread count as compute")
    if collected.enqueued:
        problems.append("the file has NCCL's collectives but no kernels of their device: they are left out")
    crossing = _crossing(host.intervals)
    if crossing:
        problems.append(
            f"{crossing} operators of the training thread overlap without nesting: their self time is not sure"
        )
    kernels = host_kernels(host, collected.ranges, bounds_of(steps))
    if note := uncounted_note(kernels.uncounted):
        problems.append(note)
    device = np.zeros(len(kernels), dtype=np.int64)
    likely = sorted(filter(likeness, collected.other_ranges), key=lambda name: (-likeness(name), name))[:MAX_SUSPECTS]
    return _trace(
        path, stream.head, kernels, device, steps, Collectives.none(), problems,
        is_cut=stream.is_cut, on_host=True, likely=likely,
    )  # fmt: skip


def _refuse(path: Path, collected: HostEvents, stream: EventStream) -> None:
    """Refuse a file that is neither of a device that is known nor of a CPU job.

    Raises:
        TraceError: it is one of these.
    """
    if collected.foreign:
        raise TraceError(
            f"{path} is of a device that is not known: it holds no kernels, but {foreign_events(collected.foreign)}; "
            "devices of NVIDIA, AMD and Intel and CPU jobs are read"
        )
    # What a file holds of the host would pass for a CPU job. Kineto writes it first.
    if stream.is_cut and _is_of_device(collected, stream.head):
        raise TraceError(f"{path} is cut off before its first kernel of the device")
    if collected.launches:
        raise TraceError(
            f"{path} holds the launches of {count(collected.launches, 'kernel')} of a device, but not the kernels: let "
            "the device finish before the profiler stops, and see that no other profiler has the device"
        )
    if len(collected.rows) or len(collected.ranges):
        return
    if stream.is_cut:
        raise TraceError(f"{path} is cut off before its first kernel or operator")
    if not stream.num_events:
        raise TraceError(f"{path} holds no events")
    raise TraceError(
        f"{path} holds {count(stream.num_events, 'event')}, but no kernel and no operator of torch: give a trace that "
        "torch.profiler wrote, or the SQLite export of Nsight Systems"
    )


def _is_of_device(collected: HostEvents, head: dict[str, Any]) -> bool:
    """Whether a file that holds no kernels is of a job on devices, as far as it tells."""
    info = head.get("distributedInfo")
    backend = info.get("backend") if isinstance(info, dict) else None
    told = head.get("deviceProperties") or "nccl" in str(backend)
    return bool(told or collected.enqueued or collected.launches)


def _trace(
    path: Path,
    head: dict[str, Any],
    kernels: KernelTable,
    device: Indices,
    steps: tuple[TraceStep, ...],
    collectives: Collectives,
    problems: list[str],
    *,
    is_cut: bool,
    on_host: bool = False,
    likely: Sequence[str] = (),
) -> Trace:
    """The parts of a trace, with what the fields around the events tell of the job.

    Args:
        path: the file.
        head: the fields of the document around the events.
        kernels: its kernels.
        device: number of the device of each row.
        steps: its steps, ascending in time.
        collectives: what is known about each communication kernel.
        problems: what is wrong or doubtful so far, in words.
        is_cut: whether the file ends before its events do.
        on_host: whether the file was read as a CPU job.
        likely: ranges of the host that may be communication, by their names.
    """
    problems += doubts_of(kernels, steps)
    rank, world_size = _job(head, problems)
    warnings = []
    if is_cut:
        steps, named = mark_cut(steps, kernels)
        lacks = "the file is cut off, so its totals lack kernels, and their time looks idle"
        warnings.append(f"{lacks}: {named}" if named else lacks)
    if world_size is not None and world_size > 1 and not (kernels.kind == Kind.COMMUNICATION).any():
        names = ", ".join(suspects(kernels) if not on_host else likely) or "none sounds like it"
        warnings.append(
            f"the job has {world_size} ranks, but nothing in this file communicates, by its name; what does can be "
            f"named with --communication REGEX. What looks most like it: {names}"
        )
    return Trace(
        path=path,
        kernels=kernels,
        device=device,
        steps=steps,
        collectives=with_groups(collectives, head.get("distributedInfo")),
        on_host=on_host,
        rank=rank,
        world_size=world_size,
        device_names=_device_names(head),
        problems=(*warnings, *problems),
        warnings=tuple(warnings),
        is_cut=is_cut,
    )


def _training_thread(collected: HostEvents) -> KernelTableBuilder:
    """The operators of the training thread: the thread that has the steps, else the one with the most operators."""
    of_rows = np.array(collected.row_threads, dtype=np.int64)
    of_steps = Counter(note.thread for note in collected.notes).most_common(1)
    if of_steps:
        training = collected.threads.get(of_steps[0][0], -1)
    else:
        training = int(np.bincount(of_rows).argmax()) if len(of_rows) else -1
    host = KernelTableBuilder()
    host.names = collected.rows.names
    mine = of_rows == training
    for name in ("start", "end", "name", "kind", "correlation", "shape", "collective"):
        column = getattr(collected.rows, name)
        if len(mine):
            setattr(host, name, array(column.typecode, np.array(column)[mine].tobytes()))
    return host


def _crossing(calls: Intervals) -> int:
    """How many calls of one thread end after the call in which they began."""
    order = np.lexsort((-calls.end_ns, calls.start_ns))
    start, end = calls.start_ns[order], calls.end_ns[order]
    latest = np.maximum.accumulate(end)[:-1]
    return int(((start[1:] < latest) & (end[1:] > latest)).sum())


def _apply_metadata(rows: KernelTableBuilder, known: Collectives) -> None:
    """Count kernels with metadata of a collective as communication if no rule knows their names.

    Not all kernels with such metadata communicate: those that copy a collective's tensors have it too, but the rules
    know their names.
    """
    if not len(known):
        return
    names, kinds = np.frombuffer(rows.name, dtype=np.int64), np.frombuffer(rows.kind, dtype=np.int8)
    texts = rows.names.texts
    unknown = [
        number
        for number in distinct_values(names[known.rows]).tolist()
        if name_rules.family_of(texts[number]) == name_rules.OTHER
    ]
    counts = (kinds[known.rows] == Kind.COMPUTE) & np.isin(names[known.rows], unknown)
    kinds[known.rows[counts]] = Kind.COMMUNICATION


def _set_times(rows: KernelTableBuilder, times: EventTimes, problems: list[str]) -> npt.NDArray[np.bool_]:
    """Set the rows' times. Returns which rows have one; shape (n,)."""
    start, end, impossible, negative = times.bounds()
    rows.start, rows.end = array("q", start.tobytes()), array("q", end.tobytes())
    if negative:
        problems.append(f"{negative} events have negative durations, and count as of no length")
    if num_unread := times.unread + int(impossible.sum()):
        problems.append(f"{num_unread} events have no time that can be read, and are left out")
    return ~impossible


def _launches(collected: DeviceEvents) -> tuple[Indices, Indices, Indices]:
    """Begin and end of the call that launched each kernel, and the number of its thread; -1 where unknown."""
    wanted = np.array(collected.rows.correlation, dtype=np.uint64)
    launched_ns, returned_ns, thread = (np.full(len(wanted), -1, dtype=np.int64) for _ in range(3))
    if len(collected.launch_correlation):
        correlation = np.array(collected.launch_correlation, dtype=np.uint64)
        times_ns, ends_ns, impossible, _ = collected.launch_times.bounds()
        order = np.argsort(correlation, kind="stable")
        place = np.minimum(np.searchsorted(correlation[order], wanted), len(order) - 1)
        launch = order[place]
        known = (correlation[launch] == wanted) & (wanted != 0) & ~impossible[launch]
        launch = launch[known]
        launched_ns[known], returned_ns[known] = times_ns[launch], ends_ns[launch]
        thread[known] = np.array(collected.launch_thread, dtype=np.int64)[launch]
    return launched_ns, returned_ns, thread


def _range_of(collected: DeviceEvents, launched_ns: Indices, thread: Indices, problems: list[str]) -> Indices | None:
    """In which range of the host each kernel was launched, -1 if in none; None of a file without ranges.

    A thread without a range, such as autograd's, works for the training thread: its kernels count for the range that
    this one was in.

    Args:
        collected: the events.
        launched_ns: when each row was launched, -1 if unknown; shape (n,).
        thread: the thread that launched it, as the ranges number them; shape (n,).
        problems: what is wrong so far; what is found is added.
    """
    ranges = collected.ranges
    known = launched_ns >= 0
    if not len(ranges) or not len(collected.threads):
        return None
    if ranges.left_out:
        problems.append(f"{ranges.left_out} ranges of the host are left out: there are too many")
    found = ranges.innermost(thread, launched_ns)
    training = ranges.thread_number(next((note.thread for note in collected.notes), None))
    if training >= 0:
        without = np.flatnonzero(known & (found < 0) & (thread != training))
        found[without] = ranges.innermost(np.full(len(without), training), launched_ns[without])
    return found


def _job(head: dict[str, Any], problems: list[str]) -> tuple[int | None, int | None]:
    """Rank and world size; None for each that the file does not tell."""
    info = head.get("distributedInfo")
    if info is None:
        return None, None
    rank, world_size = (info.get(key) if isinstance(info, dict) else None for key in ("rank", "world_size"))
    if type(rank) is not int or not 0 <= rank < _MOST_RANKS:  # true is an int too
        problems.append("the file's distributedInfo cannot be read: its rank is not known")
        return None, None
    return rank, world_size if type(world_size) is int and 0 < world_size <= _MOST_RANKS else None


def _device_names(head: dict[str, Any]) -> dict[int, str]:
    devices = head.get("deviceProperties")
    names = {}
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict) and isinstance(device.get("id"), int):
            names[device["id"]] = safe_text.clean(str(device.get("name", "")))
    return names
