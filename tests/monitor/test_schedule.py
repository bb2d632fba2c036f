from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.monitor.schedule import Part, Plan, Schedule

O, S = Mode.OVERLAPPED, Mode.SEQUENTIAL  # noqa: E741 - as the blocks are written


def window_plans(schedule: Schedule, number: int = 0) -> list[Plan]:
    start = schedule.first_step + number * schedule.every_n_steps
    return [schedule.plan(step) for step in range(start, start + schedule.window_steps)]


def counted_arms(plans: list[Plan], part: Part) -> list[Mode]:
    return [plan.arm for plan in plans if plan.part is part and plan.counted]


def first_window_step_by_search(schedule: Schedule, step: int) -> int:
    while True:
        plan = schedule.plan(step)
        if plan is not None and plan.offset == 0:
            return step
        step += 1


@st.composite
def schedules(draw):
    half = draw(st.integers(1, 3))
    blocks = "".join(draw(st.permutations("O" * half + "S" * half)))
    small = {
        "blocks": blocks,
        "repeats": draw(st.integers(1, 3)),
        "steps_per_block": draw(st.integers(1, 3)),
        "warmup_steps": draw(st.integers(0, 2)),
        "profiled_steps": half * draw(st.integers(0, 2)),
        "first_step": draw(st.integers(0, 30)),
        "control": draw(st.booleans()),
    }
    length = Schedule(**small).window_steps
    return Schedule(**small, every_n_steps=draw(st.integers(length, length + 40)))


# -- layout


def test_the_default_window_has_65_steps_at_step_20_520_and_1020():
    # 1 recorded + 16 timed blocks x (1 warm-up + 2 counted) + 8 profiled blocks x (1 warm-up + 1 counted)
    schedule = Schedule()
    assert schedule.window_steps == 1 + 16 * 3 + 8 * 2 == 65
    assert schedule.timed_blocks == 16
    inside = [step for step in range(1500) if schedule.plan(step) is not None]
    assert inside == [*range(20, 85), *range(520, 585), *range(1020, 1085)]


def test_the_default_window_is_recorded_then_timed_then_profiled():
    plans = window_plans(Schedule())
    assert [plan.part for plan in plans] == [Part.RECORDED] + [Part.TIMED] * 48 + [Part.PROFILED] * 16
    assert [plan.offset for plan in plans] == list(range(65))
    assert [plan.last for plan in plans] == [False] * 64 + [True]


def test_the_recorded_step_is_overlapped_uncounted_and_in_no_block():
    recorded = window_plans(Schedule())[0]
    assert recorded == Plan(window=0, offset=0, part=Part.RECORDED, block=-1, arm=O, mode=O, counted=False, last=False)


def test_timed_blocks_alternate_o_s_s_o_with_one_warm_up_step_then_two_counted():
    timed = [plan for plan in window_plans(Schedule()) if plan.part is Part.TIMED]
    assert [plan.block for plan in timed] == [block for block in range(16) for _ in range(3)]
    assert [plan.counted for plan in timed] == [False, True, True] * 16
    assert [plan.mode for plan in timed[::3]] == [O, S, S, O] * 4
    assert all(plan.mode is plan.arm for plan in timed)


def test_profiled_blocks_alternate_o_s_s_o_with_one_warm_up_step_then_one_counted():
    profiled = [plan for plan in window_plans(Schedule()) if plan.part is Part.PROFILED]
    assert [plan.block for plan in profiled] == [block for block in range(8) for _ in range(2)]
    assert [plan.counted for plan in profiled] == [False, True] * 8
    assert [plan.mode for plan in profiled[::2]] == [O, S, S, O] * 2


def test_other_blocks_and_counts_give_the_window_written_out_here():
    schedule = Schedule(
        every_n_steps=40, first_step=3, blocks="SO", repeats=2, steps_per_block=1, warmup_steps=2, profiled_steps=1
    )
    laid_out = "".join(
        {Part.RECORDED: "r", Part.TIMED: "t", Part.PROFILED: "p"}[plan.part]
        + ("o" if plan.mode is O else "s")
        + ("1 " if plan.counted else "0 ")
        for plan in window_plans(schedule)
    )
    timed = "ts0 ts0 ts1 to0 to0 to1 "
    assert laid_out == "ro0 " + timed + timed + "ps0 ps0 ps1 po0 po0 po1 "


def test_without_warm_up_every_step_of_a_block_counts():
    schedule = Schedule(warmup_steps=0)
    assert schedule.window_steps == 1 + 16 * 2 + 8
    assert all(plan.counted for plan in window_plans(schedule)[1:])


def test_no_profiled_steps_means_no_profiled_part():
    plans = window_plans(Schedule(profiled_steps=0))
    assert len(plans) == 49
    assert {plan.part for plan in plans} == {Part.RECORDED, Part.TIMED}
    assert plans[-1].last


def test_a_window_may_fill_the_whole_interval():
    schedule = Schedule(every_n_steps=65, first_step=0)
    assert [schedule.plan(step).window for step in (0, 64, 65, 129, 130)] == [0, 0, 1, 1, 2]


@given(schedules())
def test_both_arms_have_as_many_counted_steps_in_each_part(schedule):
    plans = window_plans(schedule)
    for part, steps in (
        (Part.TIMED, schedule.timed_blocks // 2 * schedule.steps_per_block),
        (Part.PROFILED, schedule.profiled_steps),
    ):
        assert Counter(counted_arms(plans, part)) == Counter({O: steps, S: steps})


@pytest.mark.parametrize("blocks", ["OSSO", "SOOS"])
def test_in_a_balanced_order_linear_drift_cancels(blocks):
    for part in (Part.TIMED, Part.PROFILED):
        plans = [plan for plan in window_plans(Schedule(blocks=blocks)) if plan.part is part and plan.counted]
        mean_offset = {arm: np.mean([plan.offset for plan in plans if plan.arm is arm]) for arm in Mode}
        assert mean_offset[O] == mean_offset[S]


@given(schedules())
def test_the_first_steps_after_each_change_of_block_are_warm_up_and_never_count(schedule):
    previous, since_change = None, 0
    for plan in window_plans(schedule):
        since_change = since_change + 1 if (plan.part, plan.block) == previous else 0
        previous = (plan.part, plan.block)
        if plan.part is not Part.RECORDED:
            assert plan.counted == (since_change >= schedule.warmup_steps)


# -- control


def test_a_control_window_runs_all_overlapped_but_keeps_its_arms():
    real, control = window_plans(Schedule()), window_plans(Schedule(control=True))
    assert {plan.mode for plan in control} == {O}
    assert [plan.arm for plan in control] == [plan.arm for plan in real]
    assert [(p.part, p.block, p.counted, p.last) for p in control] == [
        (p.part, p.block, p.counted, p.last) for p in real
    ]


# -- purity


@given(schedules(), st.integers(0, 400))
def test_a_fresh_schedule_of_the_same_configuration_has_the_same_plan(schedule, step):
    fresh = Schedule(**schedule.as_dict())
    assert fresh == schedule
    assert fresh.plan(step) == schedule.plan(step)
    assert fresh.next_window_step(step) == schedule.next_window_step(step)


def test_a_job_that_resumes_in_the_middle_of_a_window_goes_on_where_it_was():
    whole = Schedule()
    planned = {step: whole.plan(step) for step in range(1200)}
    resumed = Schedule()  # asked for nothing before step 547, and then backwards too
    assert [resumed.plan(step) for step in range(547, 1200)] == [planned[step] for step in range(547, 1200)]
    assert resumed.plan(30) == planned[30]
    assert resumed.plan(547).window == 1
    assert resumed.plan(547).offset == 27


@given(schedules(), st.integers(0, 5))
def test_every_window_is_the_first_one_again_but_for_its_number(schedule, number):
    def without_number(plans):
        return [(p.offset, p.part, p.block, p.arm, p.mode, p.counted, p.last) for p in plans]

    plans = window_plans(schedule, number)
    assert {plan.window for plan in plans} == {number}
    assert without_number(plans) == without_number(window_plans(schedule))


@pytest.mark.parametrize("step", [-600, -1, 0, 19])
def test_nothing_is_planned_before_the_first_step(step):
    assert Schedule().plan(step) is None


# -- next window


@given(schedules(), st.integers(0, 500))
def test_the_next_window_is_where_a_search_step_by_step_finds_it(schedule, step):
    assert schedule.next_window_step(step) == first_window_step_by_search(schedule, step)


@pytest.mark.parametrize(
    ("step", "expected"), [(-5, 20), (0, 20), (20, 20), (21, 520), (519, 520), (520, 520), (521, 1020)]
)
def test_the_next_window_of_the_default_schedule(step, expected):
    assert Schedule().next_window_step(step) == expected


# -- configuration

COUNTS = {
    "every_n_steps": 1,
    "first_step": 0,
    "repeats": 1,
    "steps_per_block": 1,
    "warmup_steps": 0,
    "profiled_steps": 0,
}


@pytest.mark.parametrize(("name", "minimum"), COUNTS.items())
def test_a_count_below_its_minimum_is_refused(name, minimum):
    with pytest.raises(ValueError, match=f"^{name} must be at least {minimum}, got {minimum - 1}$"):
        Schedule(**{name: minimum - 1})


@pytest.mark.parametrize("value", [2.0, True, "2", None, np.float64(2), np.True_])
@pytest.mark.parametrize(("name", "minimum"), COUNTS.items())
def test_a_count_that_is_no_whole_number_is_refused(name, minimum, value):
    message = f"{name} must be a whole number of at least {minimum}, got {value!r}"
    with pytest.raises(TypeError, match=re.escape(message)):
        Schedule(**{name: value})


def test_numpy_counts_are_accepted_and_recorded_as_plain_ints():
    schedule = Schedule(every_n_steps=np.int64(300), repeats=np.int32(2), profiled_steps=np.uint8(2))
    assert schedule == Schedule(every_n_steps=300, repeats=2, profiled_steps=2)
    assert {type(schedule.as_dict()[name]) for name in COUNTS} == {int}
    assert schedule.plan(np.int64(20)) == schedule.plan(20)


def test_unknown_letters_are_named_beside_the_allowed_ones():
    with pytest.raises(ValueError, match=r"blocks='OXSO' has unknown letters \['X'\]; allowed are 'O' .* and 'S'"):
        Schedule(blocks="OXSO")
    with pytest.raises(ValueError, match=r"unknown letters \['o', 's'\]"):
        Schedule(blocks="osso")


@pytest.mark.parametrize("blocks", ["OSS", "O", "SS", "", "OOSO"])
def test_blocks_that_are_not_balanced_are_refused(blocks):
    message = f"blocks={blocks!r} must hold as many 'O' as 'S', and at least one of each (say 'OSSO')"
    with pytest.raises(ValueError, match=re.escape(message)):
        Schedule(blocks=blocks)


@pytest.mark.parametrize(("blocks", "kind"), [(["O", "S"], "list"), (None, "NoneType"), (1, "int")])
def test_blocks_that_are_no_string_are_refused(blocks, kind):
    message = f"blocks must be a string of 'O' and 'S', got {blocks!r} (a {kind})"
    with pytest.raises(TypeError, match=re.escape(message)):
        Schedule(blocks=blocks)


@pytest.mark.parametrize("control", [1, 0, "yes", None])
def test_a_control_that_is_no_bool_is_refused(control):
    with pytest.raises(TypeError, match=re.escape(f"control must be True or False, got {control!r}")):
        Schedule(control=control)


def test_a_window_longer_than_the_interval_is_refused_with_both_lengths():
    Schedule(every_n_steps=65)
    with pytest.raises(
        ValueError,
        match=r"every_n_steps=64 is shorter than a window of 65 steps .* give every_n_steps of at least 65",
    ):
        Schedule(every_n_steps=64)


def test_profiled_steps_that_cannot_be_balanced_are_refused():
    message = "profiled_steps=3 must be a multiple of 2, the number of 'O' in blocks='OSSO'"
    with pytest.raises(ValueError, match=re.escape(message)):
        Schedule(profiled_steps=3)
    assert Schedule(blocks="OS", profiled_steps=3).window_steps == 1 + 8 * 3 + 6 * 2


def test_a_schedule_cannot_be_changed():
    with pytest.raises(AttributeError):
        Schedule().repeats = 2


def test_the_record_holds_the_whole_configuration():
    assert Schedule(control=True).as_dict() == {
        "every_n_steps": 500,
        "first_step": 20,
        "repeats": 4,
        "steps_per_block": 2,
        "warmup_steps": 1,
        "profiled_steps": 4,
        "blocks": "OSSO",
        "min_block_seconds": 0.0,
        "control": True,
    }


# -- blocks of a least duration


@pytest.mark.parametrize(
    ("block_s", "step_s", "steps"),
    [(1.0, 0.25, 4), (1.0, 0.3, 4), (1.0, 0.1, 10), (0.3, 0.1, 3), (0.1, 0.25, 2), (0.0, 0.25, 2), (1.0, 0.0, 2)],
)
def test_a_block_has_as_many_steps_as_its_least_duration_takes(block_s, step_s, steps):
    assert Schedule().steps_that_take(block_s, step_s) == steps


def test_longer_blocks_still_fit_into_the_interval():
    schedule = Schedule(every_n_steps=100, first_step=0)
    steps = schedule.steps_that_take(1.0, 0.01)
    assert schedule.stretched(steps).window_steps <= 100
    with pytest.raises(ValueError, match="every_n_steps"):
        schedule.stretched(steps + 1)


@pytest.mark.parametrize("blocks", ["OSSO", "OOSS", "SOOS", "SO"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 3])
def test_a_window_is_the_same_up_to_the_step_that_decides_on_its_length(blocks, warmup_steps):
    schedule = Schedule(every_n_steps=1000, blocks=blocks, warmup_steps=warmup_steps)
    longer = schedule.stretched(7)
    first = schedule.first_step
    for step in range(first, first + schedule.decided_by):
        assert longer.plan(step) == schedule.plan(step)
    # And no sequential step comes before it.
    assert all(schedule.plan(first + i).mode is Mode.OVERLAPPED for i in range(schedule.decided_by))


@pytest.mark.parametrize(("value", "error"), [(-0.1, ValueError), (math.inf, ValueError), ("1", TypeError)])
def test_a_wrong_least_duration_is_refused_by_name(value, error):
    with pytest.raises(error, match="min_block_seconds must be a"):
        Schedule(min_block_seconds=value)
