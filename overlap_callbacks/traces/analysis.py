"""Computes the figures of traces: per step, per collective and group, per kernel family."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks._version import __version__
from overlap_callbacks.analysis.bus_bandwidth import bus_factor
from overlap_callbacks.analysis.distinct import distinct_values
from overlap_callbacks.analysis.exact_sums import sums_by
from overlap_callbacks.analysis.kernels.attribution import IN_TURN, SAME_LAUNCH, Calls, Level, labels_of, match
from overlap_callbacks.analysis.kernels.table import Indices, Kind
from overlap_callbacks.analysis.kernels.timeline import step_timeline
from overlap_callbacks.analysis.kernels.times import KernelFigures, KernelSums
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.traces.collectives import UNKNOWN, CollectiveInfo
from overlap_callbacks.traces.figures import (
    Analysis,
    CollectiveFigures,
    FamilyFigures,
    SlowdownEstimate,
    StepFigures,
    TraceFigures,
)
from overlap_callbacks.traces.kineto import Trace
from overlap_callbacks.traces.rank_collectives import RankCollectives, collectives_of_rank
from overlap_callbacks.traces.sizes import collective_sizes
from overlap_callbacks.traces.skew import skew_over_ranks
from overlap_callbacks.traces.time_use import TimeFigures, top_kernels

# A kernel counts as beside communication if at least the first share of its time is, as alone if at most the second is.
_MIN_BESIDE, _MAX_ALONE = 0.9, 0.1


class Part(NamedTuple):
    """What an analysis needs of one file: its figures, and what is compared with other ranks."""

    figures: tuple[TraceFigures, ...]
    collectives: RankCollectives


def part_of(trace: Trace) -> Part:
    """What an analysis needs of a trace."""
    return Part(tuple(trace_figures(trace)), collectives_of_rank(trace))


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


def trace_figures(trace: Trace, arm: Mode = Mode.OVERLAPPED) -> list[TraceFigures]:
    """The figures of each device of a trace; a trace without kernels has figures too.

    Args:
        trace: the trace.
        arm: mode in which it was taken.
    """
    by_device = trace.by_device() or {0: trace}
    problems = []
    if len(by_device) > 1:
        problems.append(f"the file holds kernels of {len(by_device)} devices: each has its own figures")
    return [_device_figures(of_device, device, arm, problems) for device, of_device in by_device.items()]


def _device_figures(trace: Trace, device: int, arm: Mode, problems: list[str]) -> TraceFigures:
    kernels = trace.kernels
    sums = KernelSums(kernels)
    counted = sums.steps
    skipped = [
        str(trace.steps[i].number) for i in sorted({*range(len(trace.steps))} - {*counted}) if not trace.steps[i].cut
    ]
    if skipped and len(kernels):
        problems = [*problems, f"no kernels were launched in steps {', '.join(skipped[:8])}: they are left out"]
    outside = sums.of_rows(np.flatnonzero(kernels.step < 0))
    if trace.steps and outside.num_kernels:
        problems = [
            *problems,
            f"{outside.num_kernels} kernels ({outside.compute_ns / 1e6:.3f} ms of compute, "
            f"{outside.comm_ns / 1e6:.3f} ms of communication) were launched in none of the steps: they count in the "
            "total alone",
        ]
    communicates = bool((kernels.kind == Kind.COMMUNICATION).any())
    if not communicates:
        problems = [*problems, "there is no communication: its figures are undefined"]
    total = step_figures(sums.of_rows(np.arange(len(kernels))), None, span_ms(trace), communicates, cut=trace.is_cut)
    steps = tuple(
        [
            step_figures(figures, step.number, step.wall_ms, communicates, cut=step.cut)
            for figures, step in zip(sums.of_each_step(counted), [trace.steps[i] for i in counted], strict=True)
        ]
    )
    del sums  # it takes as much memory as half the trace
    use = TimeFigures(trace, counted)
    return TraceFigures(
        file=str(trace.path),
        rank=trace.rank,
        world_size=trace.world_size,
        device=device,
        device_name="" if trace.on_host else trace.device_names.get(device, ""),
        on_host=trace.on_host,
        total=total,
        steps=steps,
        collectives=_collectives(trace),
        families=_families(trace),
        estimate=_estimate(trace),
        picture=step_timeline(kernels, counted[0] if counted else -1, arm),
        problems=(*trace.problems, *problems),
        warnings=trace.warnings,
        time=use.time,
        paths=use.paths,
        kernels=top_kernels(kernels),
        queues=use.queues,
        host_limit=use.host_limit,
        utilisation=use.utilisation,
    )


def span_ms(trace: Trace) -> float | None:
    """Time from the start of a trace's first kernel to the end of its last, in milliseconds; None without kernels."""
    intervals = trace.kernels.intervals
    if not len(intervals):
        return None
    return int(intervals.end_ns.max() - intervals.start_ns.min()) / 1e6


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


def _collectives(trace: Trace) -> tuple[CollectiveFigures, ...]:
    kernels = trace.kernels
    rows = np.flatnonzero(kernels.kind == Kind.COMMUNICATION)
    info, num_bytes, _ = trace.collectives.of_rows(rows)
    infos = [known._replace(by_name=False) for known in trace.collectives.infos]
    infos += [CollectiveInfo(kind) for kind in kernels.collectives]  # of kernels of which nothing else is known
    distinct = {known: number for number, known in enumerate(dict.fromkeys(infos))}
    of_number = list(distinct)
    number_of = np.array([distinct[known] for known in infos], dtype=np.int64)
    number = number_of[np.where(info >= 0, info, len(trace.collectives.infos) + kernels.collective[rows])]
    times_ns = kernels.intervals.durations_ns[rows]
    hidden_ns = kernels.intervals[rows].covered_ns(kernels.of(Kind.COMPUTE))
    all_rows, sized = np.ones(len(rows), dtype=bool), (num_bytes != UNKNOWN) & (times_ns > 0)
    count, num_sized = (np.bincount(part, minlength=len(distinct)).tolist() for part in (number, number[sized]))
    time_ns, all_hidden_ns, sized_ns, all_bytes = (
        sums_by(number[part], values[part], len(distinct))
        for part, values in ((all_rows, times_ns), (all_rows, hidden_ns), (sized, times_ns), (sized, num_bytes))
    )
    figures = []
    found, first = np.unique(number, return_index=True)
    for i in found[np.argsort(first)].tolist():
        known = of_number[i]
        bandwidth = all_bytes[i] / sized_ns[i] if all_bytes[i] and sized_ns[i] else None  # bytes per ns, i.e. GB/s
        factor = bus_factor(known.kind, known.size)
        figures.append(
            CollectiveFigures(
                collective=known.kind,
                group=known.group,
                description=known.description,
                group_size=known.size,
                count=count[i],
                bytes=all_bytes[i] if num_sized[i] else None,
                time_ms=time_ns[i] / 1e6,
                hidden_ms=all_hidden_ns[i] / 1e6,
                algorithm_bandwidth_gb_s=bandwidth,
                bus_bandwidth_gb_s=bandwidth * factor if bandwidth is not None and factor is not None else None,
            )
        )
    return tuple(sorted(figures, key=lambda row: -row.time_ms))


def _families(trace: Trace) -> tuple[FamilyFigures, ...]:
    kernels = trace.kernels
    calls = Calls.of(kernels)
    label, labels = labels_of(kernels)
    compute = np.flatnonzero(calls.kind == Kind.COMPUTE)
    group = label[calls.row[compute]]
    count = np.bincount(group, minlength=len(labels))
    time_ns = np.bincount(group, weights=calls.duration_ns[compute], minlength=len(labels))
    beside: dict[int, dict[str, float]] = defaultdict(dict)
    for number, kind in enumerate(kernels.collectives):
        covered = calls.covered_ns(kernels.intervals[kernels.collective == number])[compute]
        for family, ns in enumerate(np.bincount(group, weights=covered, minlength=len(labels)).tolist()):
            if ns:
                beside[family][kind] = ns / 1e6
    order = np.argsort(-time_ns, kind="stable")
    return tuple(
        FamilyFigures(
            family=labels[i], calls=int(count[i]), time_ms=float(time_ns[i]) / 1e6, beside=beside.get(int(i), {})
        )
        for i in order
        if count[i]
    )


def _estimate(trace: Trace) -> SlowdownEstimate | None:
    """An estimate of the slowdown: calls beside communication against calls of the same kernels alone."""
    calls = Calls.of(trace.kernels)
    compute = (calls.kind == Kind.COMPUTE) & (calls.duration_ns > 0)
    if trace.steps:
        compute &= calls.step >= 0  # outside the steps, the turn of a call is unknown
    covered = calls.covered_ns(trace.kernels.of(Kind.COMMUNICATION)) / np.maximum(calls.duration_ns, 1)
    beside, alone = compute & (covered >= _MIN_BESIDE), compute & (covered <= _MAX_ALONE)
    if not beside.any() or not alone.any():
        return None
    # Turns need several steps to compare; and without launch shapes, a name alone does not identify a kernel.
    methods: list[tuple[tuple[Level, ...], str]] = []
    if len(trace.steps) > 1 and not trace.is_cut:
        methods.append((IN_TURN, "calls of one kernel in the same turn of different steps"))
    if any(trace.kernels.shapes):
        methods.append((SAME_LAUNCH, "calls of one kernel with the same grid and block"))
    for levels, method in methods:
        matches = match(calls, beside, calls, alone, levels)
        rows = np.flatnonzero(np.isfinite(matches.alone_ns))
        if len(rows):
            left_out = np.flatnonzero(beside & ~np.isfinite(matches.alone_ns))
            return _slowdown(calls, rows, matches.alone_ns, np.flatnonzero(matches.used), left_out, method)
    return None


def _slowdown(
    calls: Calls, rows: Indices, alone_ns: npt.NDArray[np.float64], used: Indices, left_out: Indices, method: str
) -> SlowdownEstimate:
    """The estimate, over all calls and by family.

    Args:
        calls: all calls of the trace.
        rows: calls beside communication that match calls alone.
        alone_ns: time of the same call alone; shape (calls,).
        used: the calls alone that they match.
        left_out: calls beside communication without a match.
        method: what counts as the same call, in words.
    """
    label, labels = labels_of(calls.kernels)

    def over(
        rows: Indices, used: Indices, left_out: Indices, families: dict[str, SlowdownEstimate]
    ) -> SlowdownEstimate:
        time_ns = float(calls.duration_ns[rows].sum())
        return SlowdownEstimate(
            slowdown=time_ns / float(alone_ns[rows].sum()) - 1,
            method=method,
            kernels=len(distinct_values(calls.kernels.name[calls.row[rows]])),
            calls_beside=len(rows),
            calls_alone=len(used),
            calls_left_out=len(left_out),
            time_beside_ms=time_ns / 1e6,
            families=families,
        )

    of_rows, of_used, of_left_out = (label[calls.row[part]] for part in (rows, used, left_out))
    families = {
        labels[i]: over(rows[of_rows == i], used[of_used == i], left_out[of_left_out == i], {})
        for i in distinct_values(of_rows).tolist()
    }
    return over(rows, used, left_out, dict(sorted(families.items(), key=lambda item: -item[1].time_beside_ms)))
