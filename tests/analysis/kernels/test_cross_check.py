from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.alignment import align
from overlap_callbacks.analysis.kernels.cross_check import CrossCheck, cross_check
from overlap_callbacks.analysis.kernels.issued import Issued
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.kernels.times import KernelSums
from tests.columns import MS, columns
from tests.issued import FakeCollective, issue

C, M, Y = Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY
STEPS = 4


def profile(*step: tuple[str, Kind, int]) -> KernelTable:
    """The same kernels in each of four steps, one after the other: name, kind and stream."""
    rows = [
        (name, kind, number, 100 * number + 2 * i, 100 * number + 2 * i + 1)
        for number in range(STEPS)
        for i, (name, kind, _) in enumerate(step)
    ]
    return dataclasses.replace(columns(rows), lane=np.array([lane for _, _, lane in step] * STEPS))


def in_each(*collectives: FakeCollective) -> dict[int, list[FakeCollective]]:
    return {number: list(collectives) for number in range(STEPS)}


def nccl(name: str, lane: int = 20) -> tuple[str, Kind, int]:
    return f"ncclDevKernel_{name}(args)", M, lane


GEMM = ("gemm", C, 7)


def check(kernels: KernelTable, issued: Issued) -> CrossCheck:
    return cross_check(align(kernels, issued))


ALL_REDUCE, ALL_GATHER = issue("allreduce_", "data"), issue("_allgather_base_", "data")
FINE = CrossCheck()


def test_collectives_that_all_have_their_kernel_are_not_mentioned() -> None:
    kernels = profile(GEMM, nccl("AllReduce_Sum_f32_RING_LL"), nccl("AllGather_RING_LL"))
    assert check(kernels, in_each(ALL_REDUCE, ALL_GATHER)) == FINE


def test_a_profile_that_knows_none_of_the_communication_must_not_be_used() -> None:
    found = check(profile(GEMM), in_each(ALL_REDUCE, ALL_REDUCE, ALL_GATHER))
    assert found.missing == (
        "the profile does not show the job's communication: 3 of 3 collectives a step have no kernel in the profile "
        "(2 all_reduce, 1 all_gather); its kernel times are left out [OC373]"
    )


@pytest.mark.parametrize(
    "left_out",
    [
        issue("_allgather_base_", "tensor", group_size=1),
        issue("_allgather_base_", "tensor", 0, bytes_out=0),
        issue("_allgather_base_", "tensor", on_device=False),
        issue("barrier", "world", 0, bytes_out=0, on_device=False),
        issue("monitored_barrier_", "world", 0, bytes_out=0, on_device=False),
    ],
)
def test_what_launches_no_kernel_is_not_missed(left_out: FakeCollective) -> None:
    kernels = profile(GEMM, nccl("AllReduce"))
    assert check(kernels, in_each(ALL_REDUCE, left_out)) == FINE


def test_the_kernel_of_a_barrier_is_not_extra() -> None:
    barrier = issue("barrier", "world", 0, bytes_out=0, on_device=False)
    assert check(profile(nccl("AllReduce"), nccl("AllReduce", 22)), in_each(ALL_REDUCE, barrier)) == FINE


@pytest.mark.parametrize("num_kernels", [1, 2, 3])
def test_a_block_or_a_batch_may_be_one_kernel_or_several(num_kernels: int) -> None:
    block = [issue("_allgather_base_", "data", coalesced=1)] * 3
    assert check(profile(*[nccl("AllGather")] * num_kernels), in_each(*block)) == FINE
    batch = [issue("send", "pipeline", coalesced=2, posted=1)] * 3
    assert check(profile(*[nccl("SendRecv")] * num_kernels), in_each(*batch)) == FINE


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("alltoall_base_", "SendRecv"), ("gather_", "SendRecv"), ("scatter_", "SendRecv"), ("allgather_", "Broadcast"),
        ("reduce_scatter_", "Reduce"), ("allreduce_", "Generic_4"), ("send", "Generic_4"),
    ],
)  # fmt: skip
def test_a_kernel_of_another_name_is_the_collective_s_if_nccl_runs_it_so(operator: str, name: str) -> None:
    kernels, issued = profile(GEMM, nccl(name)), in_each(issue(operator, "data"))
    assert check(kernels, issued) == FINE
    assert check(align(kernels, issued).kernels, issued) == FINE


def test_symmetric_memory_kernels_of_nccl_count_by_their_collective() -> None:
    kernels = profile(("ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)", M, 20))
    assert check(kernels, in_each(ALL_REDUCE)) == FINE


def test_a_group_without_any_kernel_is_a_fault_but_few_missing_kernels_may_be_accidental() -> None:
    others = [issue("_allgather_base_", "tensor")] * 30
    kernels = profile(GEMM, *[nccl("AllGather")] * 30)
    assert check(kernels, in_each(*others, ALL_GATHER)).missing.split(": ")[1].startswith("1 of 31 collectives")
    # The same in a single step of the four is not a whole group's.
    issued = in_each(*others)
    issued[2] = [*others, ALL_GATHER, ALL_GATHER]
    issued[3] = [*others, ALL_GATHER]
    kernels = columns([(nccl("AllGather")[0], M, step, i, i + 0.5) for step in range(STEPS) for i in range(31)])
    found = check(kernels, issued)
    assert found.missing == ""
    assert found.notes[0] == "0.25 of 30.8 collectives a step have no kernel in the profile (0.25 all_gather) [OC374]"


def test_a_few_bytes_that_gloo_sums_on_the_host_are_a_note() -> None:
    counter = issue("allreduce_", "control", 8, bytes_out=8)
    found = check(profile(GEMM, nccl("AllGather")), in_each(issue("_allgather_base_", "data", 1_000_000), counter))
    assert found.missing == ""
    assert found.notes == ("1 of 2 collectives a step have no kernel in the profile (1 all_reduce) [OC374]",)


def test_communication_without_a_collective_is_named_those_of_other_libraries_first() -> None:
    deep_ep = ("void deep_ep::internode::dispatch<false, 4>(int4*)", M, 30)
    found = check(profile(GEMM, nccl("AllReduce"), deep_ep, deep_ep), in_each(ALL_REDUCE))
    assert found.missing == ""
    (note,) = found.notes
    assert note.endswith("a step: 2 void deep_ep::internode::dispatch<false, 4>(int4*) [OC376]")
    replays = check(profile(*[nccl("AllReduce")] * 3), in_each(ALL_REDUCE))
    assert replays.notes[0].endswith("a step: 2 ncclDevKernel_AllReduce(args) [OC376]")


def test_the_text_is_bounded() -> None:
    kernels = profile(*[("void nvshmem_" + "x" * 500 + str(i), M, 30) for i in range(20)])
    note, bound = check(kernels, in_each()).notes
    assert max(len(note), len(bound)) < 500
    assert note.endswith(" and 17 more [OC376]")


def test_a_profile_of_the_host_is_not_compared() -> None:
    on_host: dict[str, Any] = {"on_device": False}
    assert check(profile(("gloo:all_reduce", M, 1)), in_each(*[issue("allreduce_", "x", **on_host)] * 9)) == FINE
    assert check(profile(GEMM), in_each(issue("allreduce_", "data", **on_host))) == FINE
    assert check(profile(GEMM), {}) == FINE


# -- copy engines

PEER, WITHIN = "Memcpy PtoP (Device -> Device)", "Memcpy DtoD (Device -> Device)"


def test_peer_copies_are_the_collective_without_a_kernel_and_need_not_be_named() -> None:
    copies = [(PEER, M, 20)] * 7
    kernels, issued = profile(GEMM, *copies, nccl("AllReduce")), in_each(ALL_GATHER, ALL_REDUCE)
    assert check(kernels, issued) == FINE
    found = align(kernels, issued).kernels
    assert {found.collectives[number] for number in found.collective if number >= 0} == {"all_gather", "all_reduce"}
    # Copy engines reduce nothing.
    assert check(profile(GEMM, *copies), in_each(ALL_REDUCE)).missing


def test_peer_copies_without_a_collective_are_named() -> None:
    (note,) = check(profile(GEMM, (PEER, M, 20), nccl("AllReduce")), in_each(ALL_REDUCE)).notes
    assert note.endswith(f"a step: 1 {PEER} [OC376]")


def test_copies_within_the_device_communicate_if_a_collective_has_no_kernel_and_their_stream_never_computes() -> None:
    issued = in_each(ALL_GATHER, ALL_REDUCE)
    kernels = profile(GEMM, (WITHIN, Y, 20), (WITHIN, Y, 20), (WITHIN, Y, 7), nccl("AllReduce"))
    found = align(kernels, issued).kernels
    assert [Kind(kind) for kind in found.kind[:5]] == [C, M, M, Y, M]
    # The table of kernels is by name, so the others keep a name of their own.
    assert [found.names[name] for name in found.name[1:4]] == [f"{WITHIN} of a collective"] * 2 + [WITHIN]
    assert check(kernels, issued) == FINE


def test_copies_within_the_device_stay_copies_where_every_collective_has_its_kernel_or_copies_are_too_few() -> None:
    kernels = profile(GEMM, (WITHIN, Y, 20), nccl("AllGather"))
    assert align(kernels, in_each(ALL_GATHER)).kernels is kernels
    assert align(kernels, in_each(ALL_REDUCE)).kernels is kernels
    assert align(kernels, in_each(*[ALL_GATHER] * 3)).kernels is kernels


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo", "mpi"])
def test_collectives_of_a_library_of_the_host_need_no_kernel_whatever_their_tensors(backend: str) -> None:
    kernels = columns([(f"ncclDevKernel_AllReduce_{step}", Kind.COMMUNICATION, step, 0.0, 1.0) for step in range(3)])

    def beside_a_side_group(side_bytes: int, side_backend: str) -> CrossCheck:
        side = issue("broadcast_", "side", side_bytes, bytes_out=0, backend=side_backend)
        return check(kernels, {step: [issue("allreduce_", "data", 10_000), side] for step in range(3)})

    assert beside_a_side_group(8, backend) == CrossCheck()
    (note,) = beside_a_side_group(5_000, backend).notes
    assert note.startswith(f"collectives of {backend} have no kernel")
    assert beside_a_side_group(5_000, "cpu:gloo,cuda:nccl").missing


@pytest.mark.parametrize(("nccl_ns", "other_ns", "named"), [(10**9, 0, False), (10**9, 10**9, True)])
def test_few_kernels_of_another_library_are_named_if_they_take_long(nccl_ns: int, other_ns: int, named: bool) -> None:
    kernels = profile(GEMM, *[nccl("AllReduce_Sum_f32_RING_LL")] * 20, ("multimem_all_reduce_kernel", M, 20))
    longer_ns = np.tile([0, *[nccl_ns] * 20, other_ns], STEPS)
    intervals = Intervals(kernels.intervals.start_ns, kernels.intervals.end_ns + longer_ns)
    found = check(dataclasses.replace(kernels, intervals=intervals), in_each(*[ALL_REDUCE] * 20))
    assert any(note.endswith("a step: 1 multimem_all_reduce_kernel [OC376]") for note in found.notes) is named
    assert bool(found.notes) is named


@pytest.mark.parametrize(("extra_ns", "named"), [(0, False), (10**9, True)])
def test_few_kernels_of_nccl_are_named_if_the_shortest_of_their_kind_take_long(extra_ns: int, named: bool) -> None:
    kernels = profile(GEMM, *[nccl("AllReduce_Sum_f32_RING_LL")] * 21)
    longer_ns = np.tile([0, *[10**9] * 20, extra_ns], STEPS)
    intervals = Intervals(kernels.intervals.start_ns, kernels.intervals.end_ns + longer_ns)
    found = check(dataclasses.replace(kernels, intervals=intervals), in_each(*[ALL_REDUCE] * 20))
    assert [note.split(": ")[1] for note in found.notes] == [
        "1 ncclDevKernel_AllReduce_Sum_f32_RING_LL(args) [OC376]"
    ] * named


# -- all that is found, with the residual overlap


def test_kinds_and_copies_are_those_of_the_log_before_any_figure_is_computed() -> None:
    rows = [
        ("gemm", C, 0, 0, 10), ("ncclDevKernel_SendRecv", M, 0, 10, 14),
        ("Memcpy PtoP (Device -> Device)", M, 0, 14, 16), ("Memcpy PtoP (Device -> Device)", M, 0, 16, 18),
    ]  # fmt: skip
    found = align(columns(rows), {0: [issue("alltoall_base_", "expert"), ALL_GATHER]})
    assert cross_check(found) == CrossCheck()
    figures = KernelSums(found.kernels).of_steps([0])
    assert (figures.p2p_busy_ns, figures.comm_ns, figures.copy_ns) == (0, 8 * MS, 0)
    assert {found.kernels.collectives[i] for i in found.kernels.collective if i >= 0} == {"all_to_all", "all_gather"}


def test_missing_communication_is_a_doubt_and_nothing_else_is_said() -> None:
    found = cross_check(align(columns([("gemm", C, 0, 0, 10)]), {0: [ALL_GATHER]}), [0])
    assert found.missing == (
        "the profile does not show the job's communication: 1 of 1 collectives a step have no kernel in the profile "
        "(1 all_gather); its kernel times are left out [OC373]"
    )
    assert found.notes == ()


def test_communication_without_a_collective_and_compute_during_it_are_problems() -> None:
    rows = [("gemm", C, 0, 0, 10), ("void nvshmem_put", M, 0, 5, 7)]
    collectives: dict[int, list[FakeCollective]] = {0: []}
    found = cross_check(align(columns(rows), collectives), [0])
    assert found.missing == ""
    extra, beside, bound = found.notes
    assert found.lower_bound
    assert bound.startswith("communication that no collective explains (void nvshmem_put) may be copies")
    assert (
        extra == "the profile has communication of no collective that the gate saw, a step: 1 void nvshmem_put [OC376]"
    )
    assert beside == (
        "in sequential steps compute ran during communication, 2 ms on stream 0 (20 % of its compute): gemm (2 ms); "
        "the gate did not see this communication: void nvshmem_put (2 ms) [OC377]"
    )


def test_collectives_of_the_gate_are_never_said_to_have_escaped_it() -> None:
    rows = [("gemm", C, 0, 0, 10), ("ncclDevKernel_AllGather", M, 0, 5, 7)]
    (beside,) = cross_check(align(columns(rows), {0: [ALL_GATHER]}), [0]).notes
    assert beside.endswith("on stream 0 (20 % of its compute): gemm (2 ms) [OC377]")


def test_communication_of_graphs_is_left_to_the_note_that_counts_it() -> None:
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    kernels = columns([("gemm", C, 0, 0, 10), (nccl, M, 0, 20, 25), (nccl, M, 0, 30, 35)])
    said = "the profile has communication of no collective that the gate saw, a step: 2 " + nccl + " [OC376]"
    for from_graphs, notes in ((0, (said,)), (1, (said,)), (2, ())):
        kernels.from_graph[3 - from_graphs :] = True
        assert cross_check(align(kernels, {0: []}), [0]).notes == notes


def test_steps_with_an_incomplete_log_are_not_compared() -> None:
    rows = [("gemm", C, 0, 0, 10), ("ncclDevKernel_AllGather", M, 1, 20, 21)]
    found = align(columns(rows), {0: [ALL_GATHER], 1: [ALL_GATHER]}, whole=[1])
    assert cross_check(found, whole=[1]) == CrossCheck()


def test_a_cpu_job_stays_as_it_is() -> None:
    kernels = columns([("aten::mm", C, 0, 0, 10), ("gloo:all_reduce", M, 0, 5, 9)])
    found = align(kernels, {0: [issue("allreduce_", "data", on_device=False)] * 5}, serialised=[0])
    assert found.kernels is kernels
    assert cross_check(found, [0]) == CrossCheck()
