"""Whether steps with an arm issue the same collectives as steps as configured, on all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlap_callbacks.analysis.job.part import merge, part_of
from overlap_callbacks.monitor.background.measurement import same_order, trial_extra_s
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.monitor.window import MeasuredStep, MeasuredWindow
from tests import samples
from tests.monitor.background.test_kinds import issuing


def own(number: int = 3, **options: object) -> MeasuredStep:
    return issuing(number, **options)  # type: ignore[arg-type]


def turned(number: int = 3, **options: object) -> MeasuredStep:
    step = issuing(number, "S", **options)  # type: ignore[arg-type]
    return replace(step, plan=replace(step.plan, turned=True))


def test_the_same_collectives_in_the_same_order_are_the_same() -> None:
    assert same_order([own(), own(4), turned(), turned(4)]) is True


@pytest.mark.parametrize(
    "step",
    [turned(4), turned(size=8), turned(operator="broadcast_"), turned(issued=5), turned(0)],
    ids=["number", "size", "operator", "unseen", "none"],
)
def test_others_or_unseen_ones_are_not(step: MeasuredStep) -> None:
    assert same_order([own(), turned(), step]) is False


def test_nothing_is_known_without_a_turned_step() -> None:
    assert same_order([own(), own()]) is None


@pytest.mark.parametrize(
    ("ranks", "job"), [((True, True), True), ((True, False), False), ((True, None), None), ((None, False), False)]
)
def test_all_ranks_must_have_the_same(ranks: tuple[bool | None, ...], job: bool | None) -> None:
    parts = [part_of(samples.window(rank, same_order=order)) for rank, order in enumerate(ranks)]
    assert merge(parts).same_order is job


@pytest.mark.parametrize("turned_", [True, False])
def test_a_trial_turns_the_last_step_alone(turned_: bool) -> None:
    for schedule in (Schedule(), Schedule(spread=False, every_n_steps=70)):
        trial = schedule.trial(turned=turned_)
        plans = [trial.plan(schedule.first_step + offset) for offset in range(schedule.every_n_steps)]
        planned = [plan for plan in plans if plan is not None]
        assert [plan.last for plan in planned] == [False] * (len(planned) - 1) + [True]
        assert [plan.turned for plan in planned[:-1]] == [False] * (len(planned) - 1)
        assert planned[-1].turned is turned_
        assert len(planned) < schedule.window_steps


def test_a_trial_that_was_cut_short_says_nothing() -> None:
    steps = [replace(own(), start=0, end=1_000_000), replace(turned(), start=0, end=3_000_000)]
    window = MeasuredWindow(number=0, first_step=0, clock=None, steps=steps)  # type: ignore[arg-type]
    assert trial_extra_s(window) is None
    window.complete = True
    assert trial_extra_s(window) == pytest.approx(0.002)
