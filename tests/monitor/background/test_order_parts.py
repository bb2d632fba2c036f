"""What ranks hand in to the order check is put together without loss, and what rank 0 does with it is bounded."""

from __future__ import annotations

import random
import threading
import time
from unittest import mock

import pytest
import torch.distributed as dist

from overlap_callbacks.gate.deadlock import CollectiveSequence, PrecedenceGraph, find_conflict
from overlap_callbacks.monitor.background import order_check, submissions
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.order_check import Decision, OrderChecker, Ruling, Verdicts, decide
from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel
from overlap_callbacks.monitor.background.submissions import OrderMessage, RecordedKinds, Submissions, in_step
from tests.gate.sequences import A, B, C, order, receive, send
from tests.margins import near


def message(*kinds: CollectiveSequence) -> OrderMessage:
    return OrderMessage.of(RecordedKinds(kinds))


def part_of(*orders: CollectiveSequence) -> Submissions:
    parts = [Submissions.of(rank, (of_rank,), message(of_rank)) for rank, of_rank in enumerate(orders)]
    random.Random(0).shuffle(parts)
    half = len(parts) // 2
    merged = Submissions.merge([Submissions.merge(parts[:half]), Submissions.merge(parts[half:])])
    return Submissions.decode(merged.encode())


def test_equal_messages_and_sequences_travel_once_and_every_rank_has_its_own() -> None:
    part = part_of(*[order(A, B)] * 5, order(B, A), *[order(A, B)] * 3)
    assert len(part.messages) == len(part.sequences) == 2
    assert [(found.message.kinds, found.runs) for found in part.each()] == [
        ((order(A, B).digest,), [(0, 4), (6, 8)]),
        ((order(B, A).digest,), [(5, 5)]),
    ]
    assert part.runs == [(0, 8)]


def test_groups_whose_collectives_have_the_same_places_on_all_ranks_need_no_search() -> None:
    assert in_step([message(order(A, B, A)), message(order(A, C, A))])
    assert not in_step([message(order(A, B)), message(order(B, A))])
    assert not in_step([message(order(A, send(0, 1))), message(order(A, receive(0, 1)))])


def test_the_quick_search_finds_what_the_whole_one_finds() -> None:
    draw = random.Random(1)
    clear = 0
    for _ in range(300):
        orders = [order(*draw.sample([A, A, B, C], k=draw.randint(1, 4))) for _ in range(3)]
        whole = PrecedenceGraph()
        for rank, of_rank in enumerate(orders):
            whole.add(of_rank, rank)
        assert (find_conflict(dict(enumerate(orders))) is None) == (whole.cycle() is None)
        clear += whole.cycle() is None
    assert 50 < clear < 250


def test_the_same_sequences_are_searched_once() -> None:
    part, verdicts = part_of(order(A, B, B), order(B, A, B)), Verdicts()
    with mock.patch.object(order_check, "find_conflict", wraps=find_conflict) as search:
        assert [decide(part, 2, 1.0, verdicts).decision for _ in range(3)] == [Decision.CONFLICT] * 3
        assert search.call_count == 1
        assert decide(part_of(order(A, A, B), order(A, B)), 2, 1.0, verdicts).decision is Decision.GRANTED
        assert search.call_count == 2


def test_no_two_rulings_have_the_same_name_whatever_their_check_is_called() -> None:
    channel = StoreChannel(Job(0, 1, "gloo"), "prefix", Connection(dist.HashStore))
    names = set()
    for _ in range(3):
        checker = OrderChecker(channel, timeout_s=10.0, budget=WindowBudget(None), on_error=lambda _: None)
        checker.start("window0", RecordedKinds((order(A, B),)), 0)
        names.add(checker.await_ruling().name)
        checker.close(5.0)
    assert len(names - {""}) == 3


@pytest.mark.parametrize("bound", ["MAX_COMPARED", "MAX_SEQUENCE_BYTES"])
def test_more_sequences_than_are_compared_are_refused_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(submissions, bound, 3)
    ruling = decide(part_of(order(A, A, B), order(A, B, A)), 2, 1.0, Verdicts())
    assert ruling.decision is Decision.FAILED
    assert "2 different sequences" in ruling.reason
    # Where all groups are in step, no sequence is needed.
    assert decide(part_of(order(A, B, A), order(A, C, A)), 2, 1.0, Verdicts()).decision is Decision.GRANTED


def test_the_training_thread_does_not_wait_for_a_search_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def search(*_: object) -> Ruling:
        goes_on.wait(30)
        return Ruling(Decision.GRANTED)

    monkeypatch.setattr(order_check, "decide", search)
    channel = StoreChannel(Job(0, 1, "gloo"), "prefix", Connection(dist.HashStore))
    checker = OrderChecker(channel, timeout_s=0.1, budget=WindowBudget(None), on_error=lambda _: None)
    checker.start("first", RecordedKinds((order(A, B),)), 0)
    began_s = time.monotonic()
    ruling = checker.await_ruling()
    assert near(time.monotonic() - began_s, 30.0)
    assert (ruling.decision, ruling.reason) == (Decision.LATE, "the order check was not done within 0.3 s [OC210]")
    assert checker.patience_s == 0.1  # nor for so long again, until a check is done in time
    goes_on.set()
    checker.start("second", RecordedKinds((order(A, B),)), 1)
    checker.patience_s = 30.0
    assert checker.await_ruling().decision is Decision.GRANTED
    assert checker.patience_s == pytest.approx(0.3)
    checker.close(5.0)


# -- several kinds of steps


def decided(*of_rank: tuple[CollectiveSequence, ...], of_steps: tuple[int, ...] = (0, 1)) -> Ruling:
    """Rank 0's ruling on the kinds of some ranks, which have as many kinds each."""
    recorded = [RecordedKinds(kinds, of_steps) for kinds in of_rank]
    parts = [Submissions.of(rank, of.kinds, OrderMessage.of(of)) for rank, of in enumerate(recorded)]
    return decide(Submissions.merge(parts), len(parts), 1.0, Verdicts())


def test_kinds_whose_orders_agree_may_all_be_serialised() -> None:
    ruling = decided((order(A, B), order(A, B, A)), (order(A, B), order(A, B, A)))
    assert (ruling.decision, ruling.only) == (Decision.GRANTED, -1)


def test_of_kinds_whose_orders_contradict_each_other_one_alone_may_be_serialised() -> None:
    both = (order(A, B), order(B, A))
    # No rank knows whether another is in a step of the same kind.
    ruling = decided(both, both)
    assert (ruling.decision, ruling.only) == (Decision.GRANTED, 0)
    assert RecordedKinds(both, (0, 1)).granted(ruling.only) == (order(A, B),)
    # The first of them that communicates.
    quiet = (order(groups={"a": (0, 1)}), *both)
    ruling = decided(quiet, quiet, of_steps=(0, 2, 1))
    assert (ruling.decision, ruling.only) == (Decision.GRANTED, 1)
    assert RecordedKinds(quiet, (0, 2, 1)).granted(ruling.only) == (order(B, A),)


def test_kinds_that_contradict_each_other_in_the_same_step_are_refused() -> None:
    ruling = decided((order(A, B), order(A)), (order(B, A), order(A)))
    assert ruling.decision is Decision.CONFLICT
    assert "rank 1 issues" in ruling.reason


def test_steps_without_collectives_are_a_kind_if_another_communicates() -> None:
    nothing = order()
    assert decided((nothing, order(A)), (nothing, order(A))).decision is Decision.GRANTED
    ruling = decided((nothing,), (nothing,), of_steps=(0, 0))
    assert ruling.decision is Decision.FAILED
    assert "issued no collectives" in ruling.reason
