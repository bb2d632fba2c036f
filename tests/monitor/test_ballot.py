"""Votes on the race check: all ranks decide alike, and nothing of it is left in the job's store."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel
from overlap_callbacks.monitor.race.ballot import Ballot, Decision

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
    return ballot.vote(WINDOW, "repeat", "terms")


def other_terms(ballot: Ballot) -> Decision:
    return ballot.vote(WINDOW, "repeat", "other terms")


def no(ballot: Ballot) -> Decision:
    return ballot.decline(WINDOW, "repeat", "why")


def test_all_agree_and_the_votes_of_a_window_are_taken_away_in_the_next() -> None:
    ranks, most = Ranks(LONG_S), 0
    for number in range(5):
        told = ranks.decide(*[lambda ballot, number=number: ballot.vote(f"window{number}", "repeat", "terms")] * RANKS)
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
        told = ballot._vote(WINDOW, "repeat", "terms") if votes else ballot._decline(WINDOW, "repeat", "why")
        if not told.agreed:
            ballot._take_away(but=None)
        return told
    finally:
        store.end()


@pytest.mark.parametrize("declines", [False, True])
def test_whatever_the_order_of_votes_and_leaving_all_decide_alike_and_leave_nothing(declines: bool) -> None:
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
