"""The messages that a job should send, in the form in which a record has those that were seen."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.communication.algorithms import POINT_TO_POINT
from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.rank_grids import Grid
from overlap_callbacks.analysis.communication.rows import MessageRow
from overlap_callbacks.analysis.communication.volumes import rank_rows
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.messages import NO_STAGE, JobMessages, MessageGroup

_Key = tuple[str, str, int, int]


def predicted_messages(job: JobShape) -> JobMessages:
    """Who should send what in a step of a job; on which hosts is not known.

    Groups of one rank send nothing and are left out.

    Args:
        job: checked.
    """
    groups: list[MessageGroup] = []
    for stage in range(job.p):
        by_key: dict[_Key, list[MessageRow]] = {}
        for row in rank_rows(job, stage * _stride(job)):
            if row.group_size != 1:
                by_key.setdefault((row.operator, row.dimension, row.group_size, row.peer), []).append(row)
        groups += [_group(job, stage, rows) for rows in by_key.values()]
    return JobMessages(tuple(groups), (_grid(0, (1, job.world_size)),))


def _stride(job: JobShape) -> int:
    """Ranks of a stage, all of which send alike."""
    return job.t * job.d


def _group(job: JobShape, stage: int, rows: Sequence[MessageRow]) -> MessageGroup:
    """The calls of one operator on groups of one form, of all ranks of a stage.

    Args:
        job: whose they are.
        stage: of the pipeline.
        rows: of the stage's first rank, by size.
    """
    first, members = rows[0], _stride(job)
    sizes: dict[int, tuple[int, int]] = {}
    for row in rows:
        exponent = row.bytes_each.bit_length() - 1
        number, total = sizes.get(exponent, (0, 0))
        sizes[exponent] = number + row.messages * members, total + row.bytes * members
    firsts, offsets = _places(job, stage, first)
    size = sum([row.bytes for row in rows])
    return MessageGroup(
        operator=first.operator,
        dimension=first.dimension,
        stage=stage if job.p > 1 else NO_STAGE,
        group_size=first.group_size,
        num_members=members,
        messages=sum([row.messages for row in rows]) * members,
        bytes=size * members,
        bytes_in=_read(first, size) * members,
        sizes=tuple([(exponent, *amounts) for exponent, amounts in sorted(sizes.items())]),
        ranks=(_grid(stage * members, (1, members)),),
        firsts=(firsts,),
        offsets=(offsets,),
    )


def _read(row: MessageRow, size: int) -> int:
    """Bytes that calls of this size read on a rank."""
    if row.operator.startswith("recv"):
        return 0
    return size // row.group_size if collective_of(row.operator) == "all_gather" else size


def _places(job: JobShape, stage: int, row: MessageRow) -> tuple[Grid, Grid]:
    """The first ranks of the groups in which a stage's ranks issue this, and a group's ranks less its first.

    Megatron-core counts tensor, then data, then pipeline ranks; experts are split over neighbours in data parallelism,
    and the shards of a model in HSDP are neighbours too.
    """
    t, d, stride, n = job.t, job.d, _stride(job), row.group_size
    start = stage * stride
    if collective_of(row.operator) == POINT_TO_POINT:
        sender, receiver = (row.peer, start) if row.operator.startswith("recv") else (start, row.peer)
        return _grid(sender, (1, stride)), _grid(0, (receiver - sender, 2))
    if row.dimension == "tensor":
        return _grid(start, (t, d)), _grid(0, (1, t))
    if row.dimension == "embedding":
        return _grid(0, (1, stride)), _grid(0, ((job.p - 1) * stride, 2))
    if row.dimension == "model" and n == job.world_size:
        return _grid(0), _grid(0, (1, n))
    if row.dimension == "model" and n == job.p * t:
        return _grid(0, (t, d)), _grid(0, (1, t), (stride, job.p))
    if row.dimension in ("expert", "model"):
        return _grid(start, (n, d // n)), _grid(0, (1, n))
    if job.replicas > 1:
        shards = d // job.replicas
        if collective_of(row.operator) == "all_reduce":
            return _grid(start, (1, shards)), _grid(0, (shards, n))
        return _grid(start, (shards, job.replicas)), _grid(0, (1, shards))
    # Of experts that are split over ``d // n`` neighbours, each rank shares its own with ``n`` ranks.
    return _grid(start, (1, stride // n)), _grid(0, (stride // n, n))


def _grid(first: int, *levels: tuple[int, int]) -> Grid:
    """A grid without levels of one rank."""
    return first, tuple([(stride, count) for stride, count in levels if count > 1])
