from __future__ import annotations

import numpy as np
import pytest

from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.kernels.timeline import call_times
from overlap_callbacks.analysis.kernels.times import KernelSums, kernel_times, profiled_block
from overlap_callbacks.analysis.results.kernel_times import CallTimes, KernelTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import ProfiledBlock
from tests.columns import MS, columns

# -- figures of a block


TWO_STEPS = columns(
    [
        ("gemm", Kind.COMPUTE, 0, 0, 10),
        ("norm", Kind.COMPUTE, 0, 5, 15),  # on a second stream
        ("nccl", Kind.COMMUNICATION, 0, 8, 12),
        ("nccl", Kind.COMMUNICATION, 0, 9, 11),  # on a second communicator
        ("nccl", Kind.COMMUNICATION, 0, 14, 22),  # runs on beside the next step's compute
        ("copy", Kind.COPY, 0, 30, 33),
        ("copy", Kind.COPY, -1, 34, 40),
        ("mark", Kind.OTHER, 0, 0, 50),
        ("gemm", Kind.COMPUTE, 1, 16, 26),
        ("gemm", Kind.COMPUTE, -1, 40, 45),
    ]
)


def test_figures_of_a_block_of_one_step_by_hand():
    assert profiled_block(Mode.OVERLAPPED, 3, KernelSums(TWO_STEPS), [0]) == ProfiledBlock(
        mode=Mode.OVERLAPPED,
        block=3,
        num_steps=1,
        compute_ms=10 + 10,
        compute_busy_ms=15,
        comm_ms=4 + 2 + 8,
        comm_busy_ms=4 + 8,
        hidden_comm_ms=4 + (1 + 6),  # 8-12 whole; of 14-22: 14-15, and 16-22 in the step after
        covered_compute_ms=2 + (4 + 1),  # of 0-10: 8-10; of 5-15: 8-12 and 14-15
        copy_ms=3,
    )


def test_a_step_s_compute_is_covered_by_communication_of_the_step_before():
    found = profiled_block(Mode.SEQUENTIAL, 0, KernelSums(TWO_STEPS), [1])
    assert (found.compute_ms, found.covered_compute_ms) == (10, 6)
    assert (found.comm_ms, found.comm_busy_ms, found.hidden_comm_ms, found.copy_ms) == (0, 0, 0, 0)


def test_each_of_some_steps_has_the_figures_that_it_has_alone():
    sums = KernelSums(TWO_STEPS)
    assert sums.of_each_step([0, 1]) == [sums.of_steps([0]), sums.of_steps([1])]
    assert sums.of_each_step([1, 7, 0]) == [sums.of_steps([step]) for step in (1, 7, 0)]  # 7 has no kernels
    assert sums.of_each_step([]) == []


def test_figures_of_a_block_of_two_steps_are_means_per_step():
    found = profiled_block(Mode.SEQUENTIAL, 0, KernelSums(TWO_STEPS), [0, 1])
    assert found.compute_ms == (20 + 10) / 2
    assert found.compute_busy_ms == (15 + 10) / 2
    assert found.comm_ms == 14 / 2
    assert found.comm_busy_ms == 12 / 2
    assert found.hidden_comm_ms == 11 / 2
    assert found.covered_compute_ms == (7 + 6) / 2
    assert found.copy_ms == 3 / 2


def test_intervals_of_one_kind_are_those_of_all_steps():
    assert TWO_STEPS.of(Kind.COMPUTE).durations_ns.tolist() == [10 * MS, 10 * MS, 10 * MS, 5 * MS]
    assert TWO_STEPS.of(Kind.COPY).sum_ns == 9 * MS


# -- figures of each kernel

FOUR_STEPS = columns(
    [
        ("gemm", Kind.COMPUTE, 0, 0, 6),
        ("gemm", Kind.COMPUTE, 0, 7, 13),
        ("gemm", Kind.COMPUTE, 3, 90, 98),
        ("gemm", Kind.COMPUTE, 1, 20, 25),
        ("gemm", Kind.COMPUTE, 1, 26, 31),
        ("nccl", Kind.COMMUNICATION, 0, 1, 4),
        ("nccl", Kind.COMMUNICATION, 1, 40, 42),
        ("linear", Kind.COMPUTE, 2, 60, 61, 1),  # one call in two pieces
        ("linear", Kind.COMPUTE, 2, 63, 64, 0),
        ("copy", Kind.COPY, 0, 70, 89),
        ("gemm", Kind.COMPUTE, -1, 100, 200),
    ]
)
OVERLAPPED_STEPS, SEQUENTIAL_STEPS = np.array([0, 3]), np.array([1, 2])


def test_time_and_calls_of_each_kernel_by_hand():
    found = kernel_times(FOUR_STEPS, OVERLAPPED_STEPS, SEQUENTIAL_STEPS, max_kernels=10)
    assert found == (
        KernelTime("gemm", False, overlapped_calls=3 / 2, sequential_calls=1, overlapped_ms=10, sequential_ms=5),
        KernelTime("nccl", True, overlapped_calls=1 / 2, sequential_calls=1 / 2, overlapped_ms=1.5, sequential_ms=1),
        KernelTime("linear", False, overlapped_calls=0, sequential_calls=1 / 2, overlapped_ms=0, sequential_ms=1),
    )
    gemm, nccl, linear = found
    assert gemm.lost_ms == 5
    assert gemm.slowdown == pytest.approx((10 / 1.5) / 5 - 1)  # per call, not per step
    assert nccl.slowdown == pytest.approx(0.5)
    assert linear.slowdown is None  # ran in one mode only


def test_the_kernels_with_the_most_time_are_kept_and_the_rest_is_a_row():
    whole = kernel_times(FOUR_STEPS, OVERLAPPED_STEPS, SEQUENTIAL_STEPS, max_kernels=10)
    found = kernel_times(FOUR_STEPS, OVERLAPPED_STEPS, SEQUENTIAL_STEPS, max_kernels=2)
    assert [kernel.name for kernel in found] == ["gemm", "nccl", "(other kernels)"]
    for field in ("overlapped_ms", "sequential_ms", "overlapped_calls", "sequential_calls"):
        assert sum(getattr(row, field) for row in found) == pytest.approx(sum(getattr(row, field) for row in whole))


def test_without_steps_of_one_mode_its_time_is_zero_and_there_is_no_slowdown():
    gemm = kernel_times(FOUR_STEPS, OVERLAPPED_STEPS, np.array([], dtype=np.int64), max_kernels=1)[0]
    assert (gemm.sequential_calls, gemm.sequential_ms) == (0, 0)
    assert gemm.slowdown is None


def test_times_of_calls_are_over_all_steps_those_with_the_most_time_first() -> None:
    assert call_times(TWO_STEPS, [0, 1]) == (
        CallTimes("gemm", False, 2, 10.0, 10.0, 10.0),
        CallTimes("nccl", True, 3, 2.0, 4.0, 8.0),
        CallTimes("norm", False, 1, 10.0, 10.0, 10.0),
    )
    assert call_times(TWO_STEPS, []) == ()
