"""Reads a trace file of any kind."""

from __future__ import annotations

import re
from pathlib import Path

from overlap_callbacks.traces.files import SQLITE_MAGIC, Progress, container_of, starts_with
from overlap_callbacks.traces.kineto import Trace, read_kineto


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
    file = Path(path)
    inside = container_of(file)
    if starts_with(file if inside is None else inside[0], SQLITE_MAGIC):
        from overlap_callbacks.traces.nsys import is_nsys, read_nsys  # few files are databases

        if is_nsys(file):
            return read_nsys(file, None, progress, steps)
        if inside is not None and inside[1].isdecimal() and is_nsys(inside[0]):
            return read_nsys(inside[0], int(inside[1]), progress, steps, file)
    return read_kineto(file, progress, steps)
