from __future__ import annotations

from typing import Any

import pytest

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.model_shape import ModelShape

MODEL = ModelShape(layers=54, hidden=2000, heads=20, sequence=1024, vocabulary=50257)


def job(**options: Any) -> JobShape:
    found = JobShape(model=MODEL, **options)
    found.check()
    return found


def test_layers_that_do_not_divide_go_to_the_first_stages() -> None:
    assert job(p=4).layers_of_stages == (14, 14, 13, 13)
    assert job(p=4, stages=(12, 14, 14, 14)).layers_of_chunk(1, 0) == range(12, 26)


def test_interleaved_chunks_take_turns() -> None:
    shape = job(p=3, chunks=2, global_batch=6)
    assert shape.layers_of_chunk(1, 0) == range(9, 18)
    assert shape.layers_of_chunk(1, 1) == range(36, 45)


def test_ranks_count_tensor_then_data_then_pipeline() -> None:
    shape = job(p=2, t=2, d=3, global_batch=3)
    assert [shape.stage_of(rank) for rank in range(shape.world_size)] == [0] * 6 + [1] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 0}, "pp must be at least 1, got 0"),
        ({"d": 4, "global_batch": 6}, "global_batch must be a multiple of micro_batch x dp = 4, got 6"),
        ({"t": 3}, "tp must divide hidden=2000, got 3"),
        ({"t": 8}, "tp must divide heads=20, got 8"),
        ({"p": 55}, "pp must be at most the 54 layers, got 55"),
        (
            {"p": 2, "stages": (20, 20)},
            "stages must be pp=2 numbers of at least 1 that add up to the 54 layers, got 20,20",
        ),
        ({"p": 2, "chunks": 4, "global_batch": 2}, "pp x chunks that divides the 54 layers, got pp=2, chunks=4"),
        ({"p": 3, "chunks": 2, "global_batch": 4}, "a number of micro-batches that pp=3 divides, got 4"),
        ({"sequence_parallel": True}, "sequence_parallel needs tp of at least 2 that divides sequence=1024, got 1"),
        ({"layout": "ddp", "t": 2}, "layout ddp has data parallelism only: pp, tp and chunks must be 1"),
        ({"layout": "hsdp", "d": 4, "global_batch": 4}, "replicas must be at least 2 and divide dp=4, got 1"),
        ({"layout": "ddp", "d": 4, "global_batch": 4, "replicas": 2}, "replicas must be 1 in layout ddp"),
        (
            {"layout": "zero1", "distributed_optimizer": True},
            "distributed_optimizer must be off outside layout megatron, got layout z",
        ),
        (
            {"layout": "fsdp2", "sequence_parallel": True},
            "sequence_parallel must be off outside layout megatron, got layout fsdp2",
        ),
        ({"ep": 2, "d": 2, "global_batch": 2}, "ep must divide experts=0 and dp=2, got 2"),
        ({"layout": "fsdp3"}, "layout must be one of megatron, ddp, .*, got 'fsdp3'"),
        ({"recompute": "some"}, "recompute must be one of none, selective, full, got 'some'"),
        ({"dtype": "fp8"}, "dtype must be one of bf16, fp16, fp32, got 'fp8'"),
    ],
)
def test_jobs_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(**options)
