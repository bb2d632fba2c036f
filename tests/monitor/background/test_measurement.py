"""A closed window becomes figures: stretches of time for power, and the times of collectives alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.power.phases import StepPhases
from overlap_callbacks.analysis.power.segments import Segment
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.gate.collectives import Collective, Group
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments.clocks import StepClock
from overlap_callbacks.instruments.power.meter import MeasuredPower
from overlap_callbacks.monitor.background import measurement
from overlap_callbacks.monitor.background.measurement import measure, segments_of
from overlap_callbacks.monitor.schedule import Part, Plan
from overlap_callbacks.monitor.window import ClosedWindow, MeasuredStep
from tests.analysis.contention.launches import H100, gemm, nccl
from tests.columns import columns

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


# -- what kernels and the power meter need of each other


class Profile:
    """A profile that was read before."""

    def __init__(self, table: KernelTable) -> None:
        self.table = table

    def kernels(self) -> KernelTable:
        return self.table


class Meter:
    """Keeps the phases that it is given."""

    def __init__(self, elsewhere: bool = False) -> None:
        self.elsewhere = elsewhere
        self.phases: Sequence[StepPhases] = ()

    def measure(self, segments: Sequence[Segment], *, phases: Sequence[StepPhases], **_: Any) -> MeasuredPower:
        self.phases = phases
        return MeasuredPower()


def profiled_window(meter: Meter, table: KernelTable) -> ClosedWindow:
    """An overlapped and a sequential profiled step; the second one does not count."""
    steps = tuple(
        MeasuredStep(
            plan=Plan(0, number, Part.PROFILED, number, arm, arm, True, True),
            start=1000 * MS * number,
            end=1000 * MS * number + 100 * MS,
            log=StepLog((), 0, None),
            counted=counted,
            profile_index=number,
        )
        for number, (arm, counted) in enumerate(((Mode.OVERLAPPED, True), (Mode.SEQUENTIAL, False)))
    )
    return ClosedWindow(
        number=0,
        first_step=0,
        steps=steps,
        complete=True,
        problems=(),
        opened_ns=0,
        wall_ms=5.0,
        clock=StepClock(),
        meter=cast(Any, meter),
        profile=cast(Any, Profile(table)),
        missing_profile="",
    )


TABLE = columns(
    [
        ("gemm@a", Kind.COMPUTE, 0, 5, 15),
        ("ncclAllReduce@b", Kind.COMMUNICATION, 0, 5, 15),
        ("gemm@a", Kind.COMPUTE, 1, 100, 110),
        ("ncclAllReduce@b", Kind.COMMUNICATION, 1, 110, 120),
    ]
)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_tells_the_power_meter_when_its_profiled_steps_computed(rank: int) -> None:
    meter = Meter()
    measure(profiled_window(meter, TABLE), rank=rank, backend="nccl")
    assert [(phases.arm, phases.counted) for phases in meter.phases] == [
        (Mode.OVERLAPPED, True),
        (Mode.SEQUENTIAL, False),
    ]
    overlapped, sequential = meter.phases
    assert (overlapped.compute.start_ns[0], overlapped.compute.end_ns[0]) == (0, 10 * MS)
    assert (sequential.communication.start_ns[0], sequential.communication.end_ns[0]) == (1010 * MS, 1020 * MS)


def test_where_another_rank_reads_the_device_no_phases_are_made() -> None:
    meter = Meter(elsewhere=True)
    measure(profiled_window(meter, TABLE), rank=0, backend="nccl")
    assert meter.phases == ()


def test_what_compute_should_lose_to_the_sms_of_communication_goes_into_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = TABLE[np.ones(len(TABLE), dtype=bool)]
    object.__setattr__(table, "launches", (gemm(132), nccl(16)))
    window = profiled_window(Meter(), table)
    window = replace(window, steps=tuple(replace(step, counted=True) for step in window.steps))
    assert measure(window, rank=0, backend="nccl").sm_loss is None  # no such device on a CPU
    monkeypatch.setattr(measurement, "chip_of", lambda stream: H100)
    found = measure(window, rank=0, backend="nccl").sm_loss
    assert found is not None
    assert found.from_sms_ms + found.from_waves_ms == pytest.approx(10)  # a wave more, all along
