"""Ranks that do not measure the same steps in the same modes are named, and nothing is reported of their windows."""

from __future__ import annotations

from typing import Any

import pytest

from overlap_callbacks import Schedule
from overlap_callbacks.gate.deadlock import CollectiveSequence, Item
from overlap_callbacks.gate.switches import OverlapSwitch
from overlap_callbacks.monitor.background.submissions import (
    GroupNote,
    OrderMessage,
    RecordedKinds,
    Submission,
    WindowConfig,
    config_mismatch,
    step_mismatch,
)
from tests.distributed import captured_log, run_ranks
from tests.gate.sequences import collective, order, receive, send
from tests.monitor.jobs import KeptReports, Training, digest_without_library, new_monitor, tiny_schedule
from tests.toggling import at_night

NUM_STEPS = 122


def train(rank: int, options: list[dict[str, Any]], late_by: list[int], native: list[bool]) -> dict[str, Any]:
    """Each rank has a schedule of its own, and begins to count its steps at a step of its own."""
    schedule = tiny_schedule(**{"every_n_steps": 40, **options[rank]})
    sink, training = KeptReports(), Training(rank)
    monitor = new_monitor(sink, schedule=schedule, order_timeout_s=10.0, report_timeout_s=10.0)
    if native[rank]:
        monitor.use_native(OwnSwitch())
    with captured_log() as lines:
        for step in range(NUM_STEPS):
            if step < late_by[rank]:
                training.step()
                continue
            with monitor.step(step - late_by[rank]):
                training.step()
        active = monitor.active
        monitor.close()
    return {
        "lines": lines,
        "active": active,
        "reports": sink.facts(),
        "same": training.digest() == digest_without_library(rank, NUM_STEPS),
    }


class OwnSwitch(OverlapSwitch):
    name = "of a test"

    def disable(self) -> None:
        pass

    def restore(self) -> None:
        pass


def run_unlike(
    *options: dict[str, Any], late_by: tuple[int, int] = (0, 0), native: tuple[bool, bool] = (False, False)
) -> list[dict[str, Any]]:
    return run_ranks(train, 2, list(options), list(late_by), list(native))


UNLIKE = [
    ({}, {"blocks": "SOOS"}, "rank 1 with blocks='SOOS' (rank 0: 'OSSO')"),
    ({"blocks": "SOOS"}, {}, "rank 1 with blocks='OSSO' (rank 0: 'SOOS')"),
    ({}, {"steps_per_block": 2}, "rank 1 with steps_per_block=2 (rank 0: 1)"),
    ({}, {"warmup_steps": 1}, "rank 1 with warmup_steps=1 (rank 0: 0)"),
    ({}, {"profiled_steps": 2}, "rank 1 with profiled_steps=2 (rank 0: 0)"),
    ({}, {"every_n_steps": 41}, "rank 1 with every_n_steps=41 (rank 0: 40)"),
    ({}, {"first_step": 3}, "rank 1 with first step of the window=3 (rank 0: 2), first_step=3 (rank 0: 2)"),
    ({}, {"control": True}, "rank 1 with control=True (rank 0: False)"),
    ({"control": True}, {}, "rank 1 with control=False (rank 0: True)"),
    ({"control": True}, {"control": True, "blocks": "SOOS"}, "rank 1 with blocks='SOOS' (rank 0: 'OSSO')"),
]


# Each option is a field of the same comparison.
@pytest.mark.parametrize(("first", "second", "named"), at_night(UNLIKE, [UNLIKE[n] for n in (1, 2, 3, 5, 8)]))
def test_a_rank_with_other_options_is_named_and_nothing_is_measured(
    first: dict[str, Any], second: dict[str, Any], named: str
) -> None:
    found = run_unlike(first, second)
    for rank in found:
        (line,) = rank["lines"]
        assert named in line
        assert not rank["active"]
        assert rank["reports"] == []
        assert rank["same"]


def test_a_rank_with_another_form_of_sequential_mode_is_named() -> None:
    for rank in run_unlike({}, {}, native=(False, True)):
        (line,) = rank["lines"]
        assert "rank 1 with sequential='of a test' (rank 0: 'gate')" in line
        assert rank["reports"] == []


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("late_by", [(0, 1), (1, 0)])
def test_a_rank_whose_window_begins_at_another_step_of_the_job_is_named_and_its_windows_are_left_out(
    control: bool, late_by: tuple[int, int]
) -> None:
    found = run_unlike({"control": control}, {"control": control}, late_by=late_by)
    for rank in found:
        (line,) = rank["lines"]  # once, for all windows
        assert "rank 1 recorded another step of the job than rank 0" in line
        assert rank["active"]
        assert rank["reports"] == []
        assert rank["same"]


@pytest.mark.parametrize("control", [False, True])
def test_ranks_that_agree_are_measured(control: bool) -> None:
    found = run_unlike({"control": control}, {"control": control}, late_by=(3, 3))
    assert [rank["lines"] for rank in found] == [[], []]
    reports = found[0]["reports"]
    assert len(reports) == 3
    assert all(report["complete"] and report["ranks"] == [0, 1] for report in reports)


# -- the comparison alone

THREE = {"a": (0, 1, 2), "p2p": (0, 1, 2)}


def messages(orders: list[CollectiveSequence], *counts: dict[str, int]) -> list[Submission]:
    return [
        Submission(OrderMessage((), counts=of_rank, groups=GroupNote.of(RecordedKinds((order,)))), [(rank, rank)])
        for rank, (order, of_rank) in enumerate(zip(orders, counts, strict=True))
    ]


def sequences(*of_rank: list[Item]) -> list[CollectiveSequence]:
    return [order(*items, groups=THREE) for items in of_rank]


ALIKE = sequences(*[[collective("a")]] * 3)


def test_equal_or_missing_counts_are_no_difference() -> None:
    assert step_mismatch(messages(ALIKE, {"a": 3}, {"a": 3}, {})) is None


def test_a_rank_with_another_count_is_named_with_the_group() -> None:
    found = step_mismatch(messages(ALIKE, {"a": 3, "other": 1}, {"a": 3, "other": 2}, {"a": 7}))
    assert found is not None
    assert found.startswith("rank 2 recorded another step of the job than rank 0: 7 collectives")
    assert "'a'" in found


def test_counts_of_a_group_with_sends_and_receives_prove_nothing() -> None:
    exchange = [collective("p2p"), send(0, 1)], [collective("p2p"), receive(0, 1)], [collective("p2p")]
    assert step_mismatch(messages(sequences(*exchange), {"p2p": 3}, {"p2p": 3}, {"p2p": 2})) is None


def recorded(*numbers: int) -> dict[str, GroupNote]:
    """A rank's log of steps that issued this many collectives on a group."""
    kinds = sorted(set(numbers))
    of_kinds = tuple([order(*[collective("a")] * number, groups=THREE) for number in kinds])
    return GroupNote.of(RecordedKinds(of_kinds, tuple([kinds.index(number) for number in numbers])))


def test_ranks_whose_steps_of_a_kind_come_at_other_places_are_named() -> None:
    def of_ranks(*notes: dict[str, GroupNote], counts: int = 3) -> str | None:
        given = [OrderMessage(("kinds",), counts={"a": 7} if rank < counts else {}, groups=of) for rank, of in
                 enumerate(notes)]  # fmt: skip
        return step_mismatch([Submission(message, [(rank, rank)]) for rank, message in enumerate(given)])

    often, late = recorded(1, 1, 4, 1), recorded(1, 1, 1, 4)
    assert of_ranks(often, often, often) is None
    found = of_ranks(often, often, late)
    assert found == (
        "rank 2 and rank 0 recorded different kinds of steps: collectives per step on group 'a' (ranks 0 to 2) are "
        "1, 1, 1, 4 on rank 2, and 1, 1, 4, 1 on rank 0 [OC204]"
    )
    # Where somebody else communicates on the group, what the gate sees of it varies.
    assert of_ranks(often, often, late, counts=2) is None
    # Other groups are none of a rank's business.
    assert of_ranks(often, often, {}) is None


def test_ranks_that_differ_in_the_same_way_are_named_together() -> None:
    def config(**options: Any) -> WindowConfig:
        return WindowConfig(step=20, options=Schedule(**options).as_dict())

    alike = Submission(OrderMessage((), config=config()), [(0, 0), (2, 2)])
    others = [
        Submission(OrderMessage((name,), config=config(repeats=2)), [(rank, rank)])
        for rank, name in ((3, ""), (1, "b"))
    ]
    given = [alike, *others]
    assert config_mismatch(given) == "ranks 1, 3 with repeats=2 (rank 0: 4)"
    assert config_mismatch([alike]) is None
