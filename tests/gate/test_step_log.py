"""What is kept of a step, and its comparison with the checked sequence."""

from __future__ import annotations

import threading

import pytest

from overlap_callbacks.gate.collectives import Collective, Group
from overlap_callbacks.gate.deadlock import CollectiveSequence, Item
from overlap_callbacks.gate.step_log import ExpectedSequence, SequenceTracker, StepRecorder

GROUPS = {name: Group(name, "", (0, 1), "gloo") for name in ("a", "b")}


def call(operator: str = "allreduce_", group: str = "a", peer: int = -1) -> Collective:
    return Collective(operator, GROUPS[group], 4, 8, None, 0, peer, 0, 17)


# -- recording


def test_a_recorder_gives_the_calls_of_each_step_once_and_counts_those_without_room() -> None:
    recorder = StepRecorder(capacity=2)
    for operator in ("barrier", "broadcast_", "allreduce_"):
        recorder.append(call(operator))
    collectives, dropped = recorder.drain()
    assert ([c.operator for c in collectives], dropped) == (["barrier", "broadcast_"], 1)
    assert recorder.drain() == ((), 0)
    recorder.append(call("gather_"))
    collectives, dropped = recorder.drain()
    assert ([c.operator for c in collectives], dropped) == (["gather_"], 0)


def test_threads_that_record_at_once_lose_no_call() -> None:
    recorder, threads = StepRecorder(capacity=10_000), []
    for _ in range(4):
        threads.append(threading.Thread(target=lambda: [recorder.append(call()) for _ in range(2_000)]))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    collectives, dropped = recorder.drain()
    assert (len(collectives), dropped) == (8_000, 0)


# -- the checked sequence


def test_calls_are_admitted_as_long_as_they_keep_to_the_sequence_and_never_after_they_left_it() -> None:
    tracker = SequenceTracker(ExpectedSequence([("allreduce_", "a"), ("barrier", "b"), ("allreduce_", "a")]))
    assert tracker.admits(call("allreduce_", "a"))
    assert tracker.divergence is None
    assert not tracker.admits(call("broadcast_", "b"))
    assert not tracker.admits(call("allreduce_", "a"))  # at its place again, but too late
    assert str(tracker.divergence) == (
        "collective 1 of the step was broadcast_ on group 'b', where the checked sequence has barrier on 'b'"
    )


def test_a_call_beyond_the_end_of_the_sequence_is_not_admitted() -> None:
    tracker = SequenceTracker(ExpectedSequence())
    assert not tracker.admits(call())
    assert "no further collective" in str(tracker.divergence)


@pytest.mark.parametrize(
    ("operator", "group", "admitted"), [("barrier", "a", True), ("barrier", "b", False), ("send", "a", False)]
)
def test_within_the_one_group_of_a_sequence_other_collectives_are_harmless(operator, group, admitted) -> None:
    tracker = SequenceTracker(ExpectedSequence([("allreduce_", "a")], single_group="a"))
    assert tracker.admits(call(operator, group)) is admitted


def test_only_the_batch_that_was_checked_at_its_place_is_admitted() -> None:
    exchange = (("send", "a", 1), ("recv_", "a", 1))
    tracker = SequenceTracker(ExpectedSequence(batches=[exchange]))
    assert tracker.admits_batch(0, [call("send", peer=1), call("recv_", peer=1)])
    assert not tracker.admits_batch(1, [call("send", peer=1), call("recv_", peer=1)])
    assert "another batch" in str(tracker.divergence)
    assert not tracker.admits_batch(0, [call("send", peer=1), call("recv_", peer=1)])


def test_an_empty_batch_that_was_not_checked_is_not_admitted_and_not_a_departure() -> None:
    tracker = SequenceTracker(ExpectedSequence())
    assert not tracker.admits_batch(0, [])
    assert tracker.divergence is None


def test_what_is_expected_is_what_the_checked_sequence_holds() -> None:
    groups = {"a": (0, 1)}
    send = Item("send", "a", source=0, target=1, posted=1)
    assert ExpectedSequence.of([CollectiveSequence((Item("barrier", "a"),), groups)]) == ExpectedSequence(
        (("barrier", "a"),), "a", ()
    )
    assert ExpectedSequence.of([CollectiveSequence((send,), groups)]) == ExpectedSequence(
        (("send", "a"),), None, ((("send", "a", 1),),)
    )


# -- several kinds of steps

DENSE = [("allreduce_", "a"), ("allreduce_", "b"), ("barrier", "a")]
SPARSE = [("allreduce_", "a"), ("barrier", "b")]


def admitted(tracker: SequenceTracker, *keys: tuple[str, str]) -> list[bool]:
    return [tracker.admits(call(*key)) for key in keys]


@pytest.mark.parametrize("keys", [DENSE, SPARSE, DENSE[:1], SPARSE[:0]], ids=str)
def test_a_step_of_any_checked_kind_is_admitted_throughout(keys: list[tuple[str, str]]) -> None:
    for first, other in ((DENSE, SPARSE), (SPARSE, DENSE)):
        tracker = SequenceTracker(ExpectedSequence(first, others=[((), ()), (other, ())]))
        assert all(admitted(tracker, *keys))
        assert tracker.divergence is None


def test_a_step_that_mixes_kinds_leaves_all_of_them_and_is_not_admitted_from_there_on() -> None:
    tracker = SequenceTracker(ExpectedSequence(DENSE, others=[(SPARSE, ())]))
    # Once its second collective is that of one kind, the third must be that kind's too.
    assert admitted(tracker, SPARSE[0], SPARSE[1], DENSE[2], DENSE[0]) == [True, True, False, False]
    assert str(tracker.divergence) == (
        "collective 2 of the step was barrier on group 'a', which none of the 2 checked kinds of steps has there"
    )


def test_batches_of_any_checked_kind_are_admitted_but_no_mixture_of_kinds() -> None:
    def batch(peer: int) -> list[Collective]:
        return [call("send", peer=peer), call("recv_", peer=peer)]

    exchanges = {peer: (("send", "a", peer), ("recv_", "a", peer)) for peer in (1, 2, 3)}
    kinds = ([], [exchanges[1], exchanges[3]]), ([], [exchanges[2], exchanges[1]])
    for peers, admits in (((1, 3), [True, True]), ((2, 1), [True, True]), ((2, 3), [True, False])):
        tracker = SequenceTracker(ExpectedSequence(batches=kinds[0][1], others=[kinds[1]]))
        assert [tracker.admits_batch(number, batch(peer)) for number, peer in enumerate(peers)] == admits


def test_steps_without_collectives_do_not_keep_a_group_from_being_the_only_one() -> None:
    nothing, one = CollectiveSequence((), {}), CollectiveSequence((Item("barrier", "a"),), {"a": (0, 1)})
    other = CollectiveSequence((Item("barrier", "b"),), {"b": (0, 1)})
    assert ExpectedSequence.of([nothing, one]).single_group == "a"
    assert not ExpectedSequence.of([nothing, one]).can_deadlock
    assert ExpectedSequence.of([one, nothing, other]).can_deadlock
    assert ExpectedSequence.of([one, nothing, other]).single_group is None
    assert ExpectedSequence.of([nothing]).single_group is None
