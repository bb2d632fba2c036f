"""Analyses many trace files: several processes at once, each with one file in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.traces.analysis import Part, part_of, together
from overlap_callbacks.traces.figures import Analysis
from overlap_callbacks.traces.files import Progress, TraceError, bytes_of
from overlap_callbacks.traces.reading import read_trace

# More processes than this gain little: a disk or a file server is the limit.
MAX_PROCESSES = 8
# Below this many bytes of files, starting a process takes longer than it saves.
_MIN_BYTES = 8 * 2**20


def analyze_files(
    paths: Sequence[str | Path],
    *,
    processes: int | None = None,
    progress: Progress | None = None,
    steps: re.Pattern[str] | None = None,
) -> Analysis:
    """The figures of trace files, each read, computed and forgotten before the next of its process.

    A file that cannot be read is left out, and the analysis says so. Files of ranks come in the order of their ranks.

    Args:
        paths: the files, as ``find_traces`` gives them.
        processes: maximum number of processes; None for one per core, at most eight.
        progress: called with what is done and the total: bytes of a single file, else files.
        steps: finds the names of the ranges of the host that are steps; None for torch's ``ProfilerStep#``.

    Raises:
        TraceError: no file can be read; or a process was killed, e.g. for want of memory.
        ValueError: no file was given.
    """
    if not paths:
        raise ValueError("paths must hold at least one file")
    files = [Path(path) for path in paths]
    if len(files) == 1:
        trace = read_trace(files[0], progress, steps, with_ranges=False)
        return together([part_of(trace, with_turns=False)])
    found: list[Part | str] = [""] * len(files)
    for done, (place, part) in enumerate(_parts(files, processes, steps), start=1):
        found[place] = part
        if progress is not None:
            progress(done, len(files))
    parts = [part for part in found if isinstance(part, Part)]
    failed = [part for part in found if isinstance(part, str)]
    if not parts:
        more = f" (and {len(failed) - 1} more files cannot be read)" if len(failed) > 1 else ""
        raise TraceError(failed[0] + more)
    ranks = [part.collectives.rank for part in parts]
    if None not in ranks and len(set(ranks)) == len(ranks):
        parts.sort(key=lambda part: part.collectives.rank or 0)
    return together(parts, [f"left out: {reason}" for reason in failed])


def _parts(
    files: Sequence[Path], processes: int | None, steps: re.Pattern[str] | None
) -> Iterator[tuple[int, Part | str]]:
    """The place of each file and what an analysis needs of it, or why it cannot be read; in any order."""
    most = min(len(files), processes or min(_cores(), MAX_PROCESSES))
    if most < 2 or (processes is None and sum(map(bytes_of, files)) < _MIN_BYTES):
        for place, file in enumerate(files):
            yield place, _part(file, steps)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    # Not forked: a fork of a process with threads, as of NumPy's, may hang.
    pool = ProcessPoolExecutor(most, multiprocessing.get_context("spawn"), initializer=_set_rules, initargs=(_rules(),))
    try:
        places = {pool.submit(_part, file, steps): place for place, file in enumerate(files)}
        for future in as_completed(places):
            yield places.pop(future), future.result()
    except BrokenProcessPool:
        raise TraceError(
            "a process that read traces was killed, perhaps for want of memory: give fewer files at a time"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _part(file: Path, steps: re.Pattern[str] | None) -> Part | str:
    try:
        return part_of(read_trace(file, steps=steps, with_ranges=False))
    except TraceError as error:
        return str(error)


_RULES = ("communication_patterns", "not_communication", "collectives", "families")


def _rules() -> dict[str, list[Any]]:
    """The rules for names, which the user may have extended in this process."""
    return {name: getattr(name_rules, name) for name in _RULES}


def _set_rules(rules: dict[str, list[Any]]) -> None:
    """Give a process the rules for names of the one that starts it."""
    for name, rows in rules.items():
        getattr(name_rules, name)[:] = rows


def _cores() -> int:
    count: Callable[[], int | None] = getattr(os, "process_cpu_count", os.cpu_count)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return count() or 1
