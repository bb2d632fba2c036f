"""Votes on the race check: all ranks decide alike, and nothing of it is left in the job's store."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel
from overlap_callbacks.monitor.race.ballot import FAILED, REPEAT, Ballot, Decision
from tests.margins import near

RANKS = 3
WINDOW = "window"
SHORT_S, LONG_S = 0.1, 30.0


class Ranks:
    """The ballots of a job's ranks, each used on a thread of its own."""

    def __init__(self, timeout_s: float) -> None:
        self.store = dist.HashStore()
        self.ballots = [
            Ballot(StoreChannel(Job(rank, RANKS, "gloo"), "prefix", Connection(lambda: self.store)), timeout_s)
            for rank in range(RANKS)
        ]
        self._threads = ThreadPoolExecutor(RANKS)

    def decide(self, *votes: Callable[[Ballot], Decision] | None) -> list[Decision]:
        """What the ranks that vote are told; None for one that does not."""
        pairs = zip(self.ballots, votes, strict=True)
        told = [self._threads.submit(vote, ballot) for ballot, vote in pairs if vote is not None]
        return [each.result() for each in told]

    def close(self, *dead: int) -> None:
        for rank, ballot in enumerate(self.ballots):
            if rank not in dead:
                ballot.close()


class InTurn:
    """A store of which one rank at a time does one thing, in an order of its own."""

    def __init__(self, seed: int) -> None:
        self._store = dist.HashStore()
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._running = RANKS
        self._turn: int | None = None

    def num_keys(self) -> int:
        return self._store.num_keys()

    def of(self, rank: int) -> Any:
        """The store as a rank sees it."""

        def wait_and(do: Callable[..., Any]) -> Callable[..., Any]:
            def waiting(*args: Any) -> Any:
                self._await_turn(rank)
                return do(*args)

            return waiting

        names = ("add", "check", "compare_set", "delete_key", "set", "get")
        return SimpleNamespace(**{name: wait_and(getattr(self._store, name)) for name in names})

    def go_on(self, rank: int) -> Any:
        """The store as a rank sees it that goes on alone, once all have ended."""
        assert self._running == 0
        self._running = 1
        return self.of(rank)

    def end(self) -> None:
        """A rank does nothing more."""
        with self._changed:
            self._running -= 1
            self._choose()

    def _await_turn(self, rank: int) -> None:
        with self._changed:
            self._waiting.add(rank)
            self._choose()
            assert self._changed.wait_for(lambda: self._turn == rank, LONG_S)
            self._turn = None

    def _choose(self) -> None:
        # Once all wait, it is one rank's turn.
        if self._turn is None and self._waiting and len(self._waiting) == self._running:
            self._turn = self._random.choice(sorted(self._waiting))
            self._waiting.remove(self._turn)
            self._changed.notify_all()


def yes(ballot: Ballot) -> Decision:
    return ballot.vote(WINDOW, REPEAT, "terms")


def other_terms(ballot: Ballot) -> Decision:
    return ballot.vote(WINDOW, REPEAT, "other terms")


def failed(ballot: Ballot) -> Decision:
    return ballot.vote(WINDOW, FAILED, "a place of its own")


def no(ballot: Ballot) -> Decision:
    return ballot.decline(WINDOW, REPEAT, "why")


def test_all_agree_and_the_votes_of_a_window_are_taken_away_in_the_next() -> None:
    ranks, most = Ranks(LONG_S), 0
    for number in range(5):
        told = ranks.decide(*[lambda ballot, number=number: ballot.vote(f"window{number}", REPEAT, "terms")] * RANKS)
        assert told == [Decision(True)] * RANKS
        most = max(most, ranks.store.num_keys())
    assert most <= 4
    ranks.close()
    assert ranks.store.num_keys() == 0


@pytest.mark.parametrize(
    "votes", [votes for votes in itertools.product((yes, no, other_terms, None), repeat=RANKS) if len({*votes}) > 1]
)
def test_ranks_that_do_not_agree_decide_no_and_leave_nothing(votes: tuple[Any, ...]) -> None:
    ranks = Ranks(SHORT_S)
    told = ranks.decide(*votes)
    assert not any(decision.agreed for decision in told)
    ranks.close()
    assert ranks.store.num_keys() == 0


@pytest.mark.parametrize("dead", range(RANKS))
def test_a_rank_that_dies_after_its_vote_leaves_nothing(dead: int) -> None:
    ranks = Ranks(LONG_S)
    assert all(decision.agreed for decision in ranks.decide(*[yes] * RANKS))
    ranks.close(dead)
    assert ranks.store.num_keys() == 0


@pytest.mark.parametrize("dead", range(RANKS))
@pytest.mark.parametrize("last", [yes, other_terms, no, failed])
@pytest.mark.parametrize("others", [yes, other_terms, no, None])
def test_a_rank_that_dies_after_a_vote_of_its_own_leaves_nothing(
    dead: int, last: Callable[[Ballot], Decision], others: Callable[[Ballot], Decision] | None
) -> None:
    ranks = Ranks(LONG_S)
    votes = [last if rank == dead else others for rank in range(RANKS)]
    if last is failed:  # after all have repeated the step
        assert all(decision.agreed for decision in ranks.decide(*[yes] * RANKS))
        votes = [failed if rank == dead else None for rank in range(RANKS)]
    for ballot in ranks.ballots:
        ballot.expect(WINDOW)
        ballot._timeout_s = SHORT_S
    ranks.decide(*votes)
    ranks.close(dead)
    assert ranks.store.num_keys() == 0


def test_ranks_that_want_different_things_do_not_wait_for_each_other() -> None:
    ranks = Ranks(LONG_S)
    began_s = time.monotonic()
    told = ranks.decide(other_terms, yes, yes)
    assert not any(decision.agreed for decision in told)
    assert near(time.monotonic() - began_s, LONG_S)
    ranks.close()


def test_a_rank_that_leaves_without_a_window_starts_no_thread_and_asks_the_store_nothing() -> None:
    def refuse() -> Any:
        raise AssertionError("asked")

    Ballot(StoreChannel(Job(0, RANKS, "gloo"), "prefix", Connection(refuse)), SHORT_S).close()


def test_a_rank_that_comes_when_the_others_have_left_decides_no() -> None:
    ranks = Ranks(SHORT_S)
    assert [decision.agreed for decision in ranks.decide(yes, yes, None)] == [False, False]
    ranks.close(2)
    assert [decision.agreed for decision in ranks.decide(None, None, yes)] == [False]
    ranks.close()
    assert ranks.store.num_keys() == 0


def _votes_and_leaves(store: InTurn, rank: int, votes: bool) -> Decision:
    """A rank that waits for nobody, and leaves at once where the ranks do not agree."""
    channel = StoreChannel(Job(rank, RANKS, "gloo"), "prefix", Connection(lambda: store.of(rank)))
    ballot = Ballot(channel, 0.0)
    try:
        # On this thread: the ballot's own would be one more of which the turns are not known.
        told = ballot._vote(WINDOW, REPEAT, "terms") if votes else ballot._decline(WINDOW, REPEAT, "why")
        if not told.agreed:
            ballot._leave()
        return told
    finally:
        store.end()


@pytest.mark.parametrize("declines", [False, True])
def test_all_ranks_decide_the_same_and_leave_nothing_in_any_order_of_votes_and_leaving(declines: bool) -> None:
    agreed = 0
    with ThreadPoolExecutor(RANKS) as threads:
        for seed in range(1000):
            store = InTurn(seed)
            votes = [rank > 0 or not declines for rank in range(RANKS)]
            told = [threads.submit(_votes_and_leaves, store, rank, vote) for rank, vote in enumerate(votes)]
            decisions = [each.result() for each in told]
            assert len({decision.agreed for decision in decisions}) == 1, seed
            agreed += decisions[0].agreed
            assert decisions[0].agreed or store.num_keys() == 0, seed
    assert declines or 0 < agreed < 1000


class _DeadError(Exception):
    pass


def _votes(store: InTurn, rank: int, terms: str, calls: int) -> tuple[Ballot, Decision | None, bool]:
    """A rank that is dead after so many calls of the store; and whether its vote made the count full."""
    seen, left = store.of(rank), [calls]
    full = False

    def counted(do: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal full
            if not left[0]:
                raise _DeadError
            left[0] -= 1
            found = do(*args)
            full |= isinstance(found, int) and found == RANKS
            return found

        return call

    client = SimpleNamespace(**{name: counted(do) for name, do in vars(seen).items()})
    ballot = Ballot(StoreChannel(Job(rank, RANKS, "gloo"), "prefix", Connection(lambda: client)), 0.0)
    ballot.expect(WINDOW)
    try:
        return ballot, ballot._vote(WINDOW, REPEAT, terms), full
    except _DeadError:
        return ballot, None, full
    finally:
        store.end()


def test_whenever_a_rank_dies_those_that_leave_after_it_leave_nothing() -> None:
    died, agreed, in_between = 0, 0, 0
    with ThreadPoolExecutor(RANKS) as threads:
        for seed in range(500):
            store, draw = InTurn(seed), random.Random(seed)
            dead, terms = draw.randrange(RANKS), [draw.choice(("terms", "terms", "other")) for _ in range(RANKS)]
            calls = [draw.randrange(6) if rank == dead else 1000 for rank in range(RANKS)]
            told = [threads.submit(_votes, store, rank, terms[rank], calls[rank]) for rank in range(RANKS)]
            found = [each.result() for each in told]
            _, ended, full = found[dead]
            died += ended is None
            living = [rank for rank in range(RANKS) if rank != dead]
            decisions = [found[rank][1] for rank in living]
            assert len({decision.agreed for decision in decisions if decision is not None}) == 1, seed
            agreed += any(decision.agreed for decision in decisions if decision is not None)
            draw.shuffle(living)
            for rank in living:
                ballot = found[rank][0]
                client = store.go_on(rank)
                ballot._channel = StoreChannel(Job(rank, RANKS, "gloo"), "prefix", Connection(lambda c=client: c))
                ballot._leave()
                store.end()
            # Its vote was late, but made the count full, and it has not read, or not told, what was decided.
            in_between += ended is None and full
            assert (ended is None and full) or store.num_keys() == 0, seed
    assert died > 100
    assert in_between < 50
    assert 0 < agreed < 400
