"""The parts of a step: dimensions of parallelism, the bubble, compute."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.step_parts import StepParts, step_parts, step_shares
from overlap_callbacks.analysis.results.window import DimensionTime


def dimension(name: str, exposed_ms: float) -> DimensionTime:
    return DimensionTime(name, 1, 8, exposed_ms + 1, exposed_ms, 1.0, 1.0)


def figures(**values: float) -> dict[str, Estimate]:
    return {name: Estimate(value, None, None, 2, 2) for name, value in values.items()}


def test_parts_add_up_to_the_step_and_waiting_receives_are_the_bubbles() -> None:
    known = figures(compute_busy_ms=60.0, exposed_comm_ms=30.0, idle_ms=10.0, bubble_ms=18.0)
    parts = step_parts(known)
    assert parts is not None
    found = step_shares([dimension("tensor", 12.0), dimension("pipeline", 13.0), dimension("data", 5.0)], parts, known)
    # 8 ms of the pipeline's 13 are receives that wait for their sender.
    assert [(row.name, row.ms) for row in found] == [
        ("tensor", 12.0), ("data", 5.0), ("pipeline", 5.0), ("bubble", 18.0), ("compute", 60.0)
    ]  # fmt: skip
    assert sum(row.fraction for row in found) == pytest.approx(1.0)


def test_dimensions_in_flight_at_once_are_scaled_to_the_exposed_time() -> None:
    known = figures(compute_busy_ms=60.0, exposed_comm_ms=20.0, idle_ms=20.0)
    parts = step_parts(known)
    assert parts is not None
    found = step_shares([dimension("tensor", 20.0), dimension("data", 20.0)], parts, known)
    assert [(row.name, row.fraction) for row in found] == [
        ("data", 0.1), ("tensor", 0.1), ("idle", 0.2), ("compute", 0.6)
    ]  # fmt: skip


def test_without_dimensions_or_time_there_are_none() -> None:
    assert step_shares([dimension("data", 10.0**300)], StepParts(4, 0, 1, 0, 0, 0), {}) == ()
    assert step_shares([], StepParts(1, 0, 0, 0, 0, 0), {}) == ()
    assert step_shares([dimension("data", 0.0)], StepParts(0, 0, 0, 0, 0, 0), {}) == ()
    assert [row.ms for row in step_shares([dimension("data", 0.0)], StepParts(4, 0, 1, 0, 0, 0), {})] == [0.0, 4]
