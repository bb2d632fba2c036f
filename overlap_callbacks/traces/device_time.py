"""How a device of a trace spends its time: idle time, critical paths, queues, utilisation."""

from __future__ import annotations

import msgspec
import numpy as np

from overlap_callbacks.analysis.intervals import Intervals, distinct_values
from overlap_callbacks.analysis.kernels.device_time import CriticalPaths, Path, TimeUse, TimeUses
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.traces.pieces import Device, Piece, Span
from overlap_callbacks.traces.trace import Launches

# Limit of kernels in the table of a path; there may be thousands of names.
MAX_PATH_KERNELS = 10
UTILISATION_PARTS = 120
# From this fraction on, waiting for launches limits a device.
LAUNCH_BOUND_FRACTION = 0.1


class DeviceTime(msgspec.Struct, frozen=True, kw_only=True):
    """How the device spent one step, or a whole file; the parts add up to ``span_ms``.

    A step lasts from the end of the last kernel of earlier steps to that of its own; the first begins with its range on
    the host.

    Attributes:
        step: number of the ``ProfilerStep#``; None for the whole file, from its first kernel to its last, or for its
            whole steps together if others lack kernels.
        compute_ms: compute ran, with or without communication.
        exposed_comm_ms: communication was in flight and no compute ran.
        copy_ms: only copies and fills ran.
        idle_ms: nothing ran.
        idle_host_ms: the part before the launch of the next row; None if the file has no launches.
        idle_launch_ms: the part between that launch and the start; None as above.
        idle_other_ms: the rest, when the next row was launched before the device fell idle; None as above.
        exposed_on_host_ms: the part in which the host waited for its own communication (Gloo); None if it has none.
        on_host_ms: host communication was in flight, whatever the device did; None as above.
    """

    step: int | None
    span_ms: float
    compute_ms: float
    exposed_comm_ms: float
    copy_ms: float
    idle_ms: float
    idle_host_ms: float | None
    idle_launch_ms: float | None
    idle_other_ms: float | None
    exposed_on_host_ms: float | None = None
    on_host_ms: float | None = None


class PathKernel(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of a kernel on a critical path, and their time on it."""

    name: str
    communication: bool
    calls: int
    time_ms: float


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """The critical path of a step: a chain of work, each link held up by the previous one. Its parts add up.

    Attributes:
        step: number of the ``ProfilerStep#``; None for a file without steps, which counts as one.
        length_ms: length of the step on the device, see ``DeviceTime``.
        compute_ms, comm_ms, copy_ms: kernels, collectives and copies on the path.
        launch_ms: from launch to start of kernels that nothing else held up.
        host_ms: the host, on the way to such a launch.
        other_ms: gaps between two links on the device.
        on_host_ms: the host, while it waited for its own communication; None if it has none.
        at_most_compute_ms, at_most_comm_ms, at_most_host_ms: the most that could be gained if compute, communication,
            or the host took no time: no more than the path has of it, nor than the other work on its busiest stream
            leaves. None if the host is on the path and the file does not record when it waits for the device.
        kernels: on the path, most time first; ten at most.
    """

    step: int | None
    length_ms: float
    compute_ms: float
    comm_ms: float
    copy_ms: float
    launch_ms: float
    host_ms: float
    other_ms: float
    at_most_compute_ms: float | None
    at_most_comm_ms: float | None
    at_most_host_ms: float | None
    on_host_ms: float | None = None
    kernels: tuple[PathKernel, ...] = ()


class TopKernel(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one kernel, in the whole file.

    Attributes:
        family: its family; for communication kernels, the kind of collective.
        share: ``time_ms`` as a share of the sum over all kernels and collectives.
        longest_ms: time of the longest call.
        beside_ms: the part of ``time_ms`` during communication; for communication kernels, during compute.
    """

    name: str
    family: str
    communication: bool
    calls: int
    time_ms: float
    share: float
    longest_ms: float
    beside_ms: float


class HostCollective(msgspec.Struct, frozen=True):
    """All collectives of one name that a host library ran beside a device, such as ``gloo:all_reduce``.

    Attributes:
        time_ms: sum of their times.
        exposed_ms: the part when the device was idle and the host waited for them.
    """

    name: str
    calls: int
    time_ms: float
    exposed_ms: float


class StreamQueue(msgspec.Struct, frozen=True, kw_only=True):
    """Launched kernels and copies of one stream that had not started yet.

    Attributes:
        stream: name of the stream in the file.
        launches: number of known launches.
        longest, mean: longest and mean queue over the file.
        delay_ms: mean time from launch to start.
    """

    stream: str
    launches: int
    longest: int
    mean: float
    delay_ms: float


class HostLimit(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the host keeps the device waiting.

    Attributes:
        launch_bound: whether at least a tenth of the time is idle because of late launches, most of it in gaps shorter
            than a millisecond.
        idle_fraction: share of the file in which the device was idle because of a late launch.
        gaps: number of such gaps.
        short_gaps_ms: time of those shorter than a millisecond.
        kernel_us: median time of compute kernels; None without any.
        launch_interval_us: median time from one launch to the next; None with fewer than two.
    """

    launch_bound: bool
    idle_fraction: float
    gaps: int
    short_gaps_ms: float
    longest_gap_ms: float
    kernel_us: float | None
    launch_interval_us: float | None


class Utilisation(msgspec.Struct, frozen=True, kw_only=True):
    """Fractions of equal parts of the file, ``part_ms`` each, with compute, and with communication alone."""

    part_ms: float
    compute: tuple[float, ...]
    exposed_comm: tuple[float, ...]


class TimeSums:
    """How one device of a trace spends its time, added up over pieces.

    If a file is cut off, whatever needs all kernels is left out: steps, paths, and ``host_limit``. So are steps that
    lack kernels: then the file's time is that of its whole steps.
    """

    def __init__(self, device: Device) -> None:
        self._device, trace = device, device.trace
        self._steps, self._is_cut = trace.steps, trace.is_cut
        self._some_lack = not trace.is_cut and any([step.cut for step in trace.steps])
        self._captures = trace.launches.captures if trace.launches is not None else None
        self._on_host = trace.launches.on_host if trace.launches is not None else None
        self._exposed_ns = np.zeros(0 if self._on_host is None else len(self._on_host.ran), dtype=np.int64)
        self._whole = TimeUse()
        self._of_steps: list[DeviceTime] = []
        self._paths: list[CriticalPath] = []
        # Where the next step's time begins on the device.
        self._until_ns = trace.steps[device.steps[0]].start_ns if device.steps else 0
        self._parts = Intervals.empty() if device.ran is None else _equal_parts(device.ran)
        self._compute_ns, self._both_ns = (np.zeros(len(self._parts), dtype=np.int64) for _ in range(2))

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        kernels = piece.trace.kernels
        ran_ns = kernels.intervals.end_ns[kernels.intervals.durations_ns > 0]
        if not len(ran_ns):
            return
        launches = piece.trace.launches
        unknown = np.full(len(kernels), -1, dtype=np.int64)
        launched_ns = unknown if launches is None else launches.launched_ns
        span = (piece.begin_ns, int(ran_ns.max()))
        steps: list[tuple[int | None, tuple[int, int]]] = [] if self._is_cut else self._step_spans(kernels)
        calls, waited = self._on_host, None if self._on_host is None else self._on_host.waited
        uses = TimeUses(kernels, launched_ns, self._captures, None if calls is None else calls.ran, waited)
        whole, *of_steps = uses.of_each([span, *[of_step for _, of_step in steps]])
        for use in of_steps if self._some_lack else [whole]:
            self._whole += use
        self._of_steps += [self._device_time(step, use) for (step, _), use in zip(steps, of_steps, strict=True)]
        if waited is not None:
            for of_span in [of_step for _, of_step in steps] if self._some_lack else [span]:
                self._exposed_ns += uses.idle_ns(waited, *of_span)
        compute, comm = kernels.union_of(Kind.COMPUTE), kernels.union_of(Kind.COMMUNICATION)
        self._compute_ns += self._parts.covered_ns(compute)
        self._both_ns += self._parts.covered_ns(compute.with_others(comm))
        if launches is not None and not self._is_cut:
            # A file without steps counts as one, but its path is not computed over pieces.
            wanted = steps or ([(None, span)] if piece.is_whole else [])
            paths = CriticalPaths(kernels, launches.launched_ns, launches.waits, piece.before, waited)
            found = [(step, paths.of(*of_step)) for step, of_step in wanted]
            self._paths += [_critical_path(step, path, kernels, launches) for step, path in found if path is not None]

    @property
    def time(self) -> tuple[DeviceTime, ...]:
        """How the device spent the whole file, and each step; empty if nothing ran."""
        return () if self._device.ran is None else (self._device_time(None, self._whole), *self._of_steps)

    @property
    def paths(self) -> tuple[CriticalPath, ...]:
        """The critical path of each step, or of a file without steps."""
        return tuple(self._paths)

    @property
    def queues(self) -> tuple[StreamQueue, ...]:
        """The queue of each stream with known launches, the most launches first."""
        launches, kernels = self._device.trace.launches, self._device.trace.kernels
        if self._device.ran is None or launches is None or not self._device.launches_known:
            return ()
        begin_ns = int(kernels.intervals.start_ns.min())
        span_ns, found = int(kernels.intervals.end_ns.max()) - begin_ns, []
        for lane in distinct_values(kernels.lane).tolist():
            rows = np.flatnonzero((kernels.lane == lane) & (launches.launched_ns >= 0))
            if not len(rows):
                continue
            # Both mostly ascend.
            start = np.sort(kernels.intervals.start_ns[rows], kind="stable")
            launched = np.minimum(launches.launched_ns[rows], kernels.intervals.start_ns[rows])
            launched.sort(kind="stable")
            # If a start and a launch coincide, the start comes first.
            waiting = np.arange(1, len(rows) + 1) - np.searchsorted(start, launched, side="right")
            waiting_ns = int((start - np.maximum(launched, begin_ns)).sum())
            found.append(
                StreamQueue(
                    stream=launches.streams[lane],
                    launches=len(rows),
                    longest=max(int(waiting.max()), 0),
                    mean=waiting_ns / span_ns if span_ns > 0 else 0.0,
                    delay_ms=int((start - launched).sum()) / len(rows) / 1e6,
                )
            )
        return tuple(sorted(found, key=lambda queue: -queue.launches))

    @property
    def host_limit(self) -> HostLimit | None:
        """Whether the host keeps the device waiting; None if unknown."""
        device, launches = self._device, self._device.trace.launches
        if device.ran is None or launches is None or not device.launches_known or self._is_cut:
            return None
        late_ns = self._whole.host_ns + self._whole.launch_ns
        fraction = late_ns / self._whole.span_ns if self._whole.span_ns else 0.0
        kernels = device.trace.kernels
        launched_ns = np.sort(launches.launched_ns[launches.launched_ns >= 0], kind="stable")
        intervals_ns = np.diff(launched_ns)
        intervals_ns = intervals_ns[intervals_ns > 0]
        return HostLimit(
            launch_bound=fraction >= LAUNCH_BOUND_FRACTION and 2 * self._whole.short_host_gaps_ns > late_ns,
            idle_fraction=fraction,
            gaps=self._whole.num_host_gaps,
            short_gaps_ms=self._whole.short_host_gaps_ns / 1e6,
            longest_gap_ms=self._whole.longest_host_gap_ns / 1e6,
            kernel_us=_median_us(kernels.intervals.durations_ns[kernels.kind == Kind.COMPUTE]),
            launch_interval_us=_median_us(intervals_ns),
        )

    @property
    def on_host(self) -> tuple[HostCollective, ...]:
        """The host libraries' collectives by name, the longest waited for first."""
        calls, found = self._on_host, []
        if calls is None:
            return ()
        for number, name in enumerate(calls.names):
            mine = calls.name == number
            time_ns, exposed_ns = calls.ran[mine].sum_ns, int(self._exposed_ns[mine].sum())
            found.append(HostCollective(name, int(mine.sum()), time_ns / 1e6, exposed_ns / 1e6))
        return tuple(sorted(found, key=lambda row: (-row.exposed_ms, -row.time_ms)))

    @property
    def utilisation(self) -> Utilisation | None:
        """Utilisation in equal parts of the span; None if nothing ran."""
        ran = self._device.ran
        if ran is None:
            return None
        lengths = np.maximum(self._parts.durations_ns, 1)
        return Utilisation(
            part_ms=(ran.end_ns - ran.start_ns) / UTILISATION_PARTS / 1e6,
            compute=tuple((self._compute_ns / lengths).tolist()),
            exposed_comm=tuple(((self._both_ns - self._compute_ns) / lengths).tolist()),
        )

    def _step_spans(self, kernels: KernelTable) -> list[tuple[int | None, tuple[int, int]]]:
        """Number, start and end on the device of a piece's steps, except those that end before an earlier one."""
        spans: list[tuple[int | None, tuple[int, int]]] = []
        in_steps = kernels.step >= 0
        ended_ns = np.full(len(self._steps), np.iinfo(np.int64).min)
        np.maximum.at(ended_ns, kernels.step[in_steps], kernels.intervals.end_ns[in_steps])
        for i in distinct_values(kernels.step[in_steps]).tolist():
            ended = int(ended_ns[i])
            # The last kernels of a step that lacks some, or that is not in the file, are not known.
            if i and (self._steps[i - 1].cut or self._steps[i - 1].number != self._steps[i].number - 1):
                self._until_ns = max(self._until_ns, self._steps[i].start_ns)
            if ended > self._until_ns:
                if not self._steps[i].cut:
                    spans.append((self._steps[i].number, (self._until_ns, ended)))
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
            exposed_on_host_ms=None if self._on_host is None else use.exposed_on_host_ns / 1e6,
            on_host_ms=None if self._on_host is None else use.on_host_ns / 1e6,
        )


def _critical_path(step: int | None, path: Path, kernels: KernelTable, launches: Launches) -> CriticalPath:
    # If the host's waits are unknown, its time on the path may have been waiting.
    is_known = launches.records_waits or not path.parts.host_ns
    compute_ms, comm_ms, copy_ms, launch_ms, host_ms, other_ms, on_host_ms = (ns / 1e6 for ns in path.parts)
    at_most_compute_ms, at_most_comm_ms, at_most_host_ms = (ns / 1e6 if is_known else None for ns in path.at_most_ns)
    kind = kernels.kind[path.rows]
    runs = kind != Kind.COPY
    # A name may have kernels of both kinds.
    key = kernels.name[path.rows][runs] * 2 + (kind[runs] == Kind.COMMUNICATION)
    calls, time_ns = np.bincount(key), np.bincount(key, weights=path.rows_ns[runs])
    found = np.flatnonzero(calls)
    longest = found[np.argsort(-time_ns[found], kind="stable")[:MAX_PATH_KERNELS]].tolist()
    return CriticalPath(
        step=step,
        length_ms=path.length_ns / 1e6,
        compute_ms=compute_ms,
        comm_ms=comm_ms,
        copy_ms=copy_ms,
        launch_ms=launch_ms,
        host_ms=host_ms,
        other_ms=other_ms,
        at_most_compute_ms=at_most_compute_ms,
        at_most_comm_ms=at_most_comm_ms,
        at_most_host_ms=at_most_host_ms,
        on_host_ms=None if launches.on_host is None else on_host_ms,
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
    """Equal parts of a span, bounded by whole nanoseconds."""
    begin, end = span
    bounds = begin + (end - begin) * np.arange(UTILISATION_PARTS + 1, dtype=object) // UTILISATION_PARTS
    bounds = bounds.astype(np.int64)
    return Intervals(bounds[:-1], bounds[1:])
