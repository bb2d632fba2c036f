"""Two traces of one job, one of each mode: equations 1 to 5, kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from overlap_callbacks._version import __version__
from overlap_callbacks.analysis.kernels.attribution import Calls, Match, Side, match, pair_times
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.kernels.times import KernelSums
from overlap_callbacks.analysis.results.catalogue import RESIDUAL_LIMIT, RESIDUAL_LIMIT_GLOO
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import KernelTime
from overlap_callbacks.traces.analysis import span_ms, trace_figures
from overlap_callbacks.traces.figures import Comparison, UnmatchedKernel
from overlap_callbacks.traces.kineto import Trace

# Below this share of matched compute time two files are not taken for one job.
_LEAST_MATCHED = 0.8


def compare(overlapped: Trace, sequential: Trace) -> Comparison:
    """Compare a trace of the job as it is with one of the same rank in which nothing overlaps.

    Steps are compared as means over all steps that have kernels. A file without steps is one step.

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
    figures = _figures(ov.means, seq.means)
    faults = list(_faults(ov, seq, figures.get("residual_overlap"), matched))
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
        problems=(*_problems(overlapped, sequential), *faults),
    )


class _Side:
    """One file: its calls, those that count, and its mean step."""

    def __init__(self, trace: Trace) -> None:
        kernels = trace.kernels
        sums = KernelSums(kernels)
        steps = sums.steps
        if steps:
            inside = np.isin(kernels.step, steps)
            wall = float(np.mean([trace.steps[i].wall_ms for i in steps]))
        else:
            inside, wall = np.ones(len(kernels), dtype=bool), span_ms(trace) or 0.0
        self.num_steps = max(len(steps), 1)
        self.calls = Calls.of(kernels)
        self.wanted: npt.NDArray[np.bool_] = inside[self.calls.row]
        self.side = Side(self.calls, self.wanted, self.num_steps)
        self.has_steps = bool(steps)
        self.on_host = trace.on_host
        found = sums.of_rows(np.flatnonzero(inside))
        per_step = 1e-6 / self.num_steps
        self.means = {
            "wall": wall,
            "compute": found.compute_ns * per_step,
            "compute_busy": found.compute_busy_ns * per_step,
            "comm": found.comm_busy_ns * per_step,
            "comm_kernels": found.comm_ns * per_step,
            "hidden": found.hidden_comm_ns * per_step,
            "covered": found.covered_compute_ns * per_step,
        }

    def matched_fraction(self, found: Match) -> float:
        """Share of its compute time whose calls the other file has too."""
        compute = self.wanted & (self.calls.kind == Kind.COMPUTE)
        in_all = int(self.calls.duration_ns[compute].sum())
        return int(self.calls.duration_ns[compute & np.isfinite(found.alone_ns)].sum()) / in_all if in_all else 0.0


def _faults(ov: _Side, seq: _Side, residual: float | None, matched: float) -> Iterator[str]:
    """What makes the comparison worthless."""
    limit = RESIDUAL_LIMIT_GLOO if ov.on_host else RESIDUAL_LIMIT
    if residual is not None and residual > limit:
        yield f"the sequential file is not sequential: its overlap ratio is {residual:.3f}, above {limit}"
    if ov.has_steps != seq.has_steps:
        yield "only one of the files has ProfilerStep ranges: a step cannot be compared with a whole file"
    elif matched < _LEAST_MATCHED:
        yield (
            f"only {matched:.0%} of the compute time of one file has a partner in the other: the two do not look like "
            "traces of one job, or hold different numbers of steps"
        )


def _figures(ov: dict[str, float], seq: dict[str, float]) -> dict[str, float]:
    """Per step; equations 1 to 5 and what follows from them, those that are defined."""
    ideal = ov["wall"] - (ov["compute"] - seq["compute"])
    model = ideal + ov["hidden"]
    found: dict[str, float | None] = {
        "compute_slowdown": _change(ov["compute"], seq["compute"]),
        "overlap_ratio": _share(ov["covered"], ov["compute"]) if ov["comm"] else None,
        "e2e_overlapped_ms": ov["wall"],
        "e2e_ideal_ms": ideal,
        "e2e_sequential_model_ms": model,
        "e2e_sequential_ms": seq["wall"],
        "speedup_vs_sequential": _change(seq["wall"], ov["wall"]),
        "gap_to_ideal": _change(ov["wall"], ideal),
        "sequential_model_error": _change(model, seq["wall"]),
        "compute_ms": ov["compute"],
        "compute_isolated_ms": seq["compute"],
        "compute_busy_ms": ov["compute_busy"],
        "compute_busy_isolated_ms": seq["compute_busy"],
        "comm_ms": ov["comm"],
        "comm_isolated_ms": seq["comm"],
        "hidden_comm_ms": ov["hidden"],
        "exposed_comm_ms": ov["comm"] - ov["hidden"],
        "hidden_comm_fraction": _share(ov["hidden"], ov["comm"]),
        "comm_slowdown": _change(ov["comm_kernels"], seq["comm_kernels"]),
        "comm_ratio": _share(ov["comm"], ov["wall"]),
        "residual_overlap": _share(seq["covered"], seq["compute"]) if seq["comm"] else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _change(value: float, base: float) -> float | None:
    return value / base - 1 if base > 0 and value > 0 else None


def _kernel_times(side: _Side, found: Match) -> tuple[KernelTime, ...]:
    calls = side.calls
    rows = np.flatnonzero(np.isfinite(found.alone_ns))
    kernels = calls.kernels
    size = len(kernels.names)
    name = kernels.name[calls.row[rows]]
    count = np.bincount(name, minlength=size) / side.num_steps
    overlapped = np.bincount(name, weights=calls.duration_ns[rows], minlength=size) / side.num_steps / 1e6
    alone = np.bincount(name, weights=found.alone_ns[rows], minlength=size) / side.num_steps / 1e6
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


def _unmatched(ov: _Side, forward: Match, seq: _Side, backward: Match) -> tuple[UnmatchedKernel, ...]:
    """Kernels without a partner in the other file, by name."""
    totals: dict[str, list[float]] = {}
    for column, side, found in ((0, ov, forward), (1, seq, backward)):
        alone = side.wanted & ~np.isfinite(found.alone_ns) & (side.calls.kind != Kind.COPY)
        for row in np.flatnonzero(alone).tolist():
            name = side.calls.kernels.names[side.calls.kernels.name[side.calls.row[row]]]
            entry = totals.setdefault(name, [0, 0, 0.0, 0.0])
            entry[column] += 1
            entry[2 + column] += int(side.calls.duration_ns[row]) / 1e6
    return tuple(
        UnmatchedKernel(
            name=name,
            overlapped_calls=int(entry[0]),
            sequential_calls=int(entry[1]),
            overlapped_ms=entry[2],
            sequential_ms=entry[3],
        )
        for name, entry in sorted(totals.items(), key=lambda item: -max(item[1][2:]))
    )


def _problems(overlapped: Trace, sequential: Trace) -> Sequence[str]:
    found = [f"overlapped: {problem}" for problem in overlapped.problems]
    found += [f"sequential: {problem}" for problem in sequential.problems]
    if overlapped.path.resolve() == sequential.path.resolve():
        found.append("the same file was given twice")
    if overlapped.rank != sequential.rank:
        found.append(f"the files are of different ranks: {overlapped.rank} and {sequential.rank}")
    if overlapped.world_size != sequential.world_size:
        found.append(
            f"the files are of different jobs: world sizes {overlapped.world_size} and {sequential.world_size}"
        )
    return found
