"""The messages of a job's ranks, whatever its layout."""

from __future__ import annotations

import msgspec

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.megatron import megatron_rows
from overlap_callbacks.analysis.communication.row_sums import merged
from overlap_callbacks.analysis.communication.rows import MessageRow
from overlap_callbacks.analysis.communication.sharded import sharded_rows
from overlap_callbacks.analysis.communication.zero import zero_rows


def rank_rows(job: JobShape, rank: int) -> tuple[MessageRow, ...]:
    """What one rank sends and receives in a step, those calls that groups of one rank issue included.

    Args:
        job: checked.
        rank: global rank.
    """
    if job.layout == "megatron":
        return merged(megatron_rows(job, rank))
    return merged(zero_rows(job, rank) if job.layout.startswith("zero") else sharded_rows(job, rank))


def representative_ranks(job: JobShape) -> tuple[int, ...]:
    """The lowest rank of each kind: of stages that send alike, the first."""
    found: dict[tuple[MessageRow, ...], int] = {}
    for rank in range(0, job.world_size, job.t * job.d):
        alike = tuple([msgspec.structs.replace(row, rank=0, peer=-1) for row in rank_rows(job, rank)])
        found.setdefault(alike, rank)
    return tuple(found.values())


def sent_rows(job: JobShape, *, all_ranks: bool = False) -> tuple[MessageRow, ...]:
    """The messages of a rank of each kind, or of all ranks; groups of one rank send nothing and are left out.

    Args:
        job: checked.
        all_ranks: of all ranks.
    """
    stride = job.t * job.d
    if not all_ranks:
        return tuple([row for rank in representative_ranks(job) for row in rank_rows(job, rank) if row.group_size != 1])
    found: list[MessageRow] = []
    for first in range(0, job.world_size, stride):
        rows = [row for row in rank_rows(job, first) if row.group_size != 1]
        # The ranks of a stage send alike, to the ranks of equal place in other stages.
        for place in range(stride):
            found += [
                msgspec.structs.replace(row, rank=first + place, peer=row.peer + place if row.peer >= 0 else -1)
                for row in rows
            ]
    return tuple(found)
