"""Computes the figures of traces: per step, per collective and group, per kernel family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from overlap_callbacks._version import __version__
from overlap_callbacks.analysis.bus_bandwidth import bus_factor
from overlap_callbacks.analysis.exact_sums import sums_by
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.kernels.timeline import step_timeline
from overlap_callbacks.analysis.kernels.times import KernelFigures, KernelSums
from overlap_callbacks.analysis.results.kernel_times import StepTimeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.traces.collectives import UNKNOWN, CollectiveInfo
from overlap_callbacks.traces.figures import Analysis, CollectiveFigures, CollectiveSize, StepFigures, TraceFigures
from overlap_callbacks.traces.kernel_sums import FamilySums, NameSums
from overlap_callbacks.traces.pieces import Device, DeviceInMemory, Outline, Piece
from overlap_callbacks.traces.rank_collectives import RankCollectives, RankSums, SizeKey, Timed
from overlap_callbacks.traces.skew import Matched, skew_over_ranks
from overlap_callbacks.traces.time_use import TimeSums
from overlap_callbacks.traces.trace import Trace


class Part(NamedTuple):
    """What an analysis needs of one file: its figures, and what is compared with other ranks."""

    figures: tuple[TraceFigures, ...]
    collectives: RankCollectives


def part_of(trace: Trace, *, with_turns: bool = True) -> Part:
    """What an analysis needs of a trace; ``with_turns`` if other files are compared with it."""
    return part_of_devices(trace, devices_of(trace), with_turns=with_turns)


def part_of_devices(trace: Trace, devices: Sequence[Device], *, with_turns: bool = True) -> Part:
    """What an analysis needs of a file.

    Args:
        trace: the file, with any rows or none.
        devices: its devices.
        with_turns: whether other files are compared with it. Devices of one file always are.
    """
    ranks = RankSums(trace, with_turns=with_turns or len(devices) > 1)
    return Part(tuple(_figures_of(devices, ranks)), ranks.collectives)


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


def devices_of(trace: Trace) -> list[Device]:
    """The devices of a trace; one of a trace without kernels."""
    by_device = trace.by_device() or {0: trace}
    return [DeviceInMemory(of_device, device) for device, of_device in by_device.items()]


def _figures_of(devices: Sequence[Device], ranks: RankSums) -> list[TraceFigures]:
    """The figures of the devices of a file, which has figures without kernels too.

    Args:
        devices: the devices.
        ranks: takes what is compared with other ranks.
    """
    problems = []
    if len(devices) > 1:
        problems.append(f"the file holds kernels of {len(devices)} devices: each has its own figures")
    return [device_figures(device, also=ranks.add, problems=problems) for device in devices]


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
    trace, outline = device.head, device.outline
    steps, use = _StepSums(trace, outline, arm), TimeSums(device)
    collectives, families, names = CollectiveSums(trace), FamilySums(trace), NameSums(trace)
    estimate = device.estimating()
    for piece in device.pieces():
        steps.add(piece)
        use.add(piece)
        for part in (collectives, families, names, estimate):
            part.add(piece.trace)
        if also is not None:
            also(outline.device, piece.trace)
    return TraceFigures(
        file=str(trace.path),
        rank=trace.rank,
        world_size=trace.world_size,
        device=outline.device,
        device_name="" if trace.on_host else trace.device_names.get(outline.device, ""),
        on_host=trace.on_host,
        total=steps.total,
        steps=tuple(steps.steps),
        collectives=collectives.figures,
        families=families.figures,
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

    def __init__(self, trace: Trace, outline: Outline, arm: Mode) -> None:
        self._trace, self._outline, self._arm = trace, outline, arm
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
            self.steps.append(
                step_figures(figures, step.number, step.wall_ms, self._outline.communicates, cut=step.cut)
            )
        if self._outline.steps and self.picture is None:
            self.picture = step_timeline(kernels, self._outline.steps[0], self._arm)
        elif not self._outline.steps and piece.is_whole:
            self.picture = step_timeline(kernels, -1, self._arm)

    @property
    def total(self) -> StepFigures:
        """The figures of the whole file."""
        span = self._outline.span
        wall_ms = None if span is None else (span.end_ns - span.start_ns) / 1e6
        return step_figures(self._all, None, wall_ms, self._outline.communicates, cut=self._trace.is_cut)

    @property
    def problems(self) -> list[str]:
        """What is doubtful, in words."""
        steps, problems = self._trace.steps, []
        without = sorted({*range(len(steps))} - {*self._outline.steps})
        skipped = [str(steps[i].number) for i in without if not steps[i].cut]
        if skipped and self._outline.span is not None:
            problems.append(f"no kernels were launched in steps {', '.join(skipped[:8])}: they are left out")
        outside = self._outside
        if steps and outside.num_kernels:
            problems.append(
                f"{outside.num_kernels} kernels ({outside.compute_ns / 1e6:.3f} ms of compute, "
                f"{outside.comm_ns / 1e6:.3f} ms of communication) were launched in none of the steps: they count in "
                "the total alone"
            )
        if not self._outline.communicates:
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
        head: the trace, with any rows or none.
    """

    def __init__(self, head: Trace) -> None:
        infos = [known._replace(by_name=False) for known in head.collectives.infos]
        infos += [CollectiveInfo(kind) for kind in head.kernels.collectives]  # of which nothing else is known
        distinct = {known: number for number, known in enumerate(dict.fromkeys(infos))}
        self._infos, self._num_known = list(distinct), len(head.collectives.infos)
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


# -- collectives by size


def collective_sizes(traces: Sequence[RankCollectives], matched: Matched) -> tuple[CollectiveSize, ...]:
    """A row for each kind, group size and message size, those with the most time first.

    Args:
        traces: all files.
        matched: the participants of each collective, see ``skew_over_ranks``. A collective of which a rank has several
            kernels counts for no transfer: how its bytes are divided among them is not known.
    """
    times: dict[SizeKey, Timed] = {}
    for trace in traces:
        for key, found in trace.by_size.items():
            before = times.get(key, Timed(0, 0))
            times[key] = Timed(before.number + found.number, before.sum_ns + found.sum_ns)
    transfers: dict[SizeKey, Timed] = {}
    for place, participants in matched.items():
        of_ranks = list(participants.values())
        sizes = {part.num_bytes for part in of_ranks}
        if len(of_ranks) > 1 and len(sizes) == 1 and all(part.num_kernels == 1 for part in of_ranks):
            key = (place[0], place[4], sizes.pop())
            before = transfers.get(key, Timed(0, 0))
            transfers[key] = Timed(before.number + 1, before.sum_ns + min(part.time_ns for part in of_ranks))
    rows = [_row(key, found, transfers.get(key, Timed(0, 0))) for key, found in times.items()]
    return tuple(sorted(rows, key=lambda row: (-row.time_ms * row.kernels, row.collective, row.bytes)))


def _row(key: SizeKey, kernels: Timed, transfers: Timed) -> CollectiveSize:
    kind, group_size, num_bytes = key
    factor = bus_factor(kind, group_size)

    def bandwidth(timed: Timed) -> float | None:  # bytes per nanosecond, i.e. GB/s
        return num_bytes * timed.number / timed.sum_ns if timed.sum_ns else None

    def bus(timed: Timed) -> float | None:
        plain = bandwidth(timed)
        return None if plain is None or factor is None else plain * factor

    return CollectiveSize(
        collective=kind,
        group_size=group_size,
        bytes=num_bytes,
        kernels=kernels.number,
        time_ms=kernels.sum_ns / kernels.number / 1e6,
        bus_bandwidth_gb_s=bus(kernels),
        matched=transfers.number,
        transfer_ms=transfers.sum_ns / transfers.number / 1e6 if transfers.number else None,
        transfer_bandwidth_gb_s=bandwidth(transfers),
        transfer_bus_bandwidth_gb_s=bus(transfers),
    )
