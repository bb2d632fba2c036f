"""A plan holds on all ranks or on none, whichever rank or store fails, and at whichever moment."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from overlap_callbacks.monitor.background import plans as module
from overlap_callbacks.monitor.background.plans import Plans, WindowPlan, lead_steps
from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel, StoreFailedError

RANKS = 3


class Ranks:
    """The plans of some ranks, joined by a real store that fails or hangs for some of them when told to."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.steps = [100] * RANKS
        self.woken = [0] * RANKS
        self.failing: set[int] = set()
        self.told: list[WindowPlan] = []
        self.each = [self._plans(rank) for rank in range(RANKS)]
        for plans in self.each:
            plans.session = self.each[0].session

    def _plans(self, rank: int) -> Plans:
        store = self.store

        class Failing:
            def __getattr__(_, name: str) -> Any:
                if rank in self.failing:
                    raise RuntimeError("no answer")
                return getattr(store, name)

        def wake() -> None:
            self.woken[rank] += 1

        channel = StoreChannel(Job(rank, RANKS, "gloo"), "test", Connection(Failing))
        return Plans(channel, lambda: self.steps[rank], wake)

    def propose(self, from_step: int = 140, **fields: Any) -> WindowPlan:
        given = {"first_step": from_step, "every_n_steps": 50, "first_number": 7, **fields}
        plan = WindowPlan.of(self.each[0].session, self.steps[0], from_step, **given)
        self.each[0].propose(plan, self.told.append)
        return plan

    def look(self, *ranks: int) -> None:
        for rank in ranks:
            self.each[rank].look()

    def hold(self, step: int) -> list[bool | None]:
        """What each rank does at a step: True for the plan, None while it is not known, False without one."""
        held = [plans.at(step) for plans in self.each]
        return [False if plan is None else plan.decided for plan in held]

    @property
    def keys(self) -> int:
        return self.store.num_keys()


def test_all_ranks_follow_from_the_step_of_the_plan_on() -> None:
    ranks = Ranks()
    ranks.propose()
    assert ranks.hold(139) == [False] * RANKS
    ranks.look(1, 2, 0, 1, 2)
    assert [plan.decided for plan in ranks.told] == [True]
    assert ranks.hold(139) == [False] * RANKS
    assert ranks.hold(140) == [True] * RANKS
    assert all(ranks.woken)
    assert [plans.next_step(120) for plans in ranks.each] == [140] * RANKS
    for plans in ranks.each:
        plan = plans.at(140)
        assert plan is not None
        plans.followed(plan)
    assert ranks.hold(141) == [False] * RANKS
    for plans in ranks.each:
        plans.leave()
    assert ranks.keys == 0


def test_no_rank_follows_a_plan_that_one_has_not_heard() -> None:
    ranks = Ranks()
    ranks.failing = {2}
    ranks.propose()
    ranks.look(1, 2, 0)
    ranks.steps = [131, 131, 131]  # too late to decide
    assert ranks.hold(140) == [None, None, False]
    ranks.look(0, 1)
    assert [plan.decided for plan in ranks.told] == [False]
    assert ranks.hold(140) == [False] * RANKS
    ranks.failing = set()
    ranks.look(2)
    assert ranks.hold(140) == [False] * RANKS
    for plans in ranks.each:
        plans.leave()
    assert ranks.keys == 0


def test_a_rank_that_is_too_far_on_does_not_vote() -> None:
    ranks = Ranks()
    ranks.propose()
    ranks.steps[1] = 121
    ranks.look(1, 2, 0)
    assert ranks.hold(140) == [None, False, None]


def test_a_rank_that_votes_late_leaves_no_key() -> None:
    ranks = Ranks()
    plan = ranks.propose()
    add = StoreChannel.add

    def late(channel: StoreChannel, key: str, amount: int = 1) -> int:
        if channel.job.rank == 2 and amount:
            ranks.steps[0] = 135
            ranks.look(0, 1)  # rank 0 decides, and deletes the votes
        return add(channel, key, amount)

    with mock.patch.object(StoreChannel, "add", late):
        ranks.look(1, 2)
    assert [plan.decided for plan in ranks.told] == [False]
    assert ranks.each[0]._channel.has(plan.votes)
    ranks.look(2)
    assert ranks.hold(140) == [False] * RANKS
    for plans in ranks.each:
        plans.leave()
    assert ranks.keys == 0


@pytest.mark.parametrize("arrives", [True, False])
def test_a_decision_that_may_not_have_been_published_is_published_again(arrives: bool) -> None:
    ranks = Ranks()
    ranks.propose()
    ranks.look(1, 2)
    publish = StoreChannel.publish

    def fails(channel: StoreChannel, key: str, message: bytes) -> None:
        if arrives:
            publish(channel, key, message)
        raise StoreFailedError("lost")

    with mock.patch.object(StoreChannel, "publish", fails):
        ranks.look(0, 1)
    assert ranks.told == []
    assert ranks.hold(140) == [None, True if arrives else None, None]  # whoever does not know opens no window
    ranks.steps = [150] * RANKS
    ranks.look(0, 1, 2)
    assert [plan.decided for plan in ranks.told] == [True]
    assert ranks.hold(150) == [True] * RANKS


def test_a_rank_that_missed_a_decision_hears_it_with_the_next_plan() -> None:
    ranks = Ranks()
    ranks.propose()
    ranks.look(1, 2, 0, 1)
    ranks.failing = {2}
    assert ranks.hold(140) == [True, True, None]
    ranks.steps = [150] * RANKS
    for rank in (0, 1):
        plan = ranks.each[rank].at(150)
        assert plan is not None
        ranks.each[rank].followed(plan)
    ranks.propose(200)
    ranks.steps[0] = 190
    ranks.look(0)
    assert [plan.decided for plan in ranks.told] == [True, False]
    ranks.failing = set()
    ranks.look(1, 2)
    assert ranks.hold(150) == [False, False, True]
    assert ranks.hold(200) == [False, False, True]


def test_the_plan_of_a_killed_job_in_the_same_store_does_not_count() -> None:
    ranks = Ranks()
    ranks.propose()
    ranks.each[1].session = "of the next job"
    ranks.look(1)
    assert ranks.each[1].at(140) is None
    ranks.each[1].session = ""  # not heard yet
    ranks.look(1)
    assert ranks.each[1].at(140) is None
    ranks.each[0].open()
    ranks.look(2)
    assert ranks.each[2].at(140) is None


def test_whatever_fails_no_two_ranks_know_different_decisions() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        ranks = Ranks()
        ranks.propose()
        known: list[set[bool]] = [set() for _ in range(RANKS)]
        for _ in itertools.repeat(None, 60):
            ranks.failing = {rank for rank in range(RANKS) if chance.random() < 0.4}
            rank = chance.randrange(RANKS)
            ranks.steps[rank] += chance.choice([0, 0, 1, 3])
            ranks.each[rank].session = ranks.each[0].session  # heard with a ruling, after a failure too
            ranks.look(rank)
            for each, plans in enumerate(ranks.each):
                plan = plans.at(10**6)
                if plan is None and each and plans._seen and plans._open is None:
                    known[each].add(False)
                elif plan is not None and plan.decided is not None:
                    known[each].add(plan.decided)
        if ranks.told:
            known[0].add(bool(ranks.told[0].decided))
        # A rank that did not vote in time has no plan, and then nobody follows one.
        followed = [True in of_rank for of_rank in known]
        if any(followed):
            voted = [plans._newest is not None or plans._open is not None for plans in ranks.each]
            assert all(voted), seed
            assert ranks.told in ([], ranks.told[:1])
            assert not ranks.told or ranks.told[0].decided, seed


def test_the_lead_grows_with_the_time_of_a_step_and_the_number_of_ranks() -> None:
    assert lead_steps(1.0, 2) == 20
    assert lead_steps(0.1, 2) == 100
    assert lead_steps(0.0, 2) == 20
    assert lead_steps(0.1, 8192) > 400
    assert module._VOTE_PART < module._DECIDE_PART < 1
