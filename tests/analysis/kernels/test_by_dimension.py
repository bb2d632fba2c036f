from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from overlap_callbacks.analysis.dimension_rules import dimension_of
from overlap_callbacks.analysis.kernels.by_dimension import dimension_times, dimensions_of_rows
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.gate.collectives import Collective, Group
from tests.columns import columns

C, M = Kind.COMPUTE, Kind.COMMUNICATION


def issued(operator: str, dimension: str, num_bytes: int = 8) -> Collective:
    group = Group(dimension, "", (0, 1), "gloo", dimension)
    return Collective(operator, group, num_bytes, num_bytes, None, 0, -1, 0, 0)


def on_lanes(rows: list[tuple[str, Kind, int, float, float]], lanes: list[int]) -> KernelTable:
    return dataclasses.replace(columns(rows), lane=np.array(lanes))


def found(kernels: KernelTable, steps: dict[int, list[Collective]]) -> list[str | None]:
    numbers, labels = dimensions_of_rows(kernels, steps)
    return [labels[number] if number >= 0 else None for number in numbers]


def test_kernels_have_the_dimension_of_the_collective_at_their_place_in_the_step() -> None:
    rows = [("gemm", C, 0, 0, 9), ("nccl_AllReduce", M, 0, 1, 2), ("nccl_AllGather", M, 0, 3, 4),
            ("nccl_AllReduce", M, 1, 11, 12)]  # fmt: skip
    steps = {
        0: [issued("allreduce_", "data"), issued("_allgather_base_", "tensor")],
        1: [issued("allreduce_", "data")],
    }
    assert found(on_lanes(rows, [7, 20, 21, 20]), steps) == [None, "data", "tensor", "data"]


def test_a_lane_goes_with_the_majority_where_collectives_overtake_each_other() -> None:
    # In step 1 the tensor group's kernel begins first, though the data group's was issued first.
    rows = [("gloo:all_reduce", M, step, start, start + 1) for step in range(3) for start in (10 * step, 10 * step + 2)]
    steps = {step: [issued("allreduce_", "data"), issued("allreduce_", "tensor")] for step in range(3)}
    assert found(on_lanes(rows, [20, 21, 21, 20, 20, 21]), steps) == [
        "data", "tensor", "tensor", "data", "data", "tensor",
    ]  # fmt: skip


def test_sends_and_receives_share_a_lane_and_have_the_dimension_of_their_own_group() -> None:
    rows = [("gloo:send", M, 0, 0, 1), ("gloo:recv", M, 0, 2, 3), ("gloo:all_reduce", M, 0, 4, 5)]
    steps = {0: [issued("send", "pipeline"), issued("recv_", "pipeline"), issued("allreduce_", "data")]}
    assert found(on_lanes(rows, [1, 1, 1]), steps) == ["pipeline", "pipeline", "data"]


def test_where_numbers_differ_kinds_decide_and_what_was_not_issued_is_other() -> None:
    rows = [("nccl_AllGather", M, 0, 0, 1), ("nccl_AllReduce", M, 0, 2, 3), ("nccl_Broadcast", M, 0, 4, 5)]
    steps = {0: [issued("allreduce_", "data"), issued("_allgather_base_", "tensor")]}
    assert found(on_lanes(rows, [1, 2, 3]), steps) == ["tensor", "data", "other"]


def test_times_of_a_dimension_by_hand() -> None:
    rows = [("gemm", C, 0, 0, 4), ("nccl_AllReduce", M, 0, 2, 8), ("nccl_AllReduce", M, 0, 6, 10),
            ("gemm", C, 1, 20, 23), ("nccl_AllReduce", M, 1, 24, 28), ("nccl_AllReduce", M, 1, 28, 30)]  # fmt: skip
    kernels = on_lanes(rows, [7, 20, 20, 7, 20, 20])
    recorded = [issued("allreduce_", "data", 100), issued("allreduce_", "data", 50), issued("barrier", "world", 1)]
    steps = {0: recorded[:2], 1: recorded[:2]}
    data, world = dimension_times(kernels, *dimensions_of_rows(kernels, steps), [0], [1], recorded)
    assert (data.dimension, data.messages, data.bytes_in) == ("data", 2, 150)
    assert (data.comm_ms, data.exposed_ms) == (8, 6)  # 2 to 10, of which 2 to 4 beside compute
    assert (data.kernels_ms, data.kernels_isolated_ms) == (10, 6)
    assert data.slowdown == pytest.approx(10 / 6 - 1)
    assert (world.dimension, world.messages, world.comm_ms, world.slowdown) == ("world", 1, 0, None)


@pytest.mark.parametrize(
    ("description", "dimension"),
    [
        ("default_pg", "world"),
        ("mesh_dp", "data"),
        ("mesh_dp_replicate", "data"),
        ("mesh_tp", "tensor"),
        ("mesh_pp", "pipeline"),
        ("mesh_cp", "context"),
        ("mesh_ep", "expert"),
        ("mesh_data", "data"),
        ("mesh_model", "tensor"),
        ("mesh_pipe", "pipeline"),
        ("mesh_seq", "context"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "data"),
        ("MODEL_PARALLEL_GROUP", "model"),
        ("CONTEXT_PARALLEL_GROUP", "context"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("EMBEDDING_GROUP", "embedding"),
        ("undefined", "other"),
        ("", "other"),
    ],
)
def test_a_group_s_description_tells_its_dimension(description: str, dimension: str) -> None:
    assert dimension_of(description) == dimension
