"""Whose communication is exposed, as far as a record tells. Pure.

A record has the exposed time of each dimension of parallelism, and which collectives a dimension issues in a step. It
has no exposed time of a single collective, bucket or layer. So a collective is only named as the cause where it is the
only kind that its dimension has.
"""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.communication.heat_map import bytes_in_words
from overlap_callbacks.analysis.formatting import PLAIN, count
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import CollectiveTime, DimensionTime
from overlap_callbacks.report.record import Record

# Collectives of one dimension that a line names.
_MAX_NAMED = 3


def exposed_lines(record: Record) -> list[str]:
    """A line for each dimension that has exposed communication, the most first; of the last window that counts."""
    window = record.latest_valid("dimensions")
    if window is None:
        return []
    rows = sorted([row for row in window.dimensions if row.exposed_ms > 0], key=lambda row: -row.exposed_ms)
    return [_line(row, window) for row in rows]


def _line(row: DimensionTime, window: OverlapReport) -> str:
    shown = f"{PLAIN.quantity(row.exposed_ms, 'ms')} of {PLAIN.quantity(row.comm_ms, 'ms')}"
    line = f"window {window.window}, dimension {row.dimension}: {shown} in flight are exposed"
    kinds = [found for found in window.collectives if found.dimension == row.dimension]
    if not kinds:
        return line
    kinds.sort(key=lambda kind: -kind.size_bytes)
    names = "; ".join(map(_name, kinds[:_MAX_NAMED])) + ("; ..." if len(kinds) > _MAX_NAMED else "")
    # Rank 0's collectives; the dimension's messages are a mean over ranks, sends and receives included.
    if len(kinds) == 1 and kinds[0].messages == row.messages:
        return f"{line}, all of it by {names}"
    return f"{line}; rank {window.first_rank} issues {names} in it (which of them is exposed, the record does not tell)"


def _name(kind: CollectiveTime) -> str:
    ranks = count(kind.group_size, "rank")
    return (
        f"{kind.operator.strip('_')} on group {kind.group} of {ranks} "
        f"({kind.messages} a step, {bytes_in_words(kind.size_bytes)} in all)"
    )


def exposed_as_data(record: Record) -> Sequence[DimensionTime]:
    """The same as plain data."""
    window = record.latest_valid("dimensions")
    return () if window is None else window.dimensions
