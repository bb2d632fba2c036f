"""The tree along which the ranks report to rank 0, and messages along its edges, through the store.

A rank's number, written in base ``FAN_IN``, names its place: its parent is the rank whose last digit other than zero is
zero instead. So ranks 1 to 15 report to rank 0, ranks 17 to 31 to rank 16, and ranks 16, 32, ... to rank 0. Only rank
numbers and the size of the job go in: what a launcher says of nodes may be set on some ranks only, and ranks with
different trees would wait for each other in vain.

No message stays in the store, whichever ranks die. Each edge has few places, used in turn: a sender uses a place again
only after its message was taken. A rank that leaves deletes the messages of its own edges, of the ranks below it that
were not heard, and, if nobody reads its own, of the ranks below its parent. Both ends of an edge may be dead, so at the
end of training each rank also watches the edges of a few others (``Tree.watched``), and deletes messages there that
nobody takes while it waits for its own. A live reader has given up on them by then, and a live sender takes them back.

Messages are left behind only

- if both ends of their edge and the ranks that watch it died, or began to leave before the message was sent;
- if both ends died and the others leave early, because of an exception, a signal or a timeout of the caller. They
  cannot know who still comes, so they watch nothing;
- if the store fails, or the time to close is too short to tell that a rank is dead.

A restarted job may find the store of the killed one (``torchrun --max-restarts``), with the same names in it. So a
sender empties its places before it sends anything.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from overlap_callbacks.analysis.rank_set import Run, in_runs
from overlap_callbacks.monitor.background.store import Job, StoreChannel, poll

# Children that a rank has on each level, and one: rank 0 hears 15 on each level, so 45 of 4,096 ranks and 46 of 8,192.
# More would mean fewer levels and more work for rank 0; a leader that is lost takes at most 1/16 of the job's rows.
FAN_IN = 16

# Ranks whose edges a leaving rank looks at, beside its own: each of them is some calls of the store, and all ranks may
# leave at once. So in a large job it is half as many.
WATCHED = 4
_MANY_RANKS = 1024

# Maximum time by which a rank waits longer for its children than they wait for theirs.
_MAX_LEAD_S = 2.5


def num_watched(world_size: int) -> int:
    """Ranks whose edges a leaving rank looks at, beside its own."""
    return WATCHED if world_size <= _MANY_RANKS else WATCHED // 2


@dataclass(frozen=True)
class Tree:
    """The place of one rank. ``fan_in`` ranks are put together at once, the leader included."""

    rank: int
    world_size: int
    fan_in: int = FAN_IN

    @classmethod
    def of(cls, job: Job) -> Tree:
        """The place of this process in its job."""
        return cls(job.rank, job.world_size, FAN_IN)

    @property
    def level(self) -> int:
        """How many levels of ranks are below this one: 0 for a rank without children, the most for rank 0."""
        level, width = 0, 1
        while width < self.world_size and self.rank % (width * self.fan_in) == 0:
            level, width = level + 1, width * self.fan_in
        return level

    @property
    def num_levels(self) -> int:
        """The level of rank 0."""
        return Tree(0, self.world_size, self.fan_in).level

    @property
    def parent(self) -> int | None:
        """The rank that this one reports to; None for rank 0."""
        if self.rank == 0:
            return None
        width: int = self.fan_in ** (self.level + 1)
        return self.rank - self.rank % width

    @property
    def children(self) -> tuple[int, ...]:
        """The ranks that report to this one."""
        widths = [self.fan_in**level for level in range(self.level)]
        ranks = [self.rank + place * width for width in widths for place in range(1, self.fan_in)]
        return tuple([rank for rank in ranks if rank < self.world_size])

    @property
    def members(self) -> range:
        """This rank and all below it."""
        return range(self.rank, min(self.rank + self.fan_in**self.level, self.world_size))

    @property
    def watched(self) -> tuple[int, ...]:
        """Ranks whose edge to their parent this one looks at when it leaves: their messages may be stale.

        They lie between this rank and the opposite one in the ring of all ranks, at distances that grow evenly: ranks
        that die together mostly follow each other, as those of a node do.
        """
        farthest, number = self.world_size / 2, num_watched(self.world_size)
        near = [round(farthest ** (place / (number - 1))) for place in range(number)]
        distances = [max(place + 1, distance) for place, distance in enumerate(near)]  # all different
        ranks = {(self.rank + distance) % self.world_size for distance in distances}
        return tuple(sorted(ranks - {0, self.rank, *self.children}))  # the edges of these it has, or they have none

    def members_without(self, runs: Sequence[Run]) -> tuple[int, ...]:
        """This rank and those below it, except the ranks in ``runs`` (joined)."""
        members = self.members
        if list(runs) == [(members.start, members.stop - 1)]:
            return ()  # the usual case, of any number of ranks
        others = set(in_runs(runs))
        return tuple([rank for rank in members if rank not in others])

    def patience_s(self, timeout_s: float) -> float:
        """How long this rank waits for its children, so that its message still reaches rank 0 within ``timeout_s``."""
        levels = max(1, self.num_levels)
        return timeout_s - (levels - self.level) * min(_MAX_LEAD_S, timeout_s / (2 * levels))


# -- messages


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

    ``kind`` names the messages. ``unheard`` has the ranks below this one that were not heard last; see ``leave``.

    Each exchange has a ``key``: the same on every rank, and never used twice. Waiting ends early when ``stop`` returns
    True.
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
        """Send ``message`` to the parent. Returns False if there was no place for it within ``patience_s``."""
        return bool(poll(lambda: self._to_parent.offer(key, message) or None, patience_s, stop))

    def gather(self, key: str, timeout_s: float, stop: Callable[[float], bool]) -> dict[int, bytes]:
        """The messages of the children, by rank; those that do not come in time are missing.

        ``stop`` gets the time of the last message, or of the call if none has come (``time.monotonic``).
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

        A parent that has not taken this rank's message within ``taken_within_s`` is considered dead, and not waited for
        any longer; None to wait for the whole time.
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

        ``parent_is_gone``: nobody has read what this rank sent while it waited.
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
        """Wait until their readers have taken them; delete what nobody takes and was seen at least ``after_s`` ago."""

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
        """The message under ``key``, or None if it has not come yet. Nobody will ask for the keys in ``over`` again."""
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
