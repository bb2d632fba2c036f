from __future__ import annotations

import numpy as np
import pytest

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.power.device import power_figures
from overlap_callbacks.analysis.power.phases import ProfilePhases, StepPhases, clocks_while_computing
from overlap_callbacks.analysis.power.readings import Reading, Readings, Segment
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import SourceInfo
from tests.columns import columns

MS = 1_000_000
OV, SEQ = Mode.OVERLAPPED, Mode.SEQUENTIAL


def intervals(*pairs_ms: tuple[float, float]) -> Intervals:
    bounds = np.array([[round(a * MS), round(b * MS)] for a, b in pairs_ms], dtype=np.int64).reshape(-1, 2)
    return Intervals(bounds[:, 0], bounds[:, 1]).union()


def in_ms(found: Intervals) -> list[tuple[float, float]]:
    return [(a / MS, b / MS) for a, b in zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True)]


def clocks(readings: dict[float, float | None]) -> Readings:
    return Readings.of([Reading(round(at * MS), power_w=1.0, sm_clock_mhz=mhz) for at, mhz in readings.items()])


def sequential(uncertainty_ms: float = 0.0, counted: bool = True) -> StepPhases:
    """50 ms of compute, then 50 ms of communication alone, then 10 ms of compute."""
    return StepPhases(SEQ, intervals((0, 50), (100, 110)), intervals((50, 100)), round(uncertainty_ms * MS), counted)


def test_readings_of_communication_alone_do_not_count() -> None:
    readings = clocks({10: 1700.0, 30: 1710.0, 40: None, 60: 1980.0, 80: 1980.0, 150: 1980.0})
    assert clocks_while_computing(readings, [sequential()]) == {SEQ: (1705.0, 2)}


def test_small_gaps_between_kernels_are_compute() -> None:
    kernels = intervals(*((i, i + 0.98) for i in range(50)))
    step = StepPhases(OV, kernels, intervals())
    assert clocks_while_computing(clocks({20: 1700.0}), [step]) == {OV: (1700.0, 1)}


def test_a_reading_that_may_have_been_taken_outside_of_compute_does_not_count() -> None:
    readings = clocks({10: 1700.0, 45: 1900.0})
    assert clocks_while_computing(readings, [sequential()]) == {SEQ: (1800.0, 2)}
    assert clocks_while_computing(readings, [sequential(uncertainty_ms=8)]) == {SEQ: (1700.0, 1)}
    assert clocks_while_computing(readings, [sequential(uncertainty_ms=60)]) == {}


def test_steps_that_do_not_count_and_steps_without_compute_give_no_clock() -> None:
    readings = clocks({10: 1700.0})
    assert clocks_while_computing(readings, [sequential(counted=False)]) == {}
    assert clocks_while_computing(readings, [StepPhases(SEQ, intervals(), intervals((0, 50)))]) == {}
    assert clocks_while_computing(clocks({}), [sequential()]) == {}


def test_a_step_is_placed_by_when_the_device_began_it() -> None:
    table = columns(
        [
            ("gemm", Kind.COMPUTE, 0, 5, 15),
            ("ncclAllReduce", Kind.COMMUNICATION, 0, 10, 25),
            ("relu", Kind.COMPUTE, 1, 20, 40),
            ("memcpy", Kind.COPY, 0, 0, 50),
        ]
    )
    found = ProfilePhases(table).of(0, OV, (1000 * MS, 1004 * MS), counted=False)
    assert found is not None
    # From its first kernel to its last; the next step's compute that runs beside its communication is part of it.
    assert in_ms(found.compute) == [(1002, 1012), (1017, 1022)]
    assert in_ms(found.communication) == [(1007, 1022)]
    assert in_ms(found.both) == [(1007, 1012), (1017, 1022)]
    assert (found.uncertainty_ns, found.counted) == (2 * MS, False)
    assert ProfilePhases(table).of(7, OV, (0, 0)) is None


def test_the_clock_during_compute_is_next_to_the_modes_mean() -> None:
    info = SourceInfo("fake", "Fake", "a", "instantaneous", 0.0, None, 0.1)
    readings = clocks({10: 1700.0, 30: 1700.0, 60: 1900.0, 90: 1900.0})
    segment = Segment(0, 100 * MS, SEQ, 1)
    found = power_figures(info, readings, [segment], interval_s=0.02, phases=[sequential()]).of(SEQ)
    assert found is not None
    assert found.sm_clock_mhz is not None
    assert found.sm_clock_mhz > 1750
    assert (found.compute_clock_mhz, found.compute_clock_readings) == (pytest.approx(1700.0), 2)
