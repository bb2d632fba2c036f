"""Who comes last to collectives: times of single collectives, held against each other between ranks in bounded space.

A collective takes from each rank's arrival until the last rank has come and the data has moved. So the rank that came
last has the least time, which is that of the transfer; what the others took longer, they waited. No clocks of two ranks
are compared. Once all ranks of a group have told, only sums stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from overlap_callbacks.analysis.communication.placement import UNKNOWN
from overlap_callbacks.analysis.communication.rank_grids import Ranks
from overlap_callbacks.analysis.identities import digest
from overlap_callbacks.analysis.results.arrivals import (
    ONE_HOST,
    SEVERAL_HOSTS,
    UNKNOWN_HOSTS,
    Arrivals,
    DimensionWaiting,
    Lateness,
    SizeTransfer,
    TimedCalls,
)
from overlap_callbacks.analysis.results.messages import NO_STAGE, SEVERAL_STAGES

# What a part keeps: groups of which ranks are missing, ranks that came last, kinds and sizes of collectives.
MAX_OPEN, MAX_LAST, MAX_KINDS, MAX_SIZES = 48, 512, 64, 128
# What a report keeps of a window.
_MAX_RANKS, _MAX_HOSTS, _MAX_DIMENSIONS = 8, 4, 16
_US_PER_MS = 1e3
# In ``OpenCalls.host``, beside the digest of a host.
_SEVERAL, _UNKNOWN = b"*", b""


class OpenCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One collective, on the ranks of its group that were heard.

    Attributes:
        step, number, size_bytes: as in ``TimedCall``; of ranks that differ, the largest size.
        heard: ranks.
        least_us: the least of their times.
        last: the rank that has it.
        sum_us: of their times.
    """

    step: int
    number: int
    size_bytes: int
    heard: int
    least_us: int
    last: int
    sum_us: int


class OpenCalls(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The timed collectives of one operator on one group.

    Attributes:
        operator, group, first_rank, group_size, dimension: as in ``TimedCalls``.
        heard: ranks of the group that told.
        host: digest of the host on which they are; ``*`` if on several, empty if unknown.
        stage: of the pipeline; ``SEVERAL_STAGES`` if they are on several.
        calls: by step and number.
    """

    operator: str
    group: str
    first_rank: int
    group_size: int
    dimension: str
    heard: int
    host: bytes
    stage: int
    calls: tuple[OpenCall, ...]


class KindSum(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sums over groups of one operator, dimension and size. Times are of all their ranks but for ``transfer_us``.

    Attributes:
        operator, dimension, group_size: of the groups.
        groups: how many.
        calls: collectives.
        steps: steps of these groups.
        heard: ranks that told, summed over collectives.
        transfer_us: sum of the least times.
        sum_us, least_sum_us: sum of all ranks' times, and what it were if each took the least.
    """

    operator: str
    dimension: str
    group_size: int
    groups: int
    calls: int
    steps: int
    heard: int
    transfer_us: int
    sum_us: int
    least_sum_us: int


class LastSum(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The collectives in which a rank came last.

    Attributes:
        rank, dimension, group_size: whose.
        last: how many.
        worst: steps in which the others of a group waited for it longest.
        others: other ranks, summed over them.
        waited_us: the others' waiting.
    """

    rank: int
    dimension: str
    group_size: int
    last: int
    worst: int
    others: int
    waited_us: int


class SizeSum(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Transfers by size, as in ``SizeTransfer``."""

    operator: str
    dimension: str
    group_size: int
    reach: str
    size: int
    calls: int
    bytes: int
    transfer_us: int


class ArrivalSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The timed collectives of a set of ranks.

    Attributes:
        num_steps: steps that were timed, the most of any rank.
        open: of groups some of whose ranks were not heard yet.
        kinds, last, sizes: of the other groups.
    """

    num_steps: int = 0
    open: tuple[OpenCalls, ...] = ()
    kinds: tuple[KindSum, ...] = ()
    last: tuple[LastSum, ...] = ()
    sizes: tuple[SizeSum, ...] = ()


def arrivals_of(rank: int, timed: Sequence[TimedCalls], host: str, stage: int = NO_STAGE) -> ArrivalSums:
    """Those of one rank.

    Args:
        rank: global rank.
        timed: its calls.
        host: what identifies its machine; empty if unknown.
        stage: of its pipeline.
    """
    own = digest(host) if host else _UNKNOWN
    return ArrivalSums(
        num_steps=len({call.step for row in timed for call in row.calls}),
        open=_kept_open(
            [
                OpenCalls(
                    row.operator, row.group, row.first_rank, row.group_size, row.dimension, 1, own, stage,
                    tuple([
                        OpenCall(call.step, call.number, call.size_bytes, 1, call.time_us, rank, call.time_us)
                        for call in row.calls
                    ]),
                )
                for row in timed
            ]
        ),
    )  # fmt: skip


def add_arrivals(parts: Iterable[ArrivalSums]) -> ArrivalSums:
    """Those of the ranks of all parts, of which no two have a rank in common."""
    parts = [part for part in parts if part.num_steps]
    if len(parts) < 2:
        return parts[0] if parts else ArrivalSums()
    by_group: dict[tuple[str, str, int], list[OpenCalls]] = {}
    for part in parts:
        for row in part.open:
            by_group.setdefault((row.operator, row.group, row.first_rank), []).append(row)
    rows = [_joined(alike) for alike in by_group.values()]
    whole = [_closed(row) for row in rows if row.heard >= row.group_size]
    return _summed(
        [*parts, *whole],
        num_steps=max(part.num_steps for part in parts),
        still_open=_kept_open([row for row in rows if row.heard < row.group_size]),
    )


def _kept_open(rows: Iterable[OpenCalls]) -> tuple[OpenCalls, ...]:
    return tuple(sorted(rows, key=lambda row: (row.first_rank, row.group, row.operator))[:MAX_OPEN])


def _joined(rows: Sequence[OpenCalls]) -> OpenCalls:
    """One group's rows of several sets of ranks."""
    if len(rows) == 1:
        return rows[0]
    calls: dict[tuple[int, int], list[OpenCall]] = {}
    for row in rows:
        for call in row.calls:
            calls.setdefault((call.step, call.number), []).append(call)
    hosts, stages = {row.host for row in rows}, {row.stage for row in rows}
    first = rows[0]
    return OpenCalls(
        first.operator, first.group, first.first_rank, first.group_size, first.dimension,
        sum([row.heard for row in rows]),
        first.host if len(hosts) == 1 else _UNKNOWN if _UNKNOWN in hosts else _SEVERAL,
        first.stage if len(stages) == 1 else SEVERAL_STAGES,
        tuple([_one_call(key, calls[key]) for key in sorted(calls)]),
    )  # fmt: skip


def _one_call(key: tuple[int, int], calls: Sequence[OpenCall]) -> OpenCall:
    least_us, last = min([(call.least_us, call.last) for call in calls])
    return OpenCall(
        *key,
        max([call.size_bytes for call in calls]),
        sum([call.heard for call in calls]),
        least_us,
        last,
        sum([call.sum_us for call in calls]),
    )


def _closed(row: OpenCalls) -> ArrivalSums:
    """The sums of one group. Calls that not all of the ranks that told have timed are left out, and single ranks.

    The stages of a pipeline end their steps one after the other. Who comes last to a collective of several stages is a
    matter of its place, so such groups tell transfers alone.
    """
    calls = [call for call in row.calls if call.heard == row.heard and call.heard > 1]
    if not calls:
        return ArrivalSums()
    reach = UNKNOWN_HOSTS if row.host == _UNKNOWN else SEVERAL_HOSTS if row.host == _SEVERAL else ONE_HOST
    last: dict[int, list[int]] = {}
    waited: dict[int, dict[int, int]] = {}  # by step and rank
    sizes: dict[int, list[int]] = {}
    for call in calls:
        sums = last.setdefault(call.last, [0, 0, 0, 0])
        waiting_us = call.sum_us - call.heard * call.least_us
        for place, amount in enumerate((1, 0, call.heard - 1, waiting_us)):
            sums[place] += amount
        of_step = waited.setdefault(call.step, {})
        of_step[call.last] = of_step.get(call.last, 0) + waiting_us
        of_size = sizes.setdefault(call.size_bytes.bit_length() - 1, [0, 0, 0])
        for place, amount in enumerate((1, call.size_bytes, call.least_us)):
            of_size[place] += amount
    by_size = tuple(
        [SizeSum(row.operator, row.dimension, row.group_size, reach, size, *sums) for size, sums in sizes.items()]
    )
    if row.stage == SEVERAL_STAGES:
        return ArrivalSums(sizes=by_size)
    for of_step in waited.values():
        worst, waited_us = min(of_step.items(), key=lambda item: (-item[1], item[0]))
        last[worst][1] += waited_us > 0
    kind = KindSum(
        row.operator, row.dimension, row.group_size, 1, len(calls), len(waited),
        sum([call.heard for call in calls]),
        sum([call.least_us for call in calls]),
        sum([call.sum_us for call in calls]),
        sum([call.heard * call.least_us for call in calls]),
    )  # fmt: skip
    return ArrivalSums(
        0,
        (),
        (kind,),
        tuple([LastSum(rank, row.dimension, row.group_size, *sums) for rank, sums in last.items()]),
        by_size,
    )


def _summed(parts: Sequence[ArrivalSums], num_steps: int, still_open: tuple[OpenCalls, ...]) -> ArrivalSums:
    kinds = [KindSum(*key, *sums) for key, sums in _added([part.kinds for part in parts], 3).items()]
    last = [LastSum(*key, *sums) for key, sums in _added([part.last for part in parts], 3).items()]
    sizes = [SizeSum(*key, *sums) for key, sums in _added([part.sizes for part in parts], 5).items()]
    kinds.sort(key=lambda row: (-row.calls, row.operator, row.dimension, row.group_size))
    last.sort(key=lambda row: (-row.last, -row.waited_us, row.rank, row.dimension, row.group_size))
    sizes.sort(key=lambda row: (-row.bytes, row.operator, row.dimension, row.group_size, row.reach, row.size))
    return ArrivalSums(
        num_steps, still_open, tuple(kinds[:MAX_KINDS]), tuple(last[:MAX_LAST]), tuple(sizes[:MAX_SIZES])
    )


def _added(tables: Iterable[Iterable[msgspec.Struct]], num_keys: int) -> dict[tuple[Any, ...], list[int]]:
    """Rows whose first fields agree are one, with sums of the others."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for table in tables:
        for row in table:
            values = msgspec.structs.astuple(row)
            key, amounts = values[:num_keys], values[num_keys:]
            known = found.get(key)
            found[key] = list(amounts) if known is None else [a + b for a, b in zip(known, amounts, strict=True)]
    return found


# -- the report


def reported_arrivals(sums: ArrivalSums, hosts: Ranks) -> tuple[Arrivals | None, tuple[SizeTransfer, ...]]:
    """Who came last, and how long transfers took; groups of which ranks were not heard count with the others.

    Args:
        sums: of all ranks heard.
        hosts: the number of each rank's host; ``UNKNOWN`` where it is not known. Empty if none is.
    """
    sums = _summed([sums, *[_closed(row) for row in sums.open]], sums.num_steps, ())
    by_dimension: dict[str, list[KindSum]] = {}
    for kind in sums.kinds:
        by_dimension.setdefault(kind.dimension, []).append(kind)
    waiting = [_waiting(dimension, kinds) for dimension, kinds in by_dimension.items()]
    waiting.sort(key=lambda row: (-row.calls * (row.transfer_ms + row.waiting_ms), row.dimension))
    ranks = sorted(
        [_late(row, by_dimension[row.dimension], hosts) for row in sums.last if row.dimension in by_dimension],
        key=lambda row: (-row.lost_fraction, -row.times_last, row.rank, row.dimension),
    )
    found = (
        None
        if not waiting
        else Arrivals(
            num_steps=sums.num_steps,
            dimensions=tuple(waiting[:_MAX_DIMENSIONS]),
            ranks=tuple(ranks[:_MAX_RANKS]),
            hosts=tuple(_late_hosts(sums.last, by_dimension, hosts)[:_MAX_HOSTS]),
        )
    )
    sizes = sorted(sums.sizes, key=lambda row: (row.dimension, row.operator, row.group_size, row.reach, row.size))
    transfers = [
        SizeTransfer(
            row.operator,
            row.dimension,
            row.group_size,
            row.reach,
            row.size,
            row.calls,
            row.bytes,
            row.transfer_us / _US_PER_MS,
        )
        for row in sizes
    ]
    return found, tuple(transfers)


def _waiting(dimension: str, kinds: Sequence[KindSum]) -> DimensionWaiting:
    calls, heard = sum(kind.calls for kind in kinds), sum(kind.heard for kind in kinds)
    waited_us = sum(kind.sum_us - kind.least_sum_us for kind in kinds)
    return DimensionWaiting(
        dimension, calls, sum(kind.transfer_us for kind in kinds) / calls / _US_PER_MS, waited_us / heard / _US_PER_MS
    )


def _late(row: LastSum, kinds: Sequence[KindSum], hosts: Ranks) -> Lateness:
    own = [kind for kind in kinds if kind.group_size == row.group_size]
    calls = round(sum(kind.calls / kind.groups for kind in own))
    # Of the time that a group's ranks spend in these collectives.
    time_us = sum(kind.sum_us / kind.groups for kind in own)
    return Lateness(
        rank=row.rank,
        host=int(hosts[row.rank]) if 0 <= row.rank < len(hosts) else UNKNOWN,
        dimension=row.dimension,
        calls=max(calls, row.last),
        times_last=row.last,
        steps=max(round(sum(kind.steps / kind.groups for kind in own)), row.worst),
        steps_blamed=row.worst,
        chance=1 / row.group_size,
        waiting_ms=row.waited_us / max(1, row.others) / _US_PER_MS,
        lost_fraction=min(1.0, row.waited_us / time_us) if time_us > 0 else 0.0,
    )


def _late_hosts(last: Iterable[LastSum], kinds: Mapping[str, Sequence[KindSum]], hosts: Ranks) -> list[Lateness]:
    """Of each host, in how many collectives of all groups one of its ranks came last."""
    number = int(hosts.max(initial=UNKNOWN)) + 1
    if number < 2 or (hosts == UNKNOWN).any():
        return []
    sums: dict[tuple[int, str], list[int]] = {}
    for row in last:
        if 0 <= row.rank < len(hosts):
            known = sums.setdefault((int(hosts[row.rank]), row.dimension), [0, 0, 0, 0])
            for place, amount in enumerate((row.last, row.worst, row.others, row.waited_us)):
                known[place] += amount
    ranks_of = [int((hosts == host).sum()) for host in range(number)]
    found = []
    for (host, dimension), (times, worst, others, waited_us) in sums.items():
        own = kinds.get(dimension, ())
        calls, time_us = sum(kind.calls for kind in own), sum(kind.sum_us for kind in own)
        found.append(
            Lateness(
                rank=-1,
                host=host,
                dimension=dimension,
                calls=max(calls, times),
                times_last=times,
                steps=max(sum(kind.steps for kind in own), worst),
                steps_blamed=worst,
                chance=ranks_of[host] / len(hosts),
                waiting_ms=waited_us / max(1, others) / _US_PER_MS,
                lost_fraction=min(1.0, waited_us / time_us) if time_us > 0 else 0.0,
            )
        )
    return sorted(found, key=lambda row: (-row.lost_fraction, -row.times_last, row.host, row.dimension))
