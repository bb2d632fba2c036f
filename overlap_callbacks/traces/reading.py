"""Reads a trace file of any kind into a ``Trace``, with the same table of kernels as a live profile.

A ``torch.profiler`` file without device kernels is a CPU job, whose kernels are the host's operators.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from overlap_callbacks.traces.archives import container_of, names_in, starts_with
from overlap_callbacks.traces.device_events import DeviceEvents
from overlap_callbacks.traces.device_trace import trace_of_device
from overlap_callbacks.traces.events import Event, ExactEvent, lose_nanoseconds
from overlap_callbacks.traces.files import SQLITE_MAGIC, TABLE_FILES, Progress, TraceError, with_tables
from overlap_callbacks.traces.host import HostEvents, trace_of_host
from overlap_callbacks.traces.merged import Survey, may_be_merged
from overlap_callbacks.traces.stream import EventStream
from overlap_callbacks.traces.trace import Trace

# Limit of host operators kept while device kernels may still come.
_MAX_UNSURE_ROWS = 2**12


def read_trace(
    path: str | Path,
    progress: Progress | None = None,
    steps: re.Pattern[str] | None = None,
    *,
    with_ranges: bool = True,
) -> Trace:
    """Read a trace of ``torch.profiler`` (.json, compressed or in an archive) or Nsight Systems (.sqlite, Parquet).

    The kernels of a long file are kept in temporary files, which go with the trace. A file is read twice if it seems to
    be of a device but has no kernels, or if times that are too late for floating-point numbers come late in it. Of a
    file into which those of several ranks were merged, the trace is that of the first, with all of them in ``merged``;
    ``merged.json/rank1`` names one.

    Args:
        path: the file, which may be one in an archive, as ``find_traces`` gives it.
        progress: called with what is done and the total, in bytes of the file or rows of a database. It starts again
            from zero where a file is read a second time.
        steps: matches the names of the host's ranges that are steps; None for torch's ``ProfilerStep#``. Its first
            group, if it has one, is the step's number.
        with_ranges: whether to find in which range of the host each kernel was launched, which ``compare`` shows.

    Raises:
        TraceError: the file cannot be read, is empty, or is not a trace; or there is no room for temporary files.
    """
    file = with_tables(Path(path))
    inside = container_of(file)
    database, process = (file, None) if inside is None else inside
    if starts_with(database, SQLITE_MAGIC) or database.name in TABLE_FILES:
        from overlap_callbacks.traces.nsys import is_nsys, processes_in, read_nsys  # few files are databases

        if is_nsys(database):
            processes = processes_in(database) if process is None else []
            if len(processes) > 1:
                paths = [database / name for name in processes]
                return _named(
                    database, None, tuple([read_trace(of, progress, steps, with_ranges=with_ranges) for of in paths])
                )
            return read_nsys(database, process, progress, steps, with_ranges=with_ranges)
    if inside is not None and ".json" not in inside[1] and names_in(inside[0]) is None:
        return _read_torch(*inside, progress, steps, with_ranges=with_ranges)
    return _read_torch(file, None, progress, steps, with_ranges=with_ranges)


def _read_torch(
    file: Path, rank: str | None, progress: Progress | None, steps: re.Pattern[str] | None, *, with_ranges: bool
) -> Trace:
    """Read a file of torch's profiler; ``rank`` is the name of one in a merged file."""
    exact = of_host = looked = False
    left_out: list[str] = []
    while True:
        device, host = DeviceEvents(steps, exact=exact, with_ranges=with_ranges), HostEvents(steps, exact=exact)
        stream = EventStream(file, ExactEvent if exact else Event, progress=progress)
        stream.problems += left_out
        has_host = _collect(stream, device, host, exact=exact, of_host=of_host, alone=looked)
        if has_host is None:
            exact = True
        elif not looked and _may_be_merged(device, host):
            looked = True
            alone = bool(has_host) and not device.rows
            ranks, left_out = _read_ranks(file, progress, steps, exact=exact, with_ranges=with_ranges, of_host=alone)
            if ranks:
                return _named(file, rank, ranks)
        elif rank is not None:
            raise TraceError(f"{file} is of one rank: there is no {rank} in it")
        elif device.rows:
            return trace_of_device(stream, device, steps)
        elif has_host:
            return trace_of_host(stream, host, steps)
        else:
            of_host = True


def _read_ranks(
    file: Path, progress: Progress | None, steps: re.Pattern[str] | None, *, exact: bool, with_ranges: bool,
    of_host: bool,
) -> tuple[tuple[Trace, ...], list[str]]:  # fmt: skip
    """The traces of a file into which those of several ranks were merged; none if it is of one.

    Also what is left out of it, in words.
    """
    survey, event = Survey(steps, by_operators=of_host), ExactEvent if exact else Event
    stream = EventStream(file, event, progress=progress)
    for events in stream:
        survey.take(events, stream)
    try:
        ranks = survey.ranks()
    except ValueError as error:
        raise TraceError(
            f"{file} holds traces of several ranks, and nothing tells them apart: {error}; give the files that were "
            "merged"
        ) from None
    left_out = survey.left_out
    if ranks is None:
        return (), left_out
    del survey
    devices = [DeviceEvents(steps, exact=exact, with_ranges=with_ranges) for _ in ranks.names]
    hosts = [HostEvents(steps, exact=exact) for _ in ranks.names]
    stream = EventStream(file, event, progress=progress)
    for events in stream:
        for place, own in ranks.split(events, stream):
            devices[place].collect(own, stream)
            if not ranks.on_device:
                hosts[place].collect(own, stream)
    if not exact and any([collected.inexact for collected in (*devices, *hosts)]):
        return _read_ranks(file, progress, steps, exact=True, with_ranges=with_ranges, of_host=of_host)
    stream.problems += left_out
    documents = [ranks.document(stream, place) for place in range(len(ranks.names))]
    if ranks.on_device:
        found = [trace_of_device(*of_rank, steps) for of_rank in zip(documents, devices, strict=True)]
    else:
        found = [trace_of_host(*of_rank, steps) for of_rank in zip(documents, hosts, strict=True)]
    return tuple(found), left_out


def _named(file: Path, name: str | None, ranks: tuple[Trace, ...]) -> Trace:
    """The rank of a merged file that was asked for; the first, with all of them, if none was."""
    if name is None:
        return dataclasses.replace(ranks[0], merged=ranks)
    for trace in ranks:
        if trace.path.name == name:
            return trace
    raise TraceError(f"{file} holds {', '.join([trace.path.name for trace in ranks[:8]])}, but no {name}")


def _collect(
    stream: EventStream, device: DeviceEvents, host: HostEvents, *, exact: bool, of_host: bool, alone: bool
) -> bool | None:
    """Read a file once: kernels of a device, and operators of the host until there are kernels.

    With ``of_host`` all operators are taken, even if the file seems to be of a device. Reading ends where the file
    seems to be of several ranks, unless it is known to be of one (``alone``).

    Returns:
        Whether ``host`` has all operators. None if floating-point numbers lose nanoseconds of the times.
    """
    has_host = True
    for number, events in enumerate(stream):
        if not alone and _may_be_merged(device, host):
            return has_host
        if number == 0 and not exact and lose_nanoseconds(events):
            return None
        device.collect(events, stream)
        has_host = has_host and not device.rows and (of_host or _may_be_of_host(stream.head, host))
        if has_host:
            host.collect(events, stream)
        events.clear()  # the next events reuse their memory while it is cached
    if not exact and (device.inexact or (has_host and host.inexact)):
        return None
    return has_host


def _may_be_merged(device: DeviceEvents, host: HostEvents) -> bool:
    return may_be_merged(device.places, device.launching, device.stepping | host.stepping)


def _may_be_of_host(head: dict[str, Any], host: HostEvents) -> bool:
    """Whether a file without kernels so far may have none, by the fields before its events.

    Old files lack these fields: they count as a host's until that would take much memory.
    """
    devices = head.get("deviceProperties")
    return not devices and ("deviceProperties" in head or len(host.rows) < _MAX_UNSURE_ROWS)
