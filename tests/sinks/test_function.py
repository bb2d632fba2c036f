from __future__ import annotations

import math

import msgspec
import pytest

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import DimensionTime
from overlap_callbacks.sinks import FunctionSink
from tests.report.arm_runs import arm_window
from tests.report.runs import window

Written = list[tuple[dict[str, float], int]]


def hostile() -> OverlapReport:
    """A name that most loggers refuse, and a value that is no number."""
    dimensions = tuple([DimensionTime(name, 1, 8, 1.0, 1.0, 1.0, 1.0) for name in ("dp-cp", "tp")])
    return msgspec.structs.replace(window(), dimensions=dimensions, measurement_overhead=math.nan)


def test_each_window_is_written_at_once_with_its_first_step() -> None:
    written: Written = []
    sink = FunctionSink(lambda metrics, step: written.append((metrics, step)))
    sink.log(window(0))
    sink.log(window(1))
    assert [step for _, step in written] == [20, 520]
    assert written[0][0] == window(0).metrics()


def test_windows_of_arms_are_written_too() -> None:
    written: Written = []
    FunctionSink(lambda metrics, step: written.append((metrics, step))).log_arm(arm_window(3))
    ((metrics, step),) = written
    assert step == arm_window(3).first_step
    assert metrics == arm_window(3).metrics()


def test_keys_and_values_are_such_as_any_vendor_takes() -> None:
    written: Written = []
    FunctionSink(lambda metrics, step: written.append((metrics, step))).log(hostile())
    assert written[0][0]["dimension/dp_cp_bytes"] == 8
    assert "overlap/measurement_overhead" not in written[0][0]


def test_or_exactly_those_of_the_report() -> None:
    written: Written = []
    FunctionSink(lambda metrics, step: written.append((metrics, step)), exact_keys=True).log(hostile())
    assert list(written[0][0]) == list(hostile().metrics())
    assert written[0][0]["dimension/dp-cp_bytes"] == 8


def test_deferred_windows_wait_for_a_flush_or_the_end() -> None:
    written: Written = []
    sink = FunctionSink(lambda metrics, step: written.append((metrics, step)), deferred=True)
    sink.log(window(0))
    assert written == []
    sink.flush()
    sink.flush()
    assert [step for _, step in written] == [20]
    sink.log(window(1))
    sink.close()
    assert [step for _, step in written] == [20, 520]


def test_or_for_a_flush_alone() -> None:
    written: Written = []
    sink = FunctionSink(lambda metrics, step: written.append((metrics, step)), deferred=True, flush_on_close=False)
    sink.log(window(0))
    sink.close()
    assert written == []
    sink.flush()
    assert [step for _, step in written] == [20]


def test_a_limited_number_of_windows_wait_and_the_oldest_are_dropped() -> None:
    written: Written = []
    sink = FunctionSink(lambda metrics, step: written.append((metrics, step)), deferred=True)
    report = window(0)
    for number in range(103):
        sink.log(msgspec.structs.replace(report, first_step=number))
    sink.flush()
    assert [step for _, step in written] == list(range(3, 103))


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="write must be a function of the metrics and the step, got 3"):
        FunctionSink(3)  # type: ignore[arg-type]
