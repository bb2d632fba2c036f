"""The table of kernels from a live profile or a trace file, one column per property.

On an accelerator, the kernels are those of the device. Without one, compute kernels are the torch operators of the
training thread with their self times, and communication is the ranges of Gloo's threads (``host.py``).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.intervals import Intervals, distinct_values

Indices = npt.NDArray[np.int64]


_Triple = tuple[int, int, int]


class LaunchShape(msgspec.Struct, frozen=True):
    """How a kernel was launched: blocks of the grid, threads of a block, and resources, 0 if unknown."""

    grid: _Triple
    block: _Triple
    registers_per_thread: int = 0
    shared_memory_bytes: int = 0
    num_sms: int = 0

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> LaunchShape | None:
        """Read the shape from an event's metadata; None without a grid and a block, or if they make no sense."""
        try:
            grid, block = _triple(metadata["grid"]), _triple(metadata["block"])
            blocks_per_sm = float(metadata.get("blocks per SM", 0))
            return cls(
                grid,
                block,
                int(metadata.get("registers per thread", 0)),
                int(metadata.get("shared memory", 0)),
                # Kineto gives the blocks of the grid per SM.
                round(prod(grid) / blocks_per_sm) if blocks_per_sm > 0 else 0,
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    @property
    def num_blocks(self) -> int:
        """Thread blocks of the whole grid."""
        return prod(self.grid)

    @property
    def threads_per_block(self) -> int:
        """Threads of one block."""
        return prod(self.block)

    def __str__(self) -> str:
        """Grid and block, as in the tables of kernels."""
        return f"{list(self.grid)} {list(self.block)}"


def _triple(value: Any) -> _Triple:
    x, y, z = (int(part) for part in value)
    return x, y, z


class Kind(enum.IntEnum):
    """What a kernel does."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2
    OTHER = 3


@dataclass(frozen=True)
class KernelTable:
    """Kernels in columns, one row per kernel; on CPU, one row per piece of an operator's self time. Shapes are (n,).

    Attributes:
        intervals: when each row ran, in nanoseconds.
        kind: ``Kind`` of each row.
        name: index into ``names``, the distinct names.
        step: index of the profiled step that launched the row; -1 outside all steps.
        call: number of the call; rows with the same number are pieces of one call.
        shape: index into ``shapes``, the distinct launch shapes as text; empty if unknown. Launches that differ in
            registers or shared memory alone have the same text. Of copies it is their size.
        collective: index into ``collectives``, kinds such as ``all_reduce``; -1 for rows that do not communicate.
        lane: device stream or host thread.
        launches: the distinct launch shapes, parallel to ``shapes``; None if unknown, and of copies.
        without_launch: whether the profile has launches, but not the row's.
        from_graph: whether a CUDA or HIP graph launched the row.
        uncounted: on CPU, the share of each profiled step in which the training thread ran no counted operator, issued
            no collective and waited for none, and nothing was in flight.
        launched_ns: of a device, when the host launched each row, -1 where unknown. None where nothing needs it.
        lacking, impossible: the profiled steps of which a device's kernels are missing, or ran longer than they can.
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
    launches: tuple[LaunchShape | None, ...]
    without_launch: npt.NDArray[np.bool_]
    from_graph: npt.NDArray[np.bool_]
    uncounted: tuple[float, ...] = ()
    launched_ns: Indices | None = None
    lacking: frozenset[int] = frozenset()
    impossible: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.intervals)

    def __getitem__(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp] | slice) -> KernelTable:
        """A table of the selected rows."""
        return KernelTable(
            self.intervals[rows], self.kind[rows], self.name[rows], self.step[rows], self.call[rows], self.names,
            self.shape[rows], self.shapes, self.collective[rows], self.collectives, self.lane[rows],
            self.launches, self.without_launch[rows], self.from_graph[rows], self.uncounted,
            None if self.launched_ns is None else self.launched_ns[rows], self.lacking, self.impossible,
        )  # fmt: skip

    @cached_property
    def one_row_a_call(self) -> bool:
        """Whether each row is a call, numbered by row, as on a device."""
        return bool((self.call == np.arange(len(self))).all())

    @property
    def busy(self) -> npt.NDArray[np.bool_]:
        """Whether each row computes or communicates; shape (n,)."""
        busy: npt.NDArray[np.bool_] = (self.kind == Kind.COMPUTE) | (self.kind == Kind.COMMUNICATION)
        return busy

    def of(self, kind: Kind) -> Intervals:
        """The intervals of one kind, within steps and outside."""
        return self.intervals[self.kind == kind]

    def union_of(self, kind: Kind) -> Intervals:
        """The union of the intervals of one kind, computed once."""
        if kind not in self._unions:
            self._unions[kind] = self.of(kind).union()
        return self._unions[kind]

    @cached_property
    def _unions(self) -> dict[Kind, Intervals]:
        return {}

    def named(self, matches: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
        """Whether each row has a matching name; shape (n,)."""
        return rows_named(matches, self.names, self.name)

    def runs(self, collective: str) -> npt.NDArray[np.bool_]:
        """Whether each row runs a kind of collective; shape (n,)."""
        return np.isin(self.collective, [n for n, kind in enumerate(self.collectives) if kind == collective])


def rows_named(matches: Callable[[str], Any], names: Sequence[str], name: Indices) -> npt.NDArray[np.bool_]:
    """Whether each row has a matching name; ``name`` is each row's index into ``names``; shape (n,)."""
    found: npt.NDArray[np.bool_] = np.array([bool(matches(text)) for text in names], dtype=bool)[name]
    return found


class StringTable(dict[str, int]):
    """Numbers distinct texts by first appearance."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        super().__init__(zip(texts, itertools.count()))

    def __missing__(self, text: str) -> int:
        self[text] = number = len(self)
        return number

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(self)

    def renamed(self, change: Callable[[str], str]) -> tuple[StringTable, Indices]:
        """A table of the changed texts, and the new number of each old one; shape (distinct texts,)."""
        changed = StringTable()
        return changed, np.array([changed[change(text)] for text in self], dtype=np.int64)


_UINT64 = 2**64 - 1


class KernelTableBuilder:
    """Growing columns that a reader of events appends to. Times are in nanoseconds.

    ``correlation`` is the number that a kernel shares with its launch, ``lane`` its stream or thread.
    """

    def __init__(self) -> None:
        self.start, self.end = array("q"), array("q")
        self.kind = array("b")
        self.name, self.names = array("q"), StringTable()
        self.correlation = array("Q")
        self.shape = array("q")
        self.shapes: dict[LaunchShape | str | None, int] = {}
        self.lane = array("q")

    def label(
        self, kind: int, name: str, correlation: int = 0, shape: LaunchShape | str | None = None, lane: int = 0
    ) -> None:
        """Append everything of a row except its times. The shape of a copy is ``size_of_copy``."""
        self.kind.append(kind)
        self.name.append(self.names[name])
        self.correlation.append(correlation & _UINT64)
        self.shape.append(self.shapes.setdefault(shape, len(self.shapes)))
        self.lane.append(lane)

    def clean_names(self) -> None:
        """Clean all names for use in tables, see ``safe_text.clean``."""
        self.names, number = self.names.renamed(safe_text.clean)
        self.name = array("q", number[np.array(self.name, dtype=np.int64)].tobytes() if len(self) else b"")

    def __len__(self) -> int:
        return len(self.name)

    @property
    def intervals(self) -> Intervals:
        return Intervals(np.array(self.start, dtype=np.int64), np.array(self.end, dtype=np.int64))


def device_kernels(
    rows: KernelTableBuilder,
    launched_ns: Indices | None,
    bounds: Sequence[tuple[int, int]],
    from_graph: npt.NDArray[np.bool_] | None = None,
) -> KernelTable:
    """The table of an accelerator's kernels, each assigned to the step that launched it.

    The device lags the host by up to a step: when profiling begins, kernels of the step before it still run, without
    launches in the profile.

    Args:
        rows: kernels, memory copies and fills.
        launched_ns: when the host launched each row, -1 if unknown; shape (n,). None without any launches in the
            profile; then the kernels' own starts decide.
        bounds: host start and end of each step, in nanoseconds.
        from_graph: whether a graph launch launched each row; shape (n,). None if unknown.
    """
    name, distinct = np.array(rows.name, dtype=np.int64), rows.names.texts
    kind = np.array(rows.kind, dtype=np.uint8)
    # A copy may communicate too, such as a copy engine's between devices.
    kind[((kind == Kind.COMPUTE) | (kind == Kind.COPY)) & communicates(rows)] = Kind.COMMUNICATION
    intervals, lane, nowhere = rows.intervals, np.array(rows.lane, dtype=np.int64), np.zeros(len(rows), dtype=bool)
    if launched_ns is None:
        step, without_launch = step_of(intervals.start_ns, bounds), nowhere
    else:
        step, without_launch = step_of_kernels(launched_ns, intervals, lane, bounds), launched_ns < 0
    collective, collectives = collectives_of(name, distinct, kind == Kind.COMMUNICATION)
    return KernelTable(
        intervals, kind, name, step, np.arange(len(name)), distinct, np.array(rows.shape, dtype=np.int64),
        tuple([str(shape or "") for shape in rows.shapes]) or ("",), collective, collectives, lane,
        launches_of(tuple(rows.shapes) or (None,)),
        without_launch, nowhere if from_graph is None else from_graph, launched_ns=launched_ns,
    )  # fmt: skip


def launches_of(shapes: Iterable[LaunchShape | str | None]) -> tuple[LaunchShape | None, ...]:
    """The launch shapes that can be read: None for others, and for sizes of copies."""
    return tuple([shape if isinstance(shape, LaunchShape) else None for shape in shapes])


def communicates(rows: KernelTableBuilder) -> npt.NDArray[np.bool_]:
    """Whether each row communicates, by its name; shape (n,)."""
    return rows_named(name_rules.is_communication, rows.names.texts, np.array(rows.name, dtype=np.int64))


def collectives_of(
    name: Indices,
    distinct: Sequence[str],
    communicates: npt.NDArray[np.bool_],
    by_metadata: npt.NDArray[np.integer[Any]] | None = None,
    kinds: Sequence[str] = ("",),
) -> tuple[Indices, tuple[str, ...]]:
    """The kind of collective of each row, -1 for rows that do not communicate, and the distinct kinds.

    Args:
        name: index into ``distinct``, the distinct names, of each row; shape (n,).
        distinct: the distinct names.
        communicates: whether each row communicates; shape (n,).
        by_metadata: index into ``kinds`` of each row that communicates; shape (n,). None without metadata.
        kinds: kinds of collectives; an empty text lets the name decide.
    """
    codes = StringTable()
    collective = np.full(len(name), -1, dtype=np.int64)
    rows = np.flatnonzero(communicates)
    size = max(len(kinds), 1)
    kind = by_metadata[rows] if by_metadata is not None else 0
    pairs, inverse = np.unique(name[rows] * size + kind, return_inverse=True)
    labels = [kinds[pair % size] or name_rules.collective_of(distinct[pair // size]) for pair in pairs.tolist()]
    if len(rows):
        collective[rows] = np.array([codes[label] for label in labels], dtype=np.int64)[inverse.reshape(-1)]
    return collective, codes.texts


# -- the step of each kernel


def step_of(times_ns: Indices, bounds: Sequence[tuple[int, int]]) -> Indices:
    """Index of the step that contains each time, -1 for none; shape (n,).

    ``bounds`` are start and end of each step, in nanoseconds, ascending and without overlap.
    """
    if not bounds:
        return np.full(len(times_ns), -1, dtype=np.int64)
    begins, ends = np.array(bounds, dtype=np.int64).T
    index = np.searchsorted(begins, times_ns, side="right") - 1
    inside = (index >= 0) & (times_ns < ends[np.maximum(index, 0)])
    return np.where(inside, index, -1)


def step_of_kernels(launched_ns: Indices, ran: Intervals, lane: Indices, bounds: Sequence[tuple[int, int]]) -> Indices:
    """Index of the step of each kernel, -1 for none; shape (n,).

    A kernel belongs to the step that launched it. Kineto omits some calls of CUDA's driver that launch kernels:
    ``cuLaunchCooperativeKernel``, ``cuGraphLaunch`` and ``cuMemcpy*Async`` (its CuptiCbidRegistry.cpp). A kernel
    without a launch (-1) belongs to the step of its neighbours on the stream if these agree, else to the step that ran
    on the device when it started. Kernels that start before a step's first kernel belong to an earlier step, and get
    -1.
    """
    step = step_of(launched_ns, bounds)
    if not (launched_ns < 0).any() or not (step >= 0).any():
        return step
    order = np.lexsort((ran.start_ns, lane))
    is_known = launched_ns[order] >= 0
    known, rows = order[is_known], order[~is_known]
    # The last row before and the first row after each row without a launch whose own is known; -1 for none.
    place = np.searchsorted(np.flatnonzero(is_known), np.flatnonzero(~is_known))
    before, after = np.append(known, -1)[place - 1], np.append(known, -1)[place]
    agree = (before >= 0) & (after >= 0) & (step[before] == step[after])
    agree &= (lane[before] == lane[rows]) & (lane[after] == lane[rows])
    step[rows] = np.where(agree, step[before], _running(step, ran, ran.start_ns[rows], bounds))
    return step


def _running(step: Indices, ran: Intervals, times_ns: Indices, bounds: Sequence[tuple[int, int]]) -> Indices:
    """The step whose kernels had begun on the device, and not all ended, at each time; -1 for none; shape (n,)."""
    inside, never = step >= 0, np.iinfo(np.int64).max
    first, last = np.full(len(bounds), never), np.array([end for _, end in bounds], dtype=np.int64)
    np.minimum.at(first, step[inside], ran.start_ns[inside])
    np.maximum.at(last, step[inside], ran.end_ns[inside])
    steps = np.flatnonzero(first < never)
    # A step's first kernel may start before one of the step before has, on another stream.
    index = np.searchsorted(np.maximum.accumulate(first[steps]), times_ns, side="right") - 1
    found = steps[np.maximum(index, 0)]
    return np.where((index >= 0) & (times_ns <= last[found]), found, -1)


# -- copies by copy engines, and those that are the work of a collective
# Copies from one device to another communicate by their name (``Memcpy PtoP``). A peer's mapped memory may show as a
# copy within the device (``Memcpy DtoD``). It communicates if it ran on a stream that never computes, and does the work
# of a collective that has no kernel, by the gate's log (``alignment.py``) or by torch's ranges (``traces``).

# Copies within a device's memory, as CUPTI and roctracer name them.
WITHIN_DEVICE = ("Memcpy DtoD", "CopyDeviceToDevice")


def is_copy(name: str) -> bool:
    """Whether a row is a copy by a copy engine, by its name. A collective has one such copy for each peer, or more."""
    return name.startswith(("Memcpy", "Memset", "Copy"))


_SIZE = " bytes"


def size_of_copy(num_bytes: Any) -> str:
    """What copies have as their launch shape: those of one size are compared. Empty if the size is not known."""
    return f"{num_bytes}{_SIZE}" if type(num_bytes) is int and num_bytes > 0 else ""


def is_size(shape: str) -> bool:
    """Whether a shape is the size of a copy."""
    return shape.endswith(_SIZE)


def directions_of(kernels: KernelTable) -> Indices:
    """The direction of each copy, an index into ``name_rules.COPIES``; -1 for fills and other rows; shape (n,)."""
    number = {label: place for place, label in enumerate(name_rules.COPIES)}
    of_name = np.array([number.get(name_rules.copy_of(name), -1) for name in kernels.names], dtype=np.int64)
    return np.where(kernels.kind == Kind.COPY, of_name[kernels.name], -1)


def copies_of(kernels: KernelTable) -> npt.NDArray[np.bool_]:
    """Which rows are copies and fills, whether they communicate or not; shape (n,)."""
    return kernels.named(is_copy)


def within_device(kernels: KernelTable) -> npt.NDArray[np.bool_]:
    """Whether each row is a copy within the device, by its name; shape (n,)."""
    within: npt.NDArray[np.bool_] = kernels.named(lambda name: name.startswith(WITHIN_DEVICE))
    within &= kernels.kind == Kind.COPY
    return within


def may_communicate(kernels: KernelTable) -> npt.NDArray[np.bool_]:
    """Whether each row is a copy within the device on a lane that never computes; shape (n,)."""
    computing = distinct_values(kernels.lane[kernels.kind == Kind.COMPUTE])
    return within_device(kernels) & ~np.isin(kernels.lane, computing)


def as_communication(kernels: KernelTable, kind_of: Mapping[int, str]) -> KernelTable:
    """The same rows, with some copies as communication; ``kind_of`` has their kinds of collectives, by row."""
    if not kind_of:
        return kernels
    rows = np.fromiter(kind_of, dtype=np.int64, count=len(kind_of))
    kinds, names = StringTable(kernels.collectives), StringTable(kernels.names)
    kind, collective, name = kernels.kind.copy(), kernels.collective.copy(), kernels.name.copy()
    kind[rows] = Kind.COMMUNICATION
    collective[rows] = [kinds[text] for text in kind_of.values()]
    for number in distinct_values(name[rows]).tolist():
        mine = rows[name[rows] == number]
        name[mine] = names[copy_of_collective(kernels.names[number])]
    return dataclasses.replace(
        kernels, kind=kind, collective=collective, collectives=kinds.texts, name=name, names=names.texts
    )


def copy_of_collective(name: str) -> str:
    """The name of a copy that does a collective's work, to separate it from other copies in tables by name."""
    return f"{name} of a collective"
