"""The messages of ranks, merged on the way to rank 0: equal ones become one row, with their ranks.

Sums are of integers, so they do not depend on the tree. The ranks of irregular jobs are truncated.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Annotated

import msgspec

from overlap_callbacks.analysis.communication.rank_grids import (
    MAX_GRIDS,
    Grids,
    cut,
    grids_of,
    in_order,
    ranks_in,
    union,
)
from overlap_callbacks.analysis.results.messages import (
    SEVERAL_STAGES,
    HostShape,
    JobMessages,
    MessageGroup,
    RankMessages,
    Sizes,
)
from overlap_callbacks.analysis.sums import digest, each_sum, first, grouped, named_sum, same_or, struct_sum

# Maximum rows of a part, and of a line of the record. A pipeline stage has about ten.
MAX_ROWS = 320
# Maximum grids for the ranks that reported.
MAX_HEARD = 256
# Maximum hosts that a part distinguishes.
MAX_HOSTS = 4096


class MessageSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Messages of a set of ranks in a step, and which ranks reported; hosts are given by digest.

    ``num_steps`` and ``num_alike`` are as in ``RankMessages``, summed.
    """

    groups: Annotated[tuple[MessageGroup, ...], _add_groups] = ()
    ranks: Annotated[Grids, _heard] = ()
    hosts: Annotated[dict[bytes, Grids], _hosts] = {}
    num_steps: int = 0
    num_alike: int = 0


def _form(group: MessageGroup) -> tuple[Hashable, ...]:
    return group.operator, group.dimension, group.stage, group.group_size, group.offsets


def _content(group: MessageGroup) -> tuple[Hashable, ...]:
    """The calls of each of its ranks; None if ranks differ."""
    if not group.alike:
        return (*_form(group), None)
    n = group.num_members
    each = (group.messages // n, group.bytes // n, group.bytes_in // n)
    return (*_form(group), each, tuple([(size, number // n, total // n) for size, number, total in group.sizes]))


def _outline(group: MessageGroup) -> tuple[Hashable, ...]:
    return group.operator, group.dimension


def _add_groups(parts: Iterable[Iterable[MessageGroup]]) -> tuple[MessageGroup, ...]:
    """Limit the number of rows: first ranks that differ share one, then forms and stages."""
    groups = list(chain.from_iterable(parts))
    for key in (_content, _form, _outline):
        groups = [_sum(rows) for rows in grouped(groups, key).values()]
        if len(groups) <= MAX_ROWS:
            break
    return tuple(groups)


def add_sizes(parts: Iterable[Iterable[tuple[int, int, int]]]) -> Sizes:
    """Messages and bytes by size, added up."""
    by_size = grouped(chain.from_iterable(parts), lambda row: row[0])
    return tuple([(size, *each_sum([row[1:] for row in by_size[size]])) for size in sorted(by_size)])


_add = struct_sum(
    MessageGroup, operator=first, dimension=first, stage=same_or(SEVERAL_STAGES), group_size=first, sizes=add_sizes,
    ranks=union, firsts=union, offsets=first, alike=all, whole=all,
)  # fmt: skip


def _sum(rows: Sequence[MessageGroup]) -> MessageGroup:
    if len(rows) == 1:
        return rows[0]
    alike = all([row.alike for row in rows]) and len({_content(row) for row in rows}) == 1
    if len({_form(row) for row in rows}) > 1:
        rows = [msgspec.structs.replace(row, group_size=0, firsts=(), offsets=(), whole=False) for row in rows]
    added = _add(rows)
    if max(len(added.ranks), len(added.firsts)) > MAX_GRIDS:
        added = msgspec.structs.replace(added, ranks=(), firsts=(), whole=False)
    return msgspec.structs.replace(added, alike=alike)


def _heard(sets: Sequence[Grids]) -> Grids:
    """The ranks of all sets; if they are too scattered to keep, all from the lowest to the highest."""
    ranks = union([grids for grids in sets if grids] or [()])
    if len(ranks) <= MAX_HEARD:
        return ranks
    numbers = ranks_in(ranks)
    return grids_of(range(int(numbers.min()), int(numbers.max()) + 1))


def _hosts(parts: Iterable[Mapping[bytes, Grids]]) -> dict[bytes, Grids]:
    return dict(list(_add_ranks(parts).items())[:MAX_HOSTS])


_add_ranks = named_sum(lambda sets: cut(union(sets)))
add_sums = struct_sum(MessageSums)


def sums_of(rank: int, messages: RankMessages | None, host: str) -> MessageSums:
    """The messages of one rank's recorded step, if it ran. ``host`` identifies its machine; empty if unknown."""
    if messages is None:
        return MessageSums()
    own = grids_of([rank])
    groups = []
    for row in messages.rows:
        first_rank = row.ranks[0] if row.ranks else -1
        offsets = in_order([other - first_rank for other in row.ranks])
        known = bool(row.ranks) and len(offsets) <= MAX_GRIDS
        groups.append(
            MessageGroup(
                operator=row.operator,
                dimension=row.dimension,
                stage=messages.stage,
                group_size=row.group_size,
                num_members=1,
                messages=row.messages,
                bytes=row.bytes,
                bytes_in=row.bytes_in,
                sizes=row.sizes,
                ranks=own,
                firsts=grids_of([first_rank]) if known else (),
                offsets=offsets if known else (),
                whole=known,
            )
        )
    hosts = {digest(host): own} if host else {}
    return MessageSums(_add_groups([groups]), own, hosts, messages.num_steps, messages.num_alike)


def job_messages(sums: MessageSums) -> JobMessages | None:
    """The messages in a record's form; None if no rank reported any."""
    if not sums.ranks:
        return None
    groups = sorted(
        sums.groups,
        key=lambda group: (group.stage, group.dimension, group.operator, group.firsts, group.offsets, group.ranks),
    )
    return JobMessages(tuple(groups), sums.ranks, _host_shapes(sums.hosts))


def _host_shapes(hosts: Mapping[bytes, Grids]) -> tuple[HostShape, ...]:
    # Without numbering each host's ranks: there are a thousand hosts, and few shapes.
    by_shape = grouped(hosts.values(), lambda grids: tuple([(at - grids[0][0], levels) for at, levels in grids]))
    return tuple(
        [
            HostShape(grids_of([grids[0][0] for grids in of_shape]), offsets)
            for offsets, of_shape in sorted(by_shape.items())
        ]
    )
