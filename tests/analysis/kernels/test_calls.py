from __future__ import annotations

import pytest

from overlap_callbacks.analysis.kernels import calls
from overlap_callbacks.analysis.kernels.calls import call_times, with_calls
from overlap_callbacks.analysis.kernels.timeline import step_timeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import CallTimes, DrawnCall, DrawnName
from tests.analysis.kernels.test_times import TWO_STEPS


def test_a_timeline_has_the_names_and_streams_of_its_calls_in_the_order_of_their_starts() -> None:
    picture = step_timeline(TWO_STEPS, 0, Mode.OVERLAPPED)
    assert picture is not None
    found = with_calls(picture, TWO_STEPS, 0, [0, 1])
    assert found.names == (DrawnName("gemm", False), DrawnName("norm", False), DrawnName("nccl", True))
    assert [(found.names[call.name].name, call.start_ms, call.length_ms) for call in found.calls] == [
        ("gemm", 0, 10), ("norm", 5, 10), ("nccl", 8, 4), ("nccl", 9, 2), ("nccl", 14, 8),
    ]  # fmt: skip
    assert {call.lane for call in found.calls} <= set(TWO_STEPS.lane.tolist())
    assert found.num_calls == 5


def test_of_many_calls_the_longest_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_CALLS", 2)
    picture = step_timeline(TWO_STEPS, 0, Mode.OVERLAPPED)
    assert picture is not None
    found = with_calls(picture, TWO_STEPS, 0, [0])
    lane = int(TWO_STEPS.lane[0])
    assert found.calls == (DrawnCall(0, lane, 0.0, 10.0), DrawnCall(1, lane, 5.0, 10.0))
    assert found.num_calls == 5


def test_times_of_calls_are_over_all_steps_those_with_the_most_time_first() -> None:
    assert call_times(TWO_STEPS, [0, 1]) == (
        CallTimes("gemm", False, 2, 10.0, 10.0, 10.0),
        CallTimes("nccl", True, 3, 2.0, 4.0, 8.0),
        CallTimes("norm", False, 1, 10.0, 10.0, 10.0),
    )
    assert call_times(TWO_STEPS, []) == ()
