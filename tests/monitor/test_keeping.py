"""Ranks that keep an arm turned on: all or none, and the job's own setting where a rank is in doubt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from overlap_callbacks.analysis.arm_costs import Stretch
from overlap_callbacks.gate.arms import Arm
from overlap_callbacks.gate.switches import SwitchState
from overlap_callbacks.monitor import keeping as keeping_module
from overlap_callbacks.monitor.arm_rotation import BoundArm
from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel
from overlap_callbacks.monitor.faults import Notices
from overlap_callbacks.monitor.keeping import Keeping
from overlap_callbacks.monitor.race.ballot import Ballot
from tests.margins import PATIENCE_S

FROM_STEP = 10


class Hanging:
    """A store whose calls wait while it hangs."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.answers = threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.answers.wait(PATIENCE_S)
            return getattr(self._store, name)(*args)

        return call


class Rank:
    """One rank's part, all ranks in this process; the steps are the test's."""

    def __init__(self, number: int, store: dist.Store, num_ranks: int = 2) -> None:
        self.store = Hanging(store)
        self.channel = StoreChannel(Job(number, num_ranks, "gloo"), "prefix", Connection(lambda: self.store))
        self.ballot = Ballot(self.channel, PATIENCE_S)
        self.switch = SwitchState()
        self.keeping = Keeping(self.switch, Notices())
        self.on = False
        arm = Arm("arm", lambda: setattr(self, "on", True), lambda: setattr(self, "on", False), equal_results=True)
        self._bound = BoundArm(arm, arm.switch({}))

    def vote(self, ruling: str = "ruling") -> None:
        self.keeping.vote(self.channel, self.ballot, self._bound, ruling, FROM_STEP)

    def step(self, number: int) -> bool:
        """Begin a step outside windows. Returns whether it has the arm."""
        self.keeping.between_steps(number)
        return self.on

    def is_off_soon(self) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while self.step(FROM_STEP + 1):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        self.store.answers.set()
        self.keeping.close()
        self.ballot.close()


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping_module, "_LOOK_S", 0.02)


@pytest.fixture(name="store")
def _store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture(name="ranks")
def _ranks(store: dist.Store) -> Any:
    ranks = [Rank(number, store) for number in range(2)]
    yield ranks
    for rank in ranks:
        rank.close()


def turned_on(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.vote()
    for rank in ranks:
        assert rank._bound is not None
        wait_for(lambda vote=rank.keeping._vote: vote.done.is_set())
    assert [rank.step(FROM_STEP) for rank in ranks] == [True, True]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_all_turn_it_on_from_the_step_that_was_planned_until_the_next_window(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.vote()
        assert not rank.step(FROM_STEP - 1)
    assert not any(rank.on for rank in ranks)
    turned_on_at = [rank.keeping.next_step for rank in ranks]
    assert turned_on_at == [FROM_STEP, FROM_STEP]
    wait_for(lambda: all(rank.keeping._vote is not None and rank.keeping._vote.done.is_set() for rank in ranks))
    assert all(rank.step(FROM_STEP) for rank in ranks)
    assert all(rank.step(FROM_STEP + 1) for rank in ranks)
    for rank in ranks:
        rank.keeping.window_opens()
    assert not any(rank.on for rank in ranks)
    assert not any(rank.step(FROM_STEP + 9) for rank in ranks)


def test_without_one_ranks_vote_none_turns_it_on_and_the_wait_is_short(ranks: list[Rank]) -> None:
    first, second = ranks
    first.vote()
    began_s = time.monotonic()
    assert not first.step(FROM_STEP)
    assert time.monotonic() - began_s < PATIENCE_S / 4
    second.vote()  # too late
    assert not second.step(FROM_STEP)
    assert not first.step(FROM_STEP + 1)


def test_after_a_wait_in_vain_none_waits_as_long_until_all_have_agreed_again(ranks: list[Rank]) -> None:
    first = ranks[0]

    def wait_in_vain(ruling: str) -> float:
        patience_s = first.keeping._patience_s
        first.vote(ruling)
        began_s = time.monotonic()
        assert not first.step(FROM_STEP)
        assert time.monotonic() - began_s >= patience_s
        return patience_s

    once, again = wait_in_vain("one"), wait_in_vain("two")
    assert again < once / 2
    turned_on(ranks)
    for rank in ranks:
        rank.keeping.window_opens()
    assert wait_in_vain("three") == once


def test_votes_for_other_steps_agree_on_nothing(ranks: list[Rank]) -> None:
    first, second = ranks
    first.vote()
    second.keeping.vote(second.channel, second.ballot, second._bound, "ruling", FROM_STEP + 1)
    assert not second.step(FROM_STEP + 1)
    assert not first.step(FROM_STEP)


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_goes_back_takes_the_others_with_it(ranks: list[Rank], leaver: int) -> None:
    turned_on(ranks)
    ranks[leaver].keeping.end("an exception")
    assert not ranks[leaver].step(FROM_STEP + 1)
    assert ranks[1 - leaver].is_off_soon()


def test_where_it_no_longer_wins_all_go_back_before_the_same_step(ranks: list[Rank]) -> None:
    ranks[0].keeping.limit(Stretch(3600.0, allowed_s=3600.0, notice_s=0.1), steps_per_window=10)
    turned_on(ranks)
    ranks[0].keeping.has_slowed(FROM_STEP)
    ranks[0].keeping.has_slowed(FROM_STEP + 1)  # changes nothing
    watches = [rank.keeping._watch for rank in ranks]
    wait_for(lambda: all(watch is not None and watch.last.step < 2**62 for watch in watches))
    last = [watch.last.step for watch in watches if watch is not None]
    assert last[0] == last[1] > FROM_STEP
    assert all(rank.step(last[0] - 1) for rank in ranks)
    assert not any(rank.step(last[0]) for rank in ranks)


# A window's distance of ten steps takes a day as configured, or no time: then any time is a loss.
@pytest.mark.parametrize(
    ("own_s", "notice_s", "goes_back"), [(86400.0, 3599.999, False), (0.0, 0.1, False), (0.0, 3599.999, True)]
)
def test_steps_that_cost_more_than_they_may_take_all_back_at_the_same_step(
    ranks: list[Rank], own_s: float, notice_s: float, goes_back: bool
) -> None:
    ranks[0].keeping.limit(stretch := Stretch(own_s, allowed_s=3600.0, notice_s=0.1), steps_per_window=10)
    turned_on(ranks)
    stretch.notice_s = notice_s
    ranks[0].keeping.pause(within_step=False)
    time.sleep(0.01)  # does not count
    ranks[0].keeping.resume()
    time.sleep(0.005)
    assert ranks[0].step(FROM_STEP + 5)
    assert stretch.windows == 0.1  # one step was trained, whatever its number
    assert 0.005 <= stretch.on_s <= time.monotonic() - ranks[0].keeping._turned_on[1] - ranks[0].keeping.paused_s
    watch = ranks[1].keeping._watch
    assert watch is not None
    if goes_back:
        wait_for(lambda: watch.last.step < 2**62)
        assert not any(rank.step(watch.last.step) for rank in ranks)
    assert watch.last.is_told is goes_back


def test_steps_that_have_cost_all_that_they_may_are_the_last_with_it_on_rank_0(ranks: list[Rank]) -> None:
    ranks[0].keeping.limit(stretch := Stretch(0.0, allowed_s=3600.0, notice_s=0.1), steps_per_window=10)
    turned_on(ranks)
    stretch.allowed_s = 0.0
    assert not ranks[0].step(FROM_STEP + 1)
    assert ranks[1].is_off_soon()


def test_the_step_that_is_named_is_so_far_ahead_as_the_last_steps_were_long(ranks: list[Rank]) -> None:
    # A thousand steps take no time and one is long, or the last three are long: a slow arm has fewer steps left.
    ahead = []
    for long_steps in (1, 3):
        ranks[0].keeping.limit(stretch := Stretch(0.0, allowed_s=1e9, notice_s=1.0), steps_per_window=10)
        turned_on(ranks)
        for step in range(1, 1001):
            ranks[0].step(FROM_STEP + step)
        for step in range(1001, 1001 + long_steps):
            time.sleep(0.02)
            ranks[0].step(FROM_STEP + step)
        stretch.must_end = True
        ranks[0].step(FROM_STEP + step + 1)
        watch = ranks[0].keeping._watch
        assert watch is not None
        ahead.append(watch.last.step - (FROM_STEP + step + 1))
        for rank in ranks:
            rank.keeping.window_opens()
    assert ahead[1] <= 50 < ahead[0]


def test_a_rank_in_doubt_goes_back_before_the_step_that_was_named_and_takes_the_others_with_it(
    ranks: list[Rank],
) -> None:
    ranks[0].keeping.limit(Stretch(3600.0, allowed_s=3600.0, notice_s=0.1), steps_per_window=10)
    turned_on(ranks)
    ranks[1].keeping.end("an exception")
    ranks[0].keeping.has_slowed(FROM_STEP + 10**6)
    assert ranks[0].is_off_soon()


def test_a_step_that_is_no_number_turns_it_off(ranks: list[Rank]) -> None:
    turned_on(ranks)
    ranks[0].channel.publish("keep/ruling", b"soon")
    assert all(rank.is_off_soon() for rank in ranks)


def test_a_silent_store_turns_it_off(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping_module, "ANSWER_TIMEOUT_S", 0.1)
    turned_on(ranks)
    ranks[0].store.answers.clear()
    assert ranks[0].is_off_soon()
    ranks[0].store.answers.set()
    assert ranks[1].is_off_soon()  # it has withdrawn once the store answered


def test_a_rank_that_cannot_read_the_decision_stays_off_and_the_others_go_back(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.vote()
    wait_for(lambda: all(rank.keeping._vote is not None and rank.keeping._vote.done.is_set() for rank in ranks))
    # As if the answer were still on its way.
    vote = ranks[0].keeping._vote
    assert vote is not None
    vote.decision = None
    assert ranks[1].step(FROM_STEP)
    assert not ranks[0].step(FROM_STEP)
    assert ranks[1].is_off_soon()


def test_a_pause_between_steps_runs_as_configured(ranks: list[Rank]) -> None:
    turned_on(ranks)
    ranks[0].keeping.pause(within_step=False)
    assert not ranks[0].on
    ranks[0].keeping.resume()
    assert ranks[0].on


def test_nothing_is_left_in_the_store(store: dist.Store) -> None:
    before = store.num_keys()
    ranks = [Rank(number, store) for number in range(2)]
    turned_on(ranks)
    ranks[1].keeping.end("an exception")
    assert ranks[0].is_off_soon()
    for rank in ranks:
        rank.keeping.window_opens()
        rank.vote("another")
    wait_for(lambda: all(rank.keeping._vote is not None and rank.keeping._vote.done.is_set() for rank in ranks))
    assert all(rank.step(FROM_STEP) for rank in ranks)
    for rank in ranks:
        rank.close()
    wait_for(lambda: store.num_keys() == before)
