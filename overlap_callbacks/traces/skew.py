"""The ranks of one job side by side: waiting for the last rank, told apart from the transfer.

A communication kernel runs from when its own rank comes to when the last rank's data is there. So of the kernels of one
collective on all its ranks the shortest is that of the rank that came last, and what the others took longer they waited
for it. Clocks of different machines need not agree for that.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.traces.figures import CollectiveSkew, RankTime
from overlap_callbacks.traces.kineto import Trace
from overlap_callbacks.traces.metadata import CollectiveInfo

# A collective: where it stands in the job, the same on all ranks that take part. Kind, group, and the group's name,
# ranks and size come first.
_Place = tuple[Any, ...]
# Who takes part: rank and device.
_Member = tuple[int, int]


def skew_over_ranks(traces: Sequence[Trace]) -> tuple[tuple[CollectiveSkew, ...], tuple[str, ...]]:
    """Match the collectives of several ranks, by group and order, and tell waiting from transfer.

    Returns:
        A row for each kind of collective and group that at least two devices of the files share, those with the most
        waiting first; and what speaks against the match, in words.
    """
    numbers = _numbers(traces)
    parts = [
        ((rank, device), part)
        for rank, trace in zip(numbers, traces, strict=True)
        for device, part in trace.by_device().items()
    ]
    if len(parts) < 2:
        return (), ()
    problems = list(_doubts(traces))
    if any("different jobs" in problem or "twice" in problem for problem in problems):
        return (), tuple(problems)
    places: dict[_Place, dict[_Member, int]] = defaultdict(dict)
    for member, part in parts:
        for place, duration_ns in _collectives(part):
            # Several kernels of one number are one collective.
            places[place][member] = places[place].get(member, 0) + duration_ns
    rows: dict[tuple[str, str, tuple[_Member, ...]], list[dict[_Member, int]]] = defaultdict(list)
    for place, durations in places.items():
        if len(durations) > 1:
            rows[place[0], place[1], tuple(sorted(durations))].append(durations)
    total = sum(map(len, places.values()))
    matched = sum(len(durations) for found in rows.values() for durations in found)
    if total and not matched and len(traces) > 1:
        problems.append("the files share no collectives: they do not look like ranks of one job")
    elif 0 < matched < total:
        problems.append(f"{total - matched} of {total} collectives have no partner in another file, and are left out")
    if matched:
        problems += _limits(traces, places)
    found = [_row(kind, group, members, durations) for (kind, group, members), durations in rows.items()]
    return tuple(sorted(found, key=lambda row: -row.skew_ms)), tuple(problems)


def _limits(traces: Sequence[Trace], places: dict[_Place, dict[_Member, int]]) -> Iterator[str]:
    """What the figures cannot say."""
    world_size = max((trace.world_size for trace in traces if trace.world_size is not None), default=0)
    if any(1 < len(members) < (place[4] or world_size) for place, members in places.items()):
        yield (
            f"not all ranks of all groups were given ({len(traces)} files): where the last to come is not among them, "
            "the transfer is shorter than shown and the waiting longer"
        )
    if any(not place[2] and not place[3] for place in places):
        yield "the files do not tell process groups: collectives were matched by their kind and order alone"


def _numbers(traces: Sequence[Trace]) -> list[int]:
    """The rank of each file; of one that does not tell its rank the first number that no other has."""
    taken = {trace.rank for trace in traces}
    numbers = []
    for position, trace in enumerate(traces):
        number = trace.rank
        if number is None:
            number = next(free for free in itertools.count(position) if free not in taken)
            taken.add(number)
        numbers.append(number)
    return numbers


def _row(kind: str, group: str, members: tuple[_Member, ...], found: list[dict[_Member, int]]) -> CollectiveSkew:
    times = np.array([[durations[member] for member in members] for durations in found], dtype=np.int64)
    shortest = times.min(axis=1, keepdims=True)
    waiting = times - shortest
    last = Counter(times.argmin(axis=1).tolist())
    return CollectiveSkew(
        collective=kind,
        group=group,
        count=len(found),
        transfer_ms=int(shortest.sum()) / 1e6,
        skew_ms=float(waiting.sum()) / len(members) / 1e6,
        ranks=tuple(
            RankTime(
                rank=rank,
                device=device,
                time_ms=int(times[:, column].sum()) / 1e6,
                waiting_ms=int(waiting[:, column].sum()) / 1e6,
                last=last[column],
            )
            for column, (rank, device) in enumerate(members)
        ),
    )


def _collectives(trace: Trace) -> Iterator[tuple[_Place, int]]:
    """Kind, group and place of each collective, in order of time, and how long its kernel ran."""
    kernels = trace.kernels
    rows = np.flatnonzero(kernels.kind == Kind.COMMUNICATION)
    rows = rows[np.argsort(kernels.intervals.start_ns[rows], kind="stable")]
    durations = kernels.intervals.durations_ns
    turns: Counter[_Place] = Counter()
    for row in rows.tolist():
        info = trace.collectives.get(row) or CollectiveInfo(kind=kernels.collectives[kernels.collective[row]])
        if info.kind == "send_recv":
            continue  # its two sides are not the same kernel
        group = info.description or info.group
        where: _Place = (info.kind, group, info.group, info.ranks, info.size)
        if info.sequence is not None:
            yield (*where, "sequence", info.sequence), int(durations[row])
            continue
        # In turn within the step, so that files that begin at different collectives still match in later steps.
        step = int(kernels.step[row])
        where = (*where, trace.steps[step].number if step >= 0 else None)
        yield (*where, turns[where]), int(durations[row])
        turns[where] += 1


def _doubts(traces: Sequence[Trace]) -> Iterator[str]:
    known = [trace for trace in traces if trace.rank is not None]
    sizes = {trace.world_size for trace in known}
    if len(sizes) > 1:
        shown = ", ".join(map(str, sorted(filter(None, sizes))))
        yield f"the files are of different jobs: their world sizes are {shown}"
    twice = [rank for rank, count in Counter(trace.rank for trace in known).items() if count > 1]
    if twice:
        yield f"rank {twice[0]} is given twice: ranks are not compared"
    if len(known) < len(traces):
        yield f"{len(traces) - len(known)} files do not tell their rank: they are numbered by position"
    devices = {trace.device_names.get(device, "") for trace in known for device in trace.devices} - {""}
    if len(devices) > 1:
        yield f"the files are from different devices: {', '.join(sorted(devices)[:4])}"
    if len({trace.on_host for trace in traces}) > 1:
        yield "the files are of different jobs: some hold kernels of a device, some do not"
