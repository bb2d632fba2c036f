from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.power.phases import StepPhases
from overlap_callbacks.analysis.power.readings import Reading, Readings, Segment
from overlap_callbacks.analysis.power.trace import MAX_POINTS, power_trace, thin
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import PowerTrace

MS = 1_000_000


def readings_of(powers, start_ms: int = 0, **columns) -> Readings:
    return Readings.of([Reading((start_ms + 10 * i) * MS, power_w=power, **columns) for i, power in enumerate(powers)])


def test_a_clock_that_is_missing_now_and_then_is_held() -> None:
    clocks = [None, 1500.0, None, None, 1400.0, None]
    readings = Readings.of([Reading(10 * i * MS, power_w=100.0, sm_clock_mhz=clock) for i, clock in enumerate(clocks)])
    trace = power_trace(readings, [], averaging_s=0.1)
    assert trace is not None
    assert trace.sm_clock_mhz == (1500.0, 1500.0, 1500.0, 1500.0, 1400.0, 1400.0)


def test_a_short_trace_is_all_there_on_the_time_of_its_segments() -> None:
    segments = [
        Segment(1_050 * MS, 1_100 * MS, Mode.SEQUENTIAL, 1),
        Segment(1_000 * MS, 1_040 * MS, Mode.OVERLAPPED, 1),
    ]
    readings = readings_of([1.0, *range(100, 112)], start_ms=990, sm_clock_mhz=1500.0, limit_w=650.0)
    trace = power_trace(readings, segments, averaging_s=0.1, tdp_w=700)
    assert trace is not None
    assert trace.start_ns == 1_000 * MS
    assert trace.time_ms == tuple(10.0 * i for i in range(11))  # what lies outside of all segments is left out
    assert trace.power_w == tuple(float(power) for power in range(100, 111))
    assert trace.sm_clock_mhz == (1500.0,) * 11
    assert [(s.mode, s.start_ms, s.end_ms) for s in trace.segments] == [
        (Mode.OVERLAPPED, 0, 40),
        (Mode.SEQUENTIAL, 50, 100),
    ]
    assert (trace.tdp_w, trace.limit_w, trace.averaging_s, trace.num_readings) == (700, 650, 0.1, 11)
    assert msgspec.json.decode(msgspec.json.encode(trace), type=PowerTrace) == trace


def test_a_long_trace_keeps_its_peaks() -> None:
    powers = [200.0] * 5_000
    powers[1_234], powers[3_210] = 980.0, 17.0
    trace = power_trace(readings_of(powers), [], averaging_s=0.0)
    assert trace is not None
    assert len(trace.time_ms) <= MAX_POINTS
    assert trace.num_readings == 5_000
    assert trace.power_w[trace.time_ms.index(12_340.0)] == 980
    assert trace.power_w[trace.time_ms.index(32_100.0)] == 17
    assert (trace.time_ms[0], trace.time_ms[-1]) == (0, 49_990)
    assert list(trace.time_ms) == sorted(trace.time_ms)


@given(
    values=st_numpy.arrays(np.float64, st.integers(1, 500), elements=st.floats(0, 1e4)),
    max_points=st.integers(4, 300),
)
def test_thinning_bounds_the_points_and_keeps_ends_and_extremes(values, max_points) -> None:
    kept = thin(values, max_points)
    assert len(kept) <= max_points
    assert (np.diff(kept) > 0).all()
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert values[kept].max() == values.max()
    assert values[kept].min() == values.min()


def test_readings_without_power_are_no_points_and_none_is_no_trace() -> None:
    trace = power_trace(readings_of([None, 100.0, None]), [], averaging_s=None)
    assert trace is not None
    assert (trace.time_ms, trace.power_w, trace.sm_clock_mhz, trace.limit_w) == ((0.0,), (100.0,), (), None)
    assert power_trace(readings_of([None]), [], averaging_s=None) is None
    assert power_trace(readings_of([]), [], averaging_s=None) is None
    outside = [Segment(5_000 * MS, 6_000 * MS, Mode.OVERLAPPED, 1)]
    assert power_trace(readings_of([1.0]), outside, averaging_s=None) is None


def test_hidden_communication_is_distinguished_from_exposed() -> None:
    def span(start_ms: int, end_ms: int) -> Intervals:
        return Intervals(np.array([start_ms * MS]), np.array([end_ms * MS]), disjoint=True)

    step = StepPhases(Mode.OVERLAPPED, compute=span(1_010, 1_030), communication=span(1_020, 1_050))
    alone = StepPhases(Mode.SEQUENTIAL, compute=span(1_060, 1_070), communication=span(1_070, 1_080))
    trace = power_trace(readings_of([100.0] * 11, start_ms=1_000), [], averaging_s=None, phases=[step, alone])
    assert trace is not None
    assert trace.communication == ((20, 50), (70, 80))
    assert trace.both == ((20, 30),)


def test_a_trace_keeps_some_intervals_of_each_step() -> None:
    starts = np.arange(500) * MS
    step = StepPhases(Mode.OVERLAPPED, *[Intervals(starts, starts + MS // 2, disjoint=True)] * 2)
    trace = power_trace(readings_of([100.0] * 11), [], averaging_s=None, phases=[step, step])
    assert trace is not None
    assert len(trace.communication) == len(trace.both) == 120
