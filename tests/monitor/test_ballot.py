"""Votes on the race check: all ranks decide alike, and nothing of it is left in the job's store."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
