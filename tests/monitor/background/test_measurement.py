"""A closed window becomes figures: stretches of time for power, and the times of collectives alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.gate.collectives import Collective, Group
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments.clocks import StepClock
from overlap_callbacks.monitor.background.measurement import measure, memory_peaks, segments_of
from overlap_callbacks.monitor.schedule import Part, Plan
from overlap_callbacks.monitor.window import ClosedWindow, MeasuredStep

MS = 1_000_000


def steps_of(gaps_ms: list[float], step_ms: float = 100.0, uncounted: tuple[int, ...] = ()) -> list[MeasuredStep]:
    """Steps of one block, each after its gap."""
    now, steps = 0, []
    for number, gap_ms in enumerate(gaps_ms):
        now += round(gap_ms * MS)
        plan = Plan(0, number, Part.TIMED, 0, Mode.OVERLAPPED, Mode.OVERLAPPED, True, False)
        end = now + round(step_ms * MS)
        log = StepLog((), 0, None)
        steps.append(MeasuredStep(plan=plan, start=now, end=end, log=log, counted=number not in uncounted))
        now = end
    return steps


def segments_in_ms(steps: list[MeasuredStep]) -> list[tuple[float, float, int]]:
    segments = segments_of(steps, StepClock(), counted_only=True)
    return [(segment.start_ns / MS, segment.end_ns / MS, segment.num_steps) for segment in segments]


def test_a_block_is_one_stretch_with_what_loading_its_batches_takes() -> None:
    assert segments_in_ms(steps_of([0, 20, 22, 19])) == [(0, 461, 4)]


def test_an_evaluation_between_two_steps_cuts_the_block_in_two() -> None:
    assert segments_in_ms(steps_of([0, 1, 3000, 1])) == [(0, 201, 2), (3201, 3402, 2)]


def test_a_step_that_does_not_count_cuts_it_too() -> None:
    assert segments_in_ms(steps_of([0, 0, 0, 0], uncounted=(1,))) == [(0, 100, 1), (200, 400, 2)]


def test_a_single_step_is_a_stretch() -> None:
    assert segments_in_ms(steps_of([0])) == [(0, 100, 1)]
    assert segments_in_ms([]) == []


# -- collectives


def test_a_collectives_time_alone_is_that_of_the_sequential_steps_per_step() -> None:
    group = Group("0", "", (0, 1), "gloo")

    def step(number: int, part: Part, arm: Mode, alone_ms: float | None) -> MeasuredStep:
        end = None if alone_ms is None else round(alone_ms * MS)
        start = None if end is None else 0
        collective = Collective("allreduce_", group, 4, 4, None, 0, -1, 0, 0, start, end)
        plan = Plan(0, number, part, 0, arm, arm, part is Part.TIMED, False)
        return MeasuredStep(
            plan=plan, start=0, end=MS, log=StepLog((collective, collective), 0, None), counted=plan.counted
        )

    overlapped, sequential = Mode.OVERLAPPED, Mode.SEQUENTIAL
    window = ClosedWindow(
        number=0,
        first_step=0,
        steps=(
            step(0, Part.RECORDED, overlapped, None),
            step(1, Part.TIMED, overlapped, None),
            step(2, Part.TIMED, sequential, 10.0),
            step(3, Part.TIMED, sequential, 30.0),
            step(4, Part.TIMED, overlapped, None),
        ),
        complete=True,
        problems=(),
        opened_ns=0,
        wall_ms=5.0,
        clock=StepClock(),
        meter=None,
        profile=None,
        missing_profile="",
    )
    (row,) = measure(window, rank=0, backend="gloo").collectives
    assert (row.messages, row.bytes_in) == (2, 8)
    assert row.isolated_ms == 40.0  # two collectives a step, of 10 ms each in one step and of 30 ms in the other


# -- memory


def with_memory(step: MeasuredStep, peak_before: int, peak_after: int) -> MeasuredStep:
    def stats(peak: int) -> dict[str, Any]:
        return {"allocated_bytes": {"all": {"current": 10, "peak": peak}}}

    return replace(step, memory=(stats(peak_before), stats(peak_after)))


def test_a_steps_readings_become_its_modes_peak() -> None:
    first, second, uncounted, unread = steps_of([0, 0, 0, 0], uncounted=(2,))
    steps = [with_memory(first, 50, 70), with_memory(second, 70, 70), with_memory(uncounted, 70, 900), unread]
    (peak,) = memory_peaks(steps)
    assert (peak.mode, peak.peak_bytes) == (Mode.OVERLAPPED, 70)


def test_without_readings_there_is_no_peak() -> None:
    assert memory_peaks(steps_of([0, 0])) == ()
