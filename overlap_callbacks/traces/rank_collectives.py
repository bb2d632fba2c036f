"""What the comparison of ranks needs of one file: which collectives it has, their times and sizes.

It is small, so that it can come from another process.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np

from overlap_callbacks.analysis.exact_sums import sums_by
from overlap_callbacks.analysis.kernels.copies import copies_of
from overlap_callbacks.analysis.kernels.table import Indices, Kind
from overlap_callbacks.traces.collectives import UNKNOWN, CollectiveInfo
from overlap_callbacks.traces.trace import Trace

# Identifies the collectives of a rank that differ in their turn alone, the same on all ranks that take part: kind,
# group, the group's name, ranks and size, and then their step, or ``sequence`` where they are numbered.
Place = tuple[Any, ...]
_NUMBERED = "sequence"


class Turns(NamedTuple):
    """Collectives of one rank that differ in nothing but their turn, in parallel.

    Attributes:
        turns: number of each, or its turn.
        durations_ns: of their kernels.
        num_bytes: their sizes, as this rank tells them; -1 if unknown.
    """

    turns: array[int]
    durations_ns: array[int]
    num_bytes: array[int]

    @classmethod
    def none(cls) -> Turns:
        """Of no collectives."""
        return cls(array("q"), array("q"), array("q"))


class Timed(NamedTuple):
    """Kernels of collectives of one kind, group size and size in bytes: how many, and their time."""

    number: int
    sum_ns: int


# Kind of a collective, ranks of its group (None if unknown), and bytes.
SizeKey = tuple[str, int | None, int]


class RankCollectives(NamedTuple):
    """What the comparison of ranks needs of one file.

    Attributes:
        rank, world_size, on_host: as in ``Trace``.
        device_names: names of the devices that ran kernels.
        of_device: for each device its collectives, by place.
        by_size: all collectives whose size is known.
    """

    rank: int | None
    world_size: int | None
    on_host: bool
    device_names: frozenset[str]
    of_device: dict[int, dict[Place, Turns]]
    by_size: dict[SizeKey, Timed]


class RankSums:
    """Gathers what the comparison of ranks needs of one file, over the pieces of the time of its devices.

    Args:
        trace: the file, with any rows or none.
        with_turns: whether each collective is kept, for a comparison. There may be millions.
    """

    def __init__(self, trace: Trace, *, with_turns: bool) -> None:
        self._trace, self._with_turns = trace, with_turns
        self._infos, self._num_known = trace.collectives.infos, len(trace.collectives.infos)
        numbers: dict[Place, int] = {}
        infos = [*self._infos, *[CollectiveInfo(kind) for kind in trace.kernels.collectives]]
        self._of_info = np.array([numbers.setdefault(_place(each), len(numbers)) for each in infos], dtype=np.int64)
        self._places = list(numbers)
        self._may_wait = np.array([each.kind != "send_recv" for each in infos], dtype=bool)
        # Turns are counted within the step, so that files that begin at different collectives still match in later
        # steps.
        self._parts = [None, *[step.number for step in trace.steps], _NUMBERED]
        self._of_device: dict[int, dict[Place, Turns]] = {}
        self._by_size: dict[SizeKey, Timed] = {}

    @property
    def collectives(self) -> RankCollectives:
        """What was gathered."""
        trace, devices = self._trace, self._of_device
        names = frozenset(trace.device_names.get(device, "") for device in devices)
        return RankCollectives(trace.rank, trace.world_size, trace.on_host, names - {""}, devices, self._by_size)

    def add(self, device: int, trace: Trace) -> None:
        """Add the rows of the next piece of a device's time."""
        if len(trace.kernels):
            of_device = self._of_device.setdefault(device, {})
            if self._with_turns:
                self._add_turns(of_device, trace)
            self._add_sizes(trace)

    def _add_sizes(self, trace: Trace) -> None:
        """Add the kernels of collectives whose size is known."""
        known, kernels = trace.collectives, trace.kernels
        counts = (known.num_bytes > 0) & (kernels.kind[known.rows] == Kind.COMMUNICATION)
        info, num_bytes = known.info[counts], known.num_bytes[counts]
        times_ns = kernels.intervals.durations_ns[known.rows[counts]]
        sizes, of_size = np.unique(num_bytes, return_inverse=True)
        distinct, number = np.unique(info * len(sizes) + of_size.reshape(-1), return_inverse=True)
        number = number.reshape(-1)
        count, sums_ns = np.bincount(number, minlength=len(distinct)), sums_by(number, times_ns, len(distinct))
        for key, calls, sum_ns in zip(distinct.tolist(), count.tolist(), sums_ns, strict=True):
            of_info = self._infos[key // len(sizes)]
            size = (of_info.kind, of_info.size, int(sizes[key % len(sizes)]))
            before = self._by_size.get(size, Timed(0, 0))
            self._by_size[size] = Timed(before.number + calls, before.sum_ns + sum_ns)

    def _add_turns(self, found: dict[Place, Turns], trace: Trace) -> None:
        """Add the collectives of one device, those of a place in order of time.

        Copies are left out: they do not wait for other ranks. So are sends and receives: a send and its receive are
        different kernels. Of a file that is cut off, so are those without numbers: earlier ones may be missing.
        """
        kernels = trace.kernels
        rows = np.flatnonzero((kernels.kind == Kind.COMMUNICATION) & ~copies_of(kernels))
        rows = rows[np.argsort(kernels.intervals.start_ns[rows], kind="stable")]
        info, num_bytes, sequence = trace.collectives.of_rows(rows)
        info = np.where(info >= 0, info, self._num_known + kernels.collective[rows])
        is_numbered = sequence != UNKNOWN
        counts = self._may_wait[info] & (is_numbered | (not trace.is_cut))
        part = np.where(is_numbered, len(self._parts) - 1, kernels.step[rows] + 1)
        group = self._of_info[info] * len(self._parts) + part
        rows, group, num_bytes, sequence = (column[counts] for column in (rows, group, num_bytes, sequence))
        order = np.argsort(group, kind="stable")
        begins = np.flatnonzero(np.diff(group[order], prepend=-1))
        ends = np.append(begins[1:], len(order))
        durations_ns = kernels.intervals.durations_ns[rows]
        sizes = np.where(num_bytes == UNKNOWN, -1, num_bytes)
        for i in np.argsort(order[begins]).tolist():  # those first that came first
            mine = order[begins[i] : ends[i]]
            place, of_part = divmod(int(group[mine[0]]), len(self._parts))
            turns = found.setdefault((*self._places[place], self._parts[of_part]), Turns.none())
            first = len(turns.turns)
            numbered = self._parts[of_part] == _NUMBERED
            turns.turns.extend(_as_array(sequence[mine] if numbered else np.arange(first, first + len(mine))))
            turns.durations_ns.extend(_as_array(durations_ns[mine]))
            turns.num_bytes.extend(_as_array(sizes[mine]))


def _place(info: CollectiveInfo) -> Place:
    return (info.kind, info.description or info.group, info.group, info.ranks, info.size)


def _as_array(column: Indices) -> array[int]:
    return array("q", column.astype(np.int64).tobytes())
