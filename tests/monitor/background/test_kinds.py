"""Counted steps are classified by what they communicate, and compared within their kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.gate.collectives import Collective, Group
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.monitor.background.kinds import StepKinds, kinds_of
from overlap_callbacks.monitor.schedule import Part, Plan
from overlap_callbacks.monitor.window import MeasuredStep

GROUP = Group("0", "", (0, 1), "gloo")


def issuing(
    seen: int,
    mode: str = "O",
    *,
    issued: int | None = None,
    size: int = 4,
    part: Part = Part.TIMED,
    operator: str = "allreduce_",
    counted: bool = True,
) -> MeasuredStep:
    """A step that issued so many collectives of a size, as far as the gate saw; ``issued`` on all threads."""
    arm = Mode.OVERLAPPED if mode == "O" else Mode.SEQUENTIAL
    collectives = (Collective(operator, GROUP, size, size, None, 0, -1, 0, 0),) * seen
    log = StepLog(collectives, 0, None, issued=seen if issued is None else issued)
    return MeasuredStep(plan=Plan(0, 0, part, 0, arm, arm, True, False), start=0, end=1, log=log, counted=counted)


def window(overlapped: Sequence[int], sequential: Sequence[int], **options: object) -> list[MeasuredStep]:
    return [
        issuing(number, mode, **options)  # type: ignore[arg-type]
        for mode, numbers in (("O", overlapped), ("S", sequential))
        for number in numbers
    ]


def kinds_in_order(found: StepKinds) -> list[int]:
    return [found.of_steps[index] for index in sorted(found.of_steps)]


def test_steps_that_all_issue_the_same_are_of_one_kind_and_nothing_is_said() -> None:
    found = kinds_of(window([4] * 4, [4] * 4))
    assert (kinds_in_order(found), found.left_out, found.notes) == ([0] * 8, frozenset(), ())
    assert kinds_of([]) == StepKinds({})


def test_kinds_that_both_modes_have_are_compared_with_each_other_and_named() -> None:
    found = kinds_of(window([12, 12, 12, 3], [3, 12, 12, 12]))
    assert kinds_in_order(found) == [0, 0, 0, 1, 1, 0, 0, 0]
    assert found.left_out == frozenset()
    assert found.notes == (
        "the job has 2 kinds of steps: 6 with 12 collectives, 2 with 3 collectives; both were measured in both modes "
        "and compared like with like [OC336]",
    )


def test_the_period_of_a_kind_is_reported_only_if_it_recurs() -> None:
    def numbered(eights: Sequence[int]) -> list[MeasuredStep]:
        steps = [(number, "OS"[number // 3 % 2], 8 if number in eights else 4) for number in range(100, 148)]
        return [replace(issuing(seen, mode), number=number) for number, mode, seen in steps]

    found = kinds_of(numbered(range(103, 148, 4)))
    assert "36 with 4 collectives, 12 with 8 collectives (every 4th step); both" in found.notes[0]
    assert found.names == {0: "4 collectives", 1: "8 collectives (every 4th step)"}
    # The same number of steps, but not always at the same distance; and too few to tell.
    for eights in ((101, 105, 107, 112, 120, 131), (101, 131)):
        assert "(every" not in kinds_of(numbered(eights)).notes[0]


def test_what_a_kind_costs_is_the_mean_of_both_modes() -> None:
    found = kinds_of(window([4, 4, 4, 8], [4, 4, 4, 8]))
    of_modes = [(0, Mode.OVERLAPPED, 100.0), (0, Mode.SEQUENTIAL, 120.0), (1, Mode.OVERLAPPED, 130.0)]
    assert found.costs(of_modes) == ()  # the sequential steps have none of it
    assert found.costs([*of_modes, (1, Mode.SEQUENTIAL, 160.0)]) == (
        "a step with 8 collectives takes 35.00 ms longer than one with 4 collectives [OC339]",
    )
    assert found.costs([(kind, mode, 200 - ms) for kind, mode, ms in [*of_modes, (1, Mode.SEQUENTIAL, 160.0)]]) == (
        "a step with 8 collectives takes 35.00 ms less than one with 4 collectives [OC339]",
    )


def test_the_order_of_collectives_distinguishes_kinds_too() -> None:
    steps = [*window([4, 4], [4, 4]), *window([4], [4], operator="broadcast_")]
    assert kinds_in_order(kinds_of(steps)) == [0, 0, 0, 0, 1, 1]


def test_a_kind_that_one_mode_lacks_is_left_out_with_the_numbers_by_mode() -> None:
    found = kinds_of(window([4, 4, 8, 8], [4, 4, 4, 4]))
    assert found.left_out == {2, 3}
    assert found.notes[0].startswith(
        "the job has 2 kinds of steps: 6 with 4 collectives, 2 with 8 collectives; left out, because the other mode "
        "had none of their kind: 2 overlapped steps of the timed part"
    )


def test_the_parts_of_a_window_are_looked_at_apart() -> None:
    timed, profiled = window([4, 8], [4, 8]), window([4, 4], [4, 8], part=Part.PROFILED)
    found = kinds_of([*timed, *profiled])
    assert found.left_out == {7}
    assert "1 sequential step of the profiled part" in found.notes[0]


def test_kinds_beyond_the_limit_of_a_window_are_left_out_and_reported() -> None:
    numbers = [10] * 6 + [20] * 5 + [40] * 4 + [80] * 3 + [160] * 2
    found = kinds_of(window(numbers, numbers))
    assert Counter(found.of_steps.values()) == {0: 12, 1: 10, 2: 8, 3: 6}
    assert found.left_out == {18, 19, 38, 39}
    assert found.notes[1] == "4 steps of the rarer kinds are left out: a window tells 4 kinds of steps apart [OC338]"


def test_steps_without_collectives_are_a_kind() -> None:
    assert kinds_in_order(kinds_of(window([0, 0, 0, 5], [0, 0, 0, 5]))) == [0, 0, 0, 1, 0, 0, 0, 1]


def test_a_few_more_collectives_make_no_difference_where_the_other_mode_lacks_them() -> None:
    found = kinds_of(window([8, 8, 9, 8], [8] * 4))  # a job's logging adds one
    assert (kinds_in_order(found), found.notes) == ([0] * 8, ())
    # But many more do, and so do other collectives.
    assert kinds_of(window([8, 8, 11, 8], [8] * 4)).left_out == {2}
    others = [*window([8] * 4, [8] * 4), issuing(9, "S", operator="broadcast_")]
    assert kinds_of(others).left_out == {8}


@pytest.mark.parametrize(
    ("numbers", "left_out"),
    [
        ([(1, 3), (1, 3), (3, 3), (3, 3)], set()),  # a hook's callbacks run on this thread, or on another
        ([(1, 3), (6, 6), (3, 3), (3, 3)], {1}),
        ([(1, 3), (3, 6), (3, 3), (6, 6)], set()),  # both kinds are in both modes
        ([(4, 4), (4, 40), (4, 4), (4, 4)], set()),  # another thread's collectives are no part of the step
    ],
)
def test_what_hooks_issue_on_other_threads_makes_no_kind(numbers: list[tuple[int, int]], left_out: set[int]) -> None:
    steps = [issuing(seen, mode, issued=issued) for (seen, issued), mode in zip(numbers, "OOSS", strict=True)]
    assert kinds_of(steps).left_out == left_out


def test_sizes_distinguish_kinds_if_they_recur_in_both_modes() -> None:
    small, large = window([4, 4], [4, 4]), window([4, 4], [4, 4], size=4_000_000)
    found = kinds_of([*small, *large])
    assert kinds_in_order(found) == [0] * 4 + [1] * 4
    assert "4 with 4 collectives of 16 B, 4 with 4 collectives of 15.3 MiB" in found.notes[0]
    # Where data make the sizes, hardly any comes twice.
    drawn = [issuing(4, mode, size=size) for size, mode in enumerate("OSOSOS")]
    assert kinds_in_order(kinds_of(drawn)) == [0] * 6


def test_an_arm_that_issues_other_collectives_is_compared_kind_by_kind() -> None:
    # One bucket where the job as configured has four.
    found = kinds_of(window([4, 4, 4, 8], [1, 1, 1, 2]))
    assert (kinds_in_order(found), found.left_out) == ([0, 0, 0, 1] * 2, frozenset())
    # If the numbers of kinds differ, the commonest are compared.
    found = kinds_of(window([4, 4, 4, 8], [1, 1, 1, 1]))
    assert (kinds_in_order(found), found.left_out) == ([0] * 7, {3})


def test_steps_that_do_not_count_make_no_kind() -> None:
    steps = [*window([4, 4], [4, 4]), issuing(9, counted=False), issuing(9, "S", counted=False)]
    assert set(kinds_of(steps).of_steps.values()) == {0}


def test_a_window_that_has_one_mode_only_leaves_nothing_out() -> None:
    assert kinds_of(window([4, 4, 8], [])).left_out == frozenset()


def test_steps_with_other_numbers_of_micro_batches_are_of_other_kinds_if_an_adapter_counts_them() -> None:
    def accumulating(micro_batches: int, mode: str) -> MeasuredStep:
        step = issuing(4, mode)
        return replace(step, log=replace(step.log, micro_batches=micro_batches))

    steps = [accumulating(*of) for of in ((2, "O"), (2, "O"), (1, "O"), (2, "S"), (2, "S"), (1, "S"))]
    found = kinds_of(steps)
    assert kinds_in_order(found) == [0, 0, 1] * 2
    assert (
        "4 with 4 collectives of 16 B in 2 micro-batches, 2 with 4 collectives of 16 B in 1 micro-batch;"
        in (found.notes[0])
    )
    assert kinds_of(steps[:-1]).left_out == {2}
