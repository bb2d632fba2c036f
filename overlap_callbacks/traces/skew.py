"""Separates, over the ranks of a job, the time that collectives wait for the last rank from the time of the transfer.

A communication kernel runs from the time its own rank arrives until the data of the last rank has arrived. So among the
kernels of one collective on all its ranks, the shortest is that of the last rank to arrive, and the others waited for
it as much longer as they took. This does not need synchronised clocks.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from overlap_callbacks.traces.figures import CollectiveSkew, RankTime
from overlap_callbacks.traces.rank_collectives import RankCollectives

# Identifies a collective of the job: its place among those of its rank (``rank_collectives``), and its turn there.
_Place = tuple[Any, ...]
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
Matched = dict[_Place, dict[_Member, Participant]]


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
