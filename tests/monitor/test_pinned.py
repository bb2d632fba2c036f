"""A mode pinned by hand: what is recorded, when steps are sequential, and what ends it."""

from __future__ import annotations

import dataclasses

import pytest

from overlap_callbacks import Mode, OverlapMonitor
from overlap_callbacks.gate.step_log import Divergence
from overlap_callbacks.monitor.background.order_check import Decision, Ruling
from overlap_callbacks.monitor.step_runner import PinnedRunner
from tests.distributed import captured_log
from tests.monitor.fakes import EMPTY_LOG, Bench

GRANTED = Ruling(Decision.GRANTED)
OV, SEQ = Mode.OVERLAPPED, Mode.SEQUENTIAL


def pinned(bench: Bench, mode: Mode = SEQ) -> PinnedRunner:
    return PinnedRunner(mode, bench.slot)


def run(runner: PinnedRunner, *steps: int) -> None:
    for step in steps:
        runner.begin(step)
        if runner.in_step:
            runner.end()


def test_the_first_step_is_recorded_and_those_after_its_ruling_are_sequential() -> None:
    bench = Bench(GRANTED)
    run(pinned(bench), *range(4))
    assert bench.gate.modes == [OV, SEQ, SEQ, SEQ]
    assert bench.checker.keys == ["pinned1"]


def test_modes_that_change_at_each_step_are_checked_once() -> None:
    bench = Bench(GRANTED)
    runner = pinned(bench)
    for step in range(8):
        runner.pin(SEQ if step % 2 == 0 else OV)
        run(runner, step)
    assert bench.gate.modes == [OV, SEQ, SEQ, SEQ]  # those in between do not need the gate
    assert bench.checker.keys == ["pinned1"]


def test_tensors_on_a_device_that_cannot_be_timed_end_measuring() -> None:
    bench = Bench()
    bench.gate.log = dataclasses.replace(EMPTY_LOG, unsupported_device="npu")
    with captured_log() as lines:
        run(pinned(bench), 0)
    assert len(lines) == bench.stopped == 1
    assert "'npu'" in lines[0]
    assert bench.checker.keys == []


def test_overlapped_steps_need_nothing_and_are_not_asked_about_again() -> None:
    bench = Bench()
    runner = pinned(bench, OV)
    run(runner, 0)
    assert bench.gate.modes == []
    assert runner.next_step > 10**15


def test_a_recorded_step_that_trained_nothing_is_recorded_again() -> None:
    bench = Bench(GRANTED)
    runner = pinned(bench)
    runner.begin(0)
    runner.skip("its gradients overflowed")
    runner.end()
    run(runner, 1, 2)
    assert bench.gate.modes == [OV, OV, SEQ]
    assert len(bench.checker.keys) == 1


def test_a_step_that_departs_from_the_checked_sequence_has_the_next_one_recorded() -> None:
    bench = Bench(GRANTED, GRANTED)
    runner = pinned(bench)
    run(runner, 0, 1)
    bench.gate.log = dataclasses.replace(EMPTY_LOG, divergence=Divergence(0, None, None))  # type: ignore[arg-type]
    run(runner, 2)
    bench.gate.log = EMPTY_LOG
    run(runner, 3, 4)
    assert bench.gate.modes == [OV, SEQ, SEQ, OV, SEQ]
    assert bench.checker.keys == ["pinned1", "pinned2"]


@pytest.mark.parametrize("decision", [Decision.LATE, Decision.FAILED])
def test_a_mode_that_is_not_granted_stays_overlapped_and_is_given_up(decision: Decision) -> None:
    bench = Bench(Ruling(decision, "rank 1 was not heard"))
    runner = pinned(bench)
    with captured_log() as lines:
        run(runner, 0, 1)
    assert bench.gate.modes == [OV]
    assert runner.finished
    assert not runner.in_step
    assert lines == ["overlap-callbacks: the mode stays overlapped: rank 1 was not heard"]
    assert bench.stopped == 0


def test_a_conflict_switches_measuring_off() -> None:
    bench = Bench(Ruling(Decision.CONFLICT, "a cycle"))
    runner = pinned(bench)
    with captured_log() as lines:
        run(runner, 0, 1)
    assert bench.gate.modes == [OV]
    assert bench.stopped == 1
    assert lines == ["overlap-callbacks: sequential mode is refused, and measuring is switched off: a cycle"]


def test_a_pause_under_a_pinned_mode_ends_for_the_clock_of_training_too() -> None:
    monitor = OverlapMonitor(sinks=[])
    monitor.force(OV)
    with monitor.pause():
        pass
    assert monitor._driver.slot.keeping._paused_at_s is None
    monitor.close()
