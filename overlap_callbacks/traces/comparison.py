"""Compares two traces of one job, one of each mode: equations 1 to 5, and losses kernel by kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from overlap_callbacks._version import __version__
from overlap_callbacks.analysis.equations import ideal_step_ms, overlap_ratio, sequential_step_ms, slowdown
from overlap_callbacks.analysis.kernels.attribution import PairSums
from overlap_callbacks.analysis.kernels.same_calls import Labels, SameCalls
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.validity import RESIDUAL_COMM_LIMIT, residual_limit
from overlap_callbacks.traces.analysis import devices_of
from overlap_callbacks.traces.compared import MatchedSums, MeanStep, Side, Unmatched, UnmatchedSums
from overlap_callbacks.traces.figures import Comparison, UnmatchedKernel
from overlap_callbacks.traces.files import Progress, container_of, pieces, starts_with
from overlap_callbacks.traces.long.columns import Folder
from overlap_callbacks.traces.reading import Devices, read_devices
from overlap_callbacks.traces.trace import Trace

# If less than this share of the compute time has a match, the two files are not of one job.
_MIN_MATCHED_FRACTION = 0.8


def compare(overlapped: Trace, sequential: Trace) -> Comparison:
    """Compare a trace of the job as it runs with a trace of the same rank in which nothing overlaps.

    The means over all steps that have kernels are compared. A file without steps counts as one step.

    Args:
        overlapped: trace of the job as it runs.
        sequential: trace of the same rank of the same job, without overlap.

    Raises:
        ValueError: a trace holds no compute kernels, or kernels of several devices.
    """
    ov = _of_one_device("overlapped", Devices(overlapped, devices_of(overlapped)))
    return _compared(ov, _of_one_device("sequential", Devices(sequential, devices_of(sequential))))


def compare_files(
    overlapped: str | Path,
    sequential: str | Path,
    progress: Progress | None = None,
    steps: re.Pattern[str] | None = None,
) -> Comparison:
    """Compare trace files as ``compare`` does. The events of long files lie in temporary files meanwhile.

    Args:
        overlapped: trace of the job as it runs, as for ``read_trace``.
        sequential: trace of the same rank of the same job, without overlap.
        progress: as for ``read_trace``; it starts again for the second file.
        steps: as for ``read_trace``.

    Raises:
        TraceError: a file cannot be read, is empty, or is not a trace.
        ValueError: a file holds no compute kernels, or kernels of several devices.
    """
    for path in (overlapped, sequential):
        _check_opens(Path(path))
    with Folder() as folder:
        ov = _of_one_device("overlapped", read_devices(overlapped, folder, progress, steps, with_ranges=True))
        seq = _of_one_device("sequential", read_devices(sequential, folder, progress, steps, with_ranges=True))
        return _compared(ov, seq)


def _check_opens(file: Path) -> None:
    """Refuse a file that cannot be opened: to read the other one first may take long."""
    inside = container_of(file)
    if not starts_with(file if inside is None else inside[0], b""):
        next(pieces(file, []), None)  # tells why


def _of_one_device(name: str, found: Devices) -> Side:
    """The side of a trace, which must have one device."""
    if len(found.devices) > 1:
        raise ValueError(
            f"{name}: {found.head.path} holds kernels of {len(found.devices)} devices: give one of one rank"
        )
    return Side(found.devices[0])


def _compared(ov: Side, seq: Side) -> Comparison:
    """The comparison of an overlapped and a sequential trace."""
    labels = Labels(ov.kernels, seq.kernels)
    of_overlapped, of_sequential = SameCalls(labels, 0), SameCalls(labels, 1)
    figures_of = ov.add_up(Mode.OVERLAPPED, of_overlapped), seq.add_up(Mode.SEQUENTIAL, of_sequential)
    for name, side in (("overlapped", ov), ("sequential", seq)):
        if not side.computes:
            raise ValueError(f"{name}: {side.head.path} holds no compute kernels")
    pairs = PairSums(ov.kernels)
    matched, unmatched_seq = MatchedSums(ov), UnmatchedSums(seq)
    for calls, wanted, trace in ov.calls():
        alone_ns = of_sequential.alone_ns(calls, wanted)
        pairs.add(calls, wanted, alone_ns)
        matched.add(calls, wanted, alone_ns, trace.launches)
    for calls, wanted, _ in seq.calls():
        pairs.add_alone(calls, wanted)
        unmatched_seq.add(calls, wanted, of_overlapped.alone_ns(calls, wanted))
    fraction = min(matched.unmatched.matched_fraction, unmatched_seq.matched_fraction)
    figures = _figures(ov.mean_step, seq.mean_step)
    faults = list(_faults(ov, seq, figures, fraction))
    return Comparison(
        library_version=__version__,
        overlapped=figures_of[0],
        sequential=figures_of[1],
        steps=(ov.num_steps, seq.num_steps),
        figures=figures,
        valid=not faults,
        matched_fraction=fraction,
        kernels=matched.kernels,
        pairs=pairs.pairs(ov.num_steps, seq.num_steps),
        unmatched=_unmatched(matched.unmatched, unmatched_seq),
        ranges=matched.ranges,
        problems=(*_problems(ov.head, seq.head), *faults),
    )


def _faults(ov: Side, seq: Side, figures: Mapping[str, float], matched: float) -> Iterator[str]:
    """What makes the comparison invalid, in words."""
    residual, of_comm = figures.get("residual_overlap"), figures.get("residual_comm_overlap")
    limit = residual_limit("cpu" if ov.head.on_host else "")
    if residual is not None and residual > limit:
        yield f"the sequential file is not sequential: its overlap ratio is {residual:.3f}, above {limit}"
    elif of_comm is not None and of_comm > RESIDUAL_COMM_LIMIT and not ov.head.on_host:  # there, ranges are not cut
        yield (
            f"the sequential file is not sequential: {of_comm:.0%} of its communication runs beside compute, above "
            f"{RESIDUAL_COMM_LIMIT:.0%}"
        )
    if ov.head.is_cut or seq.head.is_cut:
        yield "a file is cut off, and no step of it is known to be whole"
    elif ov.has_steps != seq.has_steps:
        yield "only one of the files has ProfilerStep ranges: a step cannot be compared with a whole file"
    elif matched < _MIN_MATCHED_FRACTION:
        yield (
            f"only {matched:.0%} of the compute time of one file has a partner in the other: the two do not look like "
            "traces of one job, or hold different numbers of steps"
        )


def _figures(ov: MeanStep, seq: MeanStep) -> dict[str, float]:
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


def _overlap_ratio(step: MeanStep) -> float | None:
    if step.comm_ms and step.compute_ms > 0:
        return overlap_ratio(step.covered_compute_ms, step.compute_ms)
    return None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _change(value: float, base: float) -> float | None:
    return slowdown(value, base) if base > 0 and value > 0 else None


def _unmatched(overlapped: UnmatchedSums, sequential: UnmatchedSums) -> tuple[UnmatchedKernel, ...]:
    """Kernels without a partner in the other file, those with the most time first."""
    of_both = overlapped.by_name, sequential.by_name
    kernels = []
    for name in dict.fromkeys((*of_both[0], *of_both[1])):
        in_ov, in_seq = (of_side.get(name, Unmatched(0, 0.0)) for of_side in of_both)
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
