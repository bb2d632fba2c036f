"""Computes what each device of a trace does with its time: see ``device_time`` for what the figures mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.distinct import distinct_values
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.attribution import Calls
from overlap_callbacks.analysis.kernels.critical_path import CriticalPaths, Part, Path
from overlap_callbacks.analysis.kernels.idle import TimeUse, TimeUses
from overlap_callbacks.analysis.kernels.queue import queues
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.traces.device_time import (
    CriticalPath,
    DeviceTime,
    HostLimit,
    PathKernel,
    StreamQueue,
    TopKernel,
    Utilisation,
)
from overlap_callbacks.traces.kineto import Trace
from overlap_callbacks.traces.launches import Launches

# Kernels of the table of a device, and of a path. There may be thousands of names.
MAX_KERNELS, MAX_PATH_KERNELS = 100, 10
UTILISATION_PARTS = 120
# From this share of the time on, waiting for launches is what limits a device.
LAUNCH_BOUND_FRACTION = 0.1
# Gaps shorter than this are those between launches; in longer ones the host did something else.
_SHORT_GAP_NS = 1_000_000


class TimeFigures:
    """The figures of one device of a trace.

    Of a file that is cut off, what needs all kernels is left out: steps, paths, and whether the host keeps the device
    waiting.

    Attributes:
        time: what the device did, in the whole file and in each step.
        paths: the critical path of each step.
        queues: of each stream.
        host_limit: None if the file has no launches.
        utilisation: None without kernels.
    """

    def __init__(self, trace: Trace, steps: Sequence[int]) -> None:
        kernels = trace.kernels
        self.time: tuple[DeviceTime, ...] = ()
        self.paths: tuple[CriticalPath, ...] = ()
        self.queues: tuple[StreamQueue, ...] = ()
        self.host_limit: HostLimit | None = None
        self.utilisation: Utilisation | None = None
        ran = kernels.intervals[kernels.intervals.durations_ns > 0]
        if not len(ran):
            return
        launches = trace.launches or Launches.none(len(kernels))
        begin, end = int(ran.start_ns.min()), int(ran.end_ns.max())
        self.utilisation = _utilisation(kernels, begin, end)
        spans = {} if trace.is_cut else step_spans(trace, steps)
        numbers = [None, *[trace.steps[i].number for i in spans]]
        whole, *of_steps = TimeUses(kernels, launches.launched_ns).of_each([(begin, end), *spans.values()])
        known = launches.known
        self.time = tuple(
            [_device_time(step, use, known) for step, use in zip(numbers, (whole, *of_steps), strict=True)]
        )
        if known:
            self.queues = _queues(kernels, launches)
            if not trace.is_cut:
                self.host_limit = _host_limit(kernels, launches, whole)
        if not trace.on_host and not trace.is_cut:
            wanted = [(trace.steps[i].number, span) for i, span in spans.items()]
            self.paths = _critical_paths(wanted or [(None, (begin, end))], kernels, launches)


def step_spans(trace: Trace, steps: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Start and end of steps on the device, by their indices. A step that ends before an earlier one has none.

    Args:
        trace: of one device.
        steps: indices of the steps that have kernels, ascending.
    """
    spans: dict[int, tuple[int, int]] = {}
    kernels = trace.kernels
    until = trace.steps[steps[0]].start_ns if steps else 0
    in_steps = kernels.step >= 0
    ended_ns = np.full(len(trace.steps), np.iinfo(np.int64).min)
    np.maximum.at(ended_ns, kernels.step[in_steps], kernels.intervals.end_ns[in_steps])
    for i in steps:
        ended = int(ended_ns[i])
        if ended > until:
            spans[i] = (until, ended)
            until = ended
    return spans


def top_kernels(kernels: KernelTable) -> tuple[TopKernel, ...]:
    """The kernels and collectives with the most time first; ``MAX_KERNELS`` at most."""
    calls = Calls.of(kernels)
    communicates = calls.kind == Kind.COMMUNICATION
    rows = np.flatnonzero(communicates | (calls.kind == Kind.COMPUTE))
    beside = np.where(
        communicates, calls.covered_ns(kernels.of(Kind.COMPUTE)), calls.covered_ns(kernels.of(Kind.COMMUNICATION))
    )
    # A name may stand for kernels of both kinds.
    key = kernels.name[calls.row[rows]] * 2 + communicates[rows]
    size = 2 * len(kernels.names)
    count = np.bincount(key, minlength=size)
    time_ns = np.bincount(key, weights=calls.duration_ns[rows], minlength=size)
    beside_ns = np.bincount(key, weights=beside[rows], minlength=size)
    longest_ns = np.zeros(size, dtype=np.int64)
    np.maximum.at(longest_ns, key, calls.duration_ns[rows])
    total_ns = float(time_ns.sum())
    order = np.argsort(-time_ns, kind="stable")[:MAX_KERNELS]
    found = []
    for i in order[count[order] > 0].tolist():
        name, communication = kernels.names[i // 2], bool(i % 2)
        family = name_rules.collective_of(name) if communication else name_rules.family_of(name)
        found.append(
            TopKernel(
                name=name,
                family=family,
                communication=communication,
                calls=int(count[i]),
                time_ms=float(time_ns[i]) / 1e6,
                share=float(time_ns[i]) / total_ns if total_ns else 0.0,
                longest_ms=int(longest_ns[i]) / 1e6,
                beside_ms=float(beside_ns[i]) / 1e6,
            )
        )
    return tuple(found)


def _device_time(step: int | None, use: TimeUse, launches: bool) -> DeviceTime:
    def cause(ns: int) -> float | None:
        return ns / 1e6 if launches else None

    return DeviceTime(
        step=step,
        span_ms=use.span_ns / 1e6,
        compute_ms=use.compute_ns / 1e6,
        exposed_comm_ms=use.exposed_comm_ns / 1e6,
        copy_ms=use.copy_ns / 1e6,
        idle_ms=use.idle_ns / 1e6,
        idle_host_ms=cause(use.host_ns),
        idle_launch_ms=cause(use.launch_ns),
        idle_other_ms=cause(use.other_ns),
    )


def _critical_paths(
    spans: Sequence[tuple[int | None, tuple[int, int]]], kernels: KernelTable, launches: Launches
) -> tuple[CriticalPath, ...]:
    """The critical path of each span, with the number of its step; without those in which nothing ended."""
    paths = CriticalPaths(kernels, launches.launched_ns, launches.waits)
    found = [(step, paths.of(*span)) for step, span in spans]
    return tuple([_critical_path(step, path, kernels, launches) for step, path in found if path is not None])


def _critical_path(step: int | None, path: Path, kernels: KernelTable, launches: Launches) -> CriticalPath:
    # Without the host's waits, its time on the path may be that of what it waited for.
    is_known = launches.records_waits or not path.parts_ns[Part.HOST]
    kind = kernels.kind[path.rows]
    runs = kind != Kind.COPY
    # A name may stand for kernels of both kinds.
    key = kernels.name[path.rows][runs] * 2 + (kind[runs] == Kind.COMMUNICATION)
    calls, time_ns = np.bincount(key), np.bincount(key, weights=path.rows_ns[runs])
    found = np.flatnonzero(calls)
    longest = found[np.argsort(-time_ns[found], kind="stable")[:MAX_PATH_KERNELS]].tolist()
    return CriticalPath(
        step=step,
        length_ms=path.length_ns / 1e6,
        compute_ms=path.parts_ns[Part.COMPUTE] / 1e6,
        comm_ms=path.parts_ns[Part.COMMUNICATION] / 1e6,
        copy_ms=path.parts_ns[Part.COPY] / 1e6,
        launch_ms=path.parts_ns[Part.LAUNCH] / 1e6,
        host_ms=path.parts_ns[Part.HOST] / 1e6,
        other_ms=path.parts_ns[Part.OTHER] / 1e6,
        at_most_compute_ms=path.at_most_ns[Part.COMPUTE] / 1e6 if is_known else None,
        at_most_comm_ms=path.at_most_ns[Part.COMMUNICATION] / 1e6 if is_known else None,
        at_most_host_ms=path.at_most_ns[Part.HOST] / 1e6 if is_known else None,
        kernels=tuple(
            [
                PathKernel(
                    name=kernels.names[i // 2],
                    communication=bool(i % 2),
                    calls=int(calls[i]),
                    time_ms=float(time_ns[i]) / 1e6,
                )
                for i in longest
            ]
        ),
    )


def _queues(kernels: KernelTable, launches: Launches) -> tuple[StreamQueue, ...]:
    return tuple(
        [
            StreamQueue(
                stream=launches.streams[queue.lane] if queue.lane < len(launches.streams) else str(queue.lane),
                launches=queue.num_launched,
                longest=queue.longest,
                mean=queue.mean,
                delay_ms=queue.delay_ns / 1e6,
            )
            for queue in sorted(queues(kernels, launches.launched_ns), key=lambda queue: -queue.num_launched)
        ]
    )


def _host_limit(kernels: KernelTable, launches: Launches, whole: TimeUse) -> HostLimit:
    gaps_ns = whole.host_gaps_ns
    short_ns, late_ns = int(gaps_ns[gaps_ns < _SHORT_GAP_NS].sum()), whole.host_ns + whole.launch_ns
    fraction = late_ns / whole.span_ns if whole.span_ns else 0.0
    compute_ns = kernels.of(Kind.COMPUTE).durations_ns
    launched_ns = distinct_values(launches.launched_ns[launches.launched_ns >= 0])
    return HostLimit(
        launch_bound=fraction >= LAUNCH_BOUND_FRACTION and 2 * short_ns > late_ns,
        idle_fraction=fraction,
        gaps=len(gaps_ns),
        short_gaps_ms=short_ns / 1e6,
        longest_gap_ms=int(gaps_ns.max(initial=0)) / 1e6,
        kernel_us=float(np.median(compute_ns)) / 1e3 if len(compute_ns) else None,
        launch_interval_us=float(np.median(np.diff(launched_ns))) / 1e3 if len(launched_ns) > 1 else None,
    )


def _utilisation(kernels: KernelTable, begin: int, end: int) -> Utilisation:
    """Shares of equal parts of the span. Bounds of the parts are whole nanoseconds."""
    bounds = begin + (end - begin) * np.arange(UTILISATION_PARTS + 1, dtype=object) // UTILISATION_PARTS
    bounds = bounds.astype(np.int64)
    parts = Intervals(bounds[:-1], bounds[1:])
    compute, comm = kernels.of(Kind.COMPUTE), kernels.of(Kind.COMMUNICATION)
    both = Intervals(np.concatenate((compute.start_ns, comm.start_ns)), np.concatenate((compute.end_ns, comm.end_ns)))
    compute_ns, both_ns = parts.covered_ns(compute), parts.covered_ns(both)
    lengths = np.maximum(parts.durations_ns, 1)
    return Utilisation(
        part_ms=(end - begin) / UTILISATION_PARTS / 1e6,
        compute=tuple((compute_ns / lengths).tolist()),
        exposed_comm=tuple(((both_ns - compute_ns) / lengths).tolist()),
    )
