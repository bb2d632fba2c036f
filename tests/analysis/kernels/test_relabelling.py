from __future__ import annotations

import dataclasses

import numpy as np

from overlap_callbacks.analysis.kernels.alignment import align
from overlap_callbacks.analysis.kernels.issued import Issued
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.kernels.times import KernelSums
from tests.columns import MS, columns
from tests.issued import FakeCollective, issue

C, M = Kind.COMPUTE, Kind.COMMUNICATION


def kernels(*names: tuple[str, int]) -> KernelTable:
    """Communication kernels of one step, one after the other, each with its lane; a millisecond each."""
    table = columns([(name, M, 0, 2 * i, 2 * i + 1) for i, (name, _) in enumerate(names)])
    return dataclasses.replace(table, lane=np.array([lane for _, lane in names]))


def relabelled(table: KernelTable, issued: Issued, serialised: tuple[int, ...] = ()) -> KernelTable:
    return align(table, issued, serialised).kernels


def labels(table: KernelTable) -> list[str]:
    return [table.collectives[number] for number in table.collective]


SEND_RECV, ALL_REDUCE = "ncclDevKernel_SendRecv(args)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"
GENERIC = "ncclDevKernel_Generic_4(args)"


def test_an_all_to_all_is_not_counted_as_sends_and_receives() -> None:
    table = kernels((SEND_RECV, 20), (SEND_RECV, 20), (ALL_REDUCE, 21))
    issued = {0: [issue("alltoall_base_", "expert"), issue("alltoall_base_", "expert"), issue("allreduce_", "data")]}
    assert KernelSums(table).of_steps([0]).p2p_busy_ns == 2 * MS
    found = relabelled(table, issued)
    assert labels(found) == ["all_to_all", "all_to_all", "all_reduce"]
    assert KernelSums(found).of_steps([0]).p2p_busy_ns == 0


def test_gathers_scatters_and_real_messages_are_told_apart_by_their_order() -> None:
    table = kernels((SEND_RECV, 20), (SEND_RECV, 30), (SEND_RECV, 20), (SEND_RECV, 20))
    issued = {0: [issue(name, "data") for name in ("gather_", "send", "scatter_", "alltoall_base_")]}
    assert labels(relabelled(table, issued)) == ["gather", "send_recv", "scatter", "all_to_all"]


def test_where_numbers_differ_a_kernel_is_what_alone_was_issued() -> None:
    table = kernels(*[(SEND_RECV, 20)] * 3)
    assert labels(relabelled(table, {0: [issue("alltoall_base_", "expert")] * 2})) == ["all_to_all"] * 3
    mixed: list[FakeCollective] = [issue("alltoall_base_", "expert"), issue("send", "pipeline")]
    assert labels(relabelled(table, {0: mixed})) == ["send_recv"] * 3


def test_without_messages_a_kernel_that_cannot_be_matched_is_of_the_most_frequent_kind_that_runs_so() -> None:
    table = kernels(*[(SEND_RECV, 20)] * 4)
    issued = [issue("gather_", "data"), *[issue("alltoall_base_", "expert")] * 2]
    assert labels(relabelled(table, {0: issued})) == ["all_to_all"] * 4
    assert (
        labels(relabelled(table, {0: [*issued, issue("send", "pipeline"), issue("send", "pipeline")]}))
        == ["send_recv"] * 4
    )


def test_the_one_name_of_rccl_gets_the_kind_of_the_match() -> None:
    table = kernels((GENERIC, 20), (GENERIC, 30), (GENERIC, 20), (GENERIC, 21))
    calls = [("_allgather_base_", "data"), ("send", "pipeline"), ("_reduce_scatter_base_", "data"), ("allreduce_", "x")]
    found = relabelled(table, {0: [issue(*call) for call in calls]})
    assert labels(found) == ["all_gather", "send_recv", "reduce_scatter", "all_reduce"]
    assert KernelSums(found).of_steps([0]).p2p_busy_ns == MS


def test_lanes_of_one_group_are_told_apart_by_kind_where_names_tell_nothing() -> None:
    calls = [("_allgather_base_", 11), ("_reduce_scatter_base_", 12)]
    rows = [
        (GENERIC, M, step, 10 * step + 2 * i, 10 * step + 2 * i + 1, calls[call][1])
        for step, order in enumerate([(0, 1), (1, 0)])  # in the second step the reduce-scatter starts first
        for i, call in enumerate(order)
    ]
    table = dataclasses.replace(columns([row[:5] for row in rows]), lane=np.array([row[5] for row in rows]))
    issued = {step: [issue(name, "data", asynchronous=False) for name, _ in calls] for step in (0, 1)}
    found = labels(relabelled(table, issued, serialised=(0,)))
    assert found == ["all_gather", "reduce_scatter", "reduce_scatter", "all_gather"]


def test_names_that_tell_their_collective_and_profiles_of_the_host_stay_as_they_are() -> None:
    table = kernels((ALL_REDUCE, 20))
    assert relabelled(table, {0: [issue("_allgather_base_", "data")]}) is table
    host = kernels(("gloo:send", 1))
    assert relabelled(host, {0: [issue("alltoall_base_", "expert", on_device=False)]}) is host
    assert relabelled(kernels(), {}).collectives == ()
