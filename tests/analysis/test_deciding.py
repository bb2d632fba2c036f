"""Which arm is measured next, what is dropped, and which is best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import pytest

from benchmarks.deciding import Turned
from overlap_callbacks.analysis.arm_costs import ArmCosts, KeptAccount
from overlap_callbacks.analysis.arms import SEQUENTIAL
from overlap_callbacks.analysis.deciding import Decider
from overlap_callbacks.analysis.decision_words import decision_in_words
from overlap_callbacks.analysis.results.arm import ArmReport, ComparedArm
from overlap_callbacks.analysis.results.decision import Decision, Why
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import Pooling, pool_changes
from tests.report.runs import window as overlap_window

ERROR, DEGREES = 0.03, 10.0
# Time from window to window, in which training pays for a window of 2 s at a budget of 0.5 %.
WINDOW_S, COST_S, BUDGET, ARM_STEPS = 1000.0, 2.0, 0.005, 24
PACE_ERROR, NOTICE_S, STEPS = 0.002, 2.0, 10_000


def arm_of(name: str) -> ComparedArm:
    """``tf32`` changes results, ``sequential`` is."""
    return SEQUENTIAL if name == "sequential" else ComparedArm(name, equal_results=name != "tf32")


def decider_of(
    *names: str, keeps: bool = True, earlier: tuple = (), decided: Decision | None = None, steps: int = STEPS
) -> Decider:
    return Decider(
        [arm_of(name) for name in names], budget=BUDGET, wrong=0.05, keeps=keeps, least_notice_s=NOTICE_S,
        steps_apart=steps, lines={"fast": "turn_on()"}, earlier=earlier, decided=decided,
    )  # fmt: skip


def report(name: str, window: int, log_speedup: float, **fields) -> ArmReport:
    made = ArmReport(
        arm=arm_of(name), num_ranks=2, window=window, first_step=100 * window, num_steps=50, complete=True,
        control=False, world_size=2, backend="gloo", device="cpu", valid=True, problems=(),
        speedup=Estimate(math.expm1(log_speedup), None, None, 16, 8, ERROR, DEGREES),
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


def run(
    decider: Decider,
    effects: Mapping[str, Callable[[int], float] | float],
    windows: range,
    *,
    error: float = ERROR,
    extra_s: float = 0.0,
    when_kept: float | None = None,
    at_once: float | None = None,
    slower: Callable[[int], float] = lambda window: 1.0,
    steps: int = STEPS,
    pace_error: float = PACE_ERROR,
    seed: int = 1,
) -> list[str]:
    """Measure what the decider chooses, and return it, window by window: empty for none.

    ``when_kept``: effect of an arm that is on between windows, if another. ``at_once``: of all arms, once one has been
    turned on. ``slower``: factor of the job's own pace; ``pace_error``: how much it varies, and ``steps``: of a
    window's distance.
    """
    rng = np.random.default_rng(seed)
    measured = []
    now_s = own_s = windows.start * WINDOW_S
    for window in windows:
        choice = decider.choose(window, now_s, ARM_STEPS)
        turned = Turned(decider.kept, decider.turn_on(window), steps)
        if turned.is_on and at_once is not None:
            effects = dict.fromkeys(effects, at_once)
        measured.append(choice.arm)
        if choice.trial:
            decider.record_trial(choice.arm, extra_s, extra_s)
        elif choice.arm:
            effect = effects[choice.arm]
            value = (effect(window) if callable(effect) else effect) + rng.normal(0, error)
            decider.record(report(choice.arm, window, value), COST_S)
            now_s += COST_S
        effect = effects[turned.arm] if turned.arm else 0.0
        effect = effect(window) if callable(effect) else effect
        effect = effect if when_kept is None or not turned.arm else when_kept
        slot_s = WINDOW_S * slower(window) * math.exp(pace_error * rng.normal())
        share = turned.share_of(slot_s * math.exp(-effect))
        own_s, now_s = own_s + slot_s, now_s + slot_s * (1 - share + share * math.exp(-effect))
        assert now_s - own_s <= BUDGET * (now_s - windows.start * WINDOW_S) + COST_S or windows.start
    return measured


def test_the_fastest_arm_is_kept_and_slower_ones_are_dropped_sooner_the_slower_they_are() -> None:
    decider = decider_of("fast", "nothing", "slow", "slower")
    run(decider, {"fast": 0.06, "nothing": 0.0, "slow": -0.02, "slower": -0.3}, range(100))
    found = decider.decision()
    assert (found.kept, decider.kept) == ("fast", "fast")
    windows = {one.arm: one.num_windows for one in found.left_out}
    assert windows["slower"] < windows["slow"] < windows["nothing"]
    assert {one.why for one in found.left_out} <= {Why.SLOWER, Why.BEHIND, Why.NO_GAIN}
    assert "turn_on()" in decision_in_words(found)


def test_intervals_are_those_of_the_runs_tables() -> None:
    # The decider works with logarithms; what it says must be what ``pool`` says, at all looks and for all arms.
    decider = decider_of("fast", "other")
    values = [0.05, 0.08, 0.02, 0.06]
    for window, value in enumerate(values):
        decider.record(report("fast", window, value), COST_S)
    arm = decider._arms["fast"]
    speedups = [Estimate(math.expm1(value), None, None, 16, 8, ERROR, DEGREES) for value in values]
    pooled = pool_changes(speedups, Pooling(all_looks=True, confidence=1 - 0.05 / 2))
    assert pooled is not None
    assert [math.expm1(arm.low), math.expm1(arm.high)] == pytest.approx([pooled.ci_low, pooled.ci_high])


def test_an_arm_is_tried_in_one_step_and_a_hopeless_one_costs_few_of_them() -> None:
    decider = decider_of("hopeless", "fast")
    found = decider.choose(0, 0.0, ARM_STEPS)
    assert (found.arm, found.trial) == ("hopeless", True)
    decider.record_trial("hopeless", extra_s=20.0, cost_s=20.0)
    # 24 such steps cost 480 s, which training pays for in 100,000 s; the trial itself in 4,000 s.
    assert decider.choose(1, 3900.0, ARM_STEPS).wait_s == pytest.approx(100.0)
    trials = []
    for window in range(5, 90):
        choice = decider.choose(window, window * WINDOW_S, ARM_STEPS)
        if choice.trial:
            trials.append(choice.arm)
            decider.record_trial(choice.arm, *((20.0, 20.0) if choice.arm == "hopeless" else (0.0, 0.1)))
        elif choice.arm:
            assert choice.arm == "fast"
            decider.record(report("fast", window, 0.0), COST_S)
    assert trials.count("hopeless") == 2  # three in all
    assert decider.decision().cost_s < 3 * 20 + 85 * COST_S


def test_a_slow_first_step_does_not_keep_an_arm_from_being_measured() -> None:
    decider = decider_of("compiled")
    decider.choose(0, 0.0, ARM_STEPS)
    decider.record_trial("compiled", extra_s=30.0, cost_s=30.0)  # it compiled
    assert decider.choose(7, 7000.0, ARM_STEPS).trial
    decider.record_trial("compiled", extra_s=0.01, cost_s=0.1)
    choice = decider.choose(8, 8000.0, ARM_STEPS)
    assert (choice.arm, choice.trial) == ("compiled", False)


@pytest.mark.parametrize("seed", range(4))
def test_windows_cost_no_more_than_the_budget_and_the_dearest_of_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    decider = decider_of("a", "b", "c")
    spent_s = dearest_s = 0.0
    now_s = began_s = 50.0
    for window in range(400):
        choice = decider.choose(window, now_s, ARM_STEPS)
        if choice.arm:
            cost_s = rng.exponential(0.1 if choice.trial else 2.0 if rng.random() < 0.9 else 30.0)
            spent_s, dearest_s = spent_s + cost_s, max(dearest_s, cost_s)
            if choice.trial:
                decider.record_trial(choice.arm, cost_s, cost_s)
            else:
                decider.record(report(choice.arm, window, rng.normal(0, ERROR)), cost_s)
        assert spent_s <= BUDGET * (now_s - began_s) + dearest_s + 1e-9
        now_s += rng.exponential(100.0)
    assert decider.decision().cost_s == pytest.approx(spent_s)


def test_arms_that_change_results_are_recommended_and_do_not_drive_out_those_that_can_be_kept() -> None:
    decider = decider_of("tf32", "fast", "sequential")
    run(decider, {"tf32": 0.3, "fast": 0.06, "sequential": -0.2}, range(120))
    found = decider.decision()
    assert found.kept == "fast"
    assert found.advised is not None
    assert found.advised.arm == "tf32"
    assert "tf32 is only recommended (it changes results), with a speed-up of +" in decision_in_words(found)


def test_without_keep_nothing_is_turned_on() -> None:
    decider = decider_of("fast", keeps=False)
    run(decider, {"fast": 0.06}, range(60))
    found = decider.decision()
    assert found.best is not None
    assert (found.kept, decider.kept) == ("", "")
    assert decision_in_words(found).startswith("fast is recommended, with a speed-up of +")


def test_sequential_steps_are_measured_by_reports_of_overlap() -> None:
    decider = decider_of("fast", "sequential")
    measured = overlap_window(3)
    assert measured.speedup_vs_sequential is not None
    decider.record(measured, COST_S)
    shown = decider._arms["sequential"]
    assert math.expm1(shown.center) == pytest.approx(1 / (1 + measured.speedup_vs_sequential.value) - 1)


def test_the_kept_arm_is_checked_at_growing_distances() -> None:
    decider = decider_of("fast")
    measured = run(decider, {"fast": 0.2}, range(200), error=0.001)
    checks = [window for window, arm in enumerate(measured) if arm]
    distances = np.diff(checks)
    assert distances[-1] == 32
    assert list(distances) == sorted(distances)


def test_an_arm_that_turns_slower_is_given_up_and_what_it_drove_out_comes_back() -> None:
    decider = decider_of("fast", "less")
    effects = {"fast": lambda window: 0.10 if window < 60 else -0.05, "less": 0.03}
    run(decider, effects, range(60))
    before = decider.decision()
    assert before.kept == "fast"
    assert [(one.arm, one.than) for one in before.left_out] == [("less", "fast")]
    run(decider, effects, range(60, 200))
    after = decider.decision()
    assert [(one.arm, one.why) for one in after.left_out] == [("fast", Why.STOPPED)]
    assert after.kept == "less"
    assert after.is_news(before)
    assert "fast (stopped winning)" in decision_in_words(after)


@pytest.mark.parametrize("turned", [-0.05, -0.3, -1.0, -2.3])
@pytest.mark.parametrize("slower_from", [8, 20, 100])
def test_an_arm_that_turns_slower_costs_no_more_than_the_budget_the_dearest_window_and_what_it_had_won(
    slower_from: int, turned: float
) -> None:
    decider = decider_of("fast")
    # ``run`` holds the job to that at every window.
    run(decider, {"fast": lambda window: 0.1 if window < slower_from else turned}, range(200), error=0.001)
    assert (decider.kept, [one.why for one in decider.decision().left_out]) == ("", [Why.STOPPED])


@pytest.mark.parametrize("turned", [-0.05, -0.3, -1.0, -2.3])
def test_nor_does_one_that_turns_slower_as_soon_as_it_is_turned_on(turned: float) -> None:
    decider = decider_of("fast")
    run(decider, {"fast": 0.1}, range(200), error=0.001, at_once=turned)
    assert (decider.kept, [one.why for one in decider.decision().left_out]) == ("", [Why.STOPPED])


@pytest.mark.parametrize("step_s", [10.0, 100.0])
def test_nor_does_one_whose_steps_are_long(step_s: float) -> None:
    # Three times slower from one step to the next, and rank 0 looks only between steps.
    steps = int(WINDOW_S / step_s)
    decider = decider_of("fast", steps=steps)
    run(decider, {"fast": 0.1}, range(500), error=0.001, at_once=-math.log(3), steps=steps)
    assert (decider.kept, [one.why for one in decider.decision().left_out]) == ("", [Why.STOPPED])


@pytest.mark.parametrize("seed", range(5))
def test_nor_one_that_loses_between_windows_in_a_job_whose_pace_varies(seed: int) -> None:
    decider = decider_of("fast")
    run(decider, {"fast": 0.05}, range(200), error=0.001, when_kept=-0.02, pace_error=0.05, seed=seed)


def test_an_arm_that_wins_in_windows_and_loses_between_them_is_given_up() -> None:
    decider = decider_of("fast", "other")
    run(decider, {"fast": 0.1, "other": 0.0}, range(200), error=0.001, when_kept=-0.01)
    found = decider.decision()
    assert [(one.arm, one.why) for one in found.left_out if one.arm == "fast"] == [("fast", Why.NOT_KEPT)]
    assert "fast (wins in windows only: the job was no faster while it was on between them)" in decision_in_words(found)
    resumed = decider_of("fast", earlier=(report("fast", 1, 0.1),), decided=found)
    assert not resumed.choose(0, 0.0, ARM_STEPS).arm


def test_a_job_that_slows_down_for_a_reason_of_its_own_goes_on_with_the_arm() -> None:
    decider = decider_of("fast")
    run(decider, {"fast": 0.1}, range(200), error=0.001, slower=lambda window: 1.3 if window > 60 else 1.0)
    assert decider.kept == "fast"


def test_an_arm_is_turned_on_once_training_has_paid_for_what_it_may_lose() -> None:
    decider = decider_of("fast", "other")
    on_from = kept_from = None
    rng = np.random.default_rng(3)
    for window in range(60):
        choice = decider.choose(window, window * 100.0, ARM_STEPS)
        stretch = decider.turn_on(window)
        if choice.trial:
            decider.record_trial(choice.arm, 0.0, 0.1)
        elif choice.arm:
            decider.record(report(choice.arm, window, (0.3 if choice.arm == "fast" else 0) + rng.normal(0, 1e-3)), 0.2)
        kept_from = window if kept_from is None and decider.kept else kept_from
        if stretch is not None:
            on_from = window
            # However slow it turns, it loses no more than the time in which all ranks go back.
            assert stretch.allowed_s >= 2 * stretch.notice_s >= 2 * NOTICE_S
            break
    assert kept_from is not None
    assert on_from is not None
    assert on_from > kept_from


def test_a_job_that_slows_down_is_checked_at_once() -> None:
    decider = decider_of("fast")
    run(decider, {"fast": 0.1}, range(100), error=0.001)
    now_s, window = 100 * WINDOW_S, 100
    if decider.choose(window, now_s, ARM_STEPS).arm:  # if so, the next check is far away
        decider.record(report("fast", window, 0.1), COST_S)
    looks = []
    for late in range(1, 4):
        if (stretch := decider.turn_on(window + late - 1)) is not None:
            stretch.windows, stretch.on_s = 1.0, 0.97 * WINDOW_S  # so it has lost nothing
        choice = decider.choose(window + late, now_s + late * 0.97 * WINDOW_S, ARM_STEPS)
        looks.append(choice.arm)
        if choice.arm:
            break
    assert looks[-1] == "fast"


def test_what_an_arm_has_lost_is_paid_before_it_is_checked_and_it_is_checked_before_it_is_on_again() -> None:
    # The first trial compiles, and is the dearest: the arm may lose as much, which its next window must not cost too.
    dearest_s, decider = 8.0, decider_of("fast")
    now_s, own_s, turned, on = 0.0, 0.0, 0, []
    for window in range(3000):
        choice = decider.choose(window, now_s, ARM_STEPS)
        if choice.trial:
            decider.record_trial(choice.arm, 0.0, dearest_s if window == 0 else 0.1)
            now_s += dearest_s if window == 0 else 0.1
        elif choice.arm:
            decider.record(report("fast", window, -1.0 if on else 0.1), 6.0 if on else 0.1)
            now_s += 6.0 if on else 0.1
        assert now_s - own_s <= BUDGET * now_s + dearest_s
        stretch = decider.turn_on(window)
        arm = Turned(decider.kept, stretch, 500)
        if arm.is_on:
            on.append(window)
        share = arm.share_of(50.0 * (math.e if on else 1.0))
        now_s, own_s = now_s + 50.0 * (1 - share + share * math.e), own_s + 50.0
        assert now_s - own_s <= BUDGET * now_s + dearest_s
        turned += arm.is_on
        if decider.decision().left_out:
            break
    assert turned <= 3
    assert [one.why for one in decider.decision().left_out] == [Why.STOPPED]


def test_few_windows_do_not_choose_an_arm_however_certain_each_seems() -> None:
    # Each window is certain to 0.1 %, but the effect varies by more from window to window.
    decider = decider_of("varies")
    exact = Estimate(math.expm1(0.03), None, None, 16, 8, 0.001, DEGREES)
    for window in range(5):
        decider.record(report("varies", window, 0.0, speedup=exact), COST_S)
        assert decider.kept == ""
    decider.record(report("varies", 5, 0.0, speedup=exact), COST_S)
    assert decider.kept == "varies"


def test_with_no_difference_nothing_is_decided_and_it_is_told_what_would_show() -> None:
    decider = decider_of("a", "b")
    run(decider, {"a": 0.0, "b": 0.0}, range(60))
    found = decider.decision()
    assert (found.best, found.left) == (None, ("a", "b"))
    assert set(found.would_show) == {"a", "b"}
    assert decision_in_words(found).startswith("none is known to be faster than the job as configured, where 1")


def test_what_is_not_heard_of_is_charged_and_forgotten() -> None:
    decider = decider_of("a")
    assert decider.choose(0, 0.0, ARM_STEPS).trial
    decider.record_trial("a", 0.1, 2.0)
    assert decider.choose(1, 1000.0, ARM_STEPS).arm == "a"
    waits = [decider.choose(window, window * 1000.0, ARM_STEPS) for window in range(2, 9)]
    assert "no result yet" in waits[0].reason
    assert any(choice.arm for choice in waits)
    assert decider.decision().cost_s >= 4.0


def test_an_arm_whose_windows_do_not_count_is_left_out_with_the_reason() -> None:
    decider = decider_of("a", "b")
    for window in range(4):
        decider.record(report("a", window, 0.1, complete=False), COST_S)  # cut short: says nothing of the arm
    assert decider.decision().left_out == ()
    for window in range(4, 8):
        decider.record(report("a", window, 0.1, valid=False, problems=("compute ran during it",)), COST_S)
    decider.leave_out("b", 8, "this job cannot have it")
    found = decider.decision()
    assert [(one.arm, one.why, one.reason) for one in found.left_out] == [
        ("a", Why.UNMEASURED, "compute ran during it"), ("b", Why.UNMEASURED, "this job cannot have it"),
    ]  # fmt: skip
    assert decider.choose(9, 9000.0, ARM_STEPS).arm == ""


def test_a_resumed_job_goes_on_with_what_was_known() -> None:
    reports: list[ArmReport] = []
    first = decider_of("fast", "slow")
    rng = np.random.default_rng(2)
    for window in range(40):
        name = first.choose(window, window * WINDOW_S, ARM_STEPS)
        if name.trial:
            first.record_trial(name.arm, 0.0, 0.1)
        elif name.arm:
            reports.append(report(name.arm, window, (0.06 if name.arm == "fast" else -0.06) + rng.normal(0, ERROR)))
            first.record(reports[-1], COST_S)
    decided = msgspec.json.decode(msgspec.json.encode(first.decision()), type=Decision)
    assert decided == first.decision()
    resumed = decider_of("fast", "slow", earlier=tuple(reports), decided=decided)
    found = resumed.decision()
    assert (found.best, found.left, found.left_out) == (decided.best, decided.left, decided.left_out)
    assert not found.is_news(decided)
    assert resumed.choose(0, 0.0, ARM_STEPS).arm == "fast"  # checked at once


def test_an_arm_that_was_given_up_starts_anew_with_the_job() -> None:
    decider = decider_of("fast")
    effects = {"fast": lambda window: 0.10 if window < 60 else -0.05}
    run(decider, effects, range(100))
    decided = decider.decision()
    assert [one.why for one in decided.left_out] == [Why.STOPPED]
    assert decider.choose(101, 101 * WINDOW_S, ARM_STEPS).arm == ""
    resumed = decider_of("fast", earlier=(report("fast", 1, 0.1),), decided=decided)
    assert resumed.choose(0, 0.0, ARM_STEPS) == ("fast", True, 0, 0.0, "")


def test_a_resumed_job_pays_first_for_what_the_earlier_start_owed() -> None:
    owing = msgspec.structs.replace(decider_of("fast").decision(), cost_s=12.0, training_s=1000.0)  # 5 s would be paid
    resumed = decider_of("fast", decided=owing)
    assert resumed.choose(0, 0.0, ARM_STEPS).wait_s == pytest.approx(7.0 / BUDGET)
    assert resumed.choose(2, 7.1 / BUDGET, ARM_STEPS).arm == "fast"


def test_what_an_earlier_start_owed_is_told_until_it_is_paid() -> None:
    decided = msgspec.structs.replace(decider_of("fast").decision(), cost_s=12.0, training_s=1000.0)
    told = decider_of("fast", decided=decided).decision()
    assert told.cost_s == pytest.approx(12.0 - BUDGET * 1000.0)
    assert decider_of("fast", decided=told).choose(0, 0.0, ARM_STEPS).wait_s == pytest.approx(told.cost_s / BUDGET)


def test_another_arms_window_takes_from_what_the_kept_one_may_lose() -> None:
    costs = ArmCosts(BUDGET, NOTICE_S, math.inf)
    costs.keep(KeptAccount())
    for window in range(10):
        costs.look(window, window * WINDOW_S)
    costs.begin("other", 0.0)
    stretch = costs.turn_on(0.05, in_doubt=False)
    assert stretch is not None
    before_s = stretch.allowed_s
    costs.end("other", 30.0)  # the dearest, so it adds as much
    costs.begin("other", 0.0)
    costs.end("other", 30.0)
    assert stretch.allowed_s < before_s


def test_a_resumed_job_knows_what_the_windows_of_an_arm_cost() -> None:
    resumed = decider_of("slow", earlier=(report("slow", 1, -0.01, lost_ms=3000.0),))
    assert resumed.choose(0, 0.0, ARM_STEPS).wait_s == pytest.approx(3.0 / BUDGET)
    assert resumed.choose(1, 3.1 / BUDGET, ARM_STEPS)[:2] == ("slow", False)


@pytest.mark.parametrize("error", [1e308, -1.0, None])
def test_a_window_of_an_impossible_error_says_nothing(error: float | None) -> None:
    told = report("fast", 1, 0.1, speedup=Estimate(0.1, None, None, 16, 8, error, -1.0))
    resumed = decider_of("fast", earlier=(told, report("fast", 2, 0.1)))
    assert len(resumed._arms["fast"].windows) == 1


def test_an_arm_whose_checks_are_all_cut_short_is_no_longer_kept() -> None:
    decider = decider_of("fast")
    run(decider, {"fast": 0.10}, range(40))
    assert decider.kept == "fast"
    checked = 0
    for window in range(40, 200):
        if decider.choose(window, window * WINDOW_S, ARM_STEPS).arm:
            checked += 1
            decider.record(report("fast", window, 0.1, complete=False, problems=("cut short",)), COST_S)
    assert (checked, decider.kept) == (4, "")
    assert [one.why for one in decider.decision().left_out] == [Why.UNMEASURED]


def test_a_window_that_is_asked_for_is_measured_at_once_and_is_outside_the_budget() -> None:
    decider = decider_of("fast", "slow")
    run(decider, {"fast": 0.1, "slow": -0.1}, range(60))
    assert decider.kept == "fast"
    before = decider.decision()
    for window in (60, 61):  # not due, and nothing is paid for in no time
        asked = decider.choose(window, now_s=59 * WINDOW_S, arm_steps=ARM_STEPS, asked=True)
        assert (asked.arm, asked.trial) == ("fast", False)
        decider.record(report("fast", window, 0.1), None)
    assert decider.decision().cost_s == before.cost_s
    new = decider_of("fast")
    assert new.choose(0, now_s=0.0, arm_steps=ARM_STEPS, asked=True).arm == "fast"
    new.record(report("fast", 0, 0.1, lost_ms=20_000.0), None)
    # It was not charged, but tells what the next one costs.
    assert new.decision().cost_s == 0
    assert new.choose(1, now_s=WINDOW_S, arm_steps=ARM_STEPS).wait_s > 0
