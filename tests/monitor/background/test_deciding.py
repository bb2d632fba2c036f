"""Which arm rank 0 has turned on, where a report is stuck or the job has slowed down."""

from __future__ import annotations

import math

import pytest

from overlap_callbacks.analysis.results.arm import ArmReport, ComparedArm
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.gate.arms import Arm, Keep
from overlap_callbacks.monitor.background.deciding import Deciding
from tests.report.runs import run_info

WINDOW_S, ARM_STEPS, STEPS = 1000.0, 24, 10_000


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def report(window: int, log_speedup: float = 0.1, same_order: bool | None = None) -> ArmReport:
    return ArmReport(
        arm=ComparedArm("fast", equal_results=True), num_ranks=2, window=window, first_step=100 * window, num_steps=50,
        complete=True, control=False, world_size=2, backend="gloo", device="cpu", valid=True, problems=(),
        speedup=Estimate(math.expm1(log_speedup), None, None, 16, 8, 0.01, 10.0), same_order=same_order,
    )  # fmt: skip


def deciding_at(clock: Clock, *, same_order: bool | None = True, steps: int = STEPS) -> tuple[Deciding, int]:
    """A job that keeps an arm, or would if ranks issued the same collectives; and its next window."""
    arm = Arm("fast", lambda: None, lambda: None, equal_results=True)
    deciding = Deciding(Keep(), keeps=True, arms=[arm], least_notice_s=0.5, steps_apart=steps, now_s=clock)
    deciding.available = ("fast",)
    deciding.open(None, run_info())
    for window in range(40):
        clock.now_s, deciding.at = window * WINDOW_S, (window * steps, 0.0)
        chosen, _ = deciding.choose(window, ARM_STEPS)
        if chosen is not None and chosen.trial:
            deciding.record_trial("fast", 0.0, 0.1)
        elif chosen is not None:
            deciding.record(report(window, same_order=same_order), 1.0)
    return deciding, 40


def test_an_arm_is_kept_only_with_the_same_collectives_on_all_ranks() -> None:
    for same_order in (True, False, None):
        deciding, window = deciding_at(Clock(), same_order=same_order)
        assert deciding.kept(window) == ("fast" if same_order else "")


def test_an_arm_is_off_while_the_report_of_its_check_is_stuck() -> None:
    clock = Clock()
    deciding, window = deciding_at(clock)
    while True:
        clock.now_s += WINDOW_S
        if deciding.choose(window, ARM_STEPS)[0] is not None:
            break
        assert deciding.kept(window) == "fast"
        window += 1
    assert deciding.kept(window) == "fast"
    # Whether or not the budget lets windows open meanwhile.
    assert deciding.kept(window + 5) == ""
    for later in range(window + 1, window + 12):
        clock.now_s += WINDOW_S
        deciding.choose(later, ARM_STEPS)
    assert deciding.kept(window + 11) == ""
    deciding.record(report(window + 10, same_order=True), 1.0)
    assert deciding.kept(window + 11) == "fast"


def test_a_job_that_slows_down_by_what_the_arm_wins_is_noticed_at_windows_that_do_not_open() -> None:
    for slows in (False, True):
        clock = Clock()
        deciding, window = deciding_at(clock)
        clock.now_s = window * WINDOW_S
        assert deciding.kept(window) == "fast"
        assert deciding.stretch is not None
        for _ in range(2):
            window += 1
            clock.now_s += WINDOW_S
            stretch = deciding.stretch
            stretch.has_trained(stretch.windows + 1, stretch.on_s + WINDOW_S)  # as the training thread notes
            assert not deciding.has_slowed(window, (window * STEPS, 0.0))
        clock.now_s += (1.2 if slows else 1.0) * WINDOW_S
        assert deciding.has_slowed(window + 1, ((window + 1) * STEPS, 0.0)) is slows
        assert (deciding.choose(window + 1, ARM_STEPS)[0] is not None) is slows  # checked at once


def test_the_record_has_a_decision_again_once_more_is_owed_and_when_the_job_ends() -> None:
    clock = Clock()
    deciding, window = deciding_at(clock)
    first, is_news = deciding.news()
    assert first is not None
    assert is_news
    assert deciding.news() == (None, False)
    clock.now_s = (window - 1) * WINDOW_S
    deciding.choose(window, ARM_STEPS, asked=True)
    deciding.record(report(window, same_order=True), 1.0)
    assert deciding.news() == (None, False)  # training has paid for it
    deciding.choose(window, ARM_STEPS, asked=True)
    deciding.record(report(window, same_order=True), 1000.0)
    second, is_news = deciding.news()
    assert second is not None
    assert second.owed_s > first.owed_s == 0
    assert not is_news  # which would be said again
    third, is_news = deciding.news(job_ends=True)
    assert third == second
    assert not is_news
    nothing = Deciding(Keep(), keeps=True, arms=[], least_notice_s=0.5, steps_apart=STEPS, now_s=clock)
    assert nothing.news(job_ends=True) == (None, False)


def test_what_the_arm_that_is_on_has_lost_is_told_before_its_stretch_ends() -> None:
    deciding, window = deciding_at(Clock())
    assert deciding.kept(window) == "fast"
    deciding.news()
    assert deciding.stretch is not None
    deciding.stretch.has_trained(0.0, 1000.0)
    told, _ = deciding.news()
    assert told is not None
    assert told.owed_s > 0


def test_steps_that_are_long_need_more_room_for_the_arm() -> None:
    for steps, kept in ((STEPS, "fast"), (10, "")):  # 10: two times three steps of 100 s
        deciding, window = deciding_at(Clock(), steps=steps)
        assert deciding.kept(window) == kept


def test_the_pace_is_that_of_steps_whatever_windows_numbers_are() -> None:
    # As after a quick look that was asked for: numbers come four times as fast.
    clock = Clock()
    deciding, window = deciding_at(clock)
    step = 39 * STEPS
    for later in range(2):
        clock.now_s += WINDOW_S
        step += STEPS
        deciding.at = step, 0.0
        chosen, _ = deciding.choose(window + 4 * later, ARM_STEPS)
        if chosen is not None:
            deciding.record(report(window + 4 * later, same_order=True), 1.0)
    assert deciding.kept(window + 8) == "fast"
    assert deciding.stretch is not None
    assert deciding.stretch.own_s == pytest.approx(WINDOW_S, rel=0.01)
