from __future__ import annotations

from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.kernels.times import KernelSums
from overlap_callbacks.analysis.kernels.with_log import with_log
from tests.columns import MS, columns
from tests.issued import FakeCollective, issue

C, M, Y = Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY
ALL_TO_ALL, ALL_GATHER = issue("alltoall_base_", "expert"), issue("_allgather_base_", "data")


def test_kinds_and_copies_are_those_of_the_log_before_any_figure_is_computed() -> None:
    rows = [
        ("gemm", C, 0, 0, 10), ("ncclDevKernel_SendRecv", M, 0, 10, 14),
        ("Memcpy PtoP (Device -> Device)", M, 0, 14, 16), ("Memcpy PtoP (Device -> Device)", M, 0, 16, 18),
    ]  # fmt: skip
    found = with_log(columns(rows), {0: [ALL_TO_ALL, ALL_GATHER]}, compared=[0], sequential=[])
    assert (found.doubts, found.problems) == ((), ())
    figures = KernelSums(found.kernels).of_steps([0])
    assert (figures.p2p_busy_ns, figures.comm_ns, figures.copy_ns) == (0, 8 * MS, 0)
    assert {found.kernels.collectives[i] for i in found.kernels.collective if i >= 0} == {"all_to_all", "all_gather"}


def test_missing_communication_is_a_doubt_and_nothing_else_is_said() -> None:
    found = with_log(columns([("gemm", C, 0, 0, 10)]), {0: [ALL_GATHER]}, compared=[0], sequential=[0])
    assert found.doubts == (
        "the profile does not show the job's communication: 1 of 1 collectives a step have no kernel in the profile "
        "(1 all_gather); its kernel times are left out",
    )
    assert found.problems == ()


def test_communication_without_a_collective_and_what_ran_beside_it_are_problems() -> None:
    rows = [("gemm", C, 0, 0, 10), ("void nvshmem_put", M, 0, 5, 7)]
    collectives: dict[int, list[FakeCollective]] = {0: []}
    found = with_log(columns(rows), collectives, compared=[0], sequential=[0])
    assert found.doubts == ()
    extra, beside, bound = found.problems
    assert found.lower_bound
    assert bound.startswith("communication that no collective explains (void nvshmem_put) may be copies")
    assert extra == "the profile has communication of no collective that the gate saw, a step: 1 void nvshmem_put"
    assert beside == (
        "in sequential steps compute ran beside communication, 2 ms on stream 0 (20 % of its compute): gemm (2 ms); "
        "the gate did not see this communication: void nvshmem_put (2 ms)"
    )


def test_collectives_of_the_gate_are_never_said_to_have_escaped_it() -> None:
    rows = [("gemm", C, 0, 0, 10), ("ncclDevKernel_AllGather", M, 0, 5, 7)]
    (beside,) = with_log(columns(rows), {0: [ALL_GATHER]}, compared=[0], sequential=[0]).problems
    assert beside.endswith("on stream 0 (20 % of its compute): gemm (2 ms)")


def test_steps_of_which_the_log_is_not_whole_are_not_compared() -> None:
    rows = [("gemm", C, 0, 0, 10), ("ncclDevKernel_AllGather", M, 1, 20, 21)]
    found = with_log(columns(rows), {0: [ALL_GATHER], 1: [ALL_GATHER]}, compared=[1], sequential=[])
    assert (found.doubts, found.problems) == ((), ())


def test_a_cpu_job_stays_as_it_is() -> None:
    kernels = columns([("aten::mm", C, 0, 0, 10), ("gloo:all_reduce", M, 0, 5, 9)])
    found = with_log(kernels, {0: [issue("allreduce_", "data", on_device=False)] * 5}, compared=[0], sequential=[0])
    assert found.kernels is kernels
    assert (found.doubts, found.problems) == ((), ())
