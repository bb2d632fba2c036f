"""Computes the figures of traces: per step, per collective and group, per kernel family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from overlap_callbacks._version import __version__
from overlap_callbacks.analysis.kernels.timeline import step_timeline
from overlap_callbacks.analysis.kernels.times import KernelFigures, KernelSums
from overlap_callbacks.analysis.results.kernel_times import StepTimeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.traces.collective_sums import CollectiveSums
from overlap_callbacks.traces.figures import Analysis, StepFigures, TraceFigures
from overlap_callbacks.traces.kernel_sums import FamilySums, NameSums
from overlap_callbacks.traces.pieces import Device, DeviceInMemory, Outline, Piece
from overlap_callbacks.traces.rank_collectives import RankCollectives, RankSums
from overlap_callbacks.traces.sizes import collective_sizes
from overlap_callbacks.traces.skew import skew_over_ranks
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
