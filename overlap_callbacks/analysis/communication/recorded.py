"""The messages of a record as rows of single ranks, in the form in which messages are predicted."""

from __future__ import annotations

from collections.abc import Iterator

from overlap_callbacks.analysis.communication.rank_grids import ranks_in
from overlap_callbacks.analysis.communication.rows import MessageRow, wire_factor
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.messages import JobMessages, MessageGroup


def rows_of(messages: JobMessages, rank: int) -> tuple[MessageRow, ...]:
    """What one rank sends in a step.

    A row has the calls of one operator on one group. The record keeps their sum and a histogram of their sizes, so
    ``bytes_each`` is their mean, rounded down. Where ranks that differ share a row of the record, so are all amounts.
    Groups whose ranks the record does not keep are left out.

    Args:
        messages: of the job.
        rank: global rank.
    """
    return tuple([row for group in messages.groups for row in _rows(group, rank)])


def _rows(group: MessageGroup, rank: int) -> Iterator[MessageRow]:
    if not group.whole or rank not in ranks_in(group.ranks):
        return
    messages, size = group.messages // group.num_members, group.bytes // group.num_members
    offsets = ranks_in(group.offsets)
    for first in ranks_in(group.firsts):
        members = (first + offsets).tolist()
        peer = -1
        if collective_of(group.operator) == "send_recv":
            sender, receiver = members
            own, peer = (receiver, sender) if group.operator.startswith("recv") else (sender, receiver)
            if own != rank:
                continue
        if rank in members:
            yield MessageRow(
                rank=rank,
                dimension=group.dimension,
                operator=group.operator,
                messages=messages,
                bytes_each=size // messages if messages else 0,
                bytes=size,
                wire_bytes=wire_factor(group.operator, group.group_size) * size,
                group_size=group.group_size,
                peer=peer,
            )
