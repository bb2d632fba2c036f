"""What the profile of a window gives to the power meter, and to the model of what communication takes from compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.power.phases import StepPhases
from overlap_callbacks.analysis.power.readings import Segment
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments.clocks import StepClock
from overlap_callbacks.instruments.power.meter import MeasuredPower
from overlap_callbacks.monitor.background import profile_figures
from overlap_callbacks.monitor.background.measurement import measure
from overlap_callbacks.monitor.schedule import Part, Plan
from overlap_callbacks.monitor.window import MeasuredStep, MeasuredWindow
from tests.analysis.kernels.launches import H100, gemm, nccl
from tests.columns import columns

MS = 1_000_000


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


def profiled_window(meter: Meter, table: KernelTable) -> MeasuredWindow:
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
    return MeasuredWindow(
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
    assert [(phases.mode, phases.counted) for phases in meter.phases] == [
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
    monkeypatch.setattr(profile_figures, "chip_of", lambda stream: H100)
    found = measure(window, rank=0, backend="nccl").sm_loss
    assert found is not None
    assert found.from_sms_ms + found.from_waves_ms == pytest.approx(10)  # a wave more, all along
