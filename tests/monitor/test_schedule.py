from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.monitor.placement import PERIODS, PhaseBalance
from overlap_callbacks.monitor.schedule import Part, Placement, Plan, Schedule

O, S = Mode.OVERLAPPED, Mode.SEQUENTIAL  # noqa: E741 - as the blocks are written


def placed(schedule: Schedule, number: int = 0) -> Schedule:
    """The schedule of a run's first window, placed as if it had this number."""
    first_step = schedule.first_step + number * schedule.every_n_steps
    return schedule.placed(PhaseBalance().place(schedule, first_step, "", schedule.steps_per_block))


def window_plans(schedule: Schedule, number: int = 0) -> list[Plan]:
    """The steps of a window that have a plan."""
    start = schedule.first_step + number * schedule.every_n_steps
    window = placed(schedule, number)
    plans = [window.plan(step) for step in range(start, start + schedule.every_n_steps)]
    return [plan for plan in plans if plan is not None]


def of_part(schedule: Schedule, part: Part) -> list[Plan]:
    return [plan for plan in window_plans(schedule) if plan.part is part]


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


def test_the_parts_of_the_default_windows_and_where_the_first_ones_lie():
    # 8 recorded, 8 while the order is checked, 24 around, 16 blocks x (1 warm-up + 2 counted), 24 around, 8 x (1 + 1)
    schedule = Schedule()
    assert schedule.window_steps == 1 + 16 * 3 + 8 * 2 == 65  # what a window needs
    assert (schedule.recorded_steps, schedule.decided_at, schedule.steps_around(2)) == (8, 16, 24)
    window = placed(schedule)
    by_part = {part: [step for step in range(500) if (p := window.plan(step)) and p.part is part] for part in Part}
    assert by_part == {
        Part.RECORDED: [*range(20, 28)],
        Part.AROUND: [*range(36, 60), *range(108, 132)],
        Part.TIMED: [*range(60, 108)],
        Part.LONG: [],
        Part.DELAYED: [],
        Part.PROFILED: [*range(132, 148)],
    }


def test_until_its_parts_are_placed_a_window_has_recorded_steps_alone():
    schedule = Schedule()
    assert [step for step in range(1500) if schedule.plan(step) is not None] == [
        *range(20, 28),
        *range(520, 528),
        *range(1020, 1028),
    ]


def test_steps_of_no_block_are_overlapped_and_never_count():
    for plan in window_plans(Schedule()):
        if plan.part in (Part.RECORDED, Part.AROUND):
            assert (plan.block, plan.arm, plan.mode, plan.counted) == (-1, O, O, False)


def test_the_last_step_of_a_window_is_the_last_one_with_a_plan():
    for schedule in (Schedule(), Schedule(profiled_steps=0)):
        assert [plan.last for plan in window_plans(schedule)] == [False] * (len(window_plans(schedule)) - 1) + [True]


def test_timed_blocks_alternate_and_are_turned_in_the_middle_with_one_warm_up_step_then_two_counted():
    timed = of_part(Schedule(), Part.TIMED)
    assert [plan.block for plan in timed] == [block for block in range(16) for _ in range(3)]
    assert [plan.counted for plan in timed] == [False, True, True] * 16
    assert [plan.mode for plan in timed[::3]] == [O, S] * 4 + [S, O] * 4
    assert all(plan.mode is plan.arm for plan in timed)


def test_profiled_blocks_alternate_and_are_turned_in_the_middle_with_one_warm_up_step_then_one_counted():
    profiled = of_part(Schedule(), Part.PROFILED)
    assert [plan.block for plan in profiled] == [block for block in range(8) for _ in range(2)]
    assert [plan.counted for plan in profiled] == [False, True] * 8
    assert [plan.mode for plan in profiled[::2]] == [O, S, O, S, S, O, S, O]


def test_a_part_that_is_swapped_has_every_mode_the_other_way_round():
    schedule = Schedule()
    for part in (Part.TIMED, Part.PROFILED):
        plain, swapped = schedule.part(part), schedule.part(part, swapped=True)
        assert [plan.arm for plan in swapped] == [S if plan.arm is O else O for plan in plain]
        assert [(plan.block, plan.counted) for plan in swapped] == [(plan.block, plan.counted) for plan in plain]


@pytest.mark.parametrize(
    ("blocks", "order"),
    [
        ("OSSO", "OSOSOSSOSOSO"),
        ("SOOS", "SOSOSOOSOSOS"),
        ("OS", "OSOSOS"),
        ("OOSS", "OOSSOOSSOOSS"),
        ("OSSOOSSOOS", None),
    ],
)
def test_the_halves_of_an_order_are_repeated_one_after_the_other_if_each_is_balanced(blocks, order):
    plans = Schedule(blocks=blocks, repeats=3, warmup_steps=0, steps_per_block=1, profiled_steps=0).part(Part.TIMED)
    assert "".join("O" if plan.arm is O else "S" for plan in plans) == (order or blocks * 3)


def test_other_blocks_and_counts_give_the_window_written_out_here():
    schedule = Schedule(
        every_n_steps=40, first_step=3, blocks="SO", repeats=2, steps_per_block=1, warmup_steps=2, profiled_steps=1
    )
    laid_out = "".join(
        {Part.RECORDED: "r", Part.AROUND: "b", Part.TIMED: "t", Part.PROFILED: "p"}[plan.part]
        + ("o" if plan.mode is O else "s")
        + ("1 " if plan.counted else "0 ")
        for plan in window_plans(schedule)
    )
    timed = "ts0 ts0 ts1 to0 to0 to1 "
    assert laid_out == "ro0 " * 2 + timed + timed + "ps0 ps0 ps1 po0 po0 po1 "


def test_without_warm_up_every_step_of_a_block_counts():
    schedule = Schedule(warmup_steps=0)
    assert schedule.window_steps == 1 + 16 * 2 + 8
    assert all(plan.counted for part in (Part.TIMED, Part.PROFILED) for plan in of_part(schedule, part))


def test_no_profiled_steps_means_no_profiled_part():
    assert {plan.part for plan in window_plans(Schedule(profiled_steps=0))} == {Part.RECORDED, Part.AROUND, Part.TIMED}


def test_a_window_may_fill_the_whole_interval():
    schedule = placed(Schedule(every_n_steps=65, first_step=0))
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
        plans = [plan for plan in of_part(Schedule(blocks=blocks), part) if plan.counted]
        mean_offset = {arm: np.mean([plan.offset for plan in plans if plan.arm is arm]) for arm in Mode}
        assert mean_offset[O] == mean_offset[S]


@given(schedules())
def test_the_first_steps_after_each_change_of_block_are_warm_up_and_never_count(schedule):
    previous, since_change = None, 0
    for plan in window_plans(schedule):
        since_change = since_change + 1 if (plan.part, plan.block) == previous else 0
        previous = (plan.part, plan.block)
        if plan.part in (Part.TIMED, Part.PROFILED):
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
    assert placed(fresh).plan(step) == placed(schedule).plan(step)
    assert fresh.next_window_step(step) == schedule.next_window_step(step)


def test_a_job_that_resumes_in_the_middle_of_a_window_goes_on_where_it_was():
    whole, resumed = placed(Schedule()), placed(Schedule())
    planned = {step: whole.plan(step) for step in range(1200)}
    # Asked for nothing before step 547, and then backwards too.
    assert [resumed.plan(step) for step in range(547, 1200)] == [planned[step] for step in range(547, 1200)]
    assert resumed.plan(30) == planned[30]
    assert (resumed.plan(560).window, resumed.plan(560).offset) == (1, 40)


@given(schedules(), st.integers(0, 5))
def test_every_window_equals_the_first_except_for_its_number(schedule, number):
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
def test_a_count_that_is_not_an_integer_is_refused(name, minimum, value):
    message = f"{name} must be a whole number of at least {minimum}, got {value!r}"
    with pytest.raises(TypeError, match=re.escape(message)):
        Schedule(**{name: value})


def test_numpy_counts_are_accepted_and_recorded_as_plain_ints():
    schedule = Schedule(every_n_steps=np.int64(300), repeats=np.int32(2), profiled_steps=np.uint8(2))
    assert schedule == Schedule(every_n_steps=300, repeats=2, profiled_steps=2)
    assert {type(schedule.as_dict()[name]) for name in COUNTS} == {int}
    assert schedule.plan(np.int64(20)) == schedule.plan(20)


def test_unknown_letters_are_named_with_the_allowed_ones():
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


@pytest.mark.parametrize("name", ["control", "spread"])
@pytest.mark.parametrize("given", [1, 0, "yes", None])
def test_a_switch_that_is_not_a_bool_is_refused(name, given):
    with pytest.raises(TypeError, match=re.escape(f"{name} must be True or False, got {given!r}")):
        Schedule(**{name: given})


def test_a_window_that_is_not_spread_takes_no_more_steps_than_it_must_however_much_room_there_is():
    schedule = Schedule(every_n_steps=1000, spread=False)
    window = placed(schedule)
    plans = [window.plan(step) for step in range(20, 20 + schedule.window_steps + 1)]
    assert [plan.part for plan in plans[:-1]] == [Part.RECORDED] + [Part.TIMED] * 48 + [Part.PROFILED] * 16
    assert plans[-2].last
    assert plans[-1] is None
    assert schedule.is_decided_at(21)
    balance = PhaseBalance()
    assert balance.place(schedule, 20, "", 2) == balance.place(schedule, 1020, "", 2)


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
        "spread": True,
    }


# -- blocks of a least duration


@pytest.mark.parametrize(
    ("block_s", "step_s", "steps"),
    [(1.0, 0.25, 4), (1.0, 0.3, 4), (1.0, 0.1, 10), (0.3, 0.1, 3), (0.1, 0.25, 2), (0.0, 0.25, 2), (1.0, 0.0, 2)],
)
def test_a_block_has_as_many_steps_as_its_least_duration_takes(block_s, step_s, steps):
    assert Schedule().steps_that_take(block_s, step_s) == steps


@pytest.mark.parametrize("every_n_steps", [65, 66, 100, 200, 500, 1000])
def test_longer_blocks_still_fit_into_the_interval(every_n_steps):
    schedule = Schedule(every_n_steps=every_n_steps, first_step=0)
    for steps in range(2, schedule.steps_that_take(1.0, 0.0001) + 1):
        placement = PhaseBalance().place(schedule, 0, "", steps)
        window = schedule.placed(placement)
        plans = [plan for step in range(every_n_steps) if (plan := window.plan(step)) is not None]
        assert sum(plan.counted for plan in plans if plan.part is Part.TIMED) == 16 * steps
        assert plans[-1].last
    assert schedule.spare_steps(steps + 1) < 0


@pytest.mark.parametrize("blocks", ["OSSO", "OOSS", "SOOS", "SO"])
@pytest.mark.parametrize("every_n_steps", [100, 1000])
def test_a_window_is_the_same_up_to_the_step_that_depends_on_the_ruling(blocks, every_n_steps):
    schedule = Schedule(every_n_steps=every_n_steps, blocks=blocks)
    first = schedule.first_step
    decided = first + schedule.decided_at
    assert [step for step in range(first, first + every_n_steps) if schedule.is_decided_at(step)] == [decided]
    start = schedule.decided_at + schedule.steps_around(2)
    for swapped in (False, True):
        window = schedule.placed(Placement(start, start + 60, swapped, swapped, 2))
        assert [window.plan(step) for step in range(first, decided)] == [
            schedule.plan(step) for step in range(first, decided)
        ]


# -- where windows lie


def worst_points(schedule: Schedule, distances: list[int]) -> dict[int, tuple[float, float]]:
    """By number of windows: how far a step that takes 50 % longer biases the difference of the modes, at most.

    In points, of the timed part and of the profiled part, over all periods and phases; counted from the plans.
    """
    balance, step, found = PhaseBalance(), schedule.first_step, {}
    hits = {part: {k: np.zeros(k) for k in PERIODS} for part in (Part.TIMED, Part.PROFILED)}
    for number, distance in enumerate(distances, 1):
        window = schedule.placed(balance.place(schedule, step, "", schedule.steps_per_block))
        base = schedule.first_step  # plans are asked for by their offset: windows differ in their placement alone
        plans = [plan for offset in range(schedule.every_n_steps) if (plan := window.plan(base + offset)) is not None]
        for part, by_period in hits.items():
            counted = [plan for plan in plans if plan.part is part and plan.counted]
            steps = step + np.array([plan.offset for plan in counted])
            signs = np.array([1.0 if plan.arm is S else -1.0 for plan in counted]) * 2 / len(counted)
            for k in PERIODS:
                by_period[k] += np.bincount(steps % k, weights=signs, minlength=k)
        found[number] = tuple(
            50 * max(float(np.abs(by_phase).max()) for by_phase in hits[part].values()) / number for part in hits
        )
        step += distance * schedule.every_n_steps
    return found


SKIPPED = {
    "none": lambda rng: 1,
    "every second": lambda rng: 2,
    "at random": lambda rng: int(rng.integers(1, 6)),
}


@pytest.mark.parametrize("skipped", SKIPPED)
@pytest.mark.parametrize("every_n_steps", [100, 200, 500, 1000])
def test_no_rhythm_of_the_job_meets_one_mode_more_often_than_the_other(every_n_steps, skipped):
    rng = np.random.default_rng(every_n_steps)
    distances = [SKIPPED[skipped](rng) for _ in range(24)]
    found = worst_points(Schedule(every_n_steps=every_n_steps), distances)
    for windows, timed, profiled in ((1, 12.5, 25), (12, 2.4, 5.25), (24, 1.31, 3.13)):
        assert found[windows][0] <= timed
        assert found[windows][1] <= profiled


def test_a_long_block_of_each_mode_lies_between_the_timed_steps_and_the_steps_around_them() -> None:
    schedule = Schedule()
    most = schedule.most_long_steps(2)
    placement = PhaseBalance().place(schedule, 20, "", 2, most)
    window = schedule.placed(placement)
    plans = [plan for step in range(20, 520) if (plan := window.plan(step)) is not None]
    long = [plan for plan in plans if plan.part is Part.LONG]
    assert [(plan.mode, plan.counted) for plan in long] == [
        (mode, place > 0) for mode in (O, S) for place in range(1 + most)
    ]
    offsets = [plan.offset for plan in long]
    assert offsets == list(range(placement.timed_start + 48, placement.timed_start + 48 + 2 * (1 + most)))
    around = [plan.offset for plan in plans if plan.part is Part.AROUND]
    assert around[:24] == list(range(placement.timed_start - 24, placement.timed_start))
    assert around[24:] == list(range(offsets[-1] + 1, offsets[-1] + 25))
    assert plans[-1].last
    assert max(plan.offset for plan in plans) < 500
    assert window.plan(20 + 500).part is Part.RECORDED


def test_a_window_alone_is_balanced_for_short_periods():
    counted = [plan for plan in of_part(Schedule(), Part.TIMED) if plan.counted]
    for period in (2, 3, 4, 6, 8, 12):
        for phase in range(period):
            hit = Counter(plan.arm for plan in counted if plan.offset % period == phase)
            assert hit[O] == hit[S]


def test_windows_of_each_arm_are_balanced_on_their_own():
    """Arms that come in turn would else each have windows of one phase."""
    schedule, balance = Schedule(), PhaseBalance()
    alone = PhaseBalance()
    for window in range(8):
        step = schedule.first_step + window * schedule.every_n_steps
        placement = balance.place(schedule, step, "ab"[window % 2], 2)
        if window % 2 == 0:
            assert placement == alone.place(schedule, step, "a", 2)


@pytest.mark.parametrize(("value", "error"), [(-0.1, ValueError), (math.inf, ValueError), ("1", TypeError)])
def test_a_wrong_least_duration_is_refused_by_name(value, error):
    with pytest.raises(error, match="min_block_seconds must be a"):
        Schedule(min_block_seconds=value)
