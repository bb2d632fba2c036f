"""Reads a trace file of any kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from overlap_callbacks.traces.analysis import Part, devices_of, part_of_devices
from overlap_callbacks.traces.files import SQLITE_MAGIC, Progress, container_of, starts_with
from overlap_callbacks.traces.kineto import read_kineto
from overlap_callbacks.traces.long.columns import Folder
from overlap_callbacks.traces.pieces import Device
from overlap_callbacks.traces.trace import Trace

if TYPE_CHECKING:
    from overlap_callbacks.traces.long.trace import LongTrace


def read_trace(path: str | Path, progress: Progress | None = None, steps: re.Pattern[str] | None = None) -> Trace:
    """Read a trace file of ``torch.profiler`` (.json, gzipped or not, or in an archive) or Nsight Systems (.sqlite).

    Memory is bounded by the number of kernels in the file, not by its size.

    Args:
        path: the file. What ``find_traces`` gives for what is in an archive is a path too.
        progress: called with what is done and the total, in bytes of the file or rows of a database. It starts again
            from zero where a file is read a second time.
        steps: finds the names of the ranges of the host that are steps; None for torch's ``ProfilerStep#``. Its first
            group, if it has one, is the step's number.

    Raises:
        TraceError: the file cannot be read, is empty, or is not a trace.
    """
    found = _read(Path(path), None, progress, steps)
    assert isinstance(found, Trace)  # without a folder, nothing is too long
    return found


def read_part(
    path: str | Path,
    progress: Progress | None = None,
    steps: re.Pattern[str] | None = None,
    *,
    with_turns: bool = True,
) -> Part:
    """What an analysis needs of a trace file. Of a file that is too long for memory, the events lie in files meanwhile.

    Args:
        path: the file, as for ``read_trace``.
        progress: as for ``read_trace``.
        steps: as for ``read_trace``.
        with_turns: whether other files are compared with it.

    Raises:
        TraceError: the file cannot be read, is empty, or is not a trace.
    """
    with Folder() as folder:
        found = read_devices(path, folder, progress, steps)
        return part_of_devices(found.head, found.devices, with_turns=with_turns)


class Devices(NamedTuple):
    """A trace, with any rows or none, and its devices."""

    head: Trace
    devices: Sequence[Device]


def read_devices(
    path: str | Path,
    folder: Folder,
    progress: Progress | None = None,
    steps: re.Pattern[str] | None = None,
    *,
    with_ranges: bool = False,
) -> Devices:
    """The devices of a trace file.

    Args:
        path: the file, as for ``read_trace``.
        folder: takes the events of a file that is too long for memory, and is needed as long as its devices are.
        progress: as for ``read_trace``.
        steps: as for ``read_trace``.
        with_ranges: whether to keep of such a file in which ranges of the host kernels were launched.

    Raises:
        TraceError: the file cannot be read, is empty, or is not a trace.
    """
    found = _read(Path(path), folder, progress, steps, with_ranges=with_ranges)
    if isinstance(found, Trace):
        return Devices(found, devices_of(found))
    return Devices(found.head, found.devices)


def _read(
    file: Path,
    folder: Folder | None,
    progress: Progress | None,
    steps: re.Pattern[str] | None,
    *,
    with_ranges: bool = False,
) -> Trace | LongTrace:
    inside = container_of(file)
    if starts_with(file if inside is None else inside[0], SQLITE_MAGIC):
        from overlap_callbacks.traces.nsys import is_nsys, read_nsys  # few files are databases

        database, process = file, None
        if inside is not None and inside[1].isdecimal() and is_nsys(inside[0]):
            database, process = inside[0], int(inside[1])
        if is_nsys(database):
            return read_nsys(database, process, progress, steps, file, folder, with_ranges=with_ranges)
    return read_kineto(file, progress, steps, folder, with_ranges=with_ranges)
