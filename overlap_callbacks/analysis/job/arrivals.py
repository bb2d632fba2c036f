"""Which rank comes last to collectives: times of single collectives, compared between ranks in bounded space.

A collective takes from a rank's arrival until the last rank has come and the data has moved. So the last rank has the
least time, the transfer's; the others also waited. No clocks of two ranks are compared. When all ranks of a group have
reported, only sums remain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Annotated

import msgspec

from overlap_callbacks.analysis.communication.placement import UNKNOWN
from overlap_callbacks.analysis.communication.rank_grids import Ranks
from overlap_callbacks.analysis.job.waiting import GroupTransfer
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.arrivals import (
    ALL_TO_ALL,
    ONE_HOST,
    SEVERAL_HOSTS,
    UNKNOWN_HOSTS,
    Arrivals,
    DimensionWaiting,
    Lateness,
    SizedTransfer,
    SizeTransfer,
    TimedCall,
    TimedCalls,
    came_alone,
)
from overlap_callbacks.analysis.results.messages import NO_STAGE, SEVERAL_STAGES
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.analysis.sums import digest, grouped, same_or, struct_sum, table_sum

# Limits of groups with missing ranks, ranks that came last, kinds and sizes of collectives.
MAX_OPEN, MAX_LAST, MAX_KINDS, MAX_SIZES = 48, 512, 64, 128
# What a report keeps of a window.
_MAX_RANKS, _MAX_HOSTS, _MAX_DIMENSIONS = 8, 4, 16
_US_PER_MS = 1e3
# Times of calls are whole microseconds.
_RESOLUTION_US = 1
# Special values of ``OpenCalls.host``.
_SEVERAL, _UNKNOWN = b"*", b""
# Bytes of a host's digest in each call: they tell the hosts of one group apart.
_FEW_BYTES = 4

# The least time, its rank, the next least, that rank's host, and the least on another host; -1 where there is none.
_Least = tuple[float, int, float, bytes, float]


def _two_least(times: Sequence[_Least]) -> _Least:
    first, *others = sorted(times)
    least, rank, following, host, other_host = first
    nexts = [following, *[time for other in others for time in (other[0], other[2])]]
    elsewhere = [other_host, *[other[4] if other[3] == host else other[0] for other in others]]
    return (least, rank, _least_known(nexts), host, _least_known(elsewhere))


def _least_known(times: Sequence[float]) -> float:
    return min([time for time in times if time >= 0], default=-1.0)


class OpenCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One collective, on the ranks of its group that have reported.

    Attributes:
        step, number, size_bytes: as in ``TimedCall``; the largest size if ranks differ.
        heard: number of ranks.
        least: as ``_Least``, of their times in microseconds; of an all-to-all, times per byte.
        sum_us: of their times.
        share: the largest size of an all-to-all, else 1.
        dtype: as in ``TimedCall``; empty if ranks differ.
    """

    step: int
    number: int
    size_bytes: Annotated[int, max]
    heard: int
    least: Annotated[_Least, _two_least]
    sum_us: int
    share: Annotated[int, max] = 1
    dtype: Annotated[str, same_or("")] = ""

    @property
    def transfer_us(self) -> int:
        return round(self.least[0] * self.share)

    @property
    def waited_us(self) -> int:
        """Total time that the others waited for the last rank."""
        return max(0, self.sum_us - self.heard * self.transfer_us)

    @property
    def last(self) -> int | None:
        """The rank that came last; None where several came together."""
        least, rank, following, _, _ = self.least
        return rank if self._came_alone(least, following) else None

    @property
    def last_host(self) -> bytes | None:
        """The host of the rank that came last, or of those that came together; None where these are on several."""
        least, _, _, host, elsewhere = self.least
        return host if self.last is not None or self._came_alone(least, elsewhere) else None

    def _came_alone(self, least: float, following: float) -> bool:
        least_us, following_us = round(least * self.share), round(following * self.share)
        return came_alone(least_us, following_us, _RESOLUTION_US) and self.waited_us > 0


def _host_of_all(hosts: Sequence[bytes]) -> bytes:
    return hosts[0] if len(set(hosts)) == 1 else _UNKNOWN if _UNKNOWN in hosts else _SEVERAL


class OpenCalls(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The timed collectives of one operator on one group.

    Attributes:
        operator, group, first_rank, group_size, dimension: as in ``TimedCalls``.
        heard: ranks of the group that have reported.
        host: digest of their host; ``*`` if they are on several, empty if unknown.
        stage: of the pipeline, or ``SEVERAL_STAGES``.
        calls: by step and number.
    """

    operator: str
    group: str
    first_rank: int
    group_size: int
    dimension: str
    heard: int
    host: Annotated[bytes, _host_of_all]
    stage: Annotated[int, same_or(SEVERAL_STAGES)]
    calls: Annotated[tuple[OpenCall, ...], table_sum(OpenCall, 2)]


class KindSum(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sums over the groups of one operator, dimension and size, and over their ranks.

    ``heard`` sums the ranks over the collectives, ``transfer_us`` the least times, ``sum_us`` all ranks' times, and
    ``least_sum_us`` the same if each rank took the least time.
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
    """The collectives in which a rank came last, and the time that the other ranks waited, summed over them.

    ``worst`` is the number of steps in which the others of a group waited longest for this rank.
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


class SizedSum(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Transfers of one size and element type, as in ``SizedTransfer``."""

    operator: str
    dimension: str
    group_size: int
    dtype: str
    size_bytes: int
    calls: int
    transfer_us: int


class ArrivalSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The timed collectives of a set of ranks.

    Attributes:
        num_steps: steps that were timed, the most of any rank.
        open: of groups some of whose ranks were not heard yet.
        kinds, last, sizes, sized: of the other groups.
        last_hosts: as ``last``, of hosts, for each of which any of its ranks stands.
    """

    num_steps: Annotated[int, max] = 0
    open: Annotated[tuple[OpenCalls, ...], _open] = ()
    kinds: Annotated[tuple[KindSum, ...], _kinds] = ()
    last: Annotated[tuple[LastSum, ...], _last] = ()
    sizes: Annotated[tuple[SizeSum, ...], _sizes] = ()
    last_hosts: Annotated[tuple[LastSum, ...], _last] = ()
    sized: Annotated[tuple[SizedSum, ...], _sized] = ()


_open = table_sum(OpenCalls, 5, order=lambda row: (row.first_rank, row.group, row.operator))
_kinds = table_sum(KindSum, 3, order=lambda row: -row.calls, limit=MAX_KINDS)
_last = table_sum(LastSum, 3, order=lambda row: (-row.waited_us, -row.last), limit=MAX_LAST)
_sizes = table_sum(SizeSum, 5, order=lambda row: -row.bytes, limit=MAX_SIZES)
_sized = table_sum(SizedSum, 5, order=lambda row: -row.size_bytes * row.calls, limit=MAX_SIZES)
_add = struct_sum(ArrivalSums)


def arrivals_of(rank: int, timed: Sequence[TimedCalls], host: str, stage: int = NO_STAGE) -> ArrivalSums:
    """The arrivals of one rank; ``host`` identifies its machine, and is empty if unknown."""
    own = digest(host) if host else _UNKNOWN
    rows = [
        OpenCalls(
            row.operator, row.group, row.first_rank, row.group_size, row.dimension, 1, own, stage,
            tuple([
                _open_call(call, rank, own[:_FEW_BYTES], shared=collective_of(row.operator) == ALL_TO_ALL)
                for call in row.calls
            ]),
        )
        for row in timed
    ]  # fmt: skip
    return ArrivalSums(len({call.step for row in timed for call in row.calls}), _open([rows])[:MAX_OPEN])


def _open_call(call: TimedCall, rank: int, host: bytes, *, shared: bool) -> OpenCall:
    share = max(1, call.size_bytes) if shared else 1
    least = (call.time_us / share, rank, -1.0, host, -1.0)
    return OpenCall(call.step, call.number, call.size_bytes, 1, least, call.time_us, share, call.dtype)


def add_arrivals(parts: Sequence[ArrivalSums]) -> ArrivalSums:
    """The arrivals of all parts, which have no ranks in common."""
    return _settled(_add(parts), lambda row: row.heard >= row.group_size)


def _settled(sums: ArrivalSums, is_over: Callable[[OpenCalls], bool]) -> ArrivalSums:
    """Replace groups that no missing rank can join by their sums."""
    still_open = tuple([row for row in sums.open if not is_over(row)][:MAX_OPEN])
    closed = [_closed(row) for row in sums.open if is_over(row)]
    return _add([msgspec.structs.replace(sums, open=still_open), *closed])


def _closed(row: OpenCalls) -> ArrivalSums:
    """The sums of one group, without single ranks and calls that not all reporting ranks timed.

    The stages of a pipeline end their steps one after the other, so groups of several stages give only transfers.
    """
    calls = [call for call in row.calls if call.heard == row.heard and call.heard > 1]
    reach = {_UNKNOWN: UNKNOWN_HOSTS, _SEVERAL: SEVERAL_HOSTS}.get(row.host, ONE_HOST)
    group = row.dimension, row.group_size
    sizes = [
        SizeSum(row.operator, *group, reach, call.size_bytes.bit_length() - 1, 1, call.size_bytes, call.transfer_us)
        for call in calls
    ]
    sized = [
        SizedSum(row.operator, *group, call.dtype, call.size_bytes, 1, call.transfer_us) for call in calls if call.dtype
    ]
    if not calls or row.stage == SEVERAL_STAGES:
        return ArrivalSums(sizes=tuple(sizes), sized=_sized([sized]))
    by_step = grouped(calls, lambda call: call.step)
    last = _last_sums(by_step.values(), group, lambda call: call.last)
    last_hosts = _last_sums(by_step.values(), group, lambda call: call.last_host)
    kind = KindSum(
        row.operator, *group, 1, len(calls), len(by_step),
        sum([call.heard for call in calls]),
        sum([call.transfer_us for call in calls]),
        sum([call.sum_us for call in calls]),
        sum([call.sum_us - call.waited_us for call in calls]),
    )  # fmt: skip
    return ArrivalSums(0, (), (kind,), tuple(last), tuple(sizes), tuple(last_hosts), _sized([sized]))


def _last_sums(
    steps: Iterable[Sequence[OpenCall]], group: tuple[str, int], who: Callable[[OpenCall], Hashable]
) -> list[LastSum]:
    """Who is charged with the collectives of a group, by step; ``who`` came last to one, or None."""
    rows = []
    for calls in steps:
        waited, rank_of = Counter[Hashable](), dict[Hashable, int]()
        for call in calls:
            if (name := who(call)) is not None:
                rank_of.setdefault(name, call.least[1])
                rows.append(LastSum(rank_of[name], *group, 1, 0, call.heard - 1, call.waited_us))
                waited[name] += call.waited_us
        most = waited.most_common(2)
        if len(most) == 1 or (most and most[0][1] > most[1][1]):
            rows.append(LastSum(rank_of[most[0][0]], *group, 0, 1, 0, 0))
    return rows


# -- the report


def reported_sizes(sums: ArrivalSums) -> tuple[SizedTransfer, ...]:
    """How long transfers took, by exact size and element type."""
    rows = map(msgspec.structs.astuple, _settled(sums, lambda row: True).sized)
    return tuple([SizedTransfer(*[*of_size, transfer_us / _US_PER_MS]) for *of_size, transfer_us in rows])


def reported_arrivals(sums: ArrivalSums, hosts: Ranks) -> tuple[Arrivals | None, tuple[SizeTransfer, ...]]:
    """Which ranks came last, and how long transfers took; groups with missing ranks count with the ranks they have.

    ``hosts`` is the number of each rank's host, ``UNKNOWN`` if unknown; empty if all are.
    """
    sums = _settled(sums, lambda row: True)
    kinds = grouped(sums.kinds, lambda kind: kind.dimension)
    waiting = [_waiting(dimension, of_dimension) for dimension, of_dimension in kinds.items()]
    waiting.sort(key=lambda row: (-row.calls * (row.transfer_ms + row.waiting_ms), row.dimension))
    last = [row for row in sums.last if row.dimension in kinds]
    ranks = [_late_rank(row, kinds[row.dimension], hosts) for row in last]
    of_hosts = _by_host([row for row in sums.last_hosts if row.dimension in kinds], hosts)
    late_hosts = [_late_host(row, kinds[row.dimension], hosts) for row in of_hosts]
    for rows in (ranks, late_hosts):
        rows.sort(key=lambda row: (-row.lost_fraction, -row.times_last, row.rank, row.host, row.dimension))
    found = Arrivals(
        sums.num_steps, tuple(waiting[:_MAX_DIMENSIONS]), tuple(ranks[:_MAX_RANKS]), tuple(late_hosts[:_MAX_HOSTS])
    )
    transfers = [
        SizeTransfer(*[*of_size, transfer_us / _US_PER_MS])
        for *of_size, transfer_us in map(msgspec.structs.astuple, sums.sizes)
    ]
    transfers.sort(key=lambda row: (row.dimension, row.operator, row.group_size, row.reach, row.size))
    return found if waiting else None, tuple(transfers)


def _waiting(dimension: str, kinds: Sequence[KindSum]) -> DimensionWaiting:
    calls, heard = sum(kind.calls for kind in kinds), sum(kind.heard for kind in kinds)
    waited_us = sum(kind.sum_us - kind.least_sum_us for kind in kinds)
    return DimensionWaiting(
        dimension, calls, sum(kind.transfer_us for kind in kinds) / calls / _US_PER_MS, waited_us / heard / _US_PER_MS
    )


def _late_rank(row: LastSum, kinds: Sequence[KindSum], hosts: Ranks) -> Lateness:
    """From the collectives of the rank's own group, at the mean over the groups of its size."""
    own = [(kind, kind.groups) for kind in kinds if kind.group_size == row.group_size]
    host = int(hosts[row.rank]) if 0 <= row.rank < len(hosts) else UNKNOWN
    return _lateness(row, own, rank=row.rank, host=host, chance=1 / row.group_size)


def _late_host(row: LastSum, kinds: Sequence[KindSum], hosts: Ranks) -> Lateness:
    """From the collectives of all groups, for a row of ``_by_host``."""
    chance = float((hosts == row.rank).mean())
    return _lateness(row, [(kind, 1) for kind in kinds], rank=-1, host=row.rank, chance=chance)


def _by_host(last: Sequence[LastSum], hosts: Ranks) -> tuple[LastSum, ...]:
    """Rows in which a rank of a host came last, with the host's number as the rank; none if hosts are unknown."""
    if hosts.max(initial=UNKNOWN) < 1 or (hosts == UNKNOWN).any():
        return ()
    known = [row for row in last if 0 <= row.rank < len(hosts)]
    return _last([[msgspec.structs.replace(row, rank=int(hosts[row.rank]), group_size=0) for row in known]])


def _lateness(row: LastSum, kinds: Sequence[tuple[KindSum, int]], *, rank: int, host: int, chance: float) -> Lateness:
    """As in the report, from collectives whose sums are divided by a number of groups."""
    time_us = sum(kind.sum_us / groups for kind, groups in kinds)
    return Lateness(
        rank=rank,
        host=host,
        dimension=row.dimension,
        calls=max(round(sum(kind.calls / groups for kind, groups in kinds)), row.last),
        times_last=row.last,
        steps=max(round(sum(kind.steps / groups for kind, groups in kinds)), row.worst),
        steps_blamed=row.worst,
        chance=chance,
        waiting_ms=row.waited_us / max(1, row.others) / _US_PER_MS,
        lost_fraction=min(1.0, row.waited_us / time_us) if time_us > 0 else 0.0,
    )


# -- transfers of whole steps
# The last rank may differ between the collectives of a step, so the least of the ranks' sums is an upper bound of the
# transfer. If the kernels of single collectives were compared (``waiting``), their sum is the transfer.

# Ranks that timed the same fraction of a collective differ by less.
_SAME_BYTES = 0.01
# Limit of rows. The report shows the collectives of the lowest rank, so groups of low ranks come first; a rank issues
# some tens of kinds.
MAX_COLLECTIVES = 250
MAX_SIZES_EACH = 6

# Bytes, and the least time in milliseconds.
_Time = tuple[float, float]


class Transfers(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One kind of collective on one group, over ranks; ``first_rank`` is its lowest, -1 if unknown.

    ``kernels`` is the least time of its kernels, by size, and ``isolated`` the least from issue to end.
    """

    operator: str
    group: str
    first_rank: int
    kernels: Annotated[tuple[_Time, ...], _least]
    isolated: Annotated[tuple[_Time, ...], _least]


def _least(times: Sequence[tuple[_Time, ...]]) -> tuple[_Time, ...]:
    """The least time of each size; of many, the fastest per byte."""
    by_size = grouped(chain(*times), lambda time: time[0])
    least = [min(of_size) for of_size in by_size.values()]
    return tuple(sorted(least, key=lambda time: (time[1] / max(1.0, time[0]), time))[:MAX_SIZES_EACH])


add_transfers = table_sum(Transfers, 3, order=lambda row: (row.first_rank, row.group), limit=MAX_COLLECTIVES)


def transfers_of(collectives: Sequence[CollectiveTime]) -> tuple[Transfers, ...]:
    """The transfers of one rank."""
    rows = []
    for row in collectives:
        kernels = ((float(row.size_bytes), row.kernels_ms),) if row.kernels_ms else ()
        isolated = (
            ((row.timed_bytes, row.isolated_ms),) if row.isolated_ms is not None and row.timed_bytes is not None else ()
        )
        if kernels or isolated:
            rows.append(Transfers(*_key(row), kernels, isolated))
    return tuple(rows)


def _key(row: CollectiveTime) -> tuple[str, str, int]:
    return row.operator, row.group, -1 if row.first_rank is msgspec.UNSET else row.first_rank


def with_transfers(
    collectives: Sequence[CollectiveTime], transfers: Sequence[Transfers], compared: Sequence[GroupTransfer]
) -> tuple[CollectiveTime, ...]:
    """The collectives of one rank as recorded, with the times of their transfers over all ranks."""
    by_key = {(row.operator, row.group, row.first_rank): row for row in transfers}
    kinds = Counter((collective_of(row.operator), row.group) for row in collectives)

    def transfer_ms(row: CollectiveTime) -> float | None:
        over_ranks = by_key.get(_key(row))
        least_ms = _transfer_ms(row, over_ranks)
        kind = collective_of(row.operator)
        # If shares of an all-to-all differ in size, its shortest kernel is the smallest share's.
        of_shares = kind == ALL_TO_ALL and over_ranks is not None and len(over_ranks.kernels) > 1
        if row.kernels_ms is None or least_ms is None or kinds[kind, row.group] > 1 or of_shares:
            return least_ms
        known = [
            one.transfer_us
            for one in compared
            if (one.kind, one.first_rank) == (kind, row.first_rank)
            and (row.group == one.group or row.group.endswith(f"({one.group})"))  # possibly with a description before
        ]
        return min(least_ms, known[0] / 1e3) if len(known) == 1 and known[0] > 0 else least_ms

    return tuple(
        [msgspec.structs.replace(row, transfer_ms=transfer_ms(row), first_rank=msgspec.UNSET) for row in collectives]
    )


def _transfer_ms(row: CollectiveTime, found: Transfers | None) -> float | None:
    """Includes the rank's own time, even if its size was not kept."""
    kernels, isolated = ((), ()) if found is None else (found.kernels, found.isolated)
    by_share = collective_of(row.operator) == ALL_TO_ALL
    if row.kernels_ms is not None:
        own = [row.kernels_ms] if row.kernels_ms else []
        return min([*own, *_times_of(row.size_bytes, kernels, by_share)], default=None)
    if row.isolated_ms is None or row.timed_bytes is None:
        return None
    return min([row.isolated_ms, *_times_of(row.timed_bytes, isolated, by_share)])


def _times_of(num_bytes: float, times: Sequence[_Time], by_share: bool) -> list[float]:
    """Times of ranks for this many bytes; with ``by_share``, those of all ranks at their own rates."""
    if by_share:
        return [ms * num_bytes / size for size, ms in times if size and num_bytes]
    return [ms for size, ms in times if abs(size - num_bytes) <= _SAME_BYTES * max(size, num_bytes)]
