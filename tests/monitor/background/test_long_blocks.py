"""When a window has a long block of each mode, and how long it is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.settled import Settled, Verdict
from overlap_callbacks.monitor.background.budget import LongBlocks
from overlap_callbacks.monitor.schedule import Schedule
from tests.report.runs import window


def report(
    number: int, *, step_ms: float = 50.0, longer: float = 1.1, watts: bool = False, verdict: Verdict | None = None
) -> OverlapReport:
    """A window with the watts of both modes or without; after it, the settled difference has this verdict."""
    found = window(number, power=True)
    power = found.power
    assert power is not None
    assert {mode.mode for mode in power.modes} == set(Mode)
    if not watts:
        modes = [msgspec.structs.replace(mode, mean_avg_w=None) for mode in power.modes]
        power = msgspec.structs.replace(power, modes=tuple(modes))
    times = {
        name: msgspec.structs.replace(getattr(found, name), value=value)
        for name, value in (("e2e_overlapped_ms", step_ms), ("e2e_sequential_ms", longer * step_ms))
    }
    settled = verdict and Settled(0.1, 0.09, 0.11, 0.1, 3, 0.0, verdict, None, 40, 400, number + 1)
    return msgspec.structs.replace(found, power=power, settled=settled, **times)


def lengths(blocks: LongBlocks, windows: int, schedule: Schedule | None = None, **reports: Any) -> list[int]:
    """The counted steps of the long blocks of some windows, after each of which its report comes."""
    found = []
    for number in range(windows):
        found.append(blocks.steps(number, "sequential", schedule or Schedule(), 2))
        blocks.record(report(number, **reports))
    return found


def test_every_fourth_window_has_them_from_the_second_on() -> None:
    assert lengths(LongBlocks(), 12, watts=True) == [0, 40, 0, 0] * 3


def test_one_is_enough_where_no_memory_shows_and_watts_are_known() -> None:
    assert lengths(LongBlocks(), 12, watts=True, verdict=Verdict.SHORT) == [0, 40] + [0] * 10
    assert lengths(LongBlocks(), 12, watts=False, verdict=Verdict.SHORT) == [0, 120, 0, 0] * 3


@pytest.mark.parametrize("verdict", [Verdict.SETTLED, Verdict.NOT_SETTLED])
def test_they_go_on_where_memory_shows_and_begin_again_where_it_shows_later(verdict: Verdict) -> None:
    assert lengths(LongBlocks(), 12, watts=True, verdict=verdict) == [0, 40, 0, 0] * 3
    blocks = LongBlocks()
    assert lengths(blocks, 8, watts=True, verdict=Verdict.SHORT) == [0, 40] + [0] * 6
    blocks.record(report(8, watts=True, verdict=verdict))
    assert lengths(blocks, 4, watts=True, verdict=verdict) == [0, 40, 0, 0]


def test_the_verdict_before_a_long_block_does_not_end_them() -> None:
    blocks = LongBlocks()
    found = []
    for number in range(8):  # the report of the long block itself does not count
        found.append(blocks.steps(number, "sequential", Schedule(), 2))
        blocks.record(report(number, watts=True, verdict=None if number == 1 else Verdict.SHORT))
    assert found == [0, 40, 0, 0, 0, 40, 0, 0]


def test_they_are_as_long_as_power_needs_until_six_in_a_row_were_in_vain() -> None:
    assert lengths(LongBlocks(), 36) == [0, 120, 0, 0] * 6 + [0, 40, 0, 0] * 3


def test_watts_from_long_blocks_do_not_end_them_and_watts_from_others_do() -> None:
    blocks = LongBlocks()
    found = []
    for number in range(32):
        steps = blocks.steps(number, "sequential", Schedule(), 2)
        found.append(steps)
        blocks.record(report(number, watts=bool(steps) or number > 14))
    assert found == [0, 120, 0, 0] * 4 + [0, 40, 0, 0] * 4


@pytest.mark.parametrize(("step_ms", "steps"), [(20.0, 161), (50.0, 120), (200.0, 40), (1000.0, 40), (3500.0, 40)])
def test_they_last_six_seconds_for_power_and_forty_steps_at_least(step_ms: float, steps: int) -> None:
    assert lengths(LongBlocks(), 2, step_ms=step_ms) == [0, steps]


def test_where_there_is_little_room_they_are_shorter_or_for_power_alone_or_none() -> None:
    def length(every_n_steps: int, **reports: Any) -> int:
        return lengths(LongBlocks(), 2, Schedule(every_n_steps=every_n_steps), **reports)[1]

    assert [length(every, watts=True) for every in (1000, 260, 240, 200, 100)] == [40, 40, 31, 0, 0]
    assert length(200, step_ms=500.0) == 17  # 8 s: what a sensor needs
    assert length(200, step_ms=100.0) == 0
    assert lengths(LongBlocks(), 6, Schedule(spread=False)) == [0] * 6


@pytest.mark.parametrize("watts", [False, True])
def test_there_are_none_where_they_are_dear_and_before_a_report(watts: bool) -> None:
    assert lengths(LongBlocks(), 6, longer=1.26, watts=watts) == [0] * 6
    blocks = LongBlocks()
    assert [blocks.steps(number, "sequential", Schedule(), 2) for number in range(6)] == [0] * 6


def test_without_power_they_are_as_long_as_the_settled_difference_needs() -> None:
    blocks = LongBlocks()
    blocks.record(msgspec.structs.replace(report(0), power=None))
    assert [blocks.steps(number, "sequential", Schedule(), 2) for number in range(4)] == [0, 40, 0, 0]


def test_each_arm_has_its_own() -> None:
    blocks = LongBlocks()
    blocks.record(report(0))
    assert [bool(blocks.steps(number, "ab"[number % 2], Schedule(), 2)) for number in range(4)] == [
        False, False, True, True,
    ]  # fmt: skip
