"""Reads a trace file of any kind into a ``Trace``, with the same table of kernels that a live profile gives.

A file of ``torch.profiler`` without kernels of a device is a CPU job, whose kernels are the operators of the host.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from overlap_callbacks.traces.archives import container_of, starts_with
from overlap_callbacks.traces.device_events import DeviceEvents
from overlap_callbacks.traces.device_trace import trace_of_device
from overlap_callbacks.traces.events import Event, ExactEvent, lose_nanoseconds
from overlap_callbacks.traces.files import SQLITE_MAGIC, TABLE_FILES, Progress, with_tables
from overlap_callbacks.traces.host import HostEvents, trace_of_host
from overlap_callbacks.traces.stream import EventStream
from overlap_callbacks.traces.trace import Trace

# Operators of the host that are kept of a file that may have kernels later.
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
    be of a device but has no kernels, or if times that are too late for floating-point numbers come late in it.

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
    database, process = (
        (file, None) if inside is None else (inside[0], int(inside[1]) if inside[1].isdecimal() else None)
    )
    if starts_with(database, SQLITE_MAGIC) or database.name in TABLE_FILES:
        from overlap_callbacks.traces.nsys import is_nsys, read_nsys  # few files are databases

        if is_nsys(database):
            return read_nsys(database, process, progress, steps, with_ranges=with_ranges)
    exact = of_host = False
    while True:
        device, host = DeviceEvents(steps, exact=exact, with_ranges=with_ranges), HostEvents(steps, exact=exact)
        stream = EventStream(file, ExactEvent if exact else Event, progress=progress)
        has_host = _collect(stream, device, host, exact=exact, of_host=of_host)
        if has_host is None:
            exact = True
        elif device.rows:
            return trace_of_device(stream, device, steps)
        elif has_host:
            return trace_of_host(stream, host, steps)
        else:
            of_host = True


def _collect(stream: EventStream, device: DeviceEvents, host: HostEvents, *, exact: bool, of_host: bool) -> bool | None:
    """Read a file once: kernels of a device, and operators of the host until there are kernels.

    With ``of_host`` all operators are taken, even if the file seems to be of a device.

    Returns:
        Whether ``host`` has all operators. None if floating-point numbers lose nanoseconds of the times.
    """
    has_host = True
    for number, events in enumerate(stream):
        if number == 0 and not exact and lose_nanoseconds(events):
            return None
        device.collect(events, stream)
        has_host = has_host and not device.rows and (of_host or _may_be_of_host(stream.head, host))
        if has_host:
            host.collect(events, stream)
        events.clear()  # their memory, which the core's cache still holds, is that of the next ones
    if not exact and (device.inexact or (has_host and host.inexact)):
        return None
    return has_host


def _may_be_of_host(head: dict[str, Any], host: HostEvents) -> bool:
    """Whether a file without kernels so far may have none, by the fields before its events.

    Old files do not tell: they count as a host's until that would take much memory.
    """
    devices = head.get("deviceProperties")
    return not devices and ("deviceProperties" in head or len(host.rows) < _MAX_UNSURE_ROWS)
