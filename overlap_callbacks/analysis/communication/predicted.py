"""Predicted messages of a job: for single ranks, in the form of a record, and compared with a record."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.rank_grids import Grid
from overlap_callbacks.analysis.communication.sums import add_sizes
from overlap_callbacks.analysis.communication.volumes import MessageRow, rank_rows
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.messages import NO_STAGE, JobMessages, MessageGroup
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.analysis.sums import grouped, table_sum


def sent_rows(job: JobShape, *, all_ranks: bool = False) -> tuple[MessageRow, ...]:
    """The messages of the lowest rank of each kind, or of all ranks, without groups of one rank."""
    stages = [rank_rows(job, stage * job.ranks_per_stage) for stage in range(job.p)]
    if not all_ranks:
        kinds: dict[tuple[MessageRow, ...], tuple[MessageRow, ...]] = {}
        for rows in stages:
            kinds.setdefault(tuple([msgspec.structs.replace(row, rank=0, peer=-1) for row in rows]), rows)
        stages = list(kinds.values())
    # The ranks of a stage send the same, to the corresponding ranks of other stages.
    return tuple(
        [
            msgspec.structs.replace(row, rank=row.rank + place, peer=row.peer + place if row.peer >= 0 else -1)
            for rows in stages
            for place in (range(job.ranks_per_stage) if all_ranks else (0,))
            for row in rows
            if row.group_size != 1
        ]
    )


def predicted_messages(job: JobShape) -> JobMessages:
    """Predicted messages of a step, in a record's form, without hosts and groups of one rank."""
    groups: list[MessageGroup] = []
    for stage in range(job.p):
        rows = [row for row in rank_rows(job, stage * job.ranks_per_stage) if row.group_size != 1]
        alike = grouped(rows, lambda row: (row.operator, row.dimension, row.group_size, row.peer))
        groups += [_group(job, stage, rows) for rows in alike.values()]
    return JobMessages(tuple(groups), (_grid(0, (1, job.world_size)),))


def _group(job: JobShape, stage: int, rows: Sequence[MessageRow]) -> MessageGroup:
    """The calls of one operator on groups of one form, of all ranks of a stage, from the rows of its first rank."""
    first, members = rows[0], job.ranks_per_stage
    sizes = [(row.bytes_each.bit_length() - 1, row.messages * members, row.bytes * members) for row in rows]
    firsts, offsets = _places(job, stage, first)
    size = sum([row.bytes for row in rows])
    read = size // first.group_size if collective_of(first.operator) == "all_gather" else size
    return MessageGroup(
        operator=first.operator,
        dimension=first.dimension,
        stage=stage if job.p > 1 else NO_STAGE,
        group_size=first.group_size,
        num_members=members,
        messages=sum([row.messages for row in rows]) * members,
        bytes=size * members,
        bytes_in=0 if first.operator.startswith("recv") else read * members,
        sizes=add_sizes([sizes]),
        ranks=(_grid(stage * members, (1, members)),),
        firsts=(firsts,),
        offsets=(offsets,),
    )


def _places(job: JobShape, stage: int, row: MessageRow) -> tuple[Grid, Grid]:
    """The first ranks of the groups in which a stage's ranks issue this, and a group's ranks relative to its first.

    Megatron-core counts tensor, then data, then pipeline ranks. Experts are split over neighbours in data parallelism,
    and the shards of a model in HSDP are neighbours too.
    """
    t, d, stride, n = job.t, job.d, job.ranks_per_stage, row.group_size
    start = stage * stride
    if row.peer >= 0:
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
    # Experts are split over ``d // n`` neighbours, so each rank shares its own with ``n`` ranks.
    return _grid(start, (1, stride // n)), _grid(0, (stride // n, n))


def _grid(first: int, *levels: tuple[int, int]) -> Grid:
    """A grid without levels of one rank."""
    return first, tuple([(stride, count) for stride, count in levels if count > 1])


class CheckedRow(msgspec.Struct, frozen=True):
    """One operator of one dimension on one rank, per step: predicted, and recorded by the gate; 0 if missing."""

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


def check_rank(job: JobShape, rank: int, collectives: Sequence[CollectiveTime]) -> tuple[CheckedRow, ...]:
    """Predicted and recorded messages of a rank, without groups of one rank."""
    predicted = [
        CheckedRow(rank, row.dimension, row.operator, row.messages, row.bytes, 0, 0)
        for row in rank_rows(job, rank)
        if row.group_size != 1
    ]
    # Purely data-parallel jobs only use the default group.
    name = {} if job.layout == "megatron" else {"world": "data"}
    recorded = [
        CheckedRow(rank, name.get(row.dimension, row.dimension), row.operator, 0, 0, row.messages, row.size_bytes)
        for row in collectives
        if row.group_size != 1
    ]
    return _add_rows([predicted, recorded])


def check_window(job: JobShape, window: OverlapReport) -> list[CheckedRow]:
    """The same of each recorded rank of a window."""
    ranks = {sample.rank: sample.collectives for sample in window.samples if sample.collectives}
    if not ranks:
        ranks = {min(window.ranks, default=0): window.collectives}
    return [row for rank, collectives in sorted(ranks.items()) for row in check_rank(job, rank, collectives)]


_add_rows = table_sum(CheckedRow, 3)
