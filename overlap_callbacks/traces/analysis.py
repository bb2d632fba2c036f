"""Computes the figures of traces: per step, per collective and group, per kernel family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks._version import __version__
from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.bus_bandwidth import bus_factor
from overlap_callbacks.analysis.exact_sums import sums_by
from overlap_callbacks.analysis.kernels.calls import Calls
from overlap_callbacks.analysis.kernels.table import Kind, StringTable
from overlap_callbacks.analysis.kernels.timeline import step_timeline
from overlap_callbacks.analysis.kernels.times import KernelFigures, KernelSums
from overlap_callbacks.analysis.results.kernel_times import StepTimeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.traces.collectives import UNKNOWN, CollectiveInfo
from overlap_callbacks.traces.device_time import TimeSums, TopKernel
from overlap_callbacks.traces.estimate import EstimateSums
from overlap_callbacks.traces.figures import Analysis, CollectiveFigures, FamilyFigures, StepFigures, TraceFigures
from overlap_callbacks.traces.pieces import Device, Piece, devices_of
from overlap_callbacks.traces.ranks import RankCollectives, RankSums, collective_sizes, skew_over_ranks
from overlap_callbacks.traces.trace import Trace

# Kernels of the table of a device. There may be thousands of names.
MAX_KERNELS = 100


class Part(NamedTuple):
    """What an analysis needs of one file: its figures, and what is compared with other ranks."""

    figures: tuple[TraceFigures, ...]
    collectives: RankCollectives


def part_of(trace: Trace, *, with_turns: bool = True) -> Part:
    """What an analysis needs of a trace, which has figures without kernels too.

    Args:
        trace: the trace.
        with_turns: whether other files are compared with it. Devices of one file always are.
    """
    devices, problems = devices_of(trace), []
    if len(devices) > 1:
        problems.append(f"the file holds kernels of {len(devices)} devices: each has its own figures")
    ranks = RankSums(trace, with_turns=with_turns or len(devices) > 1)
    figures = [device_figures(device, also=ranks.add, problems=problems) for device in devices]
    return Part(tuple(figures), ranks.collectives)


def analyze(traces: Sequence[Trace]) -> Analysis:
    """The figures of one trace, or of the traces of several ranks of a job.

    Raises:
        ValueError: no trace was given.
    """
    if not traces:
        raise ValueError("traces must hold at least one trace")
    return together([part_of(trace) for trace in traces])


def together(parts: Sequence[Part], warnings: Sequence[str] = ()) -> Analysis:
    """The analysis of several files.

    Args:
        parts: what is needed of each file.
        warnings: what must be read before any figure, e.g. files that could not be read.
    """
    of_ranks = [part.collectives for part in parts]
    skew = skew_over_ranks(of_ranks)
    return Analysis(
        library_version=__version__,
        traces=tuple(figures for part in parts for figures in part.figures),
        skew=skew.rows,
        problems=(*warnings, *skew.problems),
        warnings=tuple(warnings),
        sizes=collective_sizes(of_ranks, skew.matched) if skew.one_job else (),
        one_job=skew.one_job,
    )


def device_figures(
    device: Device,
    arm: Mode = Mode.OVERLAPPED,
    also: Callable[[int, Trace], object] | None = None,
    problems: Sequence[str] = (),
) -> TraceFigures:
    """The figures of a device, added up over the pieces of its time.

    Args:
        device: the device.
        arm: mode in which the trace was taken.
        also: takes the device's number and each piece too; None for nothing.
        problems: what is doubtful, in words.
    """
    trace, number = device.trace, device.number
    steps, use, estimate = _StepSums(device, arm), TimeSums(device), EstimateSums(trace)
    collectives, names = CollectiveSums(trace), NameSums(trace)
    for piece in device.pieces():
        steps.add(piece)
        use.add(piece)
        for part in (collectives, names, estimate):
            part.add(piece.trace)
        if also is not None:
            also(number, piece.trace)
    return TraceFigures(
        file=str(trace.path),
        rank=trace.rank,
        world_size=trace.world_size,
        device=number,
        device_name="" if trace.on_host else trace.device_names.get(number, ""),
        on_host=trace.on_host,
        total=steps.total,
        steps=tuple(steps.steps),
        collectives=collectives.figures,
        families=names.families,
        estimate=estimate.figures(),
        picture=steps.picture,
        problems=(*trace.problems, *problems, *steps.problems),
        warnings=trace.warnings,
        time=use.time,
        paths=use.paths,
        kernels=names.top,
        queues=use.queues,
        host_limit=use.host_limit,
        utilisation=use.utilisation,
    )


class _StepSums:
    """Times of the kernels of each step and of the whole file, added up over pieces.

    Attributes:
        steps: the figures of the steps so far.
        picture: the timeline of the first step that has kernels; without steps, of a file that is one piece.
    """

    def __init__(self, device: Device, arm: Mode) -> None:
        self._device, self._trace, self._arm = device, device.trace, arm
        self._all = self._outside = KernelFigures.nothing()
        self.steps: list[StepFigures] = []
        self.picture: StepTimeline | None = None

    def add(self, piece: Piece) -> None:
        """Add the rows of a piece."""
        kernels = piece.trace.kernels
        sums = KernelSums(kernels)
        self._all += sums.of_rows(np.arange(len(kernels)))
        self._outside += sums.of_rows(np.flatnonzero(kernels.step < 0))
        steps = sums.steps
        for figures, i in zip(sums.of_each_step(steps), steps, strict=True):
            step = self._trace.steps[i]
            self.steps.append(step_figures(figures, step.number, step.wall_ms, self._device.communicates, cut=step.cut))
        if self._device.steps and self.picture is None:
            self.picture = step_timeline(kernels, self._device.steps[0], self._arm)
        elif not self._device.steps and piece.is_whole:
            self.picture = step_timeline(kernels, -1, self._arm)

    @property
    def total(self) -> StepFigures:
        """The figures of the whole file."""
        span = self._device.span
        wall_ms = None if span is None else (span.end_ns - span.start_ns) / 1e6
        return step_figures(self._all, None, wall_ms, self._device.communicates, cut=self._trace.is_cut)

    @property
    def problems(self) -> list[str]:
        """What is doubtful, in words."""
        steps, problems = self._trace.steps, []
        without = sorted({*range(len(steps))} - {*self._device.steps})
        skipped = [str(steps[i].number) for i in without if not steps[i].cut]
        if skipped and self._device.span is not None:
            problems.append(f"no kernels were launched in steps {', '.join(skipped[:8])}: they are left out")
        outside = self._outside
        if steps and outside.num_kernels:
            problems.append(
                f"{outside.num_kernels} kernels ({outside.compute_ns / 1e6:.3f} ms of compute, "
                f"{outside.comm_ns / 1e6:.3f} ms of communication) were launched in none of the steps: they count in "
                "the total alone"
            )
        if not self._device.communicates:
            problems.append("there is no communication: its figures are undefined")
        return problems


def step_figures(
    figures: KernelFigures, step: int | None, wall_ms: float | None, communicates: bool, *, cut: bool = False
) -> StepFigures:
    """The figures of a set of kernels, in milliseconds.

    Args:
        figures: times of the kernels.
        step: number of their step; None for the whole file.
        wall_ms: length of the step on the host, or of the whole file.
        communicates: whether the file has any communication; without, ratios are undefined.
        cut: whether kernels of the step may be missing.
    """

    def ratio(part: int, whole: int) -> float | None:
        return part / whole if whole and communicates else None

    return StepFigures(
        step=step,
        wall_ms=wall_ms,
        compute_ms=figures.compute_ns / 1e6,
        compute_busy_ms=figures.compute_busy_ns / 1e6,
        comm_ms=figures.comm_busy_ns / 1e6,
        comm_kernels_ms=figures.comm_ns / 1e6,
        hidden_comm_ms=figures.hidden_comm_ns / 1e6,
        exposed_comm_ms=(figures.comm_busy_ns - figures.hidden_comm_ns) / 1e6,
        covered_compute_ms=figures.covered_compute_ns / 1e6,
        overlap_ratio=ratio(figures.covered_compute_ns, figures.compute_ns),
        overlap_ratio_busy=ratio(figures.covered_compute_busy_ns, figures.compute_busy_ns),
        hidden_comm_fraction=ratio(figures.hidden_comm_ns, figures.comm_busy_ns),
        copy_ms=figures.copy_ns / 1e6,
        kernels=figures.num_kernels,
        cut=cut,
    )


# -- collectives


_NEVER = np.iinfo(np.int64).max


class CollectiveSums:
    """The collectives of one device.

    Args:
        trace: the whole trace.
    """

    def __init__(self, trace: Trace) -> None:
        infos = [known._replace(by_name=False) for known in trace.collectives.infos]
        infos += [CollectiveInfo(kind) for kind in trace.kernels.collectives]  # of which nothing else is known
        distinct = {known: number for number, known in enumerate(dict.fromkeys(infos))}
        self._infos, self._num_known = list(distinct), len(trace.collectives.infos)
        self._number_of = np.array([distinct[known] for known in infos], dtype=np.int64)
        # Time, hidden time, time of those whose size is known, and their bytes. These may be too great for 64 bits.
        self._sums = [[0] * len(distinct) for _ in range(4)]
        self._count, self._num_sized = (np.zeros(len(distinct), dtype=np.int64) for _ in range(2))
        self._first, self._num_rows = np.full(len(distinct), _NEVER), 0

    def add(self, trace: Trace) -> None:
        """Add the rows of a piece."""
        kernels, size = trace.kernels, len(self._infos)
        rows = np.flatnonzero(kernels.kind == Kind.COMMUNICATION)
        info, num_bytes, _ = trace.collectives.of_rows(rows)
        number = self._number_of[np.where(info >= 0, info, self._num_known + kernels.collective[rows])]
        times_ns = kernels.intervals.durations_ns[rows]
        hidden_ns = kernels.intervals[rows].covered_ns(kernels.of(Kind.COMPUTE))
        every, sized = np.ones(len(rows), dtype=bool), (num_bytes != UNKNOWN) & (times_ns > 0)
        parts = ((every, times_ns), (every, hidden_ns), (sized, times_ns), (sized, num_bytes))
        for total, (part, values) in zip(self._sums, parts, strict=True):
            total[:] = map(int.__add__, total, sums_by(number[part], values[part], size))
        self._count += np.bincount(number, minlength=size)
        self._num_sized += np.bincount(number[sized], minlength=size)
        found, first = np.unique(number, return_index=True)
        self._first[found] = np.minimum(self._first[found], self._num_rows + first)
        self._num_rows += len(rows)

    @property
    def figures(self) -> tuple[CollectiveFigures, ...]:
        """The figures, those with the most time first."""
        order = np.argsort(self._first, kind="stable")
        rows = [self._figures(i) for i in order[self._count[order] > 0].tolist()]
        return tuple(sorted(rows, key=lambda row: -row.time_ms))

    def _figures(self, number: int) -> CollectiveFigures:
        known = self._infos[number]
        time_ns, hidden_ns, sized_ns, num_bytes = (total[number] for total in self._sums)
        bandwidth = num_bytes / sized_ns if num_bytes and sized_ns else None  # bytes per ns, i.e. GB/s
        factor = bus_factor(known.kind, known.size)
        return CollectiveFigures(
            collective=known.kind,
            group=known.group,
            description=known.description,
            group_size=known.size,
            count=int(self._count[number]),
            bytes=num_bytes if self._num_sized[number] else None,
            time_ms=time_ns / 1e6,
            hidden_ms=hidden_ns / 1e6,
            algorithm_bandwidth_gb_s=bandwidth,
            bus_bandwidth_gb_s=bandwidth * factor if bandwidth is not None and factor is not None else None,
        )


# -- kernels by name and family


class NameSums:
    """The kernels of one device by their names.

    Args:
        trace: the whole trace.
    """

    def __init__(self, trace: Trace) -> None:
        self._names, self._kinds = trace.kernels.names, trace.kernels.collectives
        # A name may stand for kernels of both kinds: those that compute come first.
        size = 2 * len(self._names)
        self._count, self._longest_ns = (np.zeros(size, dtype=np.int64) for _ in range(2))
        self._time_ns, self._concurrent_ns = (np.zeros(size) for _ in range(2))
        # Time of the kernels that compute during each kind of collective.
        self._by_kind_ns: npt.NDArray[np.float64] = np.zeros((len(self._kinds), len(self._names)))

    def add(self, trace: Trace) -> None:
        """Add the rows of a piece."""
        kernels, size = trace.kernels, len(self._count)
        calls = Calls.of(kernels)
        name, communicates = kernels.name[calls.row], calls.kind == Kind.COMMUNICATION
        compute = np.flatnonzero(calls.kind == Kind.COMPUTE)
        rows = np.flatnonzero(communicates | (calls.kind == Kind.COMPUTE))
        concurrent_ns = np.where(
            communicates, calls.covered_ns(kernels.of(Kind.COMPUTE)), calls.covered_ns(kernels.of(Kind.COMMUNICATION))
        )
        key = name[rows] * 2 + communicates[rows]
        self._count += np.bincount(key, minlength=size)
        self._time_ns += np.bincount(key, weights=calls.duration_ns[rows], minlength=size)
        self._concurrent_ns += np.bincount(key, weights=concurrent_ns[rows], minlength=size)
        np.maximum.at(self._longest_ns, key, calls.duration_ns[rows])
        for number in range(len(self._kinds)):
            covered_ns = calls.covered_ns(kernels.intervals[kernels.collective == number])[compute]
            self._by_kind_ns[number] += np.bincount(name[compute], weights=covered_ns, minlength=len(self._names))

    @property
    def top(self) -> tuple[TopKernel, ...]:
        """The kernels and collectives with the most time first; ``MAX_KERNELS`` at most."""
        total_ns = float(self._time_ns.sum())
        order = np.argsort(-self._time_ns, kind="stable")[:MAX_KERNELS]
        return tuple([self._kernel(i, total_ns) for i in order[self._count[order] > 0].tolist()])

    @property
    def families(self) -> tuple[FamilyFigures, ...]:
        """The families of the kernels that compute, those with the most time first."""
        texts = StringTable()
        of_name = np.array([texts[name_rules.family_of(name)] for name in self._names], dtype=np.int64)
        count, time_ns = (np.bincount(of_name, weights=values[::2]) for values in (self._count, self._time_ns))
        by_kind_ns = [np.bincount(of_name, weights=values) for values in self._by_kind_ns]
        return tuple(
            [
                FamilyFigures(
                    family=texts.texts[i],
                    calls=int(count[i]),
                    time_ms=float(time_ns[i]) / 1e6,
                    beside={
                        kind: float(values[i]) / 1e6
                        for kind, values in zip(self._kinds, by_kind_ns, strict=True)
                        if values[i]
                    },
                )
                for i in np.argsort(-time_ns, kind="stable").tolist()
                if count[i]
            ]
        )

    def _kernel(self, number: int, total_ns: float) -> TopKernel:
        name, communication = self._names[number // 2], bool(number % 2)
        time_ns = float(self._time_ns[number])
        return TopKernel(
            name=name,
            family=name_rules.collective_of(name) if communication else name_rules.family_of(name),
            communication=communication,
            calls=int(self._count[number]),
            time_ms=time_ns / 1e6,
            share=time_ns / total_ns if total_ns else 0.0,
            longest_ms=int(self._longest_ns[number]) / 1e6,
            beside_ms=float(self._concurrent_ns[number]) / 1e6,
        )
