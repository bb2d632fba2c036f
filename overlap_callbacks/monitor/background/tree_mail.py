"""Messages between parents and children of the tree, through the store. None stay there, whichever ranks die.

Each edge has few places for messages, used in turn: a sender uses a place again only after its message was taken. So
what ranks that died can leave in the store is bounded, and has names that the others know. A rank that leaves deletes
the messages of its own edges, of the ranks below it that were not heard, and, if nobody reads its own, of the ranks
below its parent.

Both ends of an edge may be dead. So at the end of training each rank also watches the edges of a few others
(``Tree.watched``), and deletes messages there that nobody takes while it waits for its own to be taken. A reader that
lives has given up on them by then, and a sender that lives takes them back itself.

Messages are left behind only

- if both ends of their edge and the ranks that watch it died, or began to leave before the message was sent;
- if both ends died and the others leave early, because of an exception, a signal or a timeout of the caller. They
  cannot know who still comes, so they watch nothing;
- if the store fails, or the time to close is too short to tell that a rank is dead.

A restarted job may find the store of the killed one (``torchrun --max-restarts`` keeps it), with the same names in it.
So a sender deletes what lies in its places before it sends anything.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from overlap_callbacks.monitor.background.store import StoreChannel, poll
from overlap_callbacks.monitor.background.tree import Tree

# Places for messages on an edge, in each direction.
PLACES = 4
# Ranks below a leaving one that were not heard, and ranks below a parent that is gone, whose messages it takes away at
# most: each of them is some calls of the store, and many ranks may leave at once.
MAX_UNHEARD = 1024
MAX_ORPHANS = 256
# While one child is waited for, the others are looked at with this interval.
_ROUND_S = 0.5
# Keys of exchanges that are over: their messages come too late.
_REMEMBERED = 64


class Exchange:
    """One kind of message, up the tree and, where it is answered, down again. One thread uses it.

    Args:
        channel: to the store.
        tree: the place of this rank.
        kind: names the messages; the same on every rank.
        answered: whether parents answer.

    Attributes:
        tree: the place of this rank.
        unheard: ranks below this one that were not heard last; see ``leave``.
    """

    def __init__(self, channel: StoreChannel, tree: Tree, kind: str, *, answered: bool) -> None:
        self.tree = tree
        self.unheard: tuple[int, ...] = ()
        self._channel = channel
        self._kind = kind
        self._directions = ("up", "down") if answered else ("up",)
        self._to_parent = _Sender(channel, self._edge("up", tree.rank))
        self._from_parent = _Receiver(channel, self._edge("down", tree.rank))
        self._from = {child: _Receiver(channel, self._edge("up", child)) for child in tree.children}
        self._to = {child: _Sender(channel, self._edge("down", child)) for child in tree.children}
        self._gathered: deque[str] = deque(maxlen=_REMEMBERED)
        self._answered: deque[str] = deque(maxlen=_REMEMBERED)

    def open(self) -> None:
        """Delete what an earlier process with this rank has sent and nobody has taken. Nothing is sent yet."""
        if self.tree.parent is not None:
            self._empty("up", self.tree.rank)
        if "down" in self._directions:
            for child in self._to:
                self._empty("down", child)

    def send_up(self, key: str, message: bytes, patience_s: float, stop: Callable[[], bool]) -> bool:
        """Send ``message`` to the parent.

        Args:
            key: of the exchange; the same on every rank, and never used twice.
            message: to send.
            patience_s: maximum time to wait for a free place.
            stop: ends the waiting early when it returns True.

        Returns:
            False if there was no place for it.
        """
        return bool(poll(lambda: self._to_parent.offer(key, message) or None, patience_s, stop))

    def gather(self, key: str, timeout_s: float, stop: Callable[[float], bool]) -> dict[int, bytes]:
        """The messages of the children, by rank; those that do not come in time are missing.

        Args:
            key: of the exchange.
            timeout_s: maximum time.
            stop: ends the waiting early when it returns True. It gets the time of the last message, or of the call if
                none has come (``time.monotonic``).
        """
        last_s = next_round_s = time.monotonic()
        found: dict[int, bytes] = {}

        def look(child: int, look_at: Callable[[str, Iterable[str]], bytes | None]) -> bool:
            nonlocal last_s
            message = look_at(key, self._gathered)
            if message is not None:
                found[child] = message
                last_s = time.monotonic()
            return message is not None

        def look_at_missing() -> bool | None:
            # All must come, so mostly it is enough to look at the first that is missing.
            nonlocal next_round_s
            all_of_them = time.monotonic() >= next_round_s
            if all_of_them:
                next_round_s = time.monotonic() + _ROUND_S
            for child, receiver in self._from.items():
                if child not in found and not look(child, receiver.look) and not all_of_them:
                    break
            return True if len(found) == len(self._from) else None

        if poll(look_at_missing, timeout_s, lambda: stop(last_s)) is None:
            for child, receiver in self._from.items():
                if child not in found:
                    look(child, receiver.search)
        self._gathered.append(key)
        return found

    def send_down(self, key: str, message: bytes) -> None:
        """Answer all children; not those that have taken none of the last answers."""
        for sender in self._to.values():
            sender.offer(key, message)

    def await_answer(
        self, key: str, timeout_s: float, stop: Callable[[], bool], *, taken_within_s: float | None = None
    ) -> bytes | None:
        """The parent's answer; None if there was none in time.

        Args:
            key: of the exchange.
            timeout_s: maximum time to wait.
            stop: ends the waiting early when it returns True.
            taken_within_s: time after which a parent that has not taken this rank's message is considered dead, and not
                waited for any longer; None to wait for the whole time.
        """
        first_s = timeout_s if taken_within_s is None else min(taken_within_s, timeout_s)
        answer = self._poll_answer(key, first_s, stop)
        if answer is None and first_s < timeout_s and not stop() and self.parent_has_taken():
            answer = self._poll_answer(key, timeout_s - first_s, stop)
        self._answered.append(key)
        return answer

    def parent_has_taken(self) -> bool:
        """Whether the parent has taken all messages of this rank."""
        return self._to_parent.is_empty()

    def withdraw(self) -> None:
        """Take back what was sent up last, if the parent has not taken it: nobody waits for the answer any longer."""
        self._to_parent.withdraw()

    def _poll_answer(self, key: str, timeout_s: float, stop: Callable[[], bool]) -> bytes | None:
        answer = poll(lambda: self._from_parent.look(key, self._answered), timeout_s, stop)
        return self._from_parent.search(key, self._answered) if answer is None else answer

    def await_taken(self, timeout_s: float, stop: Callable[[], bool]) -> bool:
        """Wait until all messages of this rank were taken; False if the parent has not taken all of its own."""
        waiting = [self._to_parent, *self._to.values()]

        def look() -> bool | None:
            waiting[:] = [sender for sender in waiting if not sender.is_empty()]
            return None if waiting else True

        poll(look, timeout_s, stop)
        return self._to_parent not in waiting

    def stale_messages(self) -> StaleMessages:
        """The messages on the edges that this rank watches, looked at before it waits for anything else."""
        edges = [self._edge(direction, rank) for rank in self.tree.watched for direction in self._directions]
        return StaleMessages(self._channel, edges)

    def leave(self, *, parent_is_gone: bool = False) -> None:
        """Delete what is left in the store; nothing is sent or gathered afterwards.

        Args:
            parent_is_gone: nobody has read what this rank sent for as long as it waited.
        """
        if self.tree.world_size == 1:
            return
        ranks = [self.tree.rank, *self._from, *self.unheard[:MAX_UNHEARD]]
        if parent_is_gone and self.tree.parent is not None:
            parent = Tree(self.tree.parent, self.tree.world_size, self.tree.fan_in)
            ranks += [parent.rank, *parent.children, *parent.members[:MAX_ORPHANS]]
        for rank in dict.fromkeys(ranks):
            for direction in self._directions:
                self._empty(direction, rank)

    def _empty(self, direction: str, child: int) -> None:
        edge = self._edge(direction, child)
        self._channel.delete(*[_place(edge, number) for number in range(PLACES)])

    def _edge(self, direction: str, child: int) -> str:
        return f"{self._kind}/{direction}/{child}"


class StaleMessages:
    """Messages between other ranks, as they lie in the store now. Mostly there are none."""

    def __init__(self, channel: StoreChannel, edges: Iterable[str]) -> None:
        self._channel = channel
        self._seen_s = time.monotonic()
        places = [_place(edge, number) for edge in edges for number in range(PLACES)]
        found = [(place, channel.peek(place)) for place in places]
        self._lying = {place: message for place, message in found if message is not None}

    def take_away(self, timeout_s: float, stop: Callable[[], bool], *, after_s: float) -> None:
        """Wait until their readers have taken them; delete those that nobody takes.

        Args:
            timeout_s: maximum time to wait.
            stop: ends the waiting early when it returns True.
            after_s: minimum age, as seen here, of a message whose ends are considered dead.
        """

        def look() -> bool | None:
            for place in list(self._lying):
                if not self._channel.has(place):
                    del self._lying[place]
            return None if self._lying else True

        if poll(look, timeout_s, stop) is None and time.monotonic() - self._seen_s >= after_s:
            for place, message in self._lying.items():
                # Another message in the same place belongs to ranks that live.
                if self._channel.peek(place) == message:
                    self._channel.delete(place)


class _Sender:
    """The sender's end of an edge."""

    def __init__(self, channel: StoreChannel, edge: str) -> None:
        self._channel = channel
        self._edge = edge
        self._number = 0

    def offer(self, key: str, message: bytes) -> bool:
        """Send, if the next place is free."""
        place = _place(self._edge, self._number)
        if self._number >= PLACES and self._channel.has(place):
            return False
        self._channel.publish(place, f"{self._number} {key}\n".encode() + message)
        self._number += 1
        return True

    def withdraw(self) -> None:
        """Take the last message back, unless it was taken."""
        # A FileStore says of every message that it has deleted it: so look before.
        if not self.is_empty() and self._channel.delete(_place(self._edge, self._number - 1)):
            self._number -= 1

    def is_empty(self) -> bool:
        """Whether all messages were taken. They are taken in order."""
        return self._number == 0 or not self._channel.has(_place(self._edge, self._number - 1))


class _Receiver:
    """The reader's end of an edge."""

    def __init__(self, channel: StoreChannel, edge: str) -> None:
        self._channel = channel
        self._edge = edge
        self._number = 0
        self._early: dict[str, bytes] = {}  # what was taken before it was asked for

    def look(self, key: str, over: Iterable[str]) -> bytes | None:
        """The message under ``key``, or None if it has not come yet.

        Args:
            key: of the exchange.
            over: keys that nobody will ask for again.
        """
        while key not in self._early:
            place = _place(self._edge, self._number)
            data = self._channel.peek(place)
            # Its sender may take it back between our two calls. Only one of us deletes it, and both know which: else
            # the two ends would count on from different numbers, and miss each other in every window to come.
            if data is None or not self._channel.delete(place):
                return None
            number, sent_key, message = _opened(data)
            self._number = number + 1
            if sent_key not in over:
                self._early[sent_key] = message
                if len(self._early) > PLACES:
                    self._early.pop(next(iter(self._early)))
        return self._early.pop(key)

    def search(self, key: str, over: Iterable[str]) -> bytes | None:
        """Like ``look``, in all places.

        If others deleted a message, the next one is in another place. And its sender may have counted back for a
        message that it believed to be withdrawn, and that was taken: so any number is a new one.
        """
        found = self.look(key, over)
        if found is None:
            places = [self._channel.peek(_place(self._edge, number)) for number in range(PLACES)]
            numbers = [_opened(data)[0] for data in places if data is not None]
            if numbers:
                self._number = min(numbers)
                found = self.look(key, over)
        return found


def _opened(data: bytes) -> tuple[int, str, bytes]:
    """The number of what was sent on its edge, the key of its exchange, and the message."""
    head, _, message = data.partition(b"\n")
    number, _, key = head.decode().partition(" ")
    return int(number), key, message


def _place(edge: str, number: int) -> str:
    return f"{edge}/{number % PLACES}"
