"""Kernels in columns, and their times step by step: of a live profile and of a trace file alike.

On an accelerator a kernel is a kernel of the device. On a machine without one, "compute kernels" are torch operators of
the training thread, each with its self time, and communication is the ranges of Gloo's own threads: a real measurement
of how the two contend for the CPU.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_callbacks import names
from overlap_callbacks.samples import KernelTime, ProfiledBlock
from overlap_callbacks.schedule import Mode
from overlap_callbacks.timeline import Intervals, self_segments

Indices = npt.NDArray[np.int64]


class Kind(enum.IntEnum):
    """What a kernel does."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2
    OTHER = 3


@dataclass(frozen=True)
class Kernels:
    """Kernels in columns, one row each; on CPU one row for each piece of an operator's self time.

    Attributes:
        intervals: when they ran; n rows.
        kind: ``Kind`` of each; shape (n,).
        name: index into ``names``; shape (n,).
        step: index of the profiled step in which they were launched, -1 outside all; shape (n,).
        call: which rows are pieces of one call: the same number; shape (n,).
        names: the distinct names.
        shape: index into ``shapes``, the grid and block that a kernel was launched with; shape (n,).
        shapes: the distinct launch shapes, as text; empty where unknown.
        collective: index into ``collectives``, -1 for what does not communicate; shape (n,).
        collectives: kinds of collectives, e.g. ``all_reduce``.
    """

    intervals: Intervals
    kind: npt.NDArray[np.uint8]
    name: Indices
    step: Indices
    call: Indices
    names: tuple[str, ...]
    shape: Indices
    shapes: tuple[str, ...]
    collective: Indices
    collectives: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.intervals)

    def __getitem__(self, rows: npt.NDArray[Any]) -> Kernels:
        """Some of the rows."""
        return Kernels(
            self.intervals[rows], self.kind[rows], self.name[rows], self.step[rows], self.call[rows], self.names,
            self.shape[rows], self.shapes, self.collective[rows], self.collectives,
        )  # fmt: skip

    def of(self, kind: Kind) -> Intervals:
        """Intervals of one kind, in all steps."""
        return self.intervals[self.kind == kind]


@dataclass
class Rows:
    """Columns that grow, for a reader of events.

    Attributes:
        start, end: nanoseconds.
        kind: ``Kind`` of each.
        names: of each.
        correlation: number that a kernel shares with its launch.
        shapes: launch shape of each.
        collectives: kind of collective, where the metadata tells it; else empty, and the name decides.
    """

    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    correlation: list[int] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)

    def add(
        self, start: int, end: int, kind: Kind, name: str, correlation: int = 0, shape: str = "", collective: str = ""
    ) -> None:
        self.start.append(start)
        self.end.append(end)
        self.kind.append(kind)
        self.names.append(name)
        self.correlation.append(correlation)
        self.shapes.append(shape)
        self.collectives.append(collective)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def intervals(self) -> Intervals:
        return Intervals(np.array(self.start, dtype=np.int64), np.array(self.end, dtype=np.int64))


# Torch operators that are no computation although their name says aten.
_NO_COMPUTE = re.compile(r"wait_tensor|^aten::(record_stream|is_pinned)")


def step_of(times_ns: Indices, bounds: Sequence[tuple[int, int]]) -> Indices:
    """Index of the step that each time lies in, -1 outside all. ``bounds`` ascend and do not overlap."""
    if not bounds:
        return np.full(len(times_ns), -1, dtype=np.int64)
    begins, ends = np.array(bounds, dtype=np.int64).T
    index = np.searchsorted(begins, times_ns, side="right") - 1
    inside = (index >= 0) & (times_ns < ends[np.maximum(index, 0)])
    return np.where(inside, index, -1)


def device_kernels(rows: Rows, launched_ns: Indices | None, bounds: Sequence[tuple[int, int]]) -> Kernels:
    """Kernels of an accelerator.

    A kernel belongs to the step that launched it: the device lags behind the host by up to a step, and kernels of the
    step before profiling began, whose launches are not in the profile, still run when it does.

    Args:
        rows: kernels, copies and fills.
        launched_ns: when the host launched each, -1 where that is not known; shape (n,). None where the profile holds
            no launches at all: the kernels' own starts must do then.
        bounds: host start and end of each step.
    """
    name, distinct = _coded(rows.names)
    communicates = np.array([names.is_communication(text) for text in distinct], dtype=bool)
    kind = np.array(rows.kind, dtype=np.uint8)
    if len(name):
        kind[(kind == Kind.COMPUTE) & communicates[name]] = Kind.COMMUNICATION
    if launched_ns is None:
        launched_ns = np.array(rows.start, dtype=np.int64)
    shape, shapes = _coded(rows.shapes)
    collective, collectives = _collectives(name, distinct, kind == Kind.COMMUNICATION, rows.collectives)
    return Kernels(
        rows.intervals, kind, name, step_of(launched_ns, bounds), np.arange(len(name)), distinct,
        shape, shapes, collective, collectives,
    )  # fmt: skip


def host_kernels(host: Rows, ranges: Rows, bounds: Sequence[tuple[int, int]], quiet_ns: Sequence[int] = ()) -> Kernels:
    """Operators of the training thread as compute, asynchronous ranges of communication libraries beside them.

    Args:
        host: all calls of the training thread.
        ranges: asynchronous ranges, of communication or not.
        bounds: start and end of each step.
        quiet_ns: ascending times at which no collective was in flight: ranges that go on after one end there.
    """
    calls = host.intervals
    pieces, owner = self_segments(calls)
    called, call_names = _coded(host.names)
    computes = np.array([name.startswith("aten::") and not _NO_COMPUTE.search(name) for name in call_names], dtype=bool)
    wanted = computes[called[owner]] if len(owner) else np.empty(0, dtype=bool)
    pieces, owner = pieces[wanted], owner[wanted]
    # The step is that of the call's start, so that all its pieces go together.
    step = step_of(calls.start_ns, bounds)[owner]

    ranged, range_names = _coded(ranges.names)
    communicates = np.array([names.is_communication(name) for name in range_names], dtype=bool)
    sends = communicates[ranged] if len(ranged) else np.empty(0, dtype=bool)
    sent, sent_name = _cut(ranges.intervals[sends], quiet_ns), ranged[sends]

    name = np.concatenate((called[owner], sent_name + len(call_names)))
    kind = np.repeat(np.array((Kind.COMPUTE, Kind.COMMUNICATION), dtype=np.uint8), (len(owner), len(sent)))
    distinct = (*call_names, *range_names)
    collective, collectives = _collectives(name, distinct, kind == Kind.COMMUNICATION, [""] * len(name))
    return Kernels(
        Intervals(np.concatenate((pieces.start_ns, sent.start_ns)), np.concatenate((pieces.end_ns, sent.end_ns))),
        kind,
        name,
        np.concatenate((step, step_of(sent.start_ns, bounds))),
        np.concatenate((owner, len(calls) + np.arange(len(sent)))),
        distinct,
        np.zeros(len(name), dtype=np.int64),
        ("",),
        collective,
        collectives,
    )


def _coded(texts: Sequence[str]) -> tuple[Indices, tuple[str, ...]]:
    """Texts as numbers, and the distinct texts, in the order in which they come."""
    codes: dict[str, int] = {}
    return np.array([codes.setdefault(text, len(codes)) for text in texts], dtype=np.int64), tuple(codes)


def _collectives(
    name: Indices, distinct: Sequence[str], communicates: npt.NDArray[np.bool_], told: Sequence[str]
) -> tuple[Indices, tuple[str, ...]]:
    """The kind of collective of each row: as told, else by its name; -1 for what does not communicate."""
    codes: dict[str, int] = {}
    by_name: dict[int, str] = {}
    found = np.full(len(name), -1, dtype=np.int64)
    for row in np.flatnonzero(communicates).tolist():
        label = told[row]
        if not label:
            number = int(name[row])
            label = by_name.get(number) or by_name.setdefault(number, names.collective_of(distinct[number]))
        found[row] = codes.setdefault(label, len(codes))
    return found, tuple(codes)


def _cut(ranges: Intervals, quiet_ns: Sequence[int]) -> Intervals:
    """The ranges, each ended at the first quiet time after its start."""
    never = np.iinfo(np.int64).max
    quiet = np.append(np.asarray(quiet_ns, dtype=np.int64), never)
    next_quiet = quiet[np.searchsorted(quiet, ranges.start_ns, side="left")]
    return Intervals(ranges.start_ns, np.minimum(ranges.end_ns, next_quiet))


@dataclass(frozen=True)
class KernelFigures:
    """Times of some kernels, in nanoseconds.

    Attributes:
        compute_ns: sum of the compute kernels' times (the study's T_comp).
        compute_busy_ns: length of the union of their intervals.
        comm_ns, comm_busy_ns: the same of the communication kernels.
        hidden_comm_ns: the part of ``comm_busy_ns`` in which compute ran too.
        covered_compute_ns: the part of ``compute_ns`` in which communication was in flight.
        copy_ns: sum of the device's memory copies and fills.
        num_kernels: compute and communication kernels (calls, on CPU).
    """

    compute_ns: int
    compute_busy_ns: int
    comm_ns: int
    comm_busy_ns: int
    hidden_comm_ns: int
    covered_compute_ns: int
    copy_ns: int
    num_kernels: int


def kernel_figures(kernels: Kernels, inside: npt.NDArray[np.bool_]) -> KernelFigures:
    """Figures of the rows ``inside``.

    Cover is taken against all kernels: communication that begins in one step may run beside the compute of the next.
    """
    compute_rows = kernels.kind == Kind.COMPUTE
    comm_rows = kernels.kind == Kind.COMMUNICATION
    all_compute, all_comm = kernels.intervals[compute_rows], kernels.intervals[comm_rows]
    compute, comm = kernels.intervals[compute_rows & inside], kernels.intervals[comm_rows & inside]
    return KernelFigures(
        compute_ns=compute.sum_ns,
        compute_busy_ns=compute.busy_ns,
        comm_ns=comm.sum_ns,
        comm_busy_ns=comm.busy_ns,
        hidden_comm_ns=comm.shared_ns(all_compute),
        covered_compute_ns=int(compute.covered_ns(all_comm).sum()),
        copy_ns=kernels.intervals[(kernels.kind == Kind.COPY) & inside].sum_ns,
        num_kernels=len(np.unique(kernels.call[(compute_rows | comm_rows) & inside])),
    )


def profiled_block(arm: Mode, block: int, num_steps: int, kernels: Kernels, steps: Indices) -> ProfiledBlock:
    """Kernel times of the profiled steps ``steps`` (indices), as means per step."""
    figures = kernel_figures(kernels, np.isin(kernels.step, steps))

    def per_step_ms(time_ns: int) -> float:
        return time_ns / num_steps / 1e6

    return ProfiledBlock(
        arm=arm,
        block=block,
        num_steps=num_steps,
        compute_ms=per_step_ms(figures.compute_ns),
        compute_busy_ms=per_step_ms(figures.compute_busy_ns),
        comm_ms=per_step_ms(figures.comm_ns),
        comm_busy_ms=per_step_ms(figures.comm_busy_ns),
        hidden_comm_ms=per_step_ms(figures.hidden_comm_ns),
        covered_compute_ms=per_step_ms(figures.covered_compute_ns),
        copy_ms=per_step_ms(figures.copy_ns),
    )


def kernel_times(kernels: Kernels, overlapped: Indices, sequential: Indices, most: int) -> tuple[KernelTime, ...]:
    """Time and calls of each kernel in both modes, per step; the ``most`` kernels with the most time.

    Args:
        kernels: of the whole profile.
        overlapped: indices of the overlapped profiled steps.
        sequential: indices of the sequential ones.
        most: rows to keep.
    """
    size = len(kernels.names)
    durations = kernels.intervals.durations_ns
    counts = np.zeros(len(kernels), dtype=np.int64)
    counts[np.unique(kernels.call, return_index=True)[1]] = 1  # of several pieces of a call, the first counts

    def totals(steps: Indices) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        rows = np.isin(kernels.step, steps)
        calls = np.bincount(kernels.name[rows], weights=counts[rows], minlength=size)
        time_ns = np.bincount(kernels.name[rows], weights=durations[rows], minlength=size)
        return calls / max(len(steps), 1), time_ns / max(len(steps), 1) / 1e6

    calls_ov, ms_ov = totals(overlapped)
    calls_seq, ms_seq = totals(sequential)
    kind = np.full(size, Kind.OTHER)
    kind[kernels.name] = kernels.kind
    ran = calls_ov + calls_seq > 0
    wanted = np.flatnonzero(((kind == Kind.COMPUTE) | (kind == Kind.COMMUNICATION)) & ran)
    wanted = wanted[np.argsort(-(ms_ov + ms_seq)[wanted], kind="stable")][:most]
    return tuple(
        KernelTime(
            name=kernels.names[i],
            communication=bool(kind[i] == Kind.COMMUNICATION),
            overlapped_calls=float(calls_ov[i]),
            sequential_calls=float(calls_seq[i]),
            overlapped_ms=float(ms_ov[i]),
            sequential_ms=float(ms_seq[i]),
        )
        for i in wanted
    )
