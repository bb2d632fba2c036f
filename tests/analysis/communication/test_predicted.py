"""The traffic matrix of a predicted job, against one that is added up rank by rank and message by message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.model_shape import ModelShape
from overlap_callbacks.analysis.communication.placement import equal_hosts, layout_of
from overlap_callbacks.analysis.communication.predicted import predicted_messages
from overlap_callbacks.analysis.communication.traffic import are_sound, matrix_of
from overlap_callbacks.analysis.communication.volumes import rank_rows

GPT = ModelShape(layers=4, hidden=32, heads=4, sequence=8, vocabulary=64)
EXPERTS = ModelShape(
    layers=2, hidden=32, heads=4, sequence=8, vocabulary=64, experts=4, experts_per_token=2, biases=False
)
JOBS: dict[str, dict[str, Any]] = {
    "tensor, data, pipeline": {"p": 2, "t": 2, "d": 2, "global_batch": 8},
    "uneven stages, sequence": {
        "p": 3, "t": 2, "d": 3, "stages": (2, 1, 1), "sequence_parallel": True, "global_batch": 6
    },
    "interleaved": {"p": 4, "chunks": 1, "d": 2, "distributed_optimizer": True, "global_batch": 8},
    "interleaved in chunks": {"p": 2, "chunks": 2, "t": 2, "global_batch": 4},
    "experts": {"d": 4, "ep": 2, "global_batch": 4, "model": EXPERTS},
    "ddp": {"layout": "ddp", "d": 3, "global_batch": 3},
    "hsdp": {"layout": "hsdp", "d": 6, "replicas": 2, "global_batch": 6},
    "zero3": {"layout": "zero3", "d": 5, "global_batch": 5, "persistence": 100},
}  # fmt: skip
PASSES = {"allreduce_": 2, "allreduce_coalesced_": 2}


def job_of(name: str) -> JobShape:
    job = JobShape(**{"model": GPT, **JOBS[name]})
    job.check()
    return job


def group_of(job: JobShape, rank: int, dimension: str, operator: str, size: int) -> list[int]:
    """The ranks that differ from this one in the dimension's coordinate alone."""
    ranks = range(job.world_size)

    def alike(*coordinates: Any) -> list[int]:
        return [other for other in ranks if all(of(other) == of(rank) for of in coordinates)]

    def t(number: int) -> int:
        return number % job.t

    def d(number: int) -> int:
        return number // job.t % job.d

    def p(number: int) -> int:
        return number // job.t // job.d

    if dimension == "tensor":
        return alike(d, p)
    if dimension == "embedding":
        return [other for other in alike(t, d) if p(other) in (0, job.p - 1)]
    if dimension == "expert" or (dimension == "model" and job.ep > 1):
        return alike(t, p, lambda number: d(number) // job.ep)
    if dimension == "model":
        return list(ranks) if job.distributed_optimizer else alike(d)
    if job.layout == "hsdp":
        shards = job.d // job.replicas
        by_shard = operator == "allreduce_"
        return alike(lambda number: number % shards) if by_shard else alike(lambda number: number // shards)
    if size < job.d:
        return alike(t, p, lambda number: d(number) % job.ep)
    return alike(t, p)


def added_up(job: JobShape) -> Any:
    matrix = np.zeros((job.world_size, job.world_size))
    for rank in range(job.world_size):
        for row in rank_rows(job, rank):
            if row.group_size == 1 or row.operator == "recv_":
                continue
            if row.operator == "send":
                matrix[rank, row.peer] += row.bytes
                continue
            members = group_of(job, rank, row.dimension, row.operator, row.group_size)
            n = len(members)
            assert n == row.group_size, row
            if row.operator == "alltoall_base_":
                for other in members:
                    matrix[rank, other] += row.bytes / n if other != rank else 0
            else:
                following = members[(members.index(rank) + 1) % n]
                matrix[rank, following] += PASSES.get(row.operator, 1) * (n - 1) / n * row.bytes
    return matrix


@pytest.mark.parametrize("name", JOBS)
def test_the_matrix_is_what_the_ranks_send_one_by_one(name: str) -> None:
    job = job_of(name)
    messages = predicted_messages(job)
    assert are_sound(messages, job.world_size)
    found = matrix_of(messages, equal_hosts(job.world_size, job.world_size))
    np.testing.assert_allclose(found.sent, added_up(job), rtol=1e-12)
    assert found.unplaced_bytes == 0


def test_the_layout_of_a_predicted_job_is_that_of_megatron_core() -> None:
    job = JobShape(model=GPT, p=4, t=2, d=4, global_batch=8)
    layout = layout_of(predicted_messages(job), job.world_size)
    assert [(part.name, part.stride, part.size) for part in layout] == [
        ("tensor", 1, 2),
        ("data", 2, 4),
        ("pipeline", 8, 4),
    ]


def test_sizes_are_those_of_all_ranks() -> None:
    job = job_of("tensor, data, pipeline")
    for group in predicted_messages(job).groups:
        assert sum(number for _, number, _ in group.sizes) == group.messages
        assert sum(total for _, _, total in group.sizes) == group.bytes
        assert all(
            2**exponent * number <= total < 2 ** (exponent + 1) * number for exponent, number, total in group.sizes
        )
