from __future__ import annotations

from typing import Any

import pytest

from overlap_callbacks.analysis.kernels.by_collective import kernel_times_by_collective
from overlap_callbacks.analysis.kernels.table import Kind
from tests.columns import columns
from tests.issued import FakeCollective, issue

C, M = Kind.COMPUTE, Kind.COMMUNICATION
REDUCE, GATHER = "nccl_AllReduce", "nccl_AllGather"


DATA, TENSOR, SHARDS = issue("allreduce_", "1"), issue("allreduce_", "2"), issue("_allgather_base_", "1")


def key(collective: FakeCollective) -> tuple[str, str]:
    return collective.operator, collective.group.name


def times(rows: list[Any], issued: dict[int, list[FakeCollective]]) -> dict[tuple[str, str], float]:
    return kernel_times_by_collective(columns(rows), issued)


def test_a_kind_of_one_group_is_identified_by_its_kernels() -> None:
    rows = [("gemm", C, 0, 0, 9), (REDUCE, M, 0, 10, 13), (REDUCE, M, 0, 14, 15), (GATHER, M, 0, 20, 22),
            (REDUCE, M, 1, 30, 34), (REDUCE, M, 1, 40, 42), (GATHER, M, 1, 50, 54), (REDUCE, M, 2, 60, 99)]  # fmt: skip
    steps = {step: [DATA, DATA, SHARDS] for step in (0, 1)}  # step 2 is an overlapped one
    assert times(rows, steps) == pytest.approx({key(DATA): (3 + 1 + 4 + 2) / 2, key(SHARDS): (2 + 4) / 2})


def test_a_kind_of_two_groups_is_ambiguous() -> None:
    rows = [(REDUCE, M, 0, 10, 13), (REDUCE, M, 0, 14, 15), (GATHER, M, 0, 20, 22)]
    assert times(rows, {0: [DATA, TENSOR, SHARDS]}) == pytest.approx({key(SHARDS): 2})


@pytest.mark.parametrize("number", [0, 2, 3])
def test_where_kernels_are_more_or_fewer_than_collectives_they_are_not_its_own(number: int) -> None:
    assert times([(REDUCE, M, 0, 10, 13)], {0: [DATA] * number}) == {}


def test_without_steps_there_is_nothing() -> None:
    assert times([(REDUCE, M, 0, 10, 13)], {}) == {}
