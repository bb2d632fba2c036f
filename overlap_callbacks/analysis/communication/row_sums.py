"""Rows of messages with their sums, and rows that are added up."""

from __future__ import annotations

from collections.abc import Iterable

from overlap_callbacks.analysis.communication.rows import MessageRow, wire_factor


def row(
    rank: int, dimension: str, operator: str, messages: int, bytes_each: int, group_size: int, peer: int = -1
) -> MessageRow:
    """A row with its sums."""
    size = messages * bytes_each
    wire_bytes = size * wire_factor(operator, group_size)
    return MessageRow(rank, dimension, operator, messages, bytes_each, size, wire_bytes, group_size, peer)


def merged(rows: Iterable[MessageRow]) -> tuple[MessageRow, ...]:
    """Rows that differ in their number of messages only are added up; rows without messages are left out."""
    counts: dict[tuple[int, str, str, int, int, int], int] = {}
    for found in rows:
        key = (found.rank, found.dimension, found.operator, found.bytes_each, found.group_size, found.peer)
        counts[key] = counts.get(key, 0) + found.messages
    return tuple(
        [
            row(rank, dimension, operator, messages, bytes_each, group_size, peer)
            for (rank, dimension, operator, bytes_each, group_size, peer), messages in counts.items()
            if messages
        ]
    )
