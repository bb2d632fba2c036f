"""The time of each collective's transfer: the least over the ranks of its group, kept in bounded space.

A rank that comes early waits for the last one within the collective. Over the collectives of a step the last rank may
differ each time, so the least of the ranks' sums is an upper bound. Where the kernels of single collectives were
compared (``waiting``), their sum is the transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Annotated

import msgspec

from overlap_callbacks.analysis.job.waiting import GroupTransfer
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.analysis.sums import grouped, table_sum

# Ranks that timed the same part of a collective differ by less.
_SAME_BYTES = 0.01
# What is kept. The report shows the collectives of the lowest rank, so groups of low ranks come first; a rank issues
# some tens of kinds.
MAX_COLLECTIVES = 250
MAX_SIZES = 6

# Bytes, and the least time in milliseconds.
_Time = tuple[float, float]


class Transfers(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One kind of collective on one group, over ranks.

    Attributes:
        operator, group: as in ``CollectiveTime``.
        first_rank: lowest rank of the group; -1 if unknown.
        kernels: by size, the least time of its kernels.
        isolated: by size, the least time from issue to end.
    """

    operator: str
    group: str
    first_rank: int
    kernels: Annotated[tuple[_Time, ...], _least]
    isolated: Annotated[tuple[_Time, ...], _least]


def _least(times: Sequence[tuple[_Time, ...]]) -> tuple[_Time, ...]:
    """The least time of each size; of many sizes, the shortest."""
    by_size = grouped(chain(*times), lambda time: time[0])
    return tuple(sorted([min(of_size) for of_size in by_size.values()], key=lambda time: time[::-1])[:MAX_SIZES])


add_transfers = table_sum(Transfers, 3, order=lambda row: (row.first_rank, row.group), limit=MAX_COLLECTIVES)


def transfers_of(collectives: Sequence[CollectiveTime]) -> tuple[Transfers, ...]:
    """Those of one rank."""
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
    """The collectives of one rank as the record has them, each with the time of its transfer.

    Args:
        collectives: of that rank.
        transfers: of all ranks.
        compared: what single collectives took that were compared over all ranks.
    """
    by_key = {(row.operator, row.group, row.first_rank): row for row in transfers}
    kinds = Counter((collective_of(row.operator), row.group) for row in collectives)

    def transfer_ms(row: CollectiveTime) -> float | None:
        least_ms = _transfer_ms(row, by_key.get(_key(row)))
        kind = collective_of(row.operator)
        if row.kernels_ms is None or least_ms is None or kinds[kind, row.group] > 1:
            return least_ms
        known = [
            one.transfer_us
            for one in compared
            if (one.kind, one.first_rank) == (kind, row.first_rank)
            and (row.group == one.group or row.group.endswith(f"({one.group})"))  # it may have a description before
        ]
        return min(least_ms, known[0] / 1e3) if len(known) == 1 and known[0] > 0 else least_ms

    return tuple(
        [msgspec.structs.replace(row, transfer_ms=transfer_ms(row), first_rank=msgspec.UNSET) for row in collectives]
    )


def _transfer_ms(row: CollectiveTime, found: Transfers | None) -> float | None:
    """The rank's own time is one of them, also where its size is none of those that were kept."""
    kernels, isolated = ((), ()) if found is None else (found.kernels, found.isolated)
    if row.kernels_ms is not None:
        own = [row.kernels_ms] if row.kernels_ms else []
        return min([*own, *[ms for size, ms in kernels if _alike(size, row.size_bytes)]], default=None)
    if row.isolated_ms is None or row.timed_bytes is None:
        return None
    return min([row.isolated_ms, *[ms for size, ms in isolated if _alike(size, row.timed_bytes)]])


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME_BYTES * max(one, other)
