"""Adds up the collectives of devices, and separates waiting for the last rank from transfer over the ranks of a job.

A communication kernel runs from its rank's arrival until the last rank's data is there. So the shortest of a
collective's kernels belongs to the last rank, and the others waited for the time by which theirs are longer. This needs
no synchronised clocks.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.equations import bus_factor
from overlap_callbacks.analysis.exposure import add_exposures
from overlap_callbacks.analysis.intervals import distinct_values, sums_by
from overlap_callbacks.analysis.kernels.exposure import exposure_of
from overlap_callbacks.analysis.kernels.table import Indices, Kind, copies_of
from overlap_callbacks.analysis.results.arrivals import came_alone
from overlap_callbacks.analysis.results.exposure import UNKNOWN_SIZE, ExposureSums, Label
from overlap_callbacks.traces.collect import Numbers
from overlap_callbacks.traces.collectives import ALL_TO_ALL, UNKNOWN, CollectiveInfo, Collectives
from overlap_callbacks.traces.cycles import ranks_in_names
from overlap_callbacks.traces.figures import CollectiveFigures, CollectiveSize, CollectiveSkew, RankTime, TraceFigures
from overlap_callbacks.traces.splits import Splits
from overlap_callbacks.traces.trace import Trace

# Common to collectives that differ only in their turn, and the same on all participating ranks: kind, group, the
# group's name, ranks and size, and the step, or ``sequence`` if numbered.
Place = tuple[Any, ...]
_NUMBERED = "sequence"
_NEVER, _UNKNOWN_SHARE, _OVERLONG = np.iinfo(np.int64).max, -2, -1


class Turns(NamedTuple):
    """Collectives of one rank that differ only in their turn: its number, the kernel's time, and bytes.

    Times are ``_OVERLONG`` of kernels that ran longer than they can. Bytes are -1 if unknown, and ``_UNKNOWN_SHARE`` if
    besides ranks may have shares of different sizes.
    """

    turns: array[int]
    durations_ns: array[int]
    num_bytes: array[int]

    @classmethod
    def none(cls) -> Turns:
        """Without collectives."""
        return cls(array("q"), array("q"), array("q"))


@dataclass(slots=True)
class Timed:
    """Number and time of collectives' kernels."""

    number: int = 0
    sum_ns: int = 0

    def add(self, number: int, sum_ns: int) -> None:
        """Add more kernels."""
        self.number += number
        self.sum_ns += sum_ns


# Kind of a collective, ranks of its group (None if unknown), and bytes.
SizeKey = tuple[str, int | None, int]


class CollectiveSums:
    """The collectives of one device, added up over the pieces of its time.

    Attributes:
        turns: each collective by place, for a comparison of ranks if ``with_turns``. There may be millions.
        by_size: those of known size.
        exposure: those of the steps that are whole; of a file without steps all, unless kernels are missing.
    """

    def __init__(self, trace: Trace, *, with_turns: bool) -> None:
        infos = [known[:5] for known in trace.collectives.infos]
        # Whether ranks may have shares of different sizes; the last is of rows of which nothing is known.
        self._has_shares = np.array([*[bool(known.sent or known.cut) for known in trace.collectives.infos], False])
        infos += [CollectiveInfo(kind)[:5] for kind in trace.kernels.collectives]  # nothing else is known of these
        distinct: Numbers[tuple[Any, ...]] = Numbers()
        self._number_of = np.array([distinct[known] for known in infos], dtype=np.int64)
        self._infos = [CollectiveInfo(*known) for known in distinct]
        self._modules = [*[known.module for known in trace.collectives.infos], ""]
        self._num_known, size = len(trace.collectives.infos), len(distinct)
        # Time, hidden time, time of those of known size, and their bytes, which may exceed 64 bits.
        self._sums = [[0] * size for _ in range(4)]
        self._count, self._num_sized = (np.zeros(size, dtype=np.int64) for _ in range(2))
        self._first, self._num_rows = np.full(size, _NEVER), 0
        self.by_size: dict[SizeKey, Timed] = defaultdict(Timed)
        self.turns: dict[Place, Turns] = defaultdict(Turns.none)
        places: Numbers[Place] = Numbers()
        self._place_of = np.array([places[_place(known)] for known in self._infos], dtype=np.int64)
        self._places = list(places)
        self._may_wait = np.array([known.kind != "send_recv" for known in self._infos], dtype=bool)
        # Turns count within the step, so that files that begin at different collectives match in later steps.
        self._parts = [None, *[step.number for step in trace.steps], _NUMBERED]
        self._with_turns = with_turns
        self._labels = [Label(known.kind, known.description, known.size or 0) for known in self._infos]
        self.exposure = ExposureSums()

    def add(self, trace: Trace) -> None:
        """Add the rows of a piece."""
        kernels, size = trace.kernels, len(self._infos)
        rows = np.flatnonzero(kernels.kind == Kind.COMMUNICATION)
        known = trace.collectives[rows]
        number = self._number_of[np.where(known.info >= 0, known.info, self._num_known + kernels.collective[rows])]
        times_ns, num_bytes = kernels.intervals.durations_ns[rows], known.num_bytes
        compute = kernels.union_of(Kind.COMPUTE)
        hidden_ns = kernels.intervals[rows].covered_ns(compute)
        begins, whole_ns = known.transfers_ns(times_ns)
        every, sized = np.ones(len(rows), dtype=bool), begins & (num_bytes != UNKNOWN) & (whole_ns > 0)
        parts = ((every, times_ns), (every, hidden_ns), (sized, whole_ns), (sized, num_bytes))
        for total, (part, values) in zip(self._sums, parts, strict=True):
            total[:] = map(int.__add__, total, sums_by(number[part], values[part], size))
        self._count += np.bincount(number[begins], minlength=size)
        self._num_sized += np.bincount(number[sized], minlength=size)
        found, first = np.unique(number, return_index=True)
        self._first[found] = np.minimum(self._first[found], self._num_rows + first)
        self._num_rows += len(rows)
        counts = begins & (num_bytes > 0)
        self._add_sizes(number[counts], num_bytes[counts], whole_ns[counts])
        held, whole = distinct_values(kernels.step).tolist(), trace.whole
        numbers = {i: trace.steps[i].number for i in held if i >= 0 and whole[i]}
        step = kernels.step[rows]
        mine = np.flatnonzero(whole[step] & ((step >= 0) | (len(trace.steps) == 0)))
        sizes = np.where(num_bytes == UNKNOWN, UNKNOWN_SIZE, num_bytes)[mine]
        names = [self._modules[info] for info in known.info[mine].tolist()] if any(self._modules) else ()
        exposure = exposure_of(kernels, compute, rows[mine], number[mine], self._labels, sizes, numbers, names)
        self.exposure = add_exposures([self.exposure, exposure])
        if self._with_turns:
            # Copies do not wait for other ranks.
            own = begins & ~copies_of(kernels)[rows]
            step = kernels.step[rows[own]]
            overlong = np.isin(kernels.intervals.start_ns[rows[own]], trace.overlong)
            durations_ns = np.where(overlong, _OVERLONG, whole_ns[own])
            self._add_turns(number[own], known[own], step, durations_ns, trace.whole[step])

    @property
    def figures(self) -> tuple[CollectiveFigures, ...]:
        """The figures by kind and group, the most time first."""
        order = np.argsort(self._first, kind="stable")
        rows = [self._figures(i) for i in order[self._count[order] > 0].tolist()]
        return tuple(sorted(rows, key=lambda row: -row.time_ms))

    def _figures(self, number: int) -> CollectiveFigures:
        known = self._infos[number]
        time_ns, hidden_ns, sized_ns, num_bytes = (total[number] for total in self._sums)
        bandwidth = num_bytes / sized_ns if num_bytes and sized_ns else None  # bytes per ns, i.e. GB/s
        factor = bus_factor(known.kind, known.size)
        return CollectiveFigures(
            collective=known.kind,
            group=known.group,
            description=known.description,
            group_size=known.size,
            count=int(self._count[number]),
            bytes=num_bytes if self._num_sized[number] else None,
            time_ms=time_ns / 1e6,
            hidden_ms=hidden_ns / 1e6,
            algorithm_bandwidth_gb_s=bandwidth,
            bus_bandwidth_gb_s=bandwidth * factor if bandwidth is not None and factor is not None else None,
        )

    def _add_sizes(self, number: Indices, num_bytes: Indices, times_ns: Indices) -> None:
        sizes, of_size = np.unique(num_bytes, return_inverse=True)
        distinct, group = np.unique(number * len(sizes) + of_size.reshape(-1), return_inverse=True)
        group = group.reshape(-1)
        count, sums_ns = np.bincount(group, minlength=len(distinct)), sums_by(group, times_ns, len(distinct))
        for key, calls, sum_ns in zip(distinct.tolist(), count.tolist(), sums_ns, strict=True):
            known = self._infos[key // len(sizes)]
            self.by_size[known.kind, known.size, int(sizes[key % len(sizes)])].add(calls, sum_ns)

    def _add_turns(
        self, number: Indices, known: Collectives, step: Indices, durations_ns: Indices, whole: npt.NDArray[np.bool_]
    ) -> None:
        """Keep collectives, in order of time.

        Sends and receives are left out, as they are different kernels. So are unnumbered ones of incomplete steps,
        which may lack earlier ones.
        """
        is_numbered = known.sequence != UNKNOWN
        part = np.where(is_numbered, len(self._parts) - 1, step + 1)
        group = self._place_of[number] * len(self._parts) + part
        unknown = np.where(self._has_shares[known.info], _UNKNOWN_SHARE, -1)
        sizes = np.where(known.num_bytes == UNKNOWN, unknown, known.num_bytes)
        counts = np.flatnonzero(self._may_wait[number] & (is_numbered | whole))
        order = counts[np.argsort(group[counts], kind="stable")]
        begins = np.flatnonzero(np.diff(group[order], prepend=-1))
        ends = np.append(begins[1:], len(order))
        for i in np.argsort(order[begins]).tolist():  # in order of first appearance
            mine = order[begins[i] : ends[i]]
            place, of_part = divmod(int(group[mine[0]]), len(self._parts))
            turns = self.turns[*self._places[place], self._parts[of_part]]
            first = len(turns.turns)
            numbered = self._parts[of_part] == _NUMBERED
            turns.turns.extend(_as_array(known.sequence[mine] if numbered else np.arange(first, first + len(mine))))
            turns.durations_ns.extend(_as_array(durations_ns[mine]))
            turns.num_bytes.extend(_as_array(sizes[mine]))


def _place(info: CollectiveInfo) -> Place:
    return (info.kind, info.description or info.group, info.group, info.ranks, info.size)


def _as_array(column: Indices) -> array[int]:
    return array("q", column.astype(np.int64).tobytes())


# -- the ranks of a job


class Part(NamedTuple):
    """What an analysis needs of one file: its devices' figures, and the collectives of devices that ran kernels."""

    figures: tuple[TraceFigures, ...]
    rank: int | None
    world_size: int | None
    on_host: bool
    device_names: frozenset[str]
    of_device: dict[int, dict[Place, Turns]]
    by_size: list[dict[SizeKey, Timed]]
    splits: list[Splits]
    exposure: ExposureSums = ExposureSums()


def heard_of(parts: Sequence[Part]) -> int:
    """How many of the files have an exposure: those that have no whole step have none."""
    return sum([bool(part.exposure.steps or part.exposure.rows) for part in parts])


# A participant: rank and device.
_Member = tuple[int, int]


@dataclass(slots=True)
class Participant(Timed):
    """One rank's part in a collective: its kernels, and the size that it gives as in ``Turns``."""

    num_bytes: int = -1


# The participants of each collective, by place: kind and group first, the group's size fifth.
Matched = dict[Place, dict[_Member, Participant]]


class Skew(NamedTuple):
    """The result of comparing the ranks of a job.

    Attributes:
        rows: one for each kind of collective and group that at least two devices share, the most waiting first.
        problems: what is doubtful about the match.
        matched: the participants of each collective; empty if the files cannot be matched.
        one_job: whether the files look like ranks of one job. If not, they must not be combined.
    """

    rows: tuple[CollectiveSkew, ...]
    problems: tuple[str, ...]
    matched: Matched
    one_job: bool


def skew_over_ranks(traces: Sequence[Part]) -> Skew:
    """Match the collectives of several ranks by group and order, and separate waiting from transfer."""
    numbers = numbers_of(traces)
    parts = [
        ((rank, device), part)
        for rank, trace in zip(numbers, traces, strict=True)
        for device, part in trace.of_device.items()
    ]
    if len(parts) < 2:
        return Skew((), (), {}, one_job=True)
    problems = list(_doubts(traces))
    if any("different jobs" in problem or "twice" in problem for problem in problems):
        return Skew((), tuple(problems), {}, one_job=False)
    places: Matched = defaultdict(lambda: defaultdict(Participant))
    overlong: set[Place] = set()
    for member, part in parts:
        for where, found in part.items():
            for turn, duration_ns, num_bytes in zip(*found, strict=True):
                participant = places[*where, turn][member]
                participant.add(1, duration_ns)  # several kernels of one number are one collective
                participant.num_bytes = num_bytes
                if duration_ns == _OVERLONG:
                    overlong.add((*where, turn))
    for place in overlong:
        del places[place]
    rows: dict[tuple[str, str, tuple[_Member, ...]], list[dict[_Member, Participant]]] = defaultdict(list)
    for place, members in places.items():
        if len(members) > 1:
            rows[place[0], place[1], tuple(sorted(members))].append(members)
    total = sum(map(len, places.values()))
    matched = sum(len(of_ranks) for of_row in rows.values() for of_ranks in of_row)
    nothing_shared = bool(total and not matched and len(traces) > 1)
    if nothing_shared:
        problems.append("the files share no collectives: they do not look like ranks of one job [OC761]")
    elif 0 < matched < total:
        problems.append(
            f"{total - matched} of {total} collectives have no partner in another file, and are left out [OC762]"
        )
    if matched:
        problems += _limits(traces, places)
    skew = [_row(kind, group, members, collectives) for (kind, group, members), collectives in rows.items()]
    skew.sort(key=lambda row: -row.skew_ms)
    return Skew(tuple(skew), tuple(problems), dict(places), one_job=not nothing_shared)


def _limits(traces: Sequence[Part], places: Matched) -> Iterator[str]:
    """What limits the figures."""
    world_size = max((trace.world_size for trace in traces if trace.world_size is not None), default=0)
    if any(1 < len(members) < (place[4] or world_size) for place, members in places.items()):
        yield (
            f"not all ranks of all groups were given ({len(traces)} files): where the last to come is not among them, "
            "the transfer is shorter than shown and the waiting longer [OC763]"
        )
    if any(not place[2] and not place[3] for place in places):
        yield "the files do not tell process groups: collectives were matched by their kind and order alone [OC764]"


def numbers_of(traces: Sequence[Part]) -> list[int]:
    """The rank of each file, where unknown that of its name, else the first number that no other file has."""
    taken = {trace.rank for trace in traces}
    if taken == {None} and (ranks := _in_names(traces)):
        return ranks
    numbers = []
    for position, trace in enumerate(traces):
        number = trace.rank
        if number is None:
            number = next(free for free in itertools.count(position) if free not in taken)
            taken.add(number)
        numbers.append(number)
    return numbers


def _in_names(traces: Sequence[Part]) -> list[int]:
    return ranks_in_names([trace.figures[0].file for trace in traces])


def _row(
    kind: str, group: str, members: tuple[_Member, ...], collectives: list[dict[_Member, Participant]]
) -> CollectiveSkew:
    """One kind of collective on one group; ``collectives`` are the participants of each."""
    of_each = [[participants[member] for member in members] for participants in collectives]
    times_ns = np.array([[part.sum_ns for part in of_ranks] for of_ranks in of_each], dtype=np.int64)
    transfers_ns = times_ns.min(axis=1, keepdims=True)
    waiting_ns = times_ns - transfers_ns
    if kind == ALL_TO_ALL:
        sizes = np.array([[part.num_bytes for part in of_ranks] for of_ranks in of_each], dtype=np.int64)
        transfers_ns, waiting_ns = _of_shares(times_ns, sizes)
    least, next_least = np.partition(waiting_ns, 1, axis=1)[:, :2].T
    # Before 2024 files had whole microseconds.
    resolution_ns = 0 if (times_ns % 1000).any(axis=0).all() else 1000
    alone = came_alone(least, next_least, resolution_ns)
    last, caused_ns = waiting_ns.argmin(axis=1)[alone], waiting_ns.sum(axis=1)[alone]
    return CollectiveSkew(
        collective=kind,
        group=group,
        count=len(collectives),
        transfer_ms=int(transfers_ns.sum()) / 1e6,
        skew_ms=float(waiting_ns.sum()) / len(members) / 1e6,
        ranks=tuple(
            RankTime(
                rank=rank,
                device=device,
                time_ms=int(times_ns[:, column].sum()) / 1e6,
                waiting_ms=int(waiting_ns[:, column].sum()) / 1e6,
                last=int((last == column).sum()),
                caused_ms=int(caused_ns[last == column].sum()) / 1e6,
            )
            for column, (rank, device) in enumerate(members)
        ),
    )


def _of_shares(times_ns: Indices, sizes: Indices) -> tuple[Indices, Indices]:
    """The times of whole all-to-alls, and how long each rank waited for others; shapes (n, 1) and (n, ranks).

    Ranks send and receive different shares. The whole takes as long as the largest share at the fastest rank's rate. A
    rank that takes longer than another because its share is larger does not wait. If shares are not known, nobody does.
    """
    shares = np.maximum(sizes, 1).astype(np.float64)
    shares[(sizes < 0).any(axis=1)] = 1.0
    own_ns, lines = np.array(times_ns), np.arange(len(times_ns))[:, None]
    for fastest in (times_ns.argmin(axis=1), (times_ns / shares).argmin(axis=1)):
        share, time_ns = shares[lines, fastest[:, None]], times_ns[lines, fastest[:, None]]
        at_rate_ns = np.minimum(own_ns, time_ns * np.maximum(1.0, shares / share))
        own_ns = np.minimum(own_ns, np.rint(at_rate_ns).astype(np.int64))
    own_ns = np.where((sizes == _UNKNOWN_SHARE).any(axis=1, keepdims=True), times_ns, own_ns)
    return own_ns.max(axis=1, keepdims=True), times_ns - own_ns


def _doubts(traces: Sequence[Part]) -> Iterator[str]:
    """Why the files may not be ranks of one job."""
    known = [trace for trace in traces if trace.rank is not None]
    sizes = {trace.world_size for trace in known if trace.world_size is not None}
    if len(sizes) > 1:
        shown = ", ".join(map(str, sorted(sizes)))
        yield f"the files are of different jobs: their world sizes are {shown} [OC765]"
    twice = [rank for rank, count in Counter(trace.rank for trace in known).items() if count > 1]
    if twice:
        yield f"rank {twice[0]} is given twice: ranks are not compared [OC766]"
    if len(known) < len(traces):
        by = "by their names" if not known and _in_names(traces) else "by position"
        yield f"{len(traces) - len(known)} files do not say which rank they are: they are numbered {by} [OC767]"
    devices = frozenset[str]().union(*(trace.device_names for trace in known))
    if len(devices) > 1:
        yield f"the files are from different devices: {', '.join(sorted(devices)[:4])} [OC768]"
    if len({trace.on_host for trace in traces}) > 1:
        yield "the files are of different jobs: some hold kernels of a device, some do not [OC769]"


# -- collectives by size


def collective_sizes(traces: Sequence[Part], matched: Matched) -> tuple[CollectiveSize, ...]:
    """A row for each kind, group size and message size, the most time first.

    Collectives with several kernels on a rank count for no transfer, as each kernel's bytes are unknown. The kernels of
    an all-to-all count with the largest size that any of its ranks sends or receives.
    """
    times: dict[SizeKey, Timed] = defaultdict(Timed)
    for of_device in itertools.chain.from_iterable(trace.by_size for trace in traces):
        for size, found in of_device.items():
            times[size].add(found.number, found.sum_ns)
    transfers: dict[SizeKey, Timed] = defaultdict(Timed)
    for place, participants in matched.items():
        of_ranks = list(participants.values())
        sizes = {part.num_bytes for part in of_ranks}
        if len(of_ranks) < 2 or any(part.number > 1 for part in of_ranks):
            continue
        if len(sizes) == 1:
            transfers[place[0], place[4], sizes.pop()].add(1, min(part.sum_ns for part in of_ranks))
        elif place[0] == ALL_TO_ALL and min(sizes) >= 0:
            # One transfer, bound by its largest share.
            sized, whole = [part for part in of_ranks if part.num_bytes], (place[0], place[4], max(sizes))
            transfers[whole].add(1, round(min(part.sum_ns * whole[2] / part.num_bytes for part in sized)))
            for part in sized:
                times[*whole[:2], part.num_bytes].add(-1, -part.sum_ns)
                times[whole].add(1, part.sum_ns)
    rows = [_size(size, found, transfers[size]) for size, found in times.items() if found.number]
    return tuple(sorted(rows, key=lambda row: (-row.time_ms * row.kernels, row.collective, row.bytes)))


def _size(size: SizeKey, kernels: Timed, transfers: Timed) -> CollectiveSize:
    kind, group_size, num_bytes = size
    factor = bus_factor(kind, group_size)

    def bandwidth(timed: Timed) -> float | None:  # bytes per nanosecond, i.e. GB/s
        return num_bytes * timed.number / timed.sum_ns if timed.sum_ns else None

    def bus(timed: Timed) -> float | None:
        plain = bandwidth(timed)
        return None if plain is None or factor is None else plain * factor

    return CollectiveSize(
        collective=kind,
        group_size=group_size,
        bytes=num_bytes,
        kernels=kernels.number,
        time_ms=kernels.sum_ns / kernels.number / 1e6,
        bus_bandwidth_gb_s=bus(kernels),
        matched=transfers.number,
        transfer_ms=transfers.sum_ns / transfers.number / 1e6 if transfers.number else None,
        transfer_bandwidth_gb_s=bandwidth(transfers),
        transfer_bus_bandwidth_gb_s=bus(transfers),
    )
