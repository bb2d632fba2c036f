"""Makes a trace of the events of a CPU job: the operators of the training thread are its kernels."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.host import host_kernels, uncounted_note
from overlap_callbacks.analysis.kernels.table import KernelTableBuilder
from overlap_callbacks.traces.collectives import Collectives
from overlap_callbacks.traces.device_trace import set_times
from overlap_callbacks.traces.doubts import KernelFacts, foreign_events
from overlap_callbacks.traces.files import TraceError
from overlap_callbacks.traces.host_events import HostEvents
from overlap_callbacks.traces.steps import bounds_of, steps_of
from overlap_callbacks.traces.stream import EventStream
from overlap_callbacks.traces.suspects import MAX_SUSPECTS, likeness
from overlap_callbacks.traces.trace import Trace, trace_with_head


def trace_of_host(path: Path, collected: HostEvents, stream: EventStream, pattern: re.Pattern[str] | None) -> Trace:
    """The trace of a file without kernels of a device: the operators of the training thread are its compute.

    Raises:
        TraceError: the file is not one of a CPU job either.
    """
    refuse(path, collected, stream)
    problems = list(stream.problems)
    steps = steps_of(collected.notes, pattern)
    for rows, times in ((collected.rows, collected.times), (collected.ranges, collected.range_times)):
        rows.clean_names()
        set_times(rows, times, problems)  # a row without a time has no length, and so drops out
    host = _operators(collected)
    problems += host_problems(collected, crossing(host.intervals))
    kernels = host_kernels(host, collected.ranges, bounds_of(steps))
    if note := uncounted_note(kernels.uncounted):
        problems.append(note)
    device = np.zeros(len(kernels), dtype=np.int64)
    facts = msgspec.structs.replace(KernelFacts.of(kernels), suspects=lambda: likely_ranges(collected))
    return trace_with_head(
        path, stream.head, facts, kernels, device, steps, Collectives.none(), problems,
        is_cut=stream.is_cut, on_host=True,
    )  # fmt: skip


def refuse(path: Path, collected: HostEvents, stream: EventStream) -> None:
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
    if collected.num_taken or collected.num_held:
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


def host_problems(collected: HostEvents, num_crossing: int) -> Iterator[str]:
    """What is doubtful about a CPU job, in words.

    Args:
        collected: its events.
        num_crossing: see ``crossing``.
    """
    yield "no kernels of a device: operators of the training thread count as compute"
    if collected.enqueued:
        yield "the file has NCCL's collectives but no kernels of their device: they are left out"
    if num_crossing:
        yield f"{num_crossing} operators of the training thread overlap without nesting: their self time is not sure"


def likely_ranges(collected: HostEvents) -> list[str]:
    """The ranges of the host that sound most like communication."""
    return sorted(filter(likeness, collected.other_ranges), key=lambda name: (-likeness(name), name))[:MAX_SUSPECTS]


def training_thread(collected: HostEvents, num_operators: Sequence[int]) -> int:
    """The training thread: the thread that has the steps, else the one with the most operators; -1 for none.

    Args:
        collected: the events.
        num_operators: of each thread, by its number.
    """
    of_steps = Counter(note.thread for note in collected.notes).most_common(1)
    if of_steps:
        return collected.threads.get(of_steps[0][0], -1)
    return int(np.argmax(num_operators)) if len(num_operators) else -1


def _operators(collected: HostEvents) -> KernelTableBuilder:
    """The operators of the training thread."""
    of_rows = np.array(collected.row_threads, dtype=np.int64)
    training = training_thread(collected, np.bincount(of_rows).tolist() if len(of_rows) else ())
    host = KernelTableBuilder()
    host.names = collected.rows.names
    mine = of_rows == training
    for name in ("start", "end", "name", "kind", "correlation", "shape", "collective"):
        column = getattr(collected.rows, name)
        if len(mine):
            setattr(host, name, array(column.typecode, np.array(column)[mine].tobytes()))
    return host


def crossing(calls: Intervals) -> int:
    """How many calls of one thread end after the call in which they began."""
    order = np.lexsort((-calls.end_ns, calls.start_ns))
    start, end = calls.start_ns[order], calls.end_ns[order]
    latest = np.maximum.accumulate(end)[:-1]
    return int(((start[1:] < latest) & (end[1:] > latest)).sum())
