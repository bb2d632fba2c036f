"""The dimension of parallelism by a job's collectives."""

from __future__ import annotations

from overlap_callbacks.analysis.results.window import CollectiveTime
from tests.gpu.dimensions import dimensions_between_ranks

HAS_CPU_FORM = True
# A sum over the vocabulary of Megatron's GPU model: as many numbers as tokens, three times.
VOCABULARY_BYTES = 3 * 16 * 512 * 4


def _row(dimension: str, group_size: int, num_bytes: int) -> CollectiveTime:
    return CollectiveTime(
        operator="allreduce_", group=dimension, group_size=group_size, backend="nccl", messages=3, bytes_in=num_bytes,
        bytes_out=num_bytes, isolated_ms=None, dimension=dimension,
    )  # fmt: skip


def test_large_sums_on_a_tensor_parallel_group_of_one_rank_do_not_count() -> None:
    rows = [_row("data", 2, 2**20), _row("tensor", 1, VOCABULARY_BYTES)]
    assert dimensions_between_ranks(rows) == {"data"}


def test_a_tensor_parallel_group_of_two_ranks_counts_and_small_messages_do_not() -> None:
    rows = [_row("data", 2, 2**20), _row("tensor", 2, VOCABULARY_BYTES), _row("pipeline", 2, 4)]
    assert dimensions_between_ranks(rows) == {"data", "tensor"}
