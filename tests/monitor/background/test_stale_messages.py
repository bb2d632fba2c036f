"""Messages between two ranks that are both gone: others take them away, and leave alone what somebody still reads."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from overlap_callbacks.monitor.background import reporter as reporting
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.reporter import Reporter
from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel
from overlap_callbacks.monitor.background.tree import FAN_IN, SLOTS, WATCHED, Exchange, Tree
from overlap_callbacks.monitor.config import MonitorConfig
from tests.margins import near

NOW = -1.0  # look once, and do not wait
LONG_S = 60.0  # nobody waits for so long


def never(*_: object) -> bool:
    return False


def must_not_wait() -> bool:
    pytest.fail("it waited")


@pytest.fixture(params=["TCPStore", "HashStore"])
def store(request: pytest.FixtureRequest) -> Any:
    """Serves itself: the ranks take turns."""
    if request.param == "HashStore":
        return dist.HashStore()
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class CountedCalls:
    """A store whose calls are counted."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._store, name)


class Ranks:
    """Plays the ranks in turn, on one thread."""

    prefixes = itertools.count()

    def __init__(self, store: Any, ranks: int, fan_in: int) -> None:
        connection, prefix = Connection(lambda: store), f"strays{next(self.prefixes)}"
        self.exchanges = [
            Exchange(StoreChannel(Job(rank, ranks, "gloo"), prefix, connection), Tree(rank, ranks, fan_in), "order",
                     answered=True)
            for rank in range(ranks)
        ]  # fmt: skip
        self.windows = itertools.count()

    def __getitem__(self, rank: int) -> Exchange:
        return self.exchanges[rank]

    def __iter__(self) -> Iterator[Exchange]:
        """Those below before those above."""
        return iter(sorted(self.exchanges, key=lambda exchange: exchange.tree.level))

    def hold_window(self) -> None:
        """All ranks are heard, and answered."""
        key = f"window{next(self.windows)}"
        for exchange in self:
            exchange.gather(key, NOW, never)
            if exchange.tree.parent is not None:
                assert exchange.send_up(key, b"-", NOW, never)
        for exchange in reversed(list(self)):
            if exchange.tree.parent is not None:
                assert exchange.await_answer(key, NOW, never) == b"answer"
            exchange.send_down(key, b"answer")

    def die(self, dead: Collection[int]) -> None:
        """These ranks send to each other, in both directions, and are gone before they read."""
        key = f"window{next(self.windows)}"
        for rank in dead:
            if self[rank].tree.parent in dead:
                assert self[rank].send_up(key, b"-", NOW, never)
            self[rank].send_down(key, b"answer")
            for child in self[rank].tree.children:
                assert child in dead or self[child].await_answer(key, NOW, never) == b"answer"

    def leave(self, ranks: Collection[int]) -> None:
        """Like the reporting thread, all at once, without waiting for missing ranks."""
        leaving = [exchange for exchange in self if exchange.tree.rank in ranks]
        stale = [exchange.stale_messages() for exchange in leaving]
        for exchange in leaving:
            exchange.leave(parent_is_gone=not exchange.await_taken(NOW, never))
        for messages in stale:
            messages.delete_unread(NOW, never, after_s=0.0)


def some_of(ranks: Sequence[int]) -> list[tuple[int, ...]]:
    return [some for size in range(1, len(ranks) + 1) for some in itertools.combinations(ranks, size)]


@pytest.mark.parametrize("living", some_of((1, 3, 4)))
def test_a_message_that_a_dead_parent_has_not_taken_from_a_dead_rank_is_not_left(
    store: Any, living: tuple[int, ...]
) -> None:
    """The parent had taken those of the living: nothing tells them that it is gone."""
    ranks, before = Ranks(store, 5, fan_in=2), store.num_keys()
    ranks[3].send_up("window", b"-", NOW, never)
    assert ranks[2].gather("window", NOW, never)
    for rank in (1, 4):
        ranks[rank].send_up("window", b"-", NOW, never)
    assert list(ranks[0].gather("window", NOW, never)) == [1, 4]
    ranks[2].send_up("window", b"-", NOW, never)
    assert all(ranks[rank].parent_has_taken() for rank in living)
    assert store.num_keys() == before + 1
    ranks.leave(living)
    assert store.num_keys() == before


@pytest.mark.parametrize("living", some_of((1, 3, 4)))
def test_an_answer_that_a_dead_rank_has_not_taken_from_its_dead_parent_is_not_left(
    store: Any, living: tuple[int, ...]
) -> None:
    ranks, before = Ranks(store, 5, fan_in=2), store.num_keys()
    ranks[0].send_down("window", b"answer")
    for rank in (1, 4):
        assert ranks[rank].await_answer("window", NOW, never) == b"answer"
    assert store.num_keys() == before + 1
    ranks.leave(living)
    assert store.num_keys() == before


@pytest.mark.parametrize("num_windows", [0, 1, SLOTS + 2])
@pytest.mark.parametrize("num_dead", range(2, WATCHED + 1))
def test_no_few_dead_leave_anything_in_the_store_wherever_they_are(num_windows: int, num_dead: int) -> None:
    """Parents and children, chains of them, and both directions."""
    store = dist.HashStore()
    for dead in itertools.combinations(range(7), num_dead):
        ranks = Ranks(store, 7, fan_in=2)
        for _ in range(num_windows):
            ranks.hold_window()
        ranks.die(dead)
        ranks.leave(set(range(7)).difference(dead))
        assert store.num_keys() == 0, dead


@pytest.mark.parametrize(
    ("num_ranks", "dead"),
    [
        (16, range(8)),  # a node of two
        (24, range(16, 24)),  # the last node, and with it all that rank 16 hears
        (64, range(16, 24)),  # a node
        (64, range(16, 32)),  # a leader with all whom it hears
        (64, range(32)),  # half of the job
        (300, range(100, 250)),
        (300, [*range(290, 300), *range(10)]),  # over the end of the numbers
    ],
)
def test_a_dead_neighbourhood_leaves_nothing_in_the_store(num_ranks: int, dead: Collection[int]) -> None:
    store = dist.HashStore()
    ranks = Ranks(store, num_ranks, FAN_IN)
    ranks.hold_window()
    ranks.die(dead)
    assert store.num_keys() >= len(dead) // 2
    ranks.leave(set(range(num_ranks)).difference(dead))
    assert store.num_keys() == 0


def test_a_message_is_left_to_a_parent_that_lives_and_comes_later(store: Any) -> None:
    ranks, taken = Ranks(store, 5, fan_in=2), []
    ranks[2].send_up("window", b"-", NOW, never)
    stale = ranks[1].stale_messages()

    def come_later() -> None:
        time.sleep(0.3)
        taken.append(ranks[0].gather("window", NOW, never))

    parent = threading.Thread(target=come_later)
    parent.start()
    stale.delete_unread(LONG_S, never, after_s=0.0)  # and waits no longer than the parent does
    parent.join()
    assert taken == [{2: b"-"}]


def test_a_message_that_has_come_into_the_same_place_is_left_to_its_reader(store: Any) -> None:
    ranks = Ranks(store, 5, fan_in=2)
    ranks[2].send_up("window0", b"-", NOW, never)
    stale = ranks[1].stale_messages()
    for window in range(SLOTS):
        assert ranks[0].gather(f"window{window}", NOW, never) == {2: b"-"}
        assert ranks[2].send_up(f"window{window + 1}", b"-", NOW, never)
    stale.delete_unread(NOW, never, after_s=0.0)
    assert ranks[0].gather(f"window{SLOTS}", NOW, never) == {2: b"-"}


def test_a_message_that_was_not_seen_for_long_is_left_to_its_reader(store: Any) -> None:
    """The time to close was over too soon to know."""
    ranks = Ranks(store, 5, fan_in=2)
    ranks[2].send_up("window", b"-", NOW, never)
    ranks[1].stale_messages().delete_unread(NOW, never, after_s=LONG_S)
    assert ranks[0].gather("window", NOW, never) == {2: b"-"}


@pytest.mark.parametrize("num_ranks", [2, 8, 100, 400])
def test_to_leave_a_job_that_is_well_takes_few_calls_of_the_store_and_no_waiting(num_ranks: int) -> None:
    store: Any = CountedCalls()
    ranks = Ranks(store, num_ranks, FAN_IN)
    for _ in range(SLOTS + 1):
        ranks.hold_window()
    store.calls.clear()
    for exchange in ranks:
        before = store.calls.total()
        stale = exchange.stale_messages()
        assert store.calls.total() - before <= 2 * SLOTS * WATCHED
        assert exchange.await_taken(LONG_S, must_not_wait)
        exchange.leave()
        before = store.calls.total()
        stale.delete_unread(LONG_S, must_not_wait, after_s=0.0)
        assert store.calls.total() == before
    # Edges are one fewer than ranks. On each, both ends see that what they sent was taken, and empty all places.
    edges = (num_ranks - 1) * 2 * (1 + 2 * SLOTS)
    assert store.calls.total() <= edges + num_ranks * 2 * SLOTS * WATCHED


def reporter_beside_a_stray(store: Any) -> Reporter:
    """Of rank 1, which has nothing to report; a message of rank 2 lies there."""
    connection = Connection(lambda: store)
    sender = StoreChannel(Job(2, 5, "gloo"), "job", connection)
    assert Exchange(sender, Tree.of(sender.job), "report", answered=False).send_up("window", b"-", NOW, never)
    reporter = Reporter(
        StoreChannel(Job(1, 5, "gloo"), "job", connection), MonitorConfig(), run=pytest.fail,
        environment=pytest.fail, budget=WindowBudget(None), on_error=pytest.fail,
        on_sink_error=pytest.fail,
    )  # fmt: skip
    reporter.open()
    return reporter


def test_a_rank_that_ends_as_all_do_waits_before_it_takes_a_message_away(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    reporter, settle_s = reporter_beside_a_stray(store), 0.5
    monkeypatch.setattr(reporting, "SETTLE_S", settle_s)
    began_s = time.monotonic()
    reporter.close(LONG_S, settle=True)
    took_s = time.monotonic() - began_s
    assert settle_s <= took_s
    assert near(took_s, LONG_S)
    assert store.num_keys() == 0


def test_a_rank_that_ends_in_haste_waits_for_no_message_of_others_and_takes_none_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reporting, "SETTLE_S", LONG_S)
    store = dist.HashStore()
    reporter = reporter_beside_a_stray(store)
    began_s = time.monotonic()
    reporter.close(LONG_S, settle=False)
    assert near(time.monotonic() - began_s, LONG_S)
    assert store.num_keys() == 1
