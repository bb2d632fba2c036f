"""Messages in the ranks' tree: a missing or late rank costs only its own message, and leaves nothing behind."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from overlap_callbacks.analysis.rank_set import joined
from overlap_callbacks.monitor.background.order_check import Decision, Ruling, check_order
from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel
from overlap_callbacks.monitor.background.submissions import OrderMessage, RecordedKinds
from overlap_callbacks.monitor.background.tree import SLOTS, Exchange, Tree
from tests.gate.sequences import A, order
from tests.margins import near

RANKS = 7  # 0 hears 1, 2 and 4; 2 hears 3; 4 hears 5 and 6
NOW = -1.0  # look once, and do not wait
LONG_S = 60.0  # nobody waits for so long


@pytest.fixture(scope="module")
def server() -> Any:
    """Serves itself: the ranks take turns."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Ranks:
    """Plays the ranks in turn, on one thread."""

    prefixes = itertools.count()

    def __init__(self, server: Any, dead: dict[int, str] | None = None, prefix: str = "") -> None:
        connection = Connection(lambda: server)
        self.prefix = prefix = prefix or f"test{next(self.prefixes)}"
        self.dead = dead or {}
        self.exchanges = [
            Exchange(StoreChannel(Job(rank, RANKS, "gloo"), prefix, connection), Tree(rank, RANKS, 2), "order",
                     answered=True)
            for rank in range(RANKS)
        ]  # fmt: skip
        for exchange in self.exchanges:
            exchange.open()

    def __iter__(self) -> Iterator[Exchange]:
        return iter(sorted(self.exchanges, key=lambda exchange: exchange.tree.level))

    def lives(self, exchange: Exchange, moment: str) -> bool:
        moments = ["at once", "after it gathered", "after it sent", "after it was answered"]
        died = self.dead.get(exchange.tree.rank)
        return died is None or moments.index(moment) < moments.index(died)

    def send_all_up(self, key: str) -> list[int]:
        """The ranks that rank 0 hears of."""
        heard: list[int] = []
        for exchange in self:
            if not self.lives(exchange, "at once"):
                continue
            ranks = [exchange.tree.rank]
            for message in exchange.gather(key, NOW, lambda _: False).values():
                ranks += list(message)
            exchange.unheard = exchange.tree.members_without(joined((rank, rank) for rank in ranks))
            if exchange.tree.rank == 0:
                heard = ranks
            elif self.lives(exchange, "after it gathered"):
                exchange.send_up(key, bytes(ranks), NOW, lambda: False)
        return sorted(heard)

    def send_all_down(self, key: str) -> list[int]:
        """The ranks that rank 0's answer reaches."""
        reached = []
        for exchange in reversed(list(self)):
            if not self.lives(exchange, "after it sent"):
                continue
            rank = exchange.tree.rank
            answer = b"answer" if rank == 0 else exchange.await_answer(key, NOW, lambda: False)
            if answer is not None:
                reached.append(rank)
            if self.lives(exchange, "after it was answered"):
                exchange.send_down(key, answer or b"none")
        return sorted(reached)

    def leave(self) -> None:
        for exchange in self:
            if exchange.tree.rank not in self.dead:
                taken = exchange.await_taken(NOW, lambda: False)
                exchange.leave(parent_is_gone=not taken)


def test_all_ranks_are_heard_and_answered_and_nothing_is_left(server: Any) -> None:
    before, ranks = server.num_keys(), Ranks(server)
    for window in range(3 * SLOTS):
        assert ranks.send_all_up(f"window{window}") == list(range(RANKS))
        assert ranks.send_all_down(f"window{window}") == list(range(RANKS))
        assert server.num_keys() == before
    ranks.leave()
    assert server.num_keys() == before


@pytest.mark.parametrize("moment", ["at once", "after it gathered"])
def test_a_leader_that_is_gone_costs_its_members_alone(server: Any, moment: str) -> None:
    ranks = Ranks(server, {4: moment})
    assert ranks.send_all_up("window0") == [0, 1, 2, 3]
    assert ranks.exchanges[0].unheard == (4, 5, 6)
    ranks.leave()


@pytest.mark.parametrize("moment", ["at once", "after it gathered", "after it sent", "after it was answered"])
@pytest.mark.parametrize("num_dead", range(1, RANKS))
def test_the_others_leave_nothing_in_the_store_whichever_rank_dies(server: Any, moment: str, num_dead: int) -> None:
    before = server.num_keys()
    for dead in itertools.combinations(range(RANKS), num_dead):
        ranks = Ranks(server, dict.fromkeys(dead, moment))
        ranks.send_all_up("window0")
        ranks.send_all_down("window0")
        ranks.leave()
        assert server.num_keys() == before, dead


def test_a_late_message_is_not_taken_for_one_of_the_next_window(server: Any) -> None:
    before, ranks = server.num_keys(), Ranks(server)
    late = ranks.exchanges[1]
    assert ranks.exchanges[0].gather("window0", NOW, lambda _: False) == {}
    late.send_up("window0", b"old", NOW, lambda: False)
    late.send_up("window1", b"new", NOW, lambda: False)
    assert ranks.exchanges[0].gather("window1", NOW, lambda _: False) == {1: b"new"}
    assert server.num_keys() == before


@pytest.mark.parametrize("num_sent", range(1, 2 * SLOTS))
def test_what_a_killed_job_has_left_is_not_taken_for_a_message_of_the_one_that_starts_again(
    server: Any, num_sent: int
) -> None:
    before, killed = server.num_keys(), Ranks(server)
    for window in range(num_sent):
        assert killed.send_all_up(f"window{window}") == list(range(RANKS))
        assert killed.send_all_down(f"window{window}") == list(range(RANKS))
    for rank in range(1, RANKS):  # killed between what they sent and who reads it
        killed.exchanges[rank].send_up(f"window{num_sent}", b"old", NOW, lambda: False)
    for exchange in killed:
        exchange.send_down(f"window{num_sent}", b"old")
    again = Ranks(server, prefix=killed.prefix)
    assert again.exchanges[0].gather(f"window{num_sent}", NOW, lambda _: False) == {}
    assert again.exchanges[1].await_answer(f"window{num_sent}", NOW, lambda: False) is None
    for window in range(num_sent + 1, num_sent + 2 * SLOTS):
        assert again.send_all_up(f"window{window}") == list(range(RANKS))
        assert again.send_all_down(f"window{window}") == list(range(RANKS))
    assert server.num_keys() == before


def test_a_parent_that_takes_nothing_is_not_waited_for_and_one_that_has_taken_is(server: Any) -> None:
    ranks = Ranks(server)
    leader, child = ranks.exchanges[4], ranks.exchanges[5]
    child.send_up("window0", b"-", NOW, lambda: False)
    began_s = time.monotonic()
    assert child.await_answer("window0", LONG_S, lambda: False, taken_within_s=0.1) is None
    assert near(time.monotonic() - began_s, LONG_S)
    leader.gather("window0", NOW, lambda _: False)
    began_s = time.monotonic()
    assert child.await_answer("window1", LONG_S, lambda: time.monotonic() > began_s + 0.5, taken_within_s=0.1) is None
    assert time.monotonic() - began_s >= 0.5  # it went on waiting, until it was stopped
    ranks.leave()


def test_the_ranks_below_a_lost_leader_do_not_wait_for_the_ruling_of_rank_0(server: Any) -> None:
    ranks, recorded, waited = Ranks(server, {4: "at once"}), RecordedKinds((order(A),)), []

    def check(rank: int) -> Ruling:
        message = OrderMessage.of(recorded)
        began_s = time.monotonic()
        ruling = check_order(
            ranks.exchanges[rank], "window0", recorded, message, timeout_s=1.0, skip=None, stop=lambda: False
        )
        waited.append(time.monotonic() - began_s)
        return ruling

    assert check(5) == Ruling(Decision.LATE, "rank 4 does not take what this rank hands in [OC207]")
    assert check(1) == Ruling(Decision.LATE, "rank 0 did not decide within 2 s [OC206]")  # rank 0 may be late itself
    assert waited[0] < waited[1]
    ranks.leave()


def test_a_rank_that_has_given_up_takes_its_message_back_so_that_a_late_parent_grants_nothing(server: Any) -> None:
    ranks, recorded = Ranks(server), RecordedKinds((order(A),))

    def check(rank: int, window: str, timeout_s: float) -> Decision:
        message = OrderMessage.of(recorded)
        return check_order(
            ranks.exchanges[rank], window, recorded, message, timeout_s=timeout_s, skip=None,
            stop=lambda: False,
        ).decision  # fmt: skip

    given_up = [check(rank, "window0", 0.05) for rank in (6, 5, 4, 3, 2, 1)]  # each waits for its parent in vain
    assert given_up == [Decision.LATE] * 6
    assert check(0, "window0", 0.05) is Decision.LATE
    # The next window is as ever.
    ranks.send_all_up("window1")
    assert ranks.send_all_down("window1") == list(range(RANKS))
    ranks.leave()


def test_a_message_that_is_taken_back_while_its_reader_takes_it_is_not_taken(server: Any) -> None:
    """A check whose time is over on one rank just when the other comes: their later ones must find each other."""
    before, ranks = server.num_keys(), Ranks(server)
    sender, reader = ranks.exchanges[1], ranks.exchanges[0]
    inlet = reader._from[1]
    peek, peeked = inlet._channel.peek, []

    def peek_and_have_it_taken_back(key: str) -> bytes | None:
        message = peek(key)
        if message is not None and not peeked:
            peeked.append(message)
            sender.withdraw()
        return message

    inlet._channel.peek = peek_and_have_it_taken_back  # type: ignore[method-assign]
    sender.send_up("window0", b"-", NOW, lambda: False)
    assert reader.gather("window0", NOW, lambda _: False) == {}
    assert peeked
    for window in ("window1", "window2"):
        assert sender.send_up(window, b"-", NOW, lambda: False)
        assert reader.gather(window, NOW, lambda _: False) == {1: b"-"}
    ranks.leave()
    assert server.num_keys() == before


def test_a_message_that_was_taken_cannot_be_taken_back_whatever_the_store_says(tmp_path: Path) -> None:
    """A FileStore says of every key that it has deleted it."""
    ranks = Ranks(dist.FileStore(str(tmp_path / "store"), 1))
    sender, reader = ranks.exchanges[1], ranks.exchanges[0]
    for window in ("window0", "window1", "window2"):
        assert sender.send_up(window, b"-", NOW, lambda: False)
        assert reader.gather(window, NOW, lambda _: False) == {1: b"-"}
        sender.withdraw()


def test_ends_that_count_from_different_numbers_find_each_other_again(server: Any) -> None:
    ranks = Ranks(server)
    sender, reader = ranks.exchanges[1], ranks.exchanges[0]
    for window in ("window0", "window1", "window2"):
        assert sender.send_up(window, b"-", NOW, lambda: False)
        assert reader.gather(window, NOW, lambda _: False) == {1: b"-"}
    sender._to_parent._number -= 1  # it held one for withdrawn while it was taken
    for window in ("window3", "window4"):
        assert sender.send_up(window, b"-", NOW, lambda: False)
        assert reader.gather(window, NOW, lambda _: False) == {1: b"-"}
    ranks.leave()


def test_a_window_that_a_parent_has_not_come_to_yet_waits_for_it(server: Any) -> None:
    before, ranks = server.num_keys(), Ranks(server)
    for window in range(3):
        assert ranks.exchanges[1].send_up(f"window{window}", bytes([window]), NOW, lambda: False)
    for window in (0, 1, 2):
        assert ranks.exchanges[0].gather(f"window{window}", NOW, lambda _: False) == {1: bytes([window])}
    assert server.num_keys() == before


def test_unread_messages_do_not_pile_up(server: Any) -> None:
    before, ranks = server.num_keys(), Ranks(server)
    sent = [ranks.exchanges[1].send_up(f"window{window}", b"-", NOW, lambda: False) for window in range(50)]
    assert sum(sent) == SLOTS == server.num_keys() - before
    # Once its parent goes on, so does it: what is over is dropped.
    for window in range(50):
        ranks.exchanges[0].gather(f"window{window}", NOW, lambda _: False)
    assert ranks.exchanges[1].send_up("window50", b"-", NOW, lambda: False)
    assert ranks.exchanges[0].gather("window50", NOW, lambda _: False) == {1: b"-"}
    ranks.leave()
    assert server.num_keys() == before


def test_where_a_message_was_taken_away_by_others_the_next_one_is_found(server: Any) -> None:
    ranks = Ranks(server)
    ranks.exchanges[1].send_up("window0", b"-", NOW, lambda: False)
    ranks.exchanges[6].leave(parent_is_gone=True)  # clears rank 4's members alone
    ranks.exchanges[2].leave(parent_is_gone=True)
    ranks.exchanges[1].send_up("window1", b"-", NOW, lambda: False)
    assert ranks.exchanges[0].gather("window1", NOW, lambda _: False) == {1: b"-"}
    ranks.leave()
