from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from overlap_callbacks.analysis.dimension_rules import dimension_of
from overlap_callbacks.analysis.kernels.alignment import align
from overlap_callbacks.analysis.kernels.by_collective import dimension_times
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.kernels.times import KernelSums
from tests.columns import MS, columns
from tests.issued import FakeCollective, issue

C, M = Kind.COMPUTE, Kind.COMMUNICATION


def on_lanes(rows: list[tuple[str, Kind, int, float, float]], lanes: list[int]) -> KernelTable:
    return dataclasses.replace(columns(rows), lane=np.array(lanes))


def found(
    kernels: KernelTable, steps: dict[int, list[FakeCollective]], serialised: tuple[int, ...] = ()
) -> list[str | None]:
    numbers, labels = align(kernels, steps, serialised).dimensions
    return [labels[number] if number >= 0 else None for number in numbers]


def test_kernels_have_the_dimension_of_the_collective_at_their_place_in_the_step() -> None:
    rows = [("gemm", C, 0, 0, 9), ("nccl_AllReduce", M, 0, 1, 2), ("nccl_AllGather", M, 0, 3, 4),
            ("nccl_AllReduce", M, 1, 11, 12)]  # fmt: skip
    steps = {
        0: [issue("allreduce_", "data"), issue("_allgather_base_", "tensor")],
        1: [issue("allreduce_", "data")],
    }
    assert found(on_lanes(rows, [7, 20, 21, 20]), steps) == [None, "data", "tensor", "data"]


def test_a_lane_goes_with_the_majority_where_collectives_overtake_each_other() -> None:
    # In step 1 the tensor group's kernel begins first, though the data group's was issued first.
    rows = [("gloo:all_reduce", M, step, start, start + 1) for step in range(3) for start in (10 * step, 10 * step + 2)]
    groups = ("data", "tensor")
    steps = {step: [issue("allreduce_", group, on_device=False) for group in groups] for step in range(3)}
    assert found(on_lanes(rows, [20, 21, 21, 20, 20, 21]), steps) == [
        "data", "tensor", "tensor", "data", "data", "tensor",
    ]  # fmt: skip


def test_sends_and_receives_share_a_lane_and_have_the_dimension_of_their_own_group() -> None:
    rows = [("gloo:send", M, 0, 0, 1), ("gloo:recv", M, 0, 2, 3), ("gloo:all_reduce", M, 0, 4, 5)]
    calls = (("send", "pipeline"), ("recv_", "pipeline"), ("allreduce_", "data"))
    steps = {0: [issue(operator, group, on_device=False) for operator, group in calls]}
    assert found(on_lanes(rows, [1, 1, 1]), steps) == ["pipeline", "pipeline", "data"]


def test_if_numbers_differ_kinds_decide_and_kernels_not_issued_are_other() -> None:
    rows = [("nccl_AllGather", M, 0, 0, 1), ("nccl_AllReduce", M, 0, 2, 3), ("nccl_Broadcast", M, 0, 4, 5)]
    steps = {0: [issue("allreduce_", "data"), issue("_allgather_base_", "tensor")]}
    assert found(on_lanes(rows, [1, 2, 3]), steps) == ["tensor", "data", "other"]


def nccl(*kernels: tuple[str, int], step: int = 0) -> tuple[list[tuple[str, Kind, int, float, float]], list[int]]:
    """Rows and lanes of NCCL's kernels of a step, one after the other."""
    rows = [
        (f"ncclDevKernel_{name}", M, step, 100 * step + i, 100 * step + i + 0.5) for i, (name, _) in enumerate(kernels)
    ]
    return rows, [lane for _, lane in kernels]


def test_synchronous_collectives_of_several_groups_on_one_stream_are_matched_in_order() -> None:
    rows, lanes = nccl(*[("AllReduce", 7)] * 4)
    groups = ["tensor", "tensor", "tensor", "data"]
    steps = {0: [issue("allreduce_", group, asynchronous=False) for group in groups]}
    assert found(on_lanes(rows, lanes), steps) == groups


def test_groups_of_one_rank_and_collectives_without_bytes_launch_no_kernel() -> None:
    rows, lanes = nccl(("SendRecv", 20), ("SendRecv", 20), ("AllReduce", 21))
    steps = {
        0: [
            *[issue("allreduce_", "tensor", group_size=1, asynchronous=False)] * 3,
            issue("allreduce_", "context", 0, bytes_out=0),
            issue("alltoall_base_", "expert"),
            issue("alltoall_base_", "expert"),
            issue("allreduce_", "data"),
        ]
    }
    assert found(on_lanes(rows, lanes), steps) == ["expert", "expert", "data"]


def test_a_coalescing_block_and_a_coalesced_batch_are_one_kernel_each() -> None:
    rows, lanes = nccl(("AllGather", 20), ("SendRecv", 30), ("AllReduce", 21))
    steps = {
        0: [
            *[issue("_allgather_base_", "data", coalesced=1)] * 3,
            *[issue(operator, "pipeline", coalesced=2, posted=1) for operator in ("send", "recv_")],
            issue("allreduce_", "tensor"),
        ]
    }
    assert found(on_lanes(rows, lanes), steps) == ["data", "pipeline", "tensor"]


def test_messages_that_are_posted_one_by_one_are_one_kernel_each() -> None:
    rows, lanes = nccl(("SendRecv", 30), ("SendRecv", 31), ("AllReduce", 21))
    steps = {
        0: [issue("send", "pipeline", posted=1), issue("recv_", "pipeline", posted=1), issue("allreduce_", "tensor")]
    }
    assert found(on_lanes(rows, lanes), steps) == ["pipeline", "pipeline", "tensor"]


def test_a_barrier_may_show_as_an_all_reduce_and_may_not() -> None:
    collectives = [
        issue("allreduce_", "data"),
        issue("barrier", "world", on_device=False),
        issue("allreduce_", "tensor"),
    ]
    with_barrier, lanes = nccl(*[("AllReduce", lane) for lane in (20, 22, 21)])
    assert found(on_lanes(with_barrier, lanes), {0: collectives}) == ["data", "world", "tensor"]
    without, lanes = nccl(("AllReduce", 20), ("AllReduce", 21))
    assert found(on_lanes(without, lanes), {0: collectives}) == ["data", "tensor"]


# FSDP2 beside tensor parallelism with sequence parallelism: all synchronous, on three streams, of the same kinds.
FSDP_TP = (
    ("_allgather_base_", "data", 11), ("_allgather_base_", "tensor", 7), ("_reduce_scatter_base_", "tensor", 7),
    ("_allgather_base_", "data", 11), ("_allgather_base_", "tensor", 7), ("_reduce_scatter_base_", "tensor", 7),
    ("_reduce_scatter_base_", "data", 12), ("allreduce_", "world", 7),
)  # fmt: skip


def test_lanes_are_learned_in_sequential_steps_and_hold_where_kernels_overtake_each_other() -> None:
    kinds = {"_allgather_base_": "AllGather", "_reduce_scatter_base_": "ReduceScatter", "allreduce_": "AllReduce"}
    steps = {step: [issue(name, group, asynchronous=False) for name, group, _ in FSDP_TP] for step in (0, 1)}
    # In the overlapped step FSDP's second all-gather runs before the first one of the tensor group.
    overlapped = [FSDP_TP[i] for i in (0, 3, 1, 2, 4, 6, 5, 7)]
    rows, lanes = nccl(*((kinds[name], lane) for name, _, lane in overlapped))
    more, more_lanes = nccl(*((kinds[name], lane) for name, _, lane in FSDP_TP), step=1)
    kernels = on_lanes(rows + more, lanes + more_lanes)
    truth = [group for _, group, _ in (*overlapped, *FSDP_TP)]
    assert found(kernels, steps, serialised=(1,)) == truth


def swapped(steps_in_order: int, steps_swapped: int) -> tuple[KernelTable, dict[int, list[FakeCollective]], list[str]]:
    """Two groups, each on an issuing stream of its own, whose kernels start in the other order in some steps."""
    rows, lanes, truth = [], [], []
    for step in range(steps_in_order + steps_swapped):
        order = [("data", 11), ("tensor", 7)] if step < steps_in_order else [("tensor", 7), ("data", 11)]
        more, more_lanes = nccl(*[("AllReduce", lane) for _, lane in order], step=step)
        rows, lanes, truth = rows + more, lanes + more_lanes, truth + [group for group, _ in order]
    calls = [issue("allreduce_", group, asynchronous=False) for group in ("data", "tensor")]
    return on_lanes(rows, lanes), dict.fromkeys(range(steps_in_order + steps_swapped), calls), truth


def test_a_single_sequential_step_outweighs_many_overlapped_ones() -> None:
    kernels, steps, truth = swapped(1, 5)
    assert found(kernels, steps, serialised=(0,)) == truth


def test_without_sequential_steps_a_rare_other_order_spoils_nothing_learned() -> None:
    kernels, steps, truth = swapped(20, 1)
    assert found(kernels, steps) == truth


def test_asynchronous_and_synchronous_collectives_of_one_group_run_on_different_lanes() -> None:
    calls = [("data", True, 20), ("tensor", False, 7), ("data", False, 7), ("data", True, 20)]
    steps = {step: [issue("allreduce_", group, asynchronous=own) for group, own, _ in calls] for step in (0, 1)}
    rows, lanes = nccl(*[("AllReduce", calls[i][2]) for i in (0, 3, 1, 2)])  # the last one overtakes two others
    more, more_lanes = nccl(*[("AllReduce", lane) for _, _, lane in calls], step=1)
    assert found(on_lanes(rows + more, lanes + more_lanes), steps, serialised=(1,)) == [
        "data", "data", "tensor", "data", "data", "tensor", "data", "data",
    ]  # fmt: skip


def test_where_a_lane_has_more_kernels_than_collectives_its_usual_dimension_counts_if_it_has_one() -> None:
    steps = {0: [issue("allreduce_", "tensor", asynchronous=False)] * 2 + [issue("allreduce_", "data")] * 2}
    steps[1] = steps[0]
    rows, lanes = nccl(*[("AllReduce", lane) for lane in (7, 7, 20, 20)])
    more, more_lanes = nccl(*[("AllReduce", lane) for lane in (7, 20, 20, 20)], step=1)
    assert found(on_lanes(rows + more, lanes + more_lanes), steps)[4:] == ["tensor", "data", "data", "data"]
    # Two groups share the stream, and its order is lost: nothing is guessed.
    mixed = [issue("allreduce_", group, asynchronous=False) for group in ("tensor", "data", "tensor", "data")]
    rows, lanes = nccl(*[("AllReduce", 7)] * 4)
    more, more_lanes = nccl(*[("AllReduce", 7)] * 3, step=1)
    assert found(on_lanes(rows + more, lanes + more_lanes), {0: mixed, 1: mixed})[4:] == ["other"] * 3


def test_kernels_of_rccl_have_one_name_and_are_matched_by_order_alone() -> None:
    rows, lanes = nccl(("Generic_4", 20), ("Generic_4", 21), ("Generic_4", 20))
    calls = [("_allgather_base_", "data"), ("alltoall_base_", "expert"), ("_reduce_scatter_base_", "data")]
    assert found(on_lanes(rows, lanes), {0: [issue(*call) for call in calls]}) == ["data", "expert", "data"]


def test_times_of_a_dimension_by_hand() -> None:
    rows = [("gemm", C, 0, 0, 4), ("nccl_AllReduce", M, 0, 2, 8), ("nccl_AllReduce", M, 0, 6, 10),
            ("gemm", C, 1, 20, 23), ("nccl_AllReduce", M, 1, 24, 28), ("nccl_AllReduce", M, 1, 28, 30)]  # fmt: skip
    kernels = on_lanes(rows, [7, 20, 20, 7, 20, 20])
    recorded = [issue("allreduce_", "data", 100), issue("allreduce_", "data", 50), issue("barrier", "world", 1)]
    steps = {0: recorded[:2], 1: recorded[:2]}
    data, world = dimension_times(align(kernels, steps), [0], [1], recorded)
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


# -- kinds that a name leaves open


def in_one_step(*names: tuple[str, int]) -> KernelTable:
    """Communication kernels of one step, one after the other, each with its lane; a millisecond each."""
    table = columns([(name, M, 0, 2 * i, 2 * i + 1) for i, (name, _) in enumerate(names)])
    return dataclasses.replace(table, lane=np.array([lane for _, lane in names]))


def labels(table: KernelTable) -> list[str]:
    return [table.collectives[number] for number in table.collective]


SEND_RECV, ALL_REDUCE = "ncclDevKernel_SendRecv(args)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"
GENERIC = "ncclDevKernel_Generic_4(args)"


def test_an_all_to_all_is_not_counted_as_sends_and_receives() -> None:
    table = in_one_step((SEND_RECV, 20), (SEND_RECV, 20), (ALL_REDUCE, 21))
    issued = {0: [issue("alltoall_base_", "expert"), issue("alltoall_base_", "expert"), issue("allreduce_", "data")]}
    assert KernelSums(table).of_steps([0]).p2p_busy_ns == 2 * MS
    found = align(table, issued).kernels
    assert labels(found) == ["all_to_all", "all_to_all", "all_reduce"]
    assert KernelSums(found).of_steps([0]).p2p_busy_ns == 0


def test_gathers_scatters_and_real_messages_are_distinguished_by_their_order() -> None:
    table = in_one_step((SEND_RECV, 20), (SEND_RECV, 30), (SEND_RECV, 20), (SEND_RECV, 20))
    issued = {0: [issue(name, "data") for name in ("gather_", "send", "scatter_", "alltoall_base_")]}
    assert labels(align(table, issued).kernels) == ["gather", "send_recv", "scatter", "all_to_all"]


def test_where_numbers_differ_a_kernel_is_what_alone_was_issued() -> None:
    table = in_one_step(*[(SEND_RECV, 20)] * 3)
    assert labels(align(table, {0: [issue("alltoall_base_", "expert")] * 2}).kernels) == ["all_to_all"] * 3
    mixed: list[FakeCollective] = [issue("alltoall_base_", "expert"), issue("send", "pipeline")]
    assert labels(align(table, {0: mixed}).kernels) == ["send_recv"] * 3


def test_without_messages_a_kernel_that_cannot_be_matched_is_of_the_most_frequent_kind_that_runs_so() -> None:
    table = in_one_step(*[(SEND_RECV, 20)] * 4)
    issued = [issue("gather_", "data"), *[issue("alltoall_base_", "expert")] * 2]
    assert labels(align(table, {0: issued}).kernels) == ["all_to_all"] * 4
    assert (
        labels(align(table, {0: [*issued, issue("send", "pipeline"), issue("send", "pipeline")]}).kernels)
        == ["send_recv"] * 4
    )


def test_the_one_name_of_rccl_gets_the_kind_of_the_match() -> None:
    table = in_one_step((GENERIC, 20), (GENERIC, 30), (GENERIC, 20), (GENERIC, 21))
    calls = [("_allgather_base_", "data"), ("send", "pipeline"), ("_reduce_scatter_base_", "data"), ("allreduce_", "x")]
    found = align(table, {0: [issue(*call) for call in calls]}).kernels
    assert labels(found) == ["all_gather", "send_recv", "reduce_scatter", "all_reduce"]
    assert KernelSums(found).of_steps([0]).p2p_busy_ns == MS


def test_lanes_of_one_group_are_distinguished_by_kind_if_names_are_unknown() -> None:
    calls = [("_allgather_base_", 11), ("_reduce_scatter_base_", 12)]
    rows = [
        (GENERIC, M, step, 10 * step + 2 * i, 10 * step + 2 * i + 1, calls[call][1])
        for step, order in enumerate([(0, 1), (1, 0)])  # in the second step the reduce-scatter starts first
        for i, call in enumerate(order)
    ]
    table = dataclasses.replace(columns([row[:5] for row in rows]), lane=np.array([row[5] for row in rows]))
    issued = {step: [issue(name, "data", asynchronous=False) for name, _ in calls] for step in (0, 1)}
    found = labels(align(table, issued, serialised=(0,)).kernels)
    assert found == ["all_gather", "reduce_scatter", "reduce_scatter", "all_gather"]


def test_names_with_a_collective_and_host_profiles_are_unchanged() -> None:
    table = in_one_step((ALL_REDUCE, 20))
    assert align(table, {0: [issue("_allgather_base_", "data")]}).kernels is table
    host = in_one_step(("gloo:send", 1))
    assert align(host, {0: [issue("alltoall_base_", "expert", on_device=False)]}).kernels is host
    assert align(in_one_step(), {}).kernels.collectives == ()


def _one_lane_if_sequential(other_group: str = "data") -> list[str]:
    """FSDP2 in native form: sequential steps have one stream for all, others one for each kind. Names of the latter."""
    gathers, reductions = [("AllGather", 20)] * 3, [("ReduceScatter", 21)] * 3
    rows, lanes = nccl(*[(name, 7) for name, _ in (*gathers, *reductions)])
    more = nccl(gathers[0], gathers[1], reductions[0], gathers[2], reductions[1], reductions[2], step=1)
    layers = ("layers.0", "layers.1", "layers.2")
    calls = [issue("_allgather_base_", other_group if n == 1 else "data", asynchronous=False) for n in range(3)]
    calls += [issue("_reduce_scatter_base_", "data", asynchronous=False) for _ in layers]
    calls = [dataclasses.replace(call, name=name) for call, name in zip(calls, layers + layers[::-1], strict=True)]
    kernels = on_lanes([*rows, *more[0]], [*lanes, *more[1]])
    aligned = align(kernels, {0: calls, 1: calls}, serialised=(0,))
    return [aligned.by_row[row].name for row in range(6, 12)]


def test_lanes_that_only_overlapped_steps_have_are_paired_by_kind() -> None:
    assert _one_lane_if_sequential() == ["layers.0", "layers.1", "layers.2", "layers.2", "layers.1", "layers.0"]


def test_lanes_that_only_overlapped_steps_have_tell_nothing_where_a_kind_has_two_groups() -> None:
    assert _one_lane_if_sequential("tensor") == [""] * 6
