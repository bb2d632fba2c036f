from __future__ import annotations

from overlap_callbacks.analysis.kernels.timeline import call_times
from overlap_callbacks.analysis.results.kernel_times import CallTimes
from tests.analysis.kernels.test_times import TWO_STEPS


def test_times_of_calls_are_over_all_steps_those_with_the_most_time_first() -> None:
    assert call_times(TWO_STEPS, [0, 1]) == (
        CallTimes("gemm", False, 2, 10.0, 10.0, 10.0),
        CallTimes("nccl", True, 3, 2.0, 4.0, 8.0),
        CallTimes("norm", False, 1, 10.0, 10.0, 10.0),
    )
    assert call_times(TWO_STEPS, []) == ()
