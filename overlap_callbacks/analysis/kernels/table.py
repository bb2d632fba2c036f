"""Kernels in columns, and their times step by step: of a live profile and of a trace file alike.

On an accelerator a kernel is a kernel of the device. On a machine without one, "compute kernels" are torch operators of
the training thread, each with its self time, and communication is the ranges of Gloo's own threads: a real measurement
of how the two contend for the CPU.
"""

from __future__ import annotations

import enum
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.intervals import Intervals, self_segments
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import KernelTime, ProfiledBlock

Indices = npt.NDArray[np.int64]


class Kind(enum.IntEnum):
    """What a kernel does."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2
    OTHER = 3


@dataclass(frozen=True)
class KernelTable:
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
        lane: stream of the device, or thread of the host, on which it ran; shape (n,).
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
    lane: Indices

    def __len__(self) -> int:
        return len(self.intervals)

    def __getitem__(self, rows: npt.NDArray[Any]) -> KernelTable:
        """Some of the rows."""
        return KernelTable(
            self.intervals[rows], self.kind[rows], self.name[rows], self.step[rows], self.call[rows], self.names,
            self.shape[rows], self.shapes, self.collective[rows], self.collectives, self.lane[rows],
        )  # fmt: skip

    def of(self, kind: Kind) -> Intervals:
        """Intervals of one kind, in all steps."""
        return self.intervals[self.kind == kind]


class StringTable:
    """Texts as numbers: each distinct text has one, in the order in which they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(self.numbers)

    def renamed(self, change: Callable[[str], str]) -> tuple[StringTable, Indices]:
        """The codes of the changed texts, and the new number of each old one."""
        found = StringTable()
        return found, np.array([found[change(text)] for text in self.numbers], dtype=np.int64)


_UINT64 = 2**64 - 1


class KernelTableBuilder:
    """Columns that grow, for a reader of events.

    Attributes:
        start, end: nanoseconds.
        kind: ``Kind`` of each.
        name: number in ``names`` of each.
        correlation: number that a kernel shares with its launch.
        shape: number in ``shapes`` of the launch shape of each.
        collective: number in ``collectives`` of the kind of collective, where metadata tells it; else that of the empty
            text, and the name decides.
        lane: stream or thread of each.
    """

    def __init__(self) -> None:
        self.start, self.end = array("q"), array("q")
        self.kind = array("b")
        self.name, self.names = array("q"), StringTable()
        self.correlation = array("Q")
        self.shape, self.shapes = array("q"), StringTable()
        self.collective, self.collectives = array("q"), StringTable()
        self.lane = array("q")

    @classmethod
    def of_host(cls, start: Sequence[int], end: Sequence[int], texts: Sequence[str]) -> KernelTableBuilder:
        """Rows that are nothing but ranges of time with a name."""
        rows, count = cls(), len(texts)
        codes = rows.names
        rows.start, rows.end = array("q", start), array("q", end)
        rows.name = array("q", [codes[text] for text in texts])
        rows.kind, rows.correlation = array("b", bytes(count)), array("Q", bytes(8 * count))
        rows.shape, rows.collective, rows.lane = (array("q", bytes(8 * count)) for _ in range(3))
        if count:
            rows.shapes[""], rows.collectives[""]
        return rows

    def add(
        self, start: int, end: int, kind: int, name: str, correlation: int = 0, shape: str = "", lane: int = 0
    ) -> None:
        """A row; ``collective`` is left to the name."""
        self.start.append(start)
        self.end.append(end)
        self.label(kind, name, correlation, shape, lane=lane)

    def label(
        self, kind: int, name: str, correlation: int = 0, shape: str = "", collective: str = "", lane: int = 0
    ) -> None:
        """All of a row but its times."""
        self.kind.append(kind)
        self.correlation.append(correlation & _UINT64)
        self.lane.append(lane)
        # As ``Codes`` would do it; here it counts.
        numbers = self.names.numbers
        self.name.append(numbers.setdefault(name, len(numbers)))
        numbers = self.shapes.numbers
        self.shape.append(numbers.setdefault(shape, len(numbers)))
        numbers = self.collectives.numbers
        self.collective.append(numbers.setdefault(collective, len(numbers)))

    def clean_names(self) -> None:
        """Make all names fit for tables."""
        self.names, number = self.names.renamed(name_rules.clean)
        self.name = array("q", number[np.array(self.name, dtype=np.int64)].tobytes() if len(self) else b"")

    def __len__(self) -> int:
        return len(self.name)

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


def device_kernels(
    rows: KernelTableBuilder, launched_ns: Indices | None, bounds: Sequence[tuple[int, int]]
) -> KernelTable:
    """Kernels of an accelerator.

    A kernel belongs to the step that launched it: the device lags behind the host by up to a step, and kernels of the
    step before profiling began, whose launches are not in the profile, still run when it does.

    Args:
        rows: kernels, copies and fills.
        launched_ns: when the host launched each, -1 where that is not known; shape (n,). None where the profile holds
            no launches at all: the kernels' own starts must do then.
        bounds: host start and end of each step.
    """
    name, distinct = np.array(rows.name, dtype=np.int64), rows.names.texts
    kind = np.array(rows.kind, dtype=np.uint8)
    kind[(kind == Kind.COMPUTE) & communicates(rows)] = Kind.COMMUNICATION
    if launched_ns is None:
        launched_ns = np.array(rows.start, dtype=np.int64)
    told = np.array(rows.collective, dtype=np.int64)
    collective, collectives = _collectives(name, distinct, kind == Kind.COMMUNICATION, told, rows.collectives.texts)
    return KernelTable(
        rows.intervals, kind, name, step_of(launched_ns, bounds), np.arange(len(name)), distinct,
        np.array(rows.shape, dtype=np.int64), rows.shapes.texts or ("",), collective, collectives,
        np.array(rows.lane, dtype=np.int64),
    )  # fmt: skip


def communicates(rows: KernelTableBuilder) -> npt.NDArray[np.bool_]:
    """Whether each row's name is that of communication; shape (n,)."""
    by_name = np.array([name_rules.is_communication(text) for text in rows.names.texts], dtype=bool)
    return by_name[np.array(rows.name, dtype=np.int64)] if len(rows) else np.empty(0, dtype=bool)


def host_kernels(
    host: KernelTableBuilder,
    ranges: KernelTableBuilder,
    bounds: Sequence[tuple[int, int]],
    quiet_ns: Sequence[int] = (),
) -> KernelTable:
    """Operators of the training thread as compute, asynchronous ranges of communication libraries beside them.

    Args:
        host: all calls of the training thread.
        ranges: asynchronous ranges, of communication or not.
        bounds: start and end of each step.
        quiet_ns: ascending times at which no collective was in flight: ranges that go on after one end there.
    """
    calls = host.intervals
    pieces, owner = self_segments(calls)
    called, call_names = np.array(host.name, dtype=np.int64), host.names.texts
    computes = np.array([name.startswith("aten::") and not _NO_COMPUTE.search(name) for name in call_names], dtype=bool)
    wanted = computes[called[owner]] if len(owner) else np.empty(0, dtype=bool)
    pieces, owner = pieces[wanted], owner[wanted]
    # The step is that of the call's start, so that all its pieces go together.
    step = step_of(calls.start_ns, bounds)[owner]

    sends = communicates(ranges)
    sent, sent_name = _cut(ranges.intervals[sends], quiet_ns), np.array(ranges.name, dtype=np.int64)[sends]

    name = np.concatenate((called[owner], sent_name + len(call_names)))
    kind = np.repeat(np.array((Kind.COMPUTE, Kind.COMMUNICATION), dtype=np.uint8), (len(owner), len(sent)))
    distinct = (*call_names, *ranges.names.texts)
    untold = np.zeros(len(name), dtype=np.int64)
    collective, collectives = _collectives(name, distinct, kind == Kind.COMMUNICATION, untold, ("",))
    return KernelTable(
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
        np.concatenate((np.zeros(len(owner), dtype=np.int64), np.array(ranges.lane, dtype=np.int64)[sends])),
    )


def _collectives(
    name: Indices, distinct: Sequence[str], communicates: npt.NDArray[np.bool_], told: Indices, kinds: Sequence[str]
) -> tuple[Indices, tuple[str, ...]]:
    """The kind of collective of each row: as told (an index into ``kinds``), else by its name; -1 for the rest."""
    codes = StringTable()
    found = np.full(len(name), -1, dtype=np.int64)
    rows = np.flatnonzero(communicates)
    pairs, inverse = np.unique(np.stack((name[rows], told[rows])), axis=1, return_inverse=True)
    labels = [kinds[kind] or name_rules.collective_of(distinct[number]) for number, kind in pairs.T.tolist()]
    if len(rows):
        found[rows] = np.array([codes[label] for label in labels], dtype=np.int64)[inverse.reshape(-1)]
    return found, codes.texts


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
        covered_compute_busy_ns: the part of ``compute_busy_ns`` in which it was.
        copy_ns: sum of the device's memory copies and fills.
        p2p_busy_ns: the part of ``comm_busy_ns`` in which sends and receives are in flight.
        idle_ns: time from the first of these kernels to the end of the last in which none ran and nothing was in
            flight: of one stage of a pipeline, its bubble.
        num_kernels: compute and communication kernels (calls, on CPU).
    """

    compute_ns: int
    compute_busy_ns: int
    comm_ns: int
    comm_busy_ns: int
    hidden_comm_ns: int
    covered_compute_ns: int
    covered_compute_busy_ns: int
    copy_ns: int
    p2p_busy_ns: int
    idle_ns: int
    num_kernels: int


class KernelSums:
    """Figures of parts of a profile.

    Cover is taken against the whole of it: communication that begins in one step may run beside the compute of the
    next.
    """

    def __init__(self, kernels: KernelTable) -> None:
        self._kernels = kernels
        self._compute, self._comm = (kernels.of(kind).union() for kind in (Kind.COMPUTE, Kind.COMMUNICATION))
        start = np.concatenate((self._compute.start_ns, self._comm.start_ns))
        self._any = Intervals(start, np.concatenate((self._compute.end_ns, self._comm.end_ns))).union()
        self._send_recv = kernels.collectives.index("send_recv") if "send_recv" in kernels.collectives else -2
        self._by_step = np.argsort(kernels.step, kind="stable")
        self._steps = kernels.step[self._by_step]

    @property
    def steps(self) -> list[int]:
        """Indices of the steps that have kernels, ascending."""
        return [step for step in np.unique(self._steps).tolist() if step >= 0]

    def of_steps(self, steps: Sequence[int]) -> KernelFigures:
        """Figures of some steps together, by their indices."""
        bounds = np.searchsorted(self._steps, [(step, step + 1) for step in steps]).reshape(-1, 2)
        return self.of_rows(np.concatenate([self._by_step[first:last] for first, last in bounds.tolist()]))

    def _idle_ns(self, compute: Intervals, comm: Intervals) -> int:
        if not len(compute) and not len(comm):
            return 0
        start = min(int(part.start_ns[0]) for part in (compute, comm) if len(part))
        end = max(int(part.end_ns[-1]) for part in (compute, comm) if len(part))
        span = Intervals(np.array([start]), np.array([end]))
        return end - start - int(span.covered_ns(self._any).sum())

    def of_rows(self, rows: npt.NDArray[Any]) -> KernelFigures:
        """Figures of some rows."""
        part = self._kernels[rows]
        compute, comm = part.of(Kind.COMPUTE), part.of(Kind.COMMUNICATION)
        busy, compute_busy = comm.union(), compute.union()
        p2p = part.intervals[part.collective == self._send_recv]
        return KernelFigures(
            compute_ns=compute.sum_ns,
            compute_busy_ns=compute_busy.sum_ns,
            comm_ns=comm.sum_ns,
            comm_busy_ns=busy.sum_ns,
            hidden_comm_ns=int(busy.covered_ns(self._compute).sum()),
            covered_compute_ns=int(compute.covered_ns(self._comm).sum()),
            covered_compute_busy_ns=int(compute_busy.covered_ns(self._comm).sum()),
            copy_ns=part.of(Kind.COPY).sum_ns,
            p2p_busy_ns=p2p.busy_ns,
            idle_ns=self._idle_ns(compute_busy, busy),
            num_kernels=len(np.unique(part.call[(part.kind == Kind.COMPUTE) | (part.kind == Kind.COMMUNICATION)])),
        )


def profiled_block(arm: Mode, block: int, sums: KernelSums, steps: Sequence[int]) -> ProfiledBlock:
    """Kernel times of the profiled steps ``steps`` (indices), as means per step."""
    num_steps = len(steps)
    figures = sums.of_steps(steps)

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
        p2p_ms=per_step_ms(figures.p2p_busy_ns),
        idle_ms=per_step_ms(sum(sums.of_steps([step]).idle_ns for step in steps)),
    )


def kernel_times(kernels: KernelTable, overlapped: Indices, sequential: Indices, most: int) -> tuple[KernelTime, ...]:
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
