"""The meter does not fall with what it polls for others."""

from __future__ import annotations

from overlap_callbacks.instruments.power.meter import PowerMeter, PowerOptions


def test_a_device_that_fails_while_its_marks_are_polled_leaves_power_alone() -> None:
    told: list[str] = []

    def fail() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    meter = PowerMeter((), PowerOptions(), lambda why, serious: told.append(why))
    meter._on_tick = fail
    meter._tick()
    assert told == []
