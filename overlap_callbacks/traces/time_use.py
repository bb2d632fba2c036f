"""Computes what each device of a trace does with its time: see ``device_time`` for what the figures mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlap_callbacks.analysis.intervals import Intervals, distinct_values
from overlap_callbacks.analysis.kernels.critical_path import CriticalPaths, LastRows, Part, Path
from overlap_callbacks.analysis.kernels.idle import TimeUse, TimeUses
from overlap_callbacks.analysis.kernels.queue import queues
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.traces.device_time import (
    CriticalPath,
    DeviceTime,
    HostLimit,
    PathKernel,
    StreamQueue,
    Utilisation,
)
from overlap_callbacks.traces.pieces import Device, Piece, Span
from overlap_callbacks.traces.trace import Launches

# Kernels of the table of a path. There may be thousands of names.
MAX_PATH_KERNELS = 10
UTILISATION_PARTS = 120
# From this share of the time on, waiting for launches is what limits a device.
LAUNCH_BOUND_FRACTION = 0.1
# Gaps shorter than this are those between launches; in longer ones the host did something else.
_SHORT_GAP_NS = 1_000_000


class TimeSums:
    """What one device of a trace does with its time, added up over the pieces of that time.

    Of a file that is cut off, what needs all kernels is left out: steps, paths, and whether the host keeps the device
    waiting.

    Args:
        device: the device.

    Attributes:
        time: what the device did, in the whole file and in each step.
        paths: the critical path of each step.
        host_limit: None if the file has no launches.
        utilisation: None without kernels.
    """

    def __init__(self, device: Device) -> None:
        self._device, trace = device, device.trace
        self._steps, self._is_cut = trace.steps, trace.is_cut
        self._whole, self._gaps = TimeUse.nothing(), _Gaps()
        self._of_steps: list[DeviceTime] = []
        self._paths: list[CriticalPath] = []
        # Where the time of the next step begins on the device.
        self._until_ns = trace.steps[device.steps[0]].start_ns if device.steps else 0
        self._parts = Intervals.empty() if device.ran is None else _equal_parts(device.ran)
        self._compute_ns, self._both_ns = (np.zeros(len(self._parts), dtype=np.int64) for _ in range(2))

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        kernels, before = piece.trace.kernels, piece.before
        ran_ns = kernels.intervals.end_ns[kernels.intervals.durations_ns > 0]
        if not len(ran_ns):
            return
        launches = piece.trace.launches
        unknown = np.full(len(kernels), -1, dtype=np.int64)
        launched_ns = unknown if launches is None else launches.launched_ns
        span = (piece.begin_ns, int(ran_ns.max()))
        spans = {} if self._is_cut else self._step_spans(kernels)
        whole, *of_steps = TimeUses(kernels, launched_ns).of_each([span, *spans.values()])
        self._whole += whole
        self._gaps.add(whole.host_gaps_ns)
        numbers = [self._steps[i].number for i in spans]
        self._of_steps += [self._device_time(*step) for step in zip(numbers, of_steps, strict=True)]
        compute, comm = kernels.of(Kind.COMPUTE), kernels.of(Kind.COMMUNICATION)
        self._compute_ns += self._parts.covered_ns(compute)
        self._both_ns += self._parts.covered_ns(compute.with_others(comm))
        if launches is not None and not self._is_cut:
            wanted: list[tuple[int | None, tuple[int, int]]] = list(zip(numbers, spans.values(), strict=True))
            # A file without steps counts as one, but its path is not worked out over pieces.
            if not spans and piece.is_whole:
                wanted = [(None, span)]
            self._paths += _critical_paths(wanted, kernels, launches, before)

    @property
    def time(self) -> tuple[DeviceTime, ...]:
        """What the device did, in the whole file and in each step; empty if nothing ran."""
        return () if self._device.ran is None else (self._device_time(None, self._whole), *self._of_steps)

    @property
    def paths(self) -> tuple[CriticalPath, ...]:
        """The critical path of each step, or of a file without steps."""
        return tuple(self._paths)

    @property
    def queues(self) -> tuple[StreamQueue, ...]:
        """The queue of each stream."""
        launches = self._device.trace.launches
        if self._device.ran is None or launches is None or not self._device.launches_known:
            return ()
        found = queues(self._device.trace.kernels, launches.launched_ns)
        return tuple(
            [
                StreamQueue(
                    stream=launches.streams[queue.lane],
                    launches=queue.num_launched,
                    longest=queue.longest,
                    mean=queue.mean,
                    delay_ms=queue.delay_ns / 1e6,
                )
                for queue in sorted(found, key=lambda queue: -queue.num_launched)
            ]
        )

    @property
    def host_limit(self) -> HostLimit | None:
        """Whether the host keeps the device waiting; None if the file does not tell."""
        device, launches = self._device, self._device.trace.launches
        if device.ran is None or launches is None or not device.launches_known or self._is_cut:
            return None
        late_ns = self._whole.host_ns + self._whole.launch_ns
        fraction = late_ns / self._whole.span_ns if self._whole.span_ns else 0.0
        kernels = device.trace.kernels
        launched_ns = np.sort(launches.launched_ns[launches.launched_ns >= 0])
        intervals_ns = np.diff(launched_ns)
        intervals_ns = intervals_ns[intervals_ns > 0]
        return HostLimit(
            launch_bound=fraction >= LAUNCH_BOUND_FRACTION and 2 * self._gaps.short_ns > late_ns,
            idle_fraction=fraction,
            gaps=self._gaps.number,
            short_gaps_ms=self._gaps.short_ns / 1e6,
            longest_gap_ms=self._gaps.longest_ns / 1e6,
            kernel_us=_median_us(kernels.intervals.durations_ns[kernels.kind == Kind.COMPUTE]),
            launch_interval_us=_median_us(intervals_ns),
        )

    @property
    def utilisation(self) -> Utilisation | None:
        """Shares of equal parts of the span; None if nothing ran."""
        ran = self._device.ran
        if ran is None:
            return None
        lengths = np.maximum(self._parts.durations_ns, 1)
        return Utilisation(
            part_ms=(ran.end_ns - ran.start_ns) / UTILISATION_PARTS / 1e6,
            compute=tuple((self._compute_ns / lengths).tolist()),
            exposed_comm=tuple(((self._both_ns - self._compute_ns) / lengths).tolist()),
        )

    def _step_spans(self, kernels: KernelTable) -> dict[int, tuple[int, int]]:
        """Start and end on the device of the steps of a piece, by their indices.

        A step that ends before an earlier one has none.
        """
        spans: dict[int, tuple[int, int]] = {}
        in_steps = kernels.step >= 0
        ended_ns = np.full(len(self._steps), np.iinfo(np.int64).min)
        np.maximum.at(ended_ns, kernels.step[in_steps], kernels.intervals.end_ns[in_steps])
        for i in distinct_values(kernels.step[in_steps]).tolist():
            ended = int(ended_ns[i])
            if ended > self._until_ns:
                spans[i] = (self._until_ns, ended)
                self._until_ns = ended
        return spans

    def _device_time(self, step: int | None, use: TimeUse) -> DeviceTime:
        def cause(ns: int) -> float | None:
            return ns / 1e6 if self._device.launches_known else None

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


class _Gaps:
    """The gaps in which the device waits for the host.

    Attributes:
        number: of gaps.
        short_ns: time of those shorter than a millisecond.
        longest_ns: the longest.
    """

    def __init__(self) -> None:
        self.number = self.short_ns = self.longest_ns = 0

    def add(self, gaps_ns: Indices) -> None:
        """Add gaps by their lengths."""
        self.number += len(gaps_ns)
        self.short_ns += int(gaps_ns[gaps_ns < _SHORT_GAP_NS].sum())
        self.longest_ns = max(self.longest_ns, int(gaps_ns.max(initial=0)))


def _critical_paths(
    spans: Sequence[tuple[int | None, tuple[int, int]]], kernels: KernelTable, launches: Launches, before: LastRows
) -> tuple[CriticalPath, ...]:
    """The critical path of each span, with the number of its step; without those in which nothing ended."""
    paths = CriticalPaths(kernels, launches.launched_ns, launches.waits, before)
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


def _median_us(times_ns: Indices) -> float | None:
    return float(np.median(times_ns)) / 1e3 if len(times_ns) else None


def _equal_parts(span: Span) -> Intervals:
    """Equal parts of a span. Their bounds are whole nanoseconds."""
    begin, end = span
    bounds = begin + (end - begin) * np.arange(UTILISATION_PARTS + 1, dtype=object) // UTILISATION_PARTS
    bounds = bounds.astype(np.int64)
    return Intervals(bounds[:-1], bounds[1:])
