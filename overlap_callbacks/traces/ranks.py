"""Separates, over the ranks of a job, the time that collectives wait for the last rank from the time of the transfer.

A communication kernel runs from the time its own rank arrives until the data of the last rank has arrived. So among the
kernels of one collective on all its ranks, the shortest is that of the last rank to arrive, and the others waited for
it as much longer as they took. This does not need synchronised clocks.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from overlap_callbacks.analysis.bus_bandwidth import bus_factor
from overlap_callbacks.analysis.exact_sums import sums_by
from overlap_callbacks.analysis.kernels.table import Indices, Kind, copies_of
from overlap_callbacks.traces.collectives import UNKNOWN, CollectiveInfo
from overlap_callbacks.traces.figures import CollectiveSize, CollectiveSkew, RankTime
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


# -- the ranks of a job


# A participant: rank and device.
_Member = tuple[int, int]


class Participant(NamedTuple):
    """One rank's part in a collective.

    Attributes:
        time_ns: time of its kernels.
        num_kernels: several kernels of one number are one collective.
        num_bytes: size of the collective as this rank tells it; -1 if unknown.
    """

    time_ns: int
    num_kernels: int
    num_bytes: int


# The participants of each collective, by place: kind and group first, the size of the group fifth.
Matched = dict[Place, dict[_Member, Participant]]


class Skew(NamedTuple):
    """What the comparison of the ranks of a job gives.

    Attributes:
        rows: one for each kind of collective and group that at least two devices of the files share, those with the
            most waiting first.
        problems: what is doubtful about the match, in words.
        matched: the participants of each collective, by place. Empty where the files cannot be matched.
        one_job: whether the files look like ranks of one job. If not, nothing may be made of them together.
    """

    rows: tuple[CollectiveSkew, ...]
    problems: tuple[str, ...]
    matched: Matched
    one_job: bool


def skew_over_ranks(traces: Sequence[RankCollectives]) -> Skew:
    """Match the collectives of several ranks by group and order, and separate waiting from transfer.

    Args:
        traces: one per rank of one job.
    """
    numbers = _numbers(traces)
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
    places: Matched = defaultdict(dict)
    for member, part in parts:
        for where, found in part.items():
            for turn, duration_ns, num_bytes in zip(*found, strict=True):
                of_place = places[(*where, turn)]
                before = of_place.get(member, Participant(0, 0, -1))
                of_place[member] = Participant(before.time_ns + duration_ns, before.num_kernels + 1, num_bytes)
    rows: dict[tuple[str, str, tuple[_Member, ...]], list[dict[_Member, int]]] = defaultdict(list)
    for place, members in places.items():
        if len(members) > 1:
            times = {member: participant.time_ns for member, participant in members.items()}
            rows[place[0], place[1], tuple(sorted(members))].append(times)
    total = sum(map(len, places.values()))
    matched = sum(len(durations) for of_row in rows.values() for durations in of_row)
    nothing_shared = bool(total and not matched and len(traces) > 1)
    if nothing_shared:
        problems.append("the files share no collectives: they do not look like ranks of one job")
    elif 0 < matched < total:
        problems.append(f"{total - matched} of {total} collectives have no partner in another file, and are left out")
    if matched:
        problems += _limits(traces, places)
    skew = [_row(kind, group, members, durations) for (kind, group, members), durations in rows.items()]
    skew.sort(key=lambda row: -row.skew_ms)
    return Skew(tuple(skew), tuple(problems), dict(places), one_job=not nothing_shared)


def _limits(traces: Sequence[RankCollectives], places: Matched) -> Iterator[str]:
    """What the figures cannot tell, in words."""
    world_size = max((trace.world_size for trace in traces if trace.world_size is not None), default=0)
    if any(1 < len(members) < (place[4] or world_size) for place, members in places.items()):
        yield (
            f"not all ranks of all groups were given ({len(traces)} files): where the last to come is not among them, "
            "the transfer is shorter than shown and the waiting longer"
        )
    if any(not place[2] and not place[3] for place in places):
        yield "the files do not tell process groups: collectives were matched by their kind and order alone"


def _numbers(traces: Sequence[RankCollectives]) -> list[int]:
    """The rank of each file. A file that does not tell its rank gets the first number that no other file has."""
    taken = {trace.rank for trace in traces}
    numbers = []
    for position, trace in enumerate(traces):
        number = trace.rank
        if number is None:
            number = next(free for free in itertools.count(position) if free not in taken)
            taken.add(number)
        numbers.append(number)
    return numbers


def _row(kind: str, group: str, members: tuple[_Member, ...], collectives: list[dict[_Member, int]]) -> CollectiveSkew:
    """One kind of collective on one group; ``collectives`` has the durations of each collective in nanoseconds."""
    times_ns = np.array([[durations[member] for member in members] for durations in collectives], dtype=np.int64)
    shortest_ns = times_ns.min(axis=1, keepdims=True)
    waiting_ns = times_ns - shortest_ns
    last = Counter(times_ns.argmin(axis=1).tolist())
    return CollectiveSkew(
        collective=kind,
        group=group,
        count=len(collectives),
        transfer_ms=int(shortest_ns.sum()) / 1e6,
        skew_ms=float(waiting_ns.sum()) / len(members) / 1e6,
        ranks=tuple(
            RankTime(
                rank=rank,
                device=device,
                time_ms=int(times_ns[:, column].sum()) / 1e6,
                waiting_ms=int(waiting_ns[:, column].sum()) / 1e6,
                last=last[column],
            )
            for column, (rank, device) in enumerate(members)
        ),
    )


def _doubts(traces: Sequence[RankCollectives]) -> Iterator[str]:
    """Why the files may not be ranks of one job, in words."""
    known = [trace for trace in traces if trace.rank is not None]
    sizes = {trace.world_size for trace in known if trace.world_size is not None}
    if len(sizes) > 1:
        shown = ", ".join(map(str, sorted(sizes)))
        yield f"the files are of different jobs: their world sizes are {shown}"
    twice = [rank for rank, count in Counter(trace.rank for trace in known).items() if count > 1]
    if twice:
        yield f"rank {twice[0]} is given twice: ranks are not compared"
    if len(known) < len(traces):
        yield f"{len(traces) - len(known)} files do not tell their rank: they are numbered by position"
    devices = frozenset[str]().union(*(trace.device_names for trace in known))
    if len(devices) > 1:
        yield f"the files are from different devices: {', '.join(sorted(devices)[:4])}"
    if len({trace.on_host for trace in traces}) > 1:
        yield "the files are of different jobs: some hold kernels of a device, some do not"


# -- collectives by size


def collective_sizes(traces: Sequence[RankCollectives], matched: Matched) -> tuple[CollectiveSize, ...]:
    """A row for each kind, group size and message size, those with the most time first.

    Args:
        traces: all files.
        matched: the participants of each collective, see ``skew_over_ranks``. A collective of which a rank has several
            kernels counts for no transfer: how its bytes are divided among them is not known.
    """
    times: dict[SizeKey, Timed] = {}
    for trace in traces:
        for key, found in trace.by_size.items():
            before = times.get(key, Timed(0, 0))
            times[key] = Timed(before.number + found.number, before.sum_ns + found.sum_ns)
    transfers: dict[SizeKey, Timed] = {}
    for place, participants in matched.items():
        of_ranks = list(participants.values())
        sizes = {part.num_bytes for part in of_ranks}
        if len(of_ranks) > 1 and len(sizes) == 1 and all(part.num_kernels == 1 for part in of_ranks):
            key = (place[0], place[4], sizes.pop())
            before = transfers.get(key, Timed(0, 0))
            transfers[key] = Timed(before.number + 1, before.sum_ns + min(part.time_ns for part in of_ranks))
    rows = [_size(key, found, transfers.get(key, Timed(0, 0))) for key, found in times.items()]
    return tuple(sorted(rows, key=lambda row: (-row.time_ms * row.kernels, row.collective, row.bytes)))


def _size(key: SizeKey, kernels: Timed, transfers: Timed) -> CollectiveSize:
    kind, group_size, num_bytes = key
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
