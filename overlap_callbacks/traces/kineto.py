"""Reads a Kineto trace file into a ``Trace``, with the same table of kernels that a live profile gives.

A file without kernels of a device is treated as a CPU job, whose kernels are the operators of the host.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from overlap_callbacks.traces.device_events import DeviceEvents
from overlap_callbacks.traces.device_trace import trace_of_device
from overlap_callbacks.traces.events import Event, ExactEvent
from overlap_callbacks.traces.files import Progress
from overlap_callbacks.traces.host_events import HostEvents
from overlap_callbacks.traces.host_trace import trace_of_host
from overlap_callbacks.traces.spilling import HostSpilling, Spilling
from overlap_callbacks.traces.stream import EventStream
from overlap_callbacks.traces.times import lose_nanoseconds
from overlap_callbacks.traces.trace import Trace

if TYPE_CHECKING:
    from overlap_callbacks.traces.long.columns import Folder
    from overlap_callbacks.traces.long.spill import HostSpill, Spill
    from overlap_callbacks.traces.long.trace import LongTrace
# Operators of the host that are kept of a file that may have kernels later.
_MAX_UNSURE_ROWS = 2**12


def read_kineto(
    path: str | Path,
    progress: Progress | None = None,
    steps: re.Pattern[str] | None = None,
    folder: Folder | None = None,
    *,
    with_ranges: bool = False,
) -> Trace | LongTrace:
    """Read a trace file of ``torch.profiler``, of any version: ``.json``, gzipped or not.

    A file is read twice if it seems to be of a device but has no kernels, or if times that are too great for
    floating-point numbers come late.

    Args:
        path: the file.
        progress: called with the number of bytes read so far and the number of bytes of the file. It starts again from
            zero if the file is read a second time.
        steps: finds the names of the ranges of the host that are steps; None for torch's ``ProfilerStep#``.
        folder: takes the events of a file that is too long for memory, and is needed as long as its trace is. None to
            hold any file in memory, which is then bounded by the number of its kernels.
        with_ranges: whether to keep of such a file in which ranges of the host kernels were launched.

    Raises:
        TraceError: the file cannot be read, is empty, or is not a trace; or there is no room in ``folder``.
    """
    file = Path(path)
    exact = of_host = False
    while True:
        collected = _collect(file, progress, steps, folder, with_ranges, exact=exact, of_host=of_host)
        if collected is None:
            exact = True
            continue
        device, host, stream, spill, host_spill = collected
        if spill is not None:
            from overlap_callbacks.traces.long.trace import long_trace

            return long_trace(file, device, spill, stream.problems, stream.head, is_cut=stream.is_cut, steps=steps)
        if device.num_rows:
            return trace_of_device(file, device, stream.problems, stream.head, is_cut=stream.is_cut, steps=steps)
        if host_spill is not None and host is not None:
            from overlap_callbacks.traces.long.host import long_host_trace

            return long_host_trace(file, host, host_spill, stream, steps)
        if host is not None:
            return trace_of_host(file, host, stream, steps)
        of_host = True


class _Collected(NamedTuple):
    """What was read of a file.

    Attributes:
        device: kernels of a device.
        host: operators of the host; None of a file with a device.
        stream: the file.
        spill: the files with the kernels; None if these are in memory.
        host_spill: the files with the operators; None if these are in memory.
    """

    device: DeviceEvents
    host: HostEvents | None
    stream: EventStream
    spill: Spill | None
    host_spill: HostSpill | None


def _collect(
    path: Path,
    progress: Progress | None,
    steps: re.Pattern[str] | None,
    folder: Folder | None,
    with_ranges: bool,
    *,
    exact: bool,
    of_host: bool,
) -> _Collected | None:
    """Read a file once, for the kernels of a device, and until there are any for the operators of the host too.

    Args:
        path: the file.
        progress: as for ``read_kineto``.
        steps: finds the names of steps.
        folder: takes the events of a file that is too long for memory; None for no such file.
        with_ranges: as for ``read_kineto``.
        exact: take times as text.
        of_host: read all operators, even of a file that seems to be of a device.

    Returns:
        None if times lose nanoseconds as floating-point numbers.
    """
    device, host = DeviceEvents(steps, exact=exact), HostEvents(steps, exact=exact)
    wanted = True
    spilling, of_operators = (
        (None, None) if folder is None else (Spilling(folder, with_ranges=with_ranges), HostSpilling(folder))
    )
    stream = EventStream(path, ExactEvent if exact else Event, progress=progress)
    for number, events in enumerate(stream):
        if number == 0 and not exact and lose_nanoseconds(events):
            return None
        device.collect(events, stream.args_of)
        if wanted and (device.num_rows or not (of_host or _may_be_of_host(stream.head, host))):
            wanted, host = False, HostEvents(steps)  # what it has is not needed
        if wanted:
            host.collect(events, stream.args_of)
            if of_operators is not None:
                of_operators.look(host)
        events.clear()  # their memory, which the core's cache still holds, is that of the next ones
        if spilling is not None:
            spilling.look(device)
    if not exact and (device.inexact or host.inexact):
        return None
    return _Collected(
        device,
        host if wanted else None,
        stream,
        None if spilling is None else spilling.finish(device),
        None if of_operators is None or not wanted else of_operators.finish(host),
    )


def _may_be_of_host(head: dict[str, Any], host: HostEvents) -> bool:
    """Whether a file of which no kernel was read yet may have none, by what stands before its events.

    Old files do not tell. They are held to be of a host until this would take much memory.
    """
    devices = head.get("deviceProperties")
    return not devices and ("deviceProperties" in head or host.num_taken + len(host.rows) < _MAX_UNSURE_ROWS)
