"""The messages of ranks, added up on their way to rank 0: what ranks send alike stands once, with the ranks.

Sums are of whole numbers, so they are equal for every tree of ranks. Which ranks send what is kept as long as the
layout of the job is regular; of irregular jobs, sums stay and ranks are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

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
from overlap_callbacks.analysis.identities import digest
from overlap_callbacks.analysis.results.messages import (
    SEVERAL_STAGES,
    HostShape,
    JobMessages,
    MessageGroup,
    RankMessages,
    Sizes,
)

# Rows of a part, and of a line of the record. A stage of a pipeline has about ten.
MAX_ROWS = 320
# Grids of the ranks that were heard.
MAX_HEARD = 256
# Hosts that a part tells apart.
MAX_HOSTS = 4096


class MessageSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a set of ranks sends in a step.

    Attributes:
        groups: what they send.
        ranks: those of them that tell.
        hosts: ranks by the digest of their host.
        num_steps, num_alike: as in ``RankMessages``, summed.
    """

    groups: tuple[MessageGroup, ...] = ()
    ranks: Grids = ()
    hosts: dict[bytes, Grids] = {}
    num_steps: int = 0
    num_alike: int = 0


def sums_of(rank: int, messages: RankMessages | None, host: str) -> MessageSums:
    """What one rank sends.

    Args:
        rank: global rank.
        messages: of its recorded step; None if it did not run.
        host: what identifies its machine; empty if unknown.
    """
    if messages is None:
        return MessageSums()
    own = grids_of([rank])
    groups = []
    for row in messages.rows:
        first = row.ranks[0] if row.ranks else -1
        offsets = in_order([other - first for other in row.ranks])
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
                firsts=grids_of([first]) if known else (),
                offsets=offsets if known else (),
                whole=known,
            )
        )
    hosts = {digest(host): own} if host else {}
    return MessageSums(_bounded(_added(groups)), own, hosts, messages.num_steps, messages.num_alike)


def add_sums(parts: Iterable[MessageSums]) -> MessageSums:
    """What the ranks of all parts send; no rank is in two of them."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    groups = _added([group for part in parts for group in part.groups])
    by_host: dict[bytes, list[Grids]] = {}
    for part in parts:
        for host, ranks in part.hosts.items():
            by_host.setdefault(host, []).append(ranks)
    hosts = {host: cut(union(ranks)) for host, ranks in sorted(by_host.items())[:MAX_HOSTS]}
    return MessageSums(
        groups=_bounded(groups),
        ranks=_heard([part.ranks for part in parts]),
        hosts=hosts,
        num_steps=sum([part.num_steps for part in parts]),
        num_alike=sum([part.num_alike for part in parts]),
    )


def _heard(sets: Sequence[Grids]) -> Grids:
    """The ranks of all sets; if they are too scattered to be kept, all from the lowest to the highest."""
    ranks = union([grids for grids in sets if grids] or [()])
    if len(ranks) <= MAX_HEARD:
        return ranks
    numbers = ranks_in(ranks)
    return grids_of(range(int(numbers.min()), int(numbers.max()) + 1))


def job_messages(sums: MessageSums) -> JobMessages | None:
    """As the record has it; None where no rank tells."""
    if not sums.ranks:
        return None
    groups = sorted(
        sums.groups,
        key=lambda group: (group.stage, group.dimension, group.operator, group.firsts, group.offsets, group.ranks),
    )
    return JobMessages(tuple(groups), sums.ranks, _host_shapes(sums.hosts))


def _host_shapes(hosts: Mapping[bytes, Grids]) -> tuple[HostShape, ...]:
    firsts_of: dict[Grids, list[int]] = {}
    for grids in hosts.values():
        first = grids[0][0]
        # Without numbering the ranks of each host: there are a thousand hosts, and few shapes.
        firsts_of.setdefault(tuple([(at - first, levels) for at, levels in grids]), []).append(first)
    return tuple([HostShape(grids_of(firsts), offsets) for offsets, firsts in sorted(firsts_of.items())])


def _form(group: MessageGroup) -> tuple[Hashable, ...]:
    return group.operator, group.dimension, group.stage, group.group_size, group.offsets


def _content(group: MessageGroup) -> tuple[Hashable, ...]:
    """What each of its ranks issues; of ranks that differ, nothing."""
    if not group.alike:
        return (*_form(group), None)
    n = group.num_members
    each = (group.messages // n, group.bytes // n, group.bytes_in // n)
    return (*_form(group), each, tuple([(size, number // n, total // n) for size, number, total in group.sizes]))


def _outline(group: MessageGroup) -> tuple[Hashable, ...]:
    return group.operator, group.dimension


def _added(groups: Sequence[MessageGroup]) -> tuple[MessageGroup, ...]:
    return _by(_content, groups)


def _bounded(groups: tuple[MessageGroup, ...]) -> tuple[MessageGroup, ...]:
    """At most so many rows: ranks that differ share one first, then forms and stages do."""
    if len(groups) > MAX_ROWS:
        groups = _by(_form, groups)
    return groups if len(groups) <= MAX_ROWS else _by(_outline, groups)


def _by(key: Callable[[MessageGroup], Hashable], groups: Sequence[MessageGroup]) -> tuple[MessageGroup, ...]:
    by_key: dict[Hashable, list[MessageGroup]] = {}
    for group in groups:
        by_key.setdefault(key(group), []).append(group)
    return tuple([_sum(alike) for alike in by_key.values()])


def _sum(rows: Sequence[MessageGroup]) -> MessageGroup:
    first = rows[0]
    if len(rows) == 1:
        return first
    one_form = len({_form(row) for row in rows}) == 1
    ranks = union([row.ranks for row in rows])
    firsts = union([row.firsts for row in rows]) if one_form else ()
    fits = len(ranks) <= MAX_GRIDS and len(firsts) <= MAX_GRIDS
    return MessageGroup(
        operator=first.operator,
        dimension=first.dimension,
        stage=first.stage if len({row.stage for row in rows}) == 1 else SEVERAL_STAGES,
        group_size=first.group_size if one_form else 0,
        num_members=sum([row.num_members for row in rows]),
        messages=sum([row.messages for row in rows]),
        bytes=sum([row.bytes for row in rows]),
        bytes_in=sum([row.bytes_in for row in rows]),
        sizes=_add_sizes([row.sizes for row in rows]),
        ranks=ranks if fits else (),
        firsts=firsts if fits else (),
        offsets=first.offsets if one_form else (),
        alike=len({_content(row) for row in rows}) == 1 and all([row.alike for row in rows]),
        whole=one_form and fits and all([row.whole for row in rows]),
    )


def _add_sizes(parts: Sequence[Sizes]) -> Sizes:
    sums: dict[int, tuple[int, int]] = {}
    for part in parts:
        for size, number, total in part:
            known = sums.get(size, (0, 0))
            sums[size] = (known[0] + number, known[1] + total)
    return tuple([(size, number, total) for size, (number, total) in sorted(sums.items())])
