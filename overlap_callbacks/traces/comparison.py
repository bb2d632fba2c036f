"""Compares two traces of one job, one per mode: equations 1 to 5, and losses by kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from overlap_callbacks._version import __version__
from overlap_callbacks.analysis.equations import ideal_step_ms, overlap_ratio, sequential_step_ms, slowdown
from overlap_callbacks.analysis.formatting import bytes_in_words
from overlap_callbacks.analysis.kernels.attribution import PairSums
from overlap_callbacks.analysis.kernels.calls import Labels, SameCalls, unordered_in
from overlap_callbacks.analysis.results.kernel_times import ALONE, PairTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.validity import RESIDUAL_COMM_LIMIT, residual_limit
from overlap_callbacks.traces.archives import container_of, starts_with
from overlap_callbacks.traces.compared import Side
from overlap_callbacks.traces.figures import (
    NOTHING_COMMUNICATES,
    Comparison,
    StepFigures,
    UnmatchedKernel,
)
from overlap_callbacks.traces.files import Progress, TraceError, pieces, with_tables
from overlap_callbacks.traces.pieces import devices_of
from overlap_callbacks.traces.reading import read_trace
from overlap_callbacks.traces.trace import Trace

# If less than this share of the compute time has a match, or one communicates less than this share of what the other
# does, the two files are not of one job.
_MIN_MATCHED_FRACTION = 0.8
# Nor if kernels that overlap nothing, and are at least the first share of the compute, differ by more than the second.
_MIN_ALONE, _MIN_LIKE = 0.1, 2 / 3
# Amounts of bytes that differ by less are the same: an average of a loss more or less.
_SAME_BYTES = 0.99
# Steps without a partner of as many bytes are left out if the others communicate at least this share.
_MIN_PAIRED = 0.1
# What overlap does to a step: nothing where nothing communicates.
_OF_OVERLAP = (
    "e2e_ideal_ms", "e2e_sequential_model_ms", "speedup_vs_sequential", "gap_to_ideal", "sequential_model_error",
)  # fmt: skip


def compare(overlapped: Trace, sequential: Trace) -> Comparison:
    """Compare a trace of the job as it runs with one of the same rank without overlap.

    Compares means over all steps with kernels; a file without steps counts as one step.

    Raises:
        ValueError: a trace holds no compute kernels, or kernels of several devices.
    """
    return _compared(_of_one_device("overlapped", overlapped), _of_one_device("sequential", sequential))


def compare_files(
    overlapped: str | Path,
    sequential: str | Path,
    progress: Progress | None = None,
    steps: re.Pattern[str] | None = None,
) -> Comparison:
    """Compare trace files as ``compare`` does.

    Args:
        overlapped: trace of the job as it runs.
        sequential: trace of the same rank of the same job, without overlap.
        progress: as for ``read_trace``; it starts again for the second file.
        steps: as for ``read_trace``.

    Raises:
        TraceError: a file cannot be read, is empty, or is not a trace.
        ValueError: a file holds no compute kernels, or kernels of several devices.
    """
    for path in (overlapped, sequential):
        _check_opens(with_tables(Path(path)))
    ov = _of_one_device("overlapped", read_trace(overlapped, progress, steps))
    return _compared(ov, _of_one_device("sequential", read_trace(sequential, progress, steps)))


def _check_opens(file: Path) -> None:
    """Fail at once if a file cannot be opened: reading the other one first may take long."""
    inside = container_of(file)
    if not starts_with(file if inside is None else inside[0], b""):
        next(pieces(file, []), None)  # raises with the reason


def _of_one_device(name: str, trace: Trace) -> Side:
    """The side of a trace, which must have one device."""
    if trace.merged:
        first = trace.merged[0].path
        raise TraceError(f"{name}: {first.parent} holds {len(trace.merged)} ranks: give one of them, as in {first}")
    devices = devices_of(trace)
    if len(devices) > 1:
        raise TraceError(f"{name}: {trace.path} holds kernels of {len(devices)} devices: give one of one rank")
    return Side(devices[0])


def _keep_common(ov: Side, seq: Side) -> None:
    """If the files have the same steps, leave out steps that lack kernels in either file."""
    numbers, other = ({step.number for step in side.trace.steps} for side in (ov, seq))
    mine, theirs = ({step.number for step in side.trace.steps if not step.cut} for side in (ov, seq))
    if numbers == other and mine != theirs and mine & theirs:
        ov.keep(mine & theirs)
        seq.keep(mine & theirs)


def _partners(mine: Mapping[int, int], theirs: Mapping[int, int]) -> list[tuple[int, int]]:
    """Pairs of steps that communicate as much; none if that is few of them. The arguments are the bytes of each step.

    Warm-up steps may communicate more than the others, and steps that only accumulate gradients less.
    """
    ours, others = (sorted(of, key=lambda step: (of[step], step), reverse=True) for of in (mine, theirs))
    pairs, least = [], min(sum(mine.values()), sum(theirs.values()))
    enough = min(len(ours), len(others)) / 2
    while ours and others:
        one, other = mine[ours[-1]], theirs[others[-1]]
        if _near(one, other):
            pairs.append((ours.pop(), others.pop()))
        else:
            (ours if one < other else others).pop()
    paired = sum([min(mine[one], theirs[other]) for one, other in pairs])
    return pairs if len(pairs) > enough and paired >= _MIN_PAIRED * least > 0 else []


def _compared(ov: Side, seq: Side, left_out: tuple[str, ...] = ()) -> Comparison:
    """The comparison of an overlapped and a sequential trace; ``left_out`` says which steps were left out of both."""
    if not left_out:
        _keep_common(ov, seq)
    labels = Labels(ov.kernels, seq.kernels)
    unordered = unordered_in(seq.kernels)
    of_overlapped, of_sequential = SameCalls(labels, 0), SameCalls(labels, 1, unordered)
    figures_of = ov.add_up(Mode.OVERLAPPED, of_overlapped), seq.add_up(Mode.SEQUENTIAL, of_sequential)
    for name, side in (("overlapped", ov), ("sequential", seq)):
        if not side.computes:
            where = " in its steps" if side.has_steps else ""
            raise TraceError(f"{name}: {side.trace.path} holds no compute kernels{where}")
    if (num_bytes := _bytes_of(ov, seq)) and not _near(*num_bytes):
        mine, theirs = ov.step_bytes, seq.step_bytes
        if not left_out and (partners := _partners(mine, theirs)):
            more, fewer = len(mine) - len(partners), len(theirs) - len(partners)
            note = (
                f"{more} of {len(mine)} steps of the overlapped file and {fewer} of {len(theirs)} of the sequential "
                "one are left out: the other file has no step of as many bytes [OC775]"
            )
            ours, others = zip(*partners, strict=True)
            return _compared(ov.only(ours), seq.only(others), (note,))
    pairs = PairSums(ov.kernels)
    for calls, wanted, trace in ov.calls():
        alone_ns, *before = of_sequential.means_ns(calls, wanted)
        pairs.add(calls, wanted, alone_ns, before_ns=dict(zip(unordered, before, strict=True)))
        ov.match(calls, wanted, alone_ns, trace)
    for calls, wanted, trace in seq.calls():
        pairs.add_alone(calls, wanted)
        seq.match(calls, wanted, of_overlapped.means_ns(calls, wanted)[0], trace)
    fraction = min(ov.matched_fraction, seq.matched_fraction)
    figures, of_pairs = _figures(ov, seq), pairs.pairs(ov.num_steps, seq.num_steps)
    unlike = _unlike(ov, seq, figures, fraction, of_pairs)
    misfits = tuple([*_misfits(ov, seq), *_not_sequential(ov, figures), *unlike])
    return Comparison(
        library_version=__version__,
        overlapped=figures_of[0],
        sequential=figures_of[1],
        steps=(ov.num_steps, seq.num_steps),
        figures=figures,
        valid=not misfits,
        matched_fraction=fraction,
        kernels=ov.matched_kernels,
        pairs=of_pairs,
        unmatched=_unmatched(ov, seq),
        ranges=ov.matched_ranges,
        problems=(*dict.fromkeys((*misfits, *left_out, *_problems(ov, seq))),),
        misfits=misfits,
    )


def _unmatched(overlapped: Side, sequential: Side) -> tuple[UnmatchedKernel, ...]:
    """Kernels without a match in the other file, the most time first."""
    found = [side.unmatched.by_name(side.kernels.names) for side in (overlapped, sequential)]
    kernels = []
    for name in dict.fromkeys((*found[0], *found[1])):
        (in_ov, ov_ms), (in_seq, seq_ms) = (of_side.get(name, (0, 0.0)) for of_side in found)
        kernels.append(
            UnmatchedKernel(
                name=name,
                overlapped_calls=in_ov,
                sequential_calls=in_seq,
                overlapped_ms=ov_ms,
                sequential_ms=seq_ms,
            )
        )
    return tuple(sorted(kernels, key=lambda kernel: -max(kernel.overlapped_ms, kernel.sequential_ms)))


def _misfits(ov: Side, seq: Side) -> Iterator[str]:
    """Why the files are not of one job, by what they say themselves."""
    sides = (("overlapped", ov), ("sequential", seq))
    if ov.trace.path.resolve() == seq.trace.path.resolve() or ov.times == seq.times:
        yield "the same file was given twice"
    if ov.trace.on_host != seq.trace.on_host:
        of_host, other = ("overlapped", "sequential") if ov.trace.on_host else ("sequential", "overlapped")
        yield f"the {of_host} file is of a CPU job, and the {other} one of a device"
    world_sizes = {side.trace.world_size for _, side in sides}
    if len(world_sizes) > 1 and None not in world_sizes:
        yield f"the files are of different jobs: world sizes {ov.trace.world_size} and {seq.trace.world_size}"
    elif ov.group_sizes and seq.group_sizes and not ov.group_sizes & seq.group_sizes:
        one, other = (", ".join(map(str, sorted(side.group_sizes))) for _, side in sides)
        yield f"the files are of different jobs: their collectives are of groups of {one} and of {other} ranks"
    if ov.device_name and seq.device_name and ov.device_name != seq.device_name:
        yield f"the files are of different devices: {ov.device_name} and {seq.device_name}"
    for name, side in sides:
        if side.trace.lacks:
            yield f"the {name} file {side.trace.lacks}, and no step of it is known to be whole"
    if ov.communicates != seq.communicates:
        name = "overlapped" if ov.communicates else "sequential"
        yield f"only the {name} file communicates; what does in the other can be named with --communication REGEX"


def _not_sequential(ov: Side, figures: Mapping[str, float]) -> Iterator[str]:
    """Whether the sequential file overlaps."""
    residual, of_comm = figures.get("residual_overlap"), figures.get("residual_comm_overlap")
    limit, ratio = residual_limit("cpu" if ov.trace.on_host else ""), figures.get("overlap_ratio")
    if residual is not None and residual > limit:
        overlaps_more = ratio is not None and ratio < residual
        swapped = f", and that of the overlapped file is {ratio:.3f}: they may be swapped" if overlaps_more else ""
        yield f"the sequential file is not sequential: its overlap ratio is {residual:.3f}, above {limit}{swapped}"
    elif of_comm is not None and of_comm > RESIDUAL_COMM_LIMIT and not ov.trace.on_host:  # there, ranges are not cut
        yield (
            f"the sequential file is not sequential: {of_comm:.0%} of its communication runs during compute, above "
            f"{RESIDUAL_COMM_LIMIT:.0%}"
        )


def _unlike(
    ov: Side, seq: Side, figures: Mapping[str, float], matched: float, pairs: Iterable[PairTime]
) -> Iterator[str]:
    """Why the work of the two files is not the same."""
    if ov.trace.lacks or seq.trace.lacks:
        return
    if ov.has_steps != seq.has_steps:
        yield "only one of the files has ProfilerStep ranges: a step cannot be compared with a whole file"
    elif ov.communicates and seq.communicates and "e2e_ideal_ms" not in figures:
        yield (
            "the overlapped file computes longer than the sequential one by more than a step lasts: the two do not "
            "look like traces of one job"
        )
    elif matched < _MIN_MATCHED_FRACTION:
        yield (
            f"only {matched:.0%} of the compute time of one file has a partner in the other: the two do not look like "
            "traces of one job, or hold different numbers of steps or micro-batches"
        )
    elif (num_bytes := _bytes_of(ov, seq)) and matched * min(num_bytes) < _MIN_MATCHED_FRACTION * max(num_bytes):
        yield _other_bytes(num_bytes)
    elif ov.communicates and seq.communicates and not ov.trace.on_host:  # a host has other work
        own = [pair for pair in pairs if pair.concurrent_with == ALONE and not pair.communication]
        times_ms = [sum([of.time_ms for of in own]), sum([of.alone_ms for of in own])]
        if times_ms[0] < _MIN_ALONE * figures["compute_ms"]:
            # What overlaps may be slower for it, and not faster.
            times_ms = [figures[name] for name in ("compute_ms", "compute_isolated_ms")]
            times_ms[0] = min(times_ms)
        if min(times_ms) > 0 and not _near(times_ms[0], times_ms[1], _MIN_LIKE):
            name = "overlapped" if times_ms[0] > times_ms[1] else "sequential"
            yield (
                f"compute takes {max(times_ms) / min(times_ms):.2f} times as long in the {name} file, which overlap "
                "does not explain: batches, sequence lengths or clocks differ"
            )


def _near(one: float, other: float, least: float = _MIN_MATCHED_FRACTION) -> bool:
    return min(one, other) >= least * max(one, other)


def _bytes_of(ov: Side, seq: Side) -> tuple[float, float] | None:
    """What a mean step of each communicates; None if that is nothing or unknown."""
    return (ov.comm_bytes, seq.comm_bytes) if ov.comm_bytes and seq.comm_bytes else None


def _other_bytes(num_bytes: tuple[float, float]) -> str:
    one, other = map(bytes_in_words, num_bytes)
    return f"they communicate different amounts in a step: {one} and {other} [OC774]"


def _figures(overlapped: Side, sequential: Side) -> dict[str, float]:
    """The defined figures, per step, by the live report's names."""
    ov, seq = overlapped.mean_step, sequential.mean_step
    ov_wall_ms, seq_wall_ms = overlapped.wall_ms, sequential.wall_ms
    ideal_ms: float | None = ideal_step_ms(ov_wall_ms, ov.compute_ms, seq.compute_ms)
    if ideal_ms is not None and ideal_ms <= 0:  # a step takes some time
        ideal_ms = None
    model_ms = None if ideal_ms is None else sequential_step_ms(ideal_ms, ov.hidden_comm_ms)
    figures: dict[str, float | None] = {
        "compute_slowdown": _change(ov.compute_ms, seq.compute_ms),
        "overlap_ratio": _overlap_ratio(ov),
        "e2e_overlapped_ms": ov_wall_ms,
        "e2e_ideal_ms": ideal_ms,
        "e2e_sequential_model_ms": model_ms,
        "e2e_sequential_ms": seq_wall_ms,
        "speedup_vs_sequential": _change(seq_wall_ms, ov_wall_ms),
        "gap_to_ideal": _change(ov_wall_ms, ideal_ms),
        "sequential_model_error": _change(model_ms, seq_wall_ms),
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
        "comm_ratio": _share(ov.comm_ms, ov_wall_ms),
        "residual_overlap": _overlap_ratio(seq),
        "residual_comm_overlap": _share(seq.hidden_comm_ms, seq.comm_ms),
    }
    if not overlapped.communicates and not sequential.communicates:
        figures |= dict.fromkeys(_OF_OVERLAP)
    return {name: value for name, value in figures.items() if value is not None}


def _overlap_ratio(step: StepFigures) -> float | None:
    if step.comm_ms and step.compute_ms > 0:
        return overlap_ratio(step.covered_compute_ms, step.compute_ms)
    return None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _change(value: float | None, base: float | None) -> float | None:
    return slowdown(value, base) if value is not None and base is not None and base > 0 and value > 0 else None


def _problems(overlapped: Side, sequential: Side) -> Iterator[str]:
    """What is doubtful, and why there may be no answer."""
    ov, seq = overlapped.trace, sequential.trace
    calls = [side.num_collectives / side.num_steps for side in (overlapped, sequential)]
    if not overlapped.communicates and not sequential.communicates:
        yield NOTHING_COMMUNICATES
    yield from [f"overlapped: {problem}" for problem in ov.problems]
    yield from [f"sequential: {problem}" for problem in seq.problems]
    if ov.rank != seq.rank and None not in (ov.rank, seq.rank):
        yield f"the files are of different ranks: {ov.rank} and {seq.rank} [OC772]"
    if num_bytes := _bytes_of(overlapped, sequential):
        if not _near(*num_bytes, _SAME_BYTES):
            yield _other_bytes(num_bytes)
    elif None in (overlapped.comm_bytes, sequential.comm_bytes) and all(calls) and not _near(*calls):
        yield f"the files have different numbers of collectives in a step: {calls[0]:.1f} and {calls[1]:.1f} [OC773]"
