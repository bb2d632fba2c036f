"""Analyses traces: figures per step, collective, group and kernel; many files in several processes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks._version import __version__
from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.exposure import add_exposures, of_cycle, of_rank, reported
from overlap_callbacks.analysis.kernels.calls import Calls
from overlap_callbacks.analysis.kernels.table import Kind, StringTable
from overlap_callbacks.analysis.kernels.timeline import step_timeline
from overlap_callbacks.analysis.kernels.times import KernelFigures, KernelSums
from overlap_callbacks.analysis.results.exposure import Exposure, ExposureSums
from overlap_callbacks.analysis.results.kernel_times import StepTimeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.traces.archives import bytes_of, container_of, in_turn, is_read_from_its_start
from overlap_callbacks.traces.cycles import File, cycles_of, in_order
from overlap_callbacks.traces.device_time import TimeSums, TopKernel
from overlap_callbacks.traces.estimate import EstimateSums
from overlap_callbacks.traces.figures import Analysis, FamilyFigures, StepFigures, TraceFigures
from overlap_callbacks.traces.files import Progress, TraceError
from overlap_callbacks.traces.pieces import Device, Piece, devices_of
from overlap_callbacks.traces.ranks import CollectiveSums, Part, collective_sizes, heard_of, numbers_of, skew_over_ranks
from overlap_callbacks.traces.reading import read_trace
from overlap_callbacks.traces.splits import split_loads, splits_of
from overlap_callbacks.traces.trace import Trace

# Kernels of the table of a device. There may be thousands of names.
MAX_KERNELS = 100
# More processes than this gain little: a disk or a file server is the limit.
MAX_PROCESSES = 8
# Below this many bytes of files, starting a process takes longer than it saves.
_MIN_BYTES = 8 * 2**20


def part_of(trace: Trace, *, with_turns: bool = True) -> Part:
    """What an analysis needs of a trace. Compares devices of a file; with ``with_turns``, files too."""
    devices, problems = devices_of(trace), []
    if len(devices) > 1:
        problems.append(f"the file holds kernels of {len(devices)} devices: each has its own figures [OC702]")
    sums = {
        device.number: CollectiveSums(device.trace, with_turns=with_turns or len(devices) > 1) for device in devices
    }
    figures = [device_figures(device, sums[device.number], problems=problems) for device in devices]
    ran = sums if len(trace.kernels) else {}
    return Part(
        tuple(figures),
        trace.rank,
        trace.world_size,
        trace.on_host,
        frozenset(trace.device_names.get(device, "") for device in ran) - {""},
        {device: of_device.turns for device, of_device in ran.items()},
        [of_device.by_size for of_device in ran.values()],
        [splits_of(device.trace) for device in devices],
        add_exposures([ExposureSums(), *[of_device.exposure for of_device in ran.values()]]),
    )


def analyze(traces: Sequence[Trace]) -> Analysis:
    """The figures of one trace, or of the traces of several ranks of a job.

    Raises:
        ValueError: no trace was given.
    """
    if not traces:
        raise ValueError("traces must hold at least one trace")
    return together([part_of(rank) for trace in traces for rank in trace.merged or (trace,)])


def together(parts: Sequence[Part], warnings: Sequence[str] = ()) -> Analysis:
    """The analysis of several files; ``warnings`` must be read before any figure.

    Ranks are compared within each cycle of a job.
    """
    cycles = _cycles(parts)
    skews = {cycle: skew_over_ranks(of_cycle) for cycle, of_cycle in cycles.items()}
    problems: dict[str, list[str]] = {}
    for cycle, skew in skews.items():
        for problem in skew.problems:
            problems.setdefault(problem, []).append(cycle)
    one_job = all([skew.one_job for skew in skews.values()])
    matched = {(*place, cycle): of for cycle, skew in skews.items() for place, of in skew.matched.items()}
    return Analysis(
        library_version=__version__,
        traces=tuple([
            msgspec.structs.replace(figures, cycle=cycle)
            for cycle, of_cycle in cycles.items() for part in of_cycle for figures in part.figures
        ]),
        skew=tuple([msgspec.structs.replace(row, cycle=cycle) for cycle, skew in skews.items() for row in skew.rows]),
        problems=(
            *warnings,
            *[
                problem if len(of) == len(cycles) else f"{', '.join(of[:4])}: {problem}"
                for problem, of in problems.items()
            ],
        ),
        warnings=tuple(warnings),
        sizes=collective_sizes(parts, matched) if one_job else (),
        exposure=_exposure(cycles) if one_job else None,
        one_job=one_job,
        splits=split_loads([(cycle, sent) for cycle, of in cycles.items() for part in of for sent in part.splits])
        if one_job else None,
    )  # fmt: skip


def _exposure(cycles: Mapping[str, Sequence[Part]]) -> Exposure | None:
    """What is exposed on all ranks; steps of two cycles differ, whatever their numbers."""
    found = []
    for cycle, parts in enumerate(cycles.values()):
        for rank, part in zip(numbers_of(parts), parts, strict=True):
            found.append(of_rank(of_cycle(part.exposure, cycle, len(cycles)), rank))
    return reported(msgspec.structs.replace(add_exposures(found), num_ranks=max(map(heard_of, cycles.values()))))


def _cycles(parts: Sequence[Part]) -> dict[str, list[Part]]:
    """The files of each cycle of a job; of others, all under an empty name."""
    files = []
    for part in parts:
        first = part.figures[0]
        numbers = [step.step for step in first.steps if step.step is not None]
        files.append(File(first.file, part.rank, min(numbers, default=None)))
    sizes = {part.world_size for part in parts if part.world_size is not None}
    labels = cycles_of(files) if len(parts) > 1 and len(sizes) < 2 else []
    if not labels:
        return {"": list(parts)}
    ranks = [part.rank for part in parts]
    return {cycle: [parts[place] for place in places] for cycle, places in in_order(labels, ranks).items()}


def device_figures(
    device: Device,
    collectives: CollectiveSums,
    mode: Mode = Mode.OVERLAPPED,
    also: Callable[[Trace], object] = lambda _: None,
    problems: Sequence[str] = (),
) -> TraceFigures:
    """The figures of a device, added up over its pieces; ``also`` receives each piece too."""
    trace, number = device.trace, device.number
    steps, use, estimate, names = _StepSums(device, mode), TimeSums(device), EstimateSums(trace), NameSums(trace)
    for piece in device.pieces():
        steps.add(piece)
        use.add(piece)
        for add in (collectives.add, names.add, estimate.add, also):
            add(piece.trace)
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
        beside_copies=estimate.beside_copies,
        picture=steps.picture,
        problems=(*trace.problems, *problems, *steps.problems),
        warnings=trace.warnings,
        time=use.time,
        paths=use.paths,
        kernels=names.top,
        queues=use.queues,
        host_limit=use.host_limit,
        utilisation=use.utilisation,
        reductions=trace.reductions,
        on_host_collectives=use.on_host,
        recorded=trace.recorded,
        exposure=reported(of_rank(collectives.exposure, trace.rank or 0)),
    )


class _StepSums:
    """Times of the kernels of each step and of the whole file, added up over pieces.

    Attributes:
        steps: the figures of the steps so far.
        picture: the timeline of the first step with kernels, or of a file without steps that is one piece.
    """

    def __init__(self, device: Device, mode: Mode) -> None:
        self._device, self._trace, self._mode = device, device.trace, mode
        self._all = self._outside = KernelFigures()
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
            self.picture = step_timeline(kernels, self._device.steps[0], self._mode)
        elif not self._device.steps and piece.is_whole:
            self.picture = step_timeline(kernels, -1, self._mode)

    @property
    def total(self) -> StepFigures:
        """The figures of the whole file."""
        span = self._device.span
        wall_ms = None if span is None else (span.end_ns - span.start_ns) / 1e6
        return step_figures(self._all, None, wall_ms, self._device.communicates, cut=self._trace.is_cut)

    @property
    def problems(self) -> list[str]:
        """What is doubtful about the file."""
        steps, problems = self._trace.steps, []
        without = sorted({*range(len(steps))} - {*self._device.steps})
        skipped = [str(steps[i].number) for i in without if not steps[i].cut]
        if skipped and self._device.span is not None:
            problems.append(f"no kernels were launched in steps {', '.join(skipped[:8])}: they are left out [OC703]")
        outside = self._outside
        if steps and outside.num_kernels:
            problems.append(
                f"{outside.num_kernels} kernels ({outside.compute_ns / 1e6:.3f} ms of compute, "
                f"{outside.comm_ns / 1e6:.3f} ms of communication) were launched in none of the steps: they count in "
                "the total alone [OC704]"
            )
        if not self._device.communicates:
            problems.append("there is no communication: its figures are undefined [OC705]")
        return problems


def step_figures(
    figures: KernelFigures,
    step: int | None,
    wall_ms: float | None,
    communicates: bool,
    *,
    cut: bool = False,
    to_ms: Callable[[int], float] = lambda ns: ns / 1e6,
) -> StepFigures:
    """The figures of a set of kernels.

    Ratios are undefined if a file never communicates. ``to_ms`` converts nanoseconds, and divides by the number of
    steps for a mean.
    """

    def ratio(part: int, whole: int) -> float | None:
        return part / whole if whole and communicates else None

    return StepFigures(
        step=step,
        wall_ms=wall_ms,
        compute_ms=to_ms(figures.compute_ns),
        compute_busy_ms=to_ms(figures.compute_busy_ns),
        comm_ms=to_ms(figures.comm_busy_ns),
        comm_kernels_ms=to_ms(figures.comm_ns),
        hidden_comm_ms=to_ms(figures.hidden_comm_ns),
        exposed_comm_ms=to_ms(figures.comm_busy_ns - figures.hidden_comm_ns),
        covered_compute_ms=to_ms(figures.covered_compute_ns),
        overlap_ratio=ratio(figures.covered_compute_ns, figures.compute_ns),
        overlap_ratio_busy=ratio(figures.covered_compute_busy_ns, figures.compute_busy_ns),
        hidden_comm_fraction=ratio(figures.hidden_comm_ns, figures.comm_busy_ns),
        copy_ms=to_ms(figures.copy_ns),
        kernels=figures.num_kernels,
        cut=cut,
    )


# -- kernels by name and family


class NameSums:
    """The kernels of one device by their names."""

    def __init__(self, trace: Trace) -> None:
        self._names, self._kinds = trace.kernels.names, trace.kernels.collectives
        # A name may have kernels of both kinds: compute kernels come first.
        size = 2 * len(self._names)
        self._count, self._longest_ns = (np.zeros(size, dtype=np.int64) for _ in range(2))
        self._time_ns, self._concurrent_ns = (np.zeros(size) for _ in range(2))
        # Time of compute kernels during each kind of collective.
        self._by_kind_ns: npt.NDArray[np.float64] = np.zeros((len(self._kinds), len(self._names)))

    def add(self, trace: Trace) -> None:
        """Add the rows of a piece."""
        kernels, size = trace.kernels, len(self._count)
        calls = Calls.of(kernels)
        name, communicates = kernels.name[calls.row], calls.kind == Kind.COMMUNICATION
        compute = np.flatnonzero(calls.kind == Kind.COMPUTE)
        rows = np.flatnonzero(communicates | (calls.kind == Kind.COMPUTE))
        concurrent_ns, mine = calls.covered_ns(kernels.union_of(Kind.COMMUNICATION)), np.flatnonzero(communicates)
        concurrent_ns[mine] = kernels.intervals[calls.row[mine]].covered_ns(kernels.union_of(Kind.COMPUTE))
        compute_ns = concurrent_ns[compute]
        key = name[rows] * 2 + communicates[rows]
        self._count += np.bincount(key, minlength=size)
        self._time_ns += np.bincount(key, weights=calls.duration_ns[rows], minlength=size)
        self._concurrent_ns += np.bincount(key, weights=concurrent_ns[rows], minlength=size)
        np.maximum.at(self._longest_ns, key, calls.duration_ns[rows])
        for number in range(len(self._kinds)):
            if len(self._kinds) > 1:
                compute_ns = calls.covered_ns(kernels.intervals[kernels.collective == number])[compute]
            self._by_kind_ns[number] += np.bincount(name[compute], weights=compute_ns, minlength=len(self._names))

    @property
    def top(self) -> tuple[TopKernel, ...]:
        """The kernels and collectives, most time first; ``MAX_KERNELS`` at most."""
        total_ns = float(self._time_ns.sum())
        order = np.argsort(-self._time_ns, kind="stable")[:MAX_KERNELS]
        return tuple([self._kernel(i, total_ns) for i in order[self._count[order] > 0].tolist()])

    @property
    def families(self) -> tuple[FamilyFigures, ...]:
        """The families of compute kernels, most time first."""
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


# -- many files


def analyze_files(
    paths: Sequence[str | Path],
    *,
    processes: int | None = None,
    progress: Progress | None = None,
    steps: re.Pattern[str] | None = None,
) -> Analysis:
    """The figures of trace files; each process holds one file in memory at a time.

    Unreadable files are left out, and reported. Files of ranks are ordered by rank.

    Args:
        paths: the files, as ``find_traces`` gives them.
        processes: maximum number of processes; None for one per core, at most eight.
        progress: called with progress and total: bytes of a single file, else files.
        steps: pattern for names of the host's ranges that are steps; None for torch's ``ProfilerStep#``.

    Raises:
        TraceError: no file can be read; or a process was killed, e.g. for lack of memory.
        ValueError: no file was given.
    """
    if not paths:
        raise ValueError("paths must hold at least one file")
    files = [Path(path) for path in paths]
    if len(files) == 1:
        trace = read_trace(files[0], progress, steps, with_ranges=False)
        return analyze([trace]) if trace.merged else together([part_of(trace, with_turns=False)])
    found: list[list[Part] | str] = [""] * len(files)
    for done, (place, part) in enumerate(_parts(files, processes, steps), start=1):
        found[place] = part
        if progress is not None:
            progress(done, len(files))
    parts = [part for of_file in found if not isinstance(of_file, str) for part in of_file]
    failed = [part for part in found if isinstance(part, str)]
    if not parts:
        more = f" (and {len(failed) - 1} more files cannot be read)" if len(failed) > 1 else ""
        raise TraceError(failed[0] + more)
    ranks = [part.rank for part in parts]
    if None not in ranks and len(set(ranks)) == len(ranks):
        parts.sort(key=lambda part: part.rank or 0)
    return together(parts, [f"left out: {reason} [OC701]" for reason in failed])


def _parts(
    files: Sequence[Path], processes: int | None, steps: re.Pattern[str] | None
) -> Iterator[tuple[int, list[Part] | str]]:
    """Place and parts of each file, one for each rank in it, or why it cannot be read; in any order."""
    most = min(len(files), processes or min(_cores(), MAX_PROCESSES))
    if most < 2 or (processes is None and sum(map(bytes_of, files)) < _MIN_BYTES):
        for batch in _batches(files, 1):
            yield from _read(batch, steps)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    # Not forked: a fork of a process with threads, as of NumPy's, may hang.
    pool = ProcessPoolExecutor(most, multiprocessing.get_context("spawn"), initializer=_set_rules, initargs=(_rules(),))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # of these processes, until ``_set_rules``
    try:
        waiting = {pool.submit(_read_all, batch, steps) for batch in _batches(files, most)}
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for future in as_completed(waiting):
            waiting.remove(future)
            yield from future.result()
    except BrokenProcessPool:
        raise TraceError(
            "a process that read traces was killed, perhaps for want of memory: give fewer files at a time"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        pool.shutdown(wait=True, cancel_futures=True)


_Batch = Sequence[tuple[int, Path]]


def _batches(files: Sequence[Path], processes: int) -> Iterator[_Batch]:
    """What a process reads at once: files, and shares of archives that are read from their start; with their places."""
    inside = [container_of(file) for file in files]
    archives = {found[0] for found in inside if found is not None}
    slow = {archive for archive in archives if is_read_from_its_start(archive)}
    batches: dict[Path, list[tuple[int, Path]]] = {}
    for place, (file, found) in enumerate(zip(files, inside, strict=True)):
        if found is not None and found[0] in slow:
            batches.setdefault(found[0], []).append((place, file))
        else:
            yield [(place, file)]
    for batch in batches.values():
        size = -(-len(batch) // processes)
        yield from [batch[first : first + size] for first in range(0, len(batch), size)]


def _read_all(batch: _Batch, steps: re.Pattern[str] | None) -> list[tuple[int, list[Part] | str]]:
    return list(_read(batch, steps))


def _read(batch: _Batch, steps: re.Pattern[str] | None) -> Iterator[tuple[int, list[Part] | str]]:
    """Place and parts of each file of a batch."""
    found = container_of(batch[0][1]) if len(batch) > 1 else None
    if found is None:
        yield from [(place, _part(file, steps)) for place, file in batch]
        return
    archive, _ = found
    places: dict[str, list[int]] = {}
    for place, file in batch:
        places.setdefault(file.relative_to(archive).as_posix(), []).append(place)
    for name in in_turn(archive, list(places)):
        yield from [(place, _part(archive / name, steps)) for place in places[name]]


def _part(file: Path, steps: re.Pattern[str] | None) -> list[Part] | str:
    try:
        trace = read_trace(file, steps=steps, with_ranges=False)
        return [part_of(rank) for rank in trace.merged or (trace,)]
    except TraceError as error:
        return str(error)


_RULES = ("communication_patterns", "direct_communication", "not_communication", "collectives", "copies", "families")


def _rules() -> dict[str, list[Any]]:
    """The rules for names, which may have been extended in this process."""
    return {name: getattr(name_rules, name) for name in _RULES}


def _set_rules(rules: dict[str, list[Any]]) -> None:
    """Install the parent's rules for names in a process, which Ctrl-C ends in silence."""
    for name, rows in rules.items():
        getattr(name_rules, name)[:] = rows
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _cores() -> int:
    count: Callable[[], int | None] = getattr(os, "process_cpu_count", os.cpu_count)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return count() or 1
