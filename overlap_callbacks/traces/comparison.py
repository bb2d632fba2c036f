"""Compares two traces of one job, one of each mode: equations 1 to 5, and losses kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlap_callbacks._version import __version__
from overlap_callbacks.analysis.equations import ideal_step_ms, overlap_ratio, sequential_step_ms, slowdown
from overlap_callbacks.analysis.kernels.attribution import Calls, Match, Side, match, pair_times
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.kernels.times import KernelSums
from overlap_callbacks.analysis.results.catalogue import RESIDUAL_COMM_LIMIT, residual_limit
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.traces.analysis import span_ms, trace_figures
from overlap_callbacks.traces.figures import Comparison, UnmatchedKernel
from overlap_callbacks.traces.trace import Trace

# If less than this share of the compute time has a match, the two files are not of one job.
_MIN_MATCHED_FRACTION = 0.8
# Stands for the range of what was launched in none.
NO_RANGE = "(no range)"


def compare(overlapped: Trace, sequential: Trace) -> Comparison:
    """Compare a trace of the job as it runs with a trace of the same rank in which nothing overlaps.

    The means over all steps that have kernels are compared. A file without steps counts as one step.

    Args:
        overlapped: trace of the job as it runs.
        sequential: trace of the same rank of the same job, without overlap.

    Raises:
        ValueError: a trace holds no compute kernels, or kernels of several devices.
    """
    for name, trace in (("overlapped", overlapped), ("sequential", sequential)):
        if len(trace.devices) > 1:
            raise ValueError(
                f"{name}: {trace.path} holds kernels of {len(trace.devices)} devices: give one of one rank"
            )
        if not bool((trace.kernels.kind == Kind.COMPUTE).any()):
            raise ValueError(f"{name}: {trace.path} holds no compute kernels")
    ov, seq = _Side(overlapped), _Side(sequential)
    forward = match(ov.calls, ov.wanted, seq.calls, seq.wanted)
    backward = match(seq.calls, seq.wanted, ov.calls, ov.wanted)
    matched = min(ov.matched_fraction(forward), seq.matched_fraction(backward))
    figures = _figures(ov.mean_step, seq.mean_step)
    faults = list(_faults(ov, seq, figures, matched))
    return Comparison(
        library_version=__version__,
        overlapped=trace_figures(overlapped)[0],
        sequential=trace_figures(sequential, Mode.SEQUENTIAL)[0],
        steps=(ov.num_steps, seq.num_steps),
        figures=figures,
        valid=not faults,
        matched_fraction=matched,
        kernels=_kernel_times(ov, forward),
        pairs=pair_times(ov.side, seq.side, forward.alone_ns),
        unmatched=_unmatched(ov, forward, seq, backward),
        ranges=_ranges(ov, forward),
        problems=(*_problems(overlapped, sequential), *faults),
    )


@dataclass(frozen=True)
class _MeanStep:
    """Means over the steps of one file, in milliseconds."""

    wall_ms: float
    compute_ms: float
    compute_busy_ms: float
    comm_ms: float
    comm_kernels_ms: float
    hidden_comm_ms: float
    covered_compute_ms: float


class _Side:
    """One file: its calls, which of them count, and its mean step."""

    def __init__(self, trace: Trace) -> None:
        kernels = trace.kernels
        sums = KernelSums(kernels)
        steps = [step for step in sums.steps if not trace.steps[step].cut]
        self.is_cut = trace.is_cut
        if steps:
            inside = np.isin(kernels.step, steps)
            wall_ms = float(np.mean([trace.steps[i].wall_ms for i in steps]))
        else:
            inside, wall_ms = np.ones(len(kernels), dtype=bool), span_ms(trace) or 0.0
        self.num_steps = max(len(steps), 1)
        self.calls = Calls.of(kernels)
        self.wanted: npt.NDArray[np.bool_] = inside[self.calls.row]
        self.side = Side(self.calls, self.wanted, self.num_steps)
        self.has_steps = bool(steps)
        self.on_host = trace.on_host
        self.launches = trace.launches
        total = sums.of_rows(np.flatnonzero(inside))
        ms_per_step = 1e-6 / self.num_steps
        self.mean_step = _MeanStep(
            wall_ms=wall_ms,
            compute_ms=total.compute_ns * ms_per_step,
            compute_busy_ms=total.compute_busy_ns * ms_per_step,
            comm_ms=total.comm_busy_ns * ms_per_step,
            comm_kernels_ms=total.comm_ns * ms_per_step,
            hidden_comm_ms=total.hidden_comm_ns * ms_per_step,
            covered_compute_ms=total.covered_compute_ns * ms_per_step,
        )

    def matched_fraction(self, matches: Match) -> float:
        """The share of its compute time whose calls the other file has too."""
        compute = self.wanted & (self.calls.kind == Kind.COMPUTE)
        total_ns = int(self.calls.duration_ns[compute].sum())
        matched_ns = int(self.calls.duration_ns[compute & np.isfinite(matches.alone_ns)].sum())
        return matched_ns / total_ns if total_ns else 0.0


def _faults(ov: _Side, seq: _Side, figures: Mapping[str, float], matched: float) -> Iterator[str]:
    """What makes the comparison invalid, in words."""
    residual, of_comm = figures.get("residual_overlap"), figures.get("residual_comm_overlap")
    limit = residual_limit("cpu" if ov.on_host else "")
    if residual is not None and residual > limit:
        yield f"the sequential file is not sequential: its overlap ratio is {residual:.3f}, above {limit}"
    elif of_comm is not None and of_comm > RESIDUAL_COMM_LIMIT and not ov.on_host:  # there, ranges are not cut
        yield (
            f"the sequential file is not sequential: {of_comm:.0%} of its communication runs beside compute, above "
            f"{RESIDUAL_COMM_LIMIT:.0%}"
        )
    if ov.is_cut or seq.is_cut:
        yield "a file is cut off, and no step of it is known to be whole"
    elif ov.has_steps != seq.has_steps:
        yield "only one of the files has ProfilerStep ranges: a step cannot be compared with a whole file"
    elif matched < _MIN_MATCHED_FRACTION:
        yield (
            f"only {matched:.0%} of the compute time of one file has a partner in the other: the two do not look like "
            "traces of one job, or hold different numbers of steps"
        )


def _figures(ov: _MeanStep, seq: _MeanStep) -> dict[str, float]:
    """The figures that are defined, per step, by the names of the live report."""
    ideal_ms = ideal_step_ms(ov.wall_ms, ov.compute_ms, seq.compute_ms)
    model_ms = sequential_step_ms(ideal_ms, ov.hidden_comm_ms)
    figures: dict[str, float | None] = {
        "compute_slowdown": _change(ov.compute_ms, seq.compute_ms),
        "overlap_ratio": _overlap_ratio(ov),
        "e2e_overlapped_ms": ov.wall_ms,
        "e2e_ideal_ms": ideal_ms,
        "e2e_sequential_model_ms": model_ms,
        "e2e_sequential_ms": seq.wall_ms,
        "speedup_vs_sequential": _change(seq.wall_ms, ov.wall_ms),
        "gap_to_ideal": _change(ov.wall_ms, ideal_ms),
        "sequential_model_error": _change(model_ms, seq.wall_ms),
        "compute_ms": ov.compute_ms,
        "compute_isolated_ms": seq.compute_ms,
        "compute_busy_ms": ov.compute_busy_ms,
        "compute_busy_isolated_ms": seq.compute_busy_ms,
        "comm_ms": ov.comm_ms,
        "comm_isolated_ms": seq.comm_ms,
        "hidden_comm_ms": ov.hidden_comm_ms,
        "exposed_comm_ms": ov.comm_ms - ov.hidden_comm_ms,
        "hidden_comm_fraction": _share(ov.hidden_comm_ms, ov.comm_ms),
        "comm_slowdown": _change(ov.comm_kernels_ms, seq.comm_kernels_ms),
        "comm_ratio": _share(ov.comm_ms, ov.wall_ms),
        "residual_overlap": _overlap_ratio(seq),
        "residual_comm_overlap": _share(seq.hidden_comm_ms, seq.comm_ms),
    }
    return {name: value for name, value in figures.items() if value is not None}


def _overlap_ratio(step: _MeanStep) -> float | None:
    if step.comm_ms and step.compute_ms > 0:
        return overlap_ratio(step.covered_compute_ms, step.compute_ms)
    return None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _change(value: float, base: float) -> float | None:
    return slowdown(value, base) if base > 0 and value > 0 else None


def _kernel_times(side: _Side, matches: Match) -> tuple[KernelTime, ...]:
    """The matched kernels per step, those that lose most time first."""
    calls = side.calls
    rows = np.flatnonzero(np.isfinite(matches.alone_ns))
    kernels = calls.kernels
    size = len(kernels.names)
    name = kernels.name[calls.row[rows]]
    count = np.bincount(name, minlength=size) / side.num_steps
    overlapped = np.bincount(name, weights=calls.duration_ns[rows], minlength=size) / side.num_steps / 1e6
    alone = np.bincount(name, weights=matches.alone_ns[rows], minlength=size) / side.num_steps / 1e6
    communicates = np.zeros(size, dtype=bool)
    communicates[name] = calls.kind[rows] == Kind.COMMUNICATION
    copies = np.zeros(size, dtype=bool)
    copies[name] = calls.kind[rows] == Kind.COPY
    return tuple(
        KernelTime(
            name=kernels.names[i],
            communication=bool(communicates[i]),
            overlapped_calls=float(count[i]),
            sequential_calls=float(count[i]),
            overlapped_ms=float(overlapped[i]),
            sequential_ms=float(alone[i]),
        )
        for i in np.argsort(-(overlapped - alone), kind="stable")
        if count[i] and not copies[i]
    )


def _ranges(side: _Side, matches: Match) -> tuple[KernelTime, ...]:
    """The matched compute per step by the range of the host in which it was launched, the largest loss first."""
    calls, launches = side.calls, side.launches
    if launches is None or launches.range_of is None:
        return ()
    rows = np.flatnonzero(np.isfinite(matches.alone_ns) & (calls.kind == Kind.COMPUTE))
    size = len(launches.ranges) + 1  # the first for what was launched in none
    of_range = launches.range_of[calls.row[rows]] + 1
    if not of_range.any():
        return ()
    count, overlapped, alone = (
        np.bincount(of_range, weights=weights, minlength=size) / side.num_steps
        for weights in (None, calls.duration_ns[rows], matches.alone_ns[rows])
    )
    names = (NO_RANGE, *launches.ranges)
    return tuple(
        KernelTime(names[i], False, float(count[i]), float(count[i]), float(overlapped[i]) / 1e6, float(alone[i]) / 1e6)
        for i in np.argsort(alone - overlapped, kind="stable")
        if count[i]
    )


@dataclass
class _Unmatched:
    """Calls of one kernel of one file that the other file lacks, and their time."""

    calls: int = 0
    time_ms: float = 0.0


def _unmatched(ov: _Side, forward: Match, seq: _Side, backward: Match) -> tuple[UnmatchedKernel, ...]:
    """Kernels without a partner in the other file, those with the most time first."""
    overlapped, sequential = _unmatched_by_name(ov, forward), _unmatched_by_name(seq, backward)
    kernels = []
    for name in dict.fromkeys((*overlapped, *sequential)):
        in_ov, in_seq = overlapped.get(name, _Unmatched()), sequential.get(name, _Unmatched())
        kernels.append(
            UnmatchedKernel(
                name=name,
                overlapped_calls=in_ov.calls,
                sequential_calls=in_seq.calls,
                overlapped_ms=in_ov.time_ms,
                sequential_ms=in_seq.time_ms,
            )
        )
    return tuple(sorted(kernels, key=lambda kernel: -max(kernel.overlapped_ms, kernel.sequential_ms)))


def _unmatched_by_name(side: _Side, matches: Match) -> dict[str, _Unmatched]:
    totals: dict[str, _Unmatched] = {}
    unmatched = side.wanted & ~np.isfinite(matches.alone_ns) & (side.calls.kind != Kind.COPY)
    for row in np.flatnonzero(unmatched).tolist():
        name = side.calls.kernels.names[side.calls.kernels.name[side.calls.row[row]]]
        total = totals.setdefault(name, _Unmatched())
        total.calls += 1
        total.time_ms += int(side.calls.duration_ns[row]) / 1e6
    return totals


def _problems(overlapped: Trace, sequential: Trace) -> Sequence[str]:
    problems = [f"overlapped: {problem}" for problem in overlapped.problems]
    problems += [f"sequential: {problem}" for problem in sequential.problems]
    if overlapped.path.resolve() == sequential.path.resolve():
        problems.append("the same file was given twice")
    if overlapped.rank != sequential.rank:
        problems.append(f"the files are of different ranks: {overlapped.rank} and {sequential.rank}")
    if overlapped.world_size != sequential.world_size:
        problems.append(
            f"the files are of different jobs: world sizes {overlapped.world_size} and {sequential.world_size}"
        )
    return problems
