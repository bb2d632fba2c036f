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

from overlap_callbacks.analysis.exact_sums import sums_by
from overlap_callbacks.analysis.kernels.accounting import copies_of
from overlap_callbacks.analysis.kernels.table import Indices, Kind
from overlap_callbacks.traces.collectives import UNKNOWN, CollectiveInfo
from overlap_callbacks.traces.figures import CollectiveSkew, RankTime
from overlap_callbacks.traces.kineto import Trace

# Identifies a collective of the job, the same on all ranks that take part: kind, group, the group's name, ranks and
# size, and then its sequence number, or its step and its turn in the step.
_Place = tuple[Any, ...]
# A participant: rank and device.
_Member = tuple[int, int]


class Turns(NamedTuple):
    """Collectives of one rank that differ in nothing but their turn, in parallel.

    Attributes:
        turns: last part of the place of each.
        durations_ns: of their kernels.
        num_bytes: their sizes, as this rank tells them; -1 if unknown.
    """

    turns: array[int]
    durations_ns: array[int]
    num_bytes: array[int]


class Timed(NamedTuple):
    """Kernels of collectives of one kind, group size and size in bytes: how many, and their time."""

    number: int
    sum_ns: int


# Kind of a collective, ranks of its group (None if unknown), and bytes.
SizeKey = tuple[str, int | None, int]


class RankCollectives(NamedTuple):
    """What the comparison of ranks needs of one file. It is small, so that it can come from another process.

    Attributes:
        rank, world_size, on_host: as in ``Trace``.
        device_names: names of the devices that ran kernels.
        of_device: for each device its collectives, by place without its last part.
        by_size: all collectives whose size is known.
    """

    rank: int | None
    world_size: int | None
    on_host: bool
    device_names: frozenset[str]
    of_device: dict[int, dict[tuple[Any, ...], Turns]]
    by_size: dict[SizeKey, Timed]


def collectives_of_rank(trace: Trace) -> RankCollectives:
    """What the comparison of ranks needs of a trace."""
    of_device = {device: _turns(part) for device, part in trace.by_device().items()}
    names = frozenset(trace.device_names.get(device, "") for device in trace.devices)
    return RankCollectives(trace.rank, trace.world_size, trace.on_host, names - {""}, of_device, _by_size(trace))


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
Matched = dict[_Place, dict[_Member, Participant]]


def skew_over_ranks(
    traces: Sequence[RankCollectives],
) -> tuple[tuple[CollectiveSkew, ...], tuple[str, ...], Matched]:
    """Match the collectives of several ranks by group and order, and separate waiting from transfer.

    Args:
        traces: one per rank of one job.

    Returns:
        A row for each kind of collective and group that at least two devices of the files share, those with the most
        waiting first; what is doubtful about the match, in words; and the participants of each collective, by place:
        kind and group first. The last is empty where the files cannot be matched.
    """
    numbers = _numbers(traces)
    parts = [
        ((rank, device), part)
        for rank, trace in zip(numbers, traces, strict=True)
        for device, part in trace.of_device.items()
    ]
    if len(parts) < 2:
        return (), (), {}
    problems = list(_doubts(traces))
    if any("different jobs" in problem or "twice" in problem for problem in problems):
        return (), tuple(problems), {}
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
    if total and not matched and len(traces) > 1:
        problems.append("the files share no collectives: they do not look like ranks of one job")
    elif 0 < matched < total:
        problems.append(f"{total - matched} of {total} collectives have no partner in another file, and are left out")
    if matched:
        problems += _limits(traces, places)
    skew = [_row(kind, group, members, durations) for (kind, group, members), durations in rows.items()]
    return tuple(sorted(skew, key=lambda row: -row.skew_ms)), tuple(problems), dict(places)


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


def _by_size(trace: Trace) -> dict[SizeKey, Timed]:
    """The kernels of collectives whose size is known."""
    known, kernels = trace.collectives, trace.kernels
    counts = (known.num_bytes > 0) & (kernels.kind[known.rows] == Kind.COMMUNICATION)
    info, num_bytes = known.info[counts], known.num_bytes[counts]
    times_ns = kernels.intervals.durations_ns[known.rows[counts]]
    sizes, of_size = np.unique(num_bytes, return_inverse=True)
    distinct, number = np.unique(info * len(sizes) + of_size.reshape(-1), return_inverse=True)
    number = number.reshape(-1)
    count, sums_ns = np.bincount(number, minlength=len(distinct)), sums_by(number, times_ns, len(distinct))
    found: dict[SizeKey, Timed] = {}
    for key, calls, sum_ns in zip(distinct.tolist(), count.tolist(), sums_ns, strict=True):
        of_info = known.infos[key // len(sizes)]
        size = (of_info.kind, of_info.size, int(sizes[key % len(sizes)]))
        before = found.get(size, Timed(0, 0))
        found[size] = Timed(before.number + calls, before.sum_ns + sum_ns)
    return found


def _turns(trace: Trace) -> dict[tuple[Any, ...], Turns]:
    """The collectives of one device, by place without its last part: their turns there, times and sizes.

    Copies are left out: they do not wait for other ranks.
    """
    kernels = trace.kernels
    rows = np.flatnonzero((kernels.kind == Kind.COMMUNICATION) & ~copies_of(kernels))
    rows = rows[np.argsort(kernels.intervals.start_ns[rows], kind="stable")]
    info, num_bytes, sequence = trace.collectives.of_rows(rows)
    infos = [*trace.collectives.infos, *[CollectiveInfo(kind) for kind in kernels.collectives]]
    info = np.where(info >= 0, info, len(trace.collectives.infos) + kernels.collective[rows])
    # A send and its receive are different kernels.
    wheres = [
        (known.kind, known.description or known.group, known.group, known.ranks, known.size)
        if known.kind != "send_recv"
        else None
        for known in infos
    ]
    numbers = {where: number for number, where in enumerate(dict.fromkeys(wheres))}
    where = np.array([numbers[of_info] for of_info in wheres], dtype=np.int64)[info]
    is_numbered = sequence != UNKNOWN
    counts = where != numbers.get(None, -1)
    if trace.is_cut:
        counts &= is_numbered  # the turn of others is not known: earlier ones may be missing
    # Counted within the step, so that files that begin at different collectives still match in later steps.
    num_steps = len(trace.steps)
    part = np.where(is_numbered, num_steps + 1, kernels.step[rows] + 1)
    group = (where * (num_steps + 2) + part)[counts]
    order = np.argsort(group, kind="stable")
    times_ns = kernels.intervals.durations_ns[rows]
    columns = [column[counts][order] for column in (sequence, times_ns, num_bytes)]
    group = group[order]
    begins = np.flatnonzero(np.concatenate(([True], group[1:] != group[:-1]))) if len(group) else group
    ends = np.append(begins[1:], len(group))
    texts = list(numbers)
    found: dict[tuple[Any, ...], Turns] = {}
    for i in np.argsort(order[begins]).tolist():  # in order of time
        first, last = int(begins[i]), int(ends[i])
        of_where, of_part = divmod(int(group[first]), num_steps + 2)
        step = trace.steps[of_part - 1].number if 0 < of_part <= num_steps else None
        place: _Place = texts[of_where] or ()
        sequences, durations, sizes = (column[first:last] for column in columns)
        if of_part > num_steps:
            found[(*place, "sequence")] = _as_turns(sequences, durations, sizes)
        else:
            found[(*place, step)] = _as_turns(np.arange(last - first), durations, sizes)
    return found


def _as_turns(turns: Indices, durations_ns: Indices, num_bytes: Indices) -> Turns:
    sizes = np.where(num_bytes == UNKNOWN, -1, num_bytes)
    return Turns(*[array("q", column.astype(np.int64).tobytes()) for column in (turns, durations_ns, sizes)])


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
