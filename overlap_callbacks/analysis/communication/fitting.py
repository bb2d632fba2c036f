"""What a record says of a model's prediction: effective bandwidths, and the messages that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.rows import wire_factor
from overlap_callbacks.analysis.communication.volumes import rank_rows
from overlap_callbacks.analysis.results.window import CollectiveTime

# Jobs with data parallelism only use the default group.
_WORLD, _DATA = "world", "data"


class CheckedRow(msgspec.Struct, frozen=True):
    """One operator of one dimension on one rank, per step: what was predicted and what the gate recorded.

    Attributes:
        rank: global rank.
        dimension, operator: as in ``MessageRow``.
        messages, bytes: predicted; 0 where none was.
        measured_messages, measured_bytes: recorded; 0 where none was.
    """

    rank: int
    dimension: str
    operator: str
    messages: int
    bytes: int
    measured_messages: int
    measured_bytes: int

    @property
    def equal(self) -> bool:
        """Whether both numbers agree exactly."""
        return (self.messages, self.bytes) == (self.measured_messages, self.measured_bytes)


def effective_bandwidths(collectives: Iterable[CollectiveTime]) -> dict[str, float]:
    """Bytes on the wire a second, by dimension: from transfers (the least time over the ranks), never from waiting.

    Dimensions without a timed message of more than one rank are missing.
    """
    wire: dict[str, float] = {}
    time_ms: dict[str, float] = {}
    for row in collectives:
        if row.group_size < 2 or row.transfer is None:
            continue
        size, ms = row.transfer
        dimension = _DATA if row.dimension == _WORLD else row.dimension
        wire[dimension] = wire.get(dimension, 0.0) + size * wire_factor(row.operator, row.group_size)
        time_ms[dimension] = time_ms.get(dimension, 0.0) + ms
    return {name: wire[name] / time_ms[name] * 1e3 for name in wire if time_ms[name] > 0 and wire[name] > 0}


def check_rank(job: JobShape, rank: int, collectives: Sequence[CollectiveTime]) -> tuple[CheckedRow, ...]:
    """Predicted messages of a rank beside those that a window recorded; groups of one rank are left out of both.

    Args:
        job: checked.
        rank: global rank.
        collectives: of the window's recorded step on that rank.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for row in rank_rows(job, rank):
        if row.group_size != 1:
            sums = found.setdefault((row.dimension, row.operator), [0, 0, 0, 0])
            sums[0] += row.messages
            sums[1] += row.bytes
    for measured in collectives:
        if measured.group_size != 1:
            plain = job.layout != "megatron" and measured.dimension == _WORLD
            key = (_DATA if plain else measured.dimension, measured.operator)
            sums = found.setdefault(key, [0, 0, 0, 0])
            sums[2] += measured.messages
            sums[3] += measured.size_bytes
    return tuple([CheckedRow(rank, *key, *sums) for key, sums in sorted(found.items())])
