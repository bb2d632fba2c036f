"""Compares two traces of one job, one per mode: equations 1 to 5, and losses by kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_callbacks._version import __version__
from overlap_callbacks.analysis.equations import ideal_step_ms, overlap_ratio, sequential_step_ms, slowdown
from overlap_callbacks.analysis.formatting import bytes_in_words
from overlap_callbacks.analysis.intervals import distinct_values, sum_of
from overlap_callbacks.analysis.kernels.attribution import PairSums
from overlap_callbacks.analysis.kernels.calls import Calls, Labels, SameCalls, unordered_in
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.kernels.times import KernelFigures, KernelSums
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.validity import RESIDUAL_COMM_LIMIT, residual_limit
from overlap_callbacks.traces.analysis import device_figures, step_figures
from overlap_callbacks.traces.archives import container_of, starts_with
from overlap_callbacks.traces.collectives import UNKNOWN, Collectives
from overlap_callbacks.traces.figures import (
    NOTHING_COMMUNICATES,
    Comparison,
    StepFigures,
    TraceFigures,
    UnmatchedKernel,
)
from overlap_callbacks.traces.files import Progress, pieces, with_tables
from overlap_callbacks.traces.pieces import Device, devices_of
from overlap_callbacks.traces.ranks import CollectiveSums
from overlap_callbacks.traces.reading import read_trace
from overlap_callbacks.traces.trace import Trace

# If less than this share of the compute time has a match, or one communicates less than this share of what the other
# does, the two files are not of one job.
_MIN_MATCHED_FRACTION = 0.8
# What overlap does to a step: nothing where nothing communicates.
_OF_OVERLAP = (
    "e2e_ideal_ms", "e2e_sequential_model_ms", "speedup_vs_sequential", "gap_to_ideal", "sequential_model_error",
)  # fmt: skip
# Stands for the range of what was launched in none.
NO_RANGE = "(no range)"

_Marks = npt.NDArray[np.bool_]


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


def _of_one_device(name: str, trace: Trace) -> _Side:
    """The side of a trace, which must have one device."""
    if trace.merged:
        first = trace.merged[0].path
        raise ValueError(f"{name}: {first.parent} holds {len(trace.merged)} ranks: give one of them, as in {first}")
    devices = devices_of(trace)
    if len(devices) > 1:
        raise ValueError(f"{name}: {trace.path} holds kernels of {len(devices)} devices: give one of one rank")
    return _Side(devices[0])


def _keep_common(ov: _Side, seq: _Side) -> None:
    """If the files have the same steps, leave out steps that lack kernels in either file."""
    numbers, other = ({step.number for step in side.trace.steps} for side in (ov, seq))
    mine, theirs = ({step.number for step in side.trace.steps if not step.cut} for side in (ov, seq))
    if numbers == other and mine != theirs and mine & theirs:
        ov.keep(mine & theirs)
        seq.keep(mine & theirs)


def _compared(ov: _Side, seq: _Side) -> Comparison:
    """The comparison of an overlapped and a sequential trace."""
    _keep_common(ov, seq)
    labels = Labels(ov.kernels, seq.kernels)
    unordered = unordered_in(seq.kernels)
    of_overlapped, of_sequential = SameCalls(labels, 0), SameCalls(labels, 1, unordered)
    figures_of = ov.add_up(Mode.OVERLAPPED, of_overlapped), seq.add_up(Mode.SEQUENTIAL, of_sequential)
    for name, side in (("overlapped", ov), ("sequential", seq)):
        if not side.computes:
            where = " in its steps" if side.has_steps else ""
            raise ValueError(f"{name}: {side.trace.path} holds no compute kernels{where}")
    pairs = PairSums(ov.kernels)
    for calls, wanted, trace in ov.calls():
        alone_ns, *before = of_sequential.means_ns(calls, wanted)
        pairs.add(calls, wanted, alone_ns, before_ns=dict(zip(unordered, before, strict=True)))
        ov.match(calls, wanted, alone_ns, trace)
    for calls, wanted, trace in seq.calls():
        pairs.add_alone(calls, wanted)
        seq.match(calls, wanted, of_overlapped.means_ns(calls, wanted)[0], trace)
    fraction = min(ov.matched_fraction, seq.matched_fraction)
    figures = _figures(ov, seq)
    misfits = tuple([*_misfits(ov, seq), *_not_sequential(ov, figures), *_unlike(ov, seq, figures, fraction)])
    return Comparison(
        library_version=__version__,
        overlapped=figures_of[0],
        sequential=figures_of[1],
        steps=(ov.num_steps, seq.num_steps),
        figures=figures,
        valid=not misfits,
        matched_fraction=fraction,
        kernels=ov.matched_kernels,
        pairs=pairs.pairs(ov.num_steps, seq.num_steps),
        unmatched=_unmatched(ov, seq),
        ranges=ov.matched_ranges,
        problems=(*misfits, *_problems(ov, seq)),
        misfits=misfits,
    )


class _Side:
    """One file: its mean step, and sums of its calls by their matches in the other one.

    Attributes:
        trace: the whole trace.
        kernels: a table without rows, with the names of all kernels.
        num_steps: number of whole steps, which count; 1 for a file without any.
        has_steps: whether the file has any.
        computes: whether any kernel that counts computes, once the calls were added up.
        num_collectives: kernels that count and communicate, once the calls were added up.
        unmatched: the calls that match none, by the number of their name, once all were matched.
    """

    def __init__(self, device: Device) -> None:
        self.trace = trace = device.trace
        self.kernels = kernels = trace.kernels[:0]
        self._device = device
        self.keep({step.number for step in trace.steps})
        self.computes, self.num_collectives = False, 0
        self._comm_bytes: int | None = 0
        self._infos: set[int] = set()
        self._total = KernelFigures()
        self._compute_ns = self._matched_ns = 0
        self._matched, self.unmatched = _Times(len(kernels.names)), _Times(len(kernels.names))
        self._kind = np.full(len(kernels.names), Kind.OTHER)
        self._ranges = (NO_RANGE, *(trace.launches.ranges if trace.launches is not None else ()))
        self._by_range = _Times(len(self._ranges))

    def keep(self, numbers: set[int]) -> None:
        """Count only whole steps with these numbers; call before anything is added up."""
        steps = self.trace.steps
        self._steps = [i for i in self._device.steps if not steps[i].cut and steps[i].number in numbers]
        if not self._steps:
            # A file without whole steps is one step, with the turns of all its calls.
            self._device.at_least = len(self.trace.kernels)
        self.has_steps, self.num_steps = bool(self._steps), max(len(self._steps), 1)

    def add_up(self, mode: Mode, same_calls: SameCalls) -> TraceFigures:
        """The figures of the file; ``same_calls`` collects the calls that the other file's may match."""

        def add(trace: Trace) -> None:
            calls, wanted, _rows = self._calls(trace)
            same_calls.add(calls, wanted)
            rows = np.flatnonzero(self._counts(trace.kernels))
            kind = trace.kernels.kind[rows]
            self.computes |= bool((kind == Kind.COMPUTE).any())
            self._total += KernelSums(trace.kernels).of_rows(rows)
            self._add_collectives(trace.collectives[rows[kind == Kind.COMMUNICATION]])

        return device_figures(self._device, CollectiveSums(self.trace, with_turns=False), mode, add)

    def calls(self) -> Iterator[tuple[Calls, _Marks, Trace]]:
        """The calls of each piece, which of them count, and the piece."""
        return (self._calls(piece.trace) for piece in self._device.pieces())

    def match(self, calls: Calls, wanted: _Marks, alone_ns: npt.NDArray[np.float64], trace: Trace) -> None:
        """Add the wanted calls of a piece; ``alone_ns`` are the times of their matches, NaN without any."""
        is_matched, kind = np.isfinite(alone_ns), calls.kind
        name, time_ns = calls.kernels.name[calls.row], calls.duration_ns
        compute = wanted & (kind == Kind.COMPUTE)
        self._compute_ns += sum_of(time_ns[compute])
        self._matched_ns += sum_of(time_ns[compute & is_matched])
        rows = np.flatnonzero(wanted & ~is_matched & (kind != Kind.COPY))
        self.unmatched.add(name[rows], time_ns[rows], alone_ns[rows])
        rows = np.flatnonzero(is_matched)
        self._matched.add(name[rows], time_ns[rows], alone_ns[rows])
        self._kind[name[rows]] = kind[rows]  # the last kind counts for names with several
        if trace.launches is not None and trace.launches.range_of is not None:
            rows = rows[kind[rows] == Kind.COMPUTE]
            self._by_range.add(trace.launches.range_of[calls.row[rows]] + 1, time_ns[rows], alone_ns[rows])

    @property
    def wall_ms(self) -> float:
        """Mean length of a step on the host, or the length of a file without steps."""
        if self.has_steps:
            return float(np.mean([self.trace.steps[i].wall_ms for i in self._steps]))
        span = self._device.span
        return 0.0 if span is None else (span.end_ns - span.start_ns) / 1e6

    @property
    def mean_step(self) -> StepFigures:
        """The kernels of the mean step, once the calls were added up."""
        ms_per_step = 1e-6 / self.num_steps
        return step_figures(self._total, None, None, communicates=True, to_ms=lambda ns: ns * ms_per_step)

    @property
    def device_name(self) -> str:
        """Empty if unknown, and of a CPU job."""
        return "" if self.trace.on_host else self.trace.device_names.get(self._device.number, "")

    @property
    def communicates(self) -> bool:
        """Whether the steps that count do, or the host, once the calls were added up."""
        launches = self.trace.launches
        return bool(self.num_collectives) or (launches is not None and launches.on_host is not None)

    @property
    def group_sizes(self) -> set[int]:
        """Those of the collectives' groups, as far as the file tells, once the calls were added up."""
        infos = self.trace.collectives.infos
        return {size for i in self._infos if (size := infos[i].size) is not None}

    @property
    def comm_bytes(self) -> float | None:
        """What a mean step communicates, once the calls were added up; None if any size is unknown."""
        return None if self._comm_bytes is None else self._comm_bytes / self.num_steps

    @property
    def matched_fraction(self) -> float:
        """The share of the compute time whose calls the other file has too."""
        return self._matched_ns / self._compute_ns if self._compute_ns else 0.0

    @property
    def matched_kernels(self) -> tuple[KernelTime, ...]:
        """The matched kernels per step, the largest loss first."""
        return tuple(self._matched.of_each(self.kernels.names, self._kind, self.num_steps))

    @property
    def matched_ranges(self) -> tuple[KernelTime, ...]:
        """Matched compute per step by the host's range around its launch, the largest loss first."""
        if not self._by_range.calls[1:].any():
            return ()
        compute = np.full(len(self._ranges), Kind.COMPUTE)
        return tuple(self._by_range.of_each(self._ranges, compute, self.num_steps))

    def _add_collectives(self, found: Collectives) -> None:
        self.num_collectives += len(found.info)
        self._infos.update(distinct_values(found.info[found.info >= 0]).tolist())
        if self._comm_bytes is not None:
            is_known = bool((found.num_bytes != UNKNOWN).all())
            self._comm_bytes = self._comm_bytes + sum_of(found.num_bytes) if is_known else None

    def _calls(self, trace: Trace) -> tuple[Calls, _Marks, Trace]:
        calls = Calls.of(trace.kernels)
        return calls, self._counts(trace.kernels)[calls.row], trace

    def _counts(self, kernels: KernelTable) -> _Marks:
        """Which rows count."""
        return np.isin(kernels.step, self._steps) if self.has_steps else np.ones(len(kernels), dtype=bool)


class _Times:
    """Per key, such as a kernel's name: number of calls, their time, and that of their matches."""

    def __init__(self, size: int) -> None:
        self.calls, self._time_ns, self._alone_ns = (np.zeros(size) for _ in range(3))

    def add(
        self, of: npt.NDArray[np.int64], duration_ns: npt.NDArray[np.int64], alone_ns: npt.NDArray[np.float64]
    ) -> None:
        """Add calls by key, with their times and their matches' times; shape (n,) each."""
        size = len(self.calls)
        self.calls += np.bincount(of, minlength=size)
        self._time_ns += np.bincount(of, weights=duration_ns, minlength=size)
        self._alone_ns += np.bincount(of, weights=alone_ns, minlength=size)

    def by_name(self, names: tuple[str, ...]) -> dict[str, tuple[int, float]]:
        """Number and time in milliseconds of calls, by key."""
        return {names[i]: (int(self.calls[i]), float(self._time_ns[i]) / 1e6) for i in np.flatnonzero(self.calls)}

    def of_each(self, names: tuple[str, ...], kind: npt.NDArray[Any], num_steps: int) -> Iterator[KernelTime]:
        """The calls of each key per step, except copies, the largest loss first."""
        calls, overlapped_ms = self.calls / num_steps, self._time_ns / num_steps / 1e6
        alone_ms = self._alone_ns / num_steps / 1e6
        for i in np.argsort(alone_ms - overlapped_ms, kind="stable").tolist():
            if self.calls[i] and kind[i] != Kind.COPY:
                yield KernelTime(
                    name=names[i],
                    communication=bool(kind[i] == Kind.COMMUNICATION),
                    overlapped_calls=float(calls[i]),
                    sequential_calls=float(calls[i]),
                    overlapped_ms=float(overlapped_ms[i]),
                    sequential_ms=float(alone_ms[i]),
                )


def _unmatched(overlapped: _Side, sequential: _Side) -> tuple[UnmatchedKernel, ...]:
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


def _misfits(ov: _Side, seq: _Side) -> Iterator[str]:
    """Why the files are not of one job, by what they say themselves."""
    sides = (("overlapped", ov), ("sequential", seq))
    if ov.trace.path.resolve() == seq.trace.path.resolve():
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


def _not_sequential(ov: _Side, figures: Mapping[str, float]) -> Iterator[str]:
    """Whether the sequential file overlaps."""
    residual, of_comm = figures.get("residual_overlap"), figures.get("residual_comm_overlap")
    limit, ratio = residual_limit("cpu" if ov.trace.on_host else ""), figures.get("overlap_ratio")
    if residual is not None and residual > limit:
        overlaps_more = ratio is not None and ratio < residual
        swapped = f", and that of the overlapped file is {ratio:.3f}: they may be swapped" if overlaps_more else ""
        yield f"the sequential file is not sequential: its overlap ratio is {residual:.3f}, above {limit}{swapped}"
    elif of_comm is not None and of_comm > RESIDUAL_COMM_LIMIT and not ov.trace.on_host:  # there, ranges are not cut
        yield (
            f"the sequential file is not sequential: {of_comm:.0%} of its communication runs beside compute, above "
            f"{RESIDUAL_COMM_LIMIT:.0%}"
        )


def _unlike(ov: _Side, seq: _Side, figures: Mapping[str, float], matched: float) -> Iterator[str]:
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
    elif ov.comm_bytes and seq.comm_bytes and not _near(ov.comm_bytes, seq.comm_bytes):
        one, other = map(bytes_in_words, (ov.comm_bytes, seq.comm_bytes))
        yield f"they communicate different amounts in a step: {one} and {other}"


def _near(one: float, other: float) -> bool:
    return min(one, other) >= _MIN_MATCHED_FRACTION * max(one, other)


def _figures(overlapped: _Side, sequential: _Side) -> dict[str, float]:
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


def _problems(overlapped: _Side, sequential: _Side) -> Iterator[str]:
    """What is doubtful, and why there may be no answer."""
    ov, seq = overlapped.trace, sequential.trace
    calls = [side.num_collectives / side.num_steps for side in (overlapped, sequential)]
    if not overlapped.communicates and not sequential.communicates:
        yield NOTHING_COMMUNICATES
    yield from [f"overlapped: {problem}" for problem in ov.problems]
    yield from [f"sequential: {problem}" for problem in seq.problems]
    if ov.rank != seq.rank and None not in (ov.rank, seq.rank):
        yield f"the files are of different ranks: {ov.rank} and {seq.rank}"
    if None in (overlapped.comm_bytes, sequential.comm_bytes) and all(calls) and not _near(*calls):
        yield f"the files have different numbers of collectives in a step: {calls[0]:.1f} and {calls[1]:.1f}"
