"""The way of a window: from its recorded step to its report, or to whatever cuts it short."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest

from overlap_callbacks import Mode, Schedule
from overlap_callbacks.gate.switches import OverlapSwitch
from overlap_callbacks.monitor.background.order_check import Decision, Ruling
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.race.check import RaceChecks
from overlap_callbacks.monitor.schedule import Placement
from overlap_callbacks.monitor.window import Window
from overlap_callbacks.monitor.window_runner import WindowRunner
from tests.distributed import captured_log
from tests.monitor.fakes import EMPTY_LOG, Bench
from tests.monitor.jobs import tiny_schedule

GRANTED = Ruling(Decision.GRANTED)
OV, SEQ = Mode.OVERLAPPED, Mode.SEQUENTIAL
# Windows of one recorded step and the blocks O S S O: steps 2 to 6, 12 to 16, ... at the earliest.
SCHEDULE = tiny_schedule(every_n_steps=10)


def windows(bench: Bench, schedule: Schedule = SCHEDULE) -> WindowRunner:
    bench.slot.config = MonitorConfig(schedule=schedule)
    return WindowRunner(bench.slot, bench.ring)


def run(runner: WindowRunner, *steps: int) -> None:
    """Steps as the monitor drives them: those before ``next_step`` are not handed on."""
    for step in steps:
        if step >= runner.next_step:
            runner.begin(step)
        if runner.in_step:
            runner.end()


def test_a_window_that_is_granted_runs_by_its_plans_and_is_reported_as_complete() -> None:
    bench = Bench(GRANTED, GRANTED)
    runner = windows(bench)
    run(runner, *range(22))
    assert bench.gate.modes == [OV, OV, SEQ, SEQ, OV, OV, SEQ, OV, OV, SEQ]  # the second window is turned round
    assert bench.reporter.blocks == [(window, block) for window in (0, 1) for block in range(4)]
    assert bench.reporter.windows == [(0, True), (1, True)]
    assert bench.checker.keys == ["0/window0", "0/window1"]
    assert not runner.in_window


def test_tensors_on_a_device_that_cannot_be_timed_end_measuring_with_a_line_that_names_it() -> None:
    bench = Bench()
    bench.gate.log = dataclasses.replace(EMPTY_LOG, unsupported_device="xpu")
    runner = windows(bench)
    with captured_log() as lines:
        run(runner, *range(4))
    assert [line for line in lines if "'xpu'" in line] == lines
    assert len(lines) == bench.stopped == 1
    assert (bench.reporter.blocks, bench.reporter.windows) == ([], [])
    assert not runner.in_window


@pytest.mark.parametrize(("on_device", "warmup_steps", "noted"), [(True, 0, 1), (True, 1, 0), (False, 0, 0)])
def test_on_a_device_a_window_without_warm_up_steps_says_so(
    on_device: bool, warmup_steps: int, noted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(Window, "on_device", on_device)
    monkeypatch.setattr(Window, "note", lambda self, problem: notes.append(problem))
    schedule = tiny_schedule(every_n_steps=20, warmup_steps=warmup_steps)
    run(windows(Bench(GRANTED), schedule), *range(3))
    assert len([note for note in notes if note.startswith("warmup_steps=0")]) == noted


def test_a_control_window_runs_overlapped_and_needs_a_ruling_all_the_same() -> None:
    bench = Bench(GRANTED, Ruling(Decision.STEP_MISMATCH, "why"))
    run(windows(bench, tiny_schedule(every_n_steps=10, control=True)), *range(20))
    assert bench.gate.modes == [OV] * 5 + [OV]
    assert bench.reporter.blocks == [(0, block) for block in range(4)]
    assert bench.reporter.windows == [(0, True)]


def test_after_windows_in_vain_ever_more_are_left_out_until_all_ranks_come_again() -> None:
    late = Ruling(Decision.LATE, "why")
    # A budget so large that only the number of windows in vain counts.
    config = MonitorConfig(schedule=SCHEDULE, max_overhead=None)
    bench = Bench(late, late, late, GRANTED, GRANTED, config=config)
    runner = WindowRunner(bench.slot, bench.ring)
    run(runner, *range(2 + 10 * 10))
    assert bench.reporter.windows == [(0, False), (2, False), (4, False), (8, True), (9, True)]


@pytest.mark.parametrize(
    ("decision", "reported", "stopped", "line"),
    [
        (Decision.CONFLICT, [(0, False)], 1, "sequential mode is refused, and measuring is switched off: why"),
        (Decision.CONFIG_MISMATCH, [], 1, "measuring is switched off: why"),
        (Decision.STEP_MISMATCH, [], 0, "a window is left out: why"),
        (Decision.SKIPPED, [], 0, "window left out: why"),
        (Decision.LATE, [(0, False)], 0, "a window has no sequential steps: why"),
        (Decision.FAILED, [(0, False)], 0, "window 0 was cut short: why"),
    ],
)
def test_a_window_that_is_not_granted_ends_before_its_first_timed_step(
    decision: Decision, reported: list[tuple[int, bool]], stopped: int, line: str
) -> None:
    bench = Bench(Ruling(decision, "why"))
    runner = windows(bench)
    with captured_log(logging.INFO) as lines:
        run(runner, *range(6))
    assert bench.gate.modes == [OV]
    assert bench.reporter.blocks == []  # nothing of it may stand in the record
    assert bench.reporter.windows == reported
    assert bench.stopped == stopped
    assert f"overlap-callbacks: {line}" in lines
    assert not runner.in_window
    run(runner, *range(6, 12))
    assert len(bench.gate.modes) == 1  # no other step of it is touched


def test_windows_that_rank_0_has_left_out_already_are_not_opened() -> None:
    bench = Bench(Ruling(Decision.SKIPPED, "why", next_window=3), GRANTED)
    run(windows(bench), *range(2 + 10 * 4))
    assert len(bench.checker.keys) == 2
    assert bench.reporter.left_out == [(0, "why"), (1, "why"), (2, "why")]  # each as it comes
    assert bench.reporter.windows == [(3, True)]
    assert len(bench.gate.modes) == 1 + 5


def test_where_the_job_has_slowed_down_an_arm_is_put_back_at_a_window_that_is_not_opened() -> None:
    bench = Bench(Ruling(Decision.SKIPPED, "why", next_window=4))
    runner, put_back = windows(bench), []
    bench.slot.acquire().deciding = SimpleNamespace(has_slowed=lambda window, _: window == 2)
    bench.slot.keeping.has_slowed = lambda _: put_back.append(len(bench.reporter.left_out))
    run(runner, *range(2 + 10 * 4))
    assert put_back == [2]  # at the third one


def test_a_step_number_that_goes_back_begins_anew() -> None:
    bench = Bench(Ruling(Decision.SKIPPED, "why", next_window=3), GRANTED)
    runner = windows(bench)
    run(runner, *range(10))
    runner.rewind()
    run(runner, *range(10))
    assert bench.reporter.windows == [(0, True)]


def test_a_window_whose_recorded_step_trained_nothing_is_left_out() -> None:
    bench = Bench()
    runner = windows(bench)
    runner.begin(2)
    runner.skip("its gradients overflowed")
    runner.end()
    assert not runner.in_window
    assert bench.checker.keys == []
    assert bench.reporter.windows == []
    assert bench.reporter.left_out == [(0, "its recorded steps were skipped (its gradients overflowed) [OC303]")]


def test_a_window_whose_recorded_step_compiled_is_left_out() -> None:
    bench = Bench(Ruling(Decision.SKIPPED, "torch.compile compiled in a recorded step"), GRANTED)
    runner = windows(bench)
    bench.gate.log = dataclasses.replace(EMPTY_LOG, compiled=True)
    run(runner, 2, 3, 4, 5)
    # The other ranks may not have compiled: all ask, so that nobody waits in vain, and all hear the same.
    assert len(bench.checker.keys) == 1
    assert bench.checker.recorded[0].kinds[0].compiled
    bench.gate.log = EMPTY_LOG
    run(runner, *range(6, 22))
    assert bench.reporter.windows == [(1, True)]


def test_the_parts_of_a_window_lie_where_its_ruling_says() -> None:
    schedule = tiny_schedule(every_n_steps=40, profiled_steps=2)
    bench = Bench(Ruling(Decision.GRANTED, placement=Placement(5, 25, True, False, steps_per_block=3)))
    runner = windows(bench, schedule)
    modes = {}
    for step in range(40):
        seen = len(bench.gate.modes)
        run(runner, step)
        modes |= {step: bench.gate.modes[-1]} if len(bench.gate.modes) > seen else {}
    recorded = range(2, 2 + schedule.recorded_steps)
    around = schedule.steps_around(3)
    timed = [*[SEQ] * 3, *[OV] * 6, *[SEQ] * 3]
    assert modes == {
        **dict.fromkeys(recorded, OV),
        **dict(zip(range(7, 19), timed, strict=True)),
        **dict.fromkeys([*range(7 - around, 7), *range(19, 19 + around)], OV),
        **dict(zip(range(27, 31), [OV, SEQ, SEQ, OV], strict=True)),
    }
    assert bench.reporter.blocks == [(0, block) for block in range(4)]


def test_a_collective_that_got_stuck_ends_the_window_and_the_measuring() -> None:
    bench = Bench(GRANTED)
    runner = windows(bench)
    run(runner, *range(2, 6))
    runner.begin(6)
    bench.gate.stuck = "allreduce_ on '0'"
    with captured_log() as lines:
        runner.end()
    assert bench.reporter.windows == [(0, False)]
    assert bench.stopped == 1
    (line,) = lines
    assert "allreduce_ on '0' did not finish within 10 s" in line


def test_the_race_check_after_a_window_has_the_name_of_its_ruling(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []
    monkeypatch.setattr(RaceChecks, "after_window", lambda self, name, *_: named.append(name))
    run(windows(Bench(Ruling(Decision.GRANTED, name="a"), Ruling(Decision.GRANTED, name="b"))), *range(22))
    assert named == ["a", "b"]


def test_windows_that_come_again_after_the_numbers_went_back_have_keys_of_their_own() -> None:
    bench = Bench(GRANTED, GRANTED)
    runner = windows(bench)
    run(runner, *range(2, 12))
    runner.rewind()
    run(runner, *range(2, 12))
    assert bench.checker.keys == ["0/window0", "1/window0"]


def test_an_abandoned_window_within_a_step_leaves_the_switch_for_the_step_after() -> None:
    turned: list[str] = []

    class Switch(OverlapSwitch):
        only_between_steps = True

        def disable(self) -> None:
            turned.append("off")

        def restore(self) -> None:
            turned.append("on")

    bench = Bench(GRANTED)
    bench.switch.adopt(Switch())
    runner = windows(bench)
    run(runner, 2, 3)
    runner.begin(4)
    assert turned == ["off"]
    runner.abandon("a mode was pinned by hand", within_step=True)
    assert turned == ["off"]
    runner.next_step = 0  # as when the mode is given back
    runner.begin(5)
    assert turned == ["off", "on"]
    assert bench.gate.modes == [OV, OV, OV]  # the gate serialises nothing where a switch does it
