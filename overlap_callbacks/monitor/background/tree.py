"""The tree along which the ranks report to rank 0, and messages along its edges, through the store.

A rank's number in base ``FAN_IN`` gives its place: to find its parent, set its last non-zero digit to zero. So ranks 1
to 15 report to rank 0, ranks 17 to 31 to rank 16, and ranks 16, 32, ... to rank 0. Only rank numbers and the job's size
matter: a launcher's node variables may be set on some ranks only, and ranks with different trees would wait for each
other in vain.

No message stays in the store, whichever ranks die. Each edge has a few slots, used in turn: a sender reuses a slot only
after its message was taken. A leaving rank deletes the messages on its own edges, those of missing ranks below it, and,
if nobody reads its own, those of the ranks below its parent. Both ends of an edge may be dead, so at the end of
training each rank also watches the edges of a few others (``Tree.watched``), and deletes messages there that nobody
takes while it waits for its own to be read. A live reader has given up on them by then, and a live sender takes them
back.

Messages are left behind only

- if both ends of their edge and the ranks that watch it died, or began to leave before the message was sent;
- if both ends died and the others leave early, because of an exception, a signal or a timeout of the caller: they
  cannot know which ranks are still to come, so they watch nothing;
- if the store fails, or the time to close is too short to detect that a rank is dead.

A restarted job may find the store of the killed one (``torchrun --max-restarts``), with the same names in it. So a
sender clears its slots before it sends anything.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from overlap_callbacks.analysis.rank_set import Run, in_runs
from overlap_callbacks.monitor.background.store import Job, StoreChannel, poll

# Fan-in of the tree, the leader included: rank 0 hears 15 ranks on each level, so 45 of 4,096 ranks and 46 of 8,192. A
# larger one would mean fewer levels and more work for rank 0; a lost leader takes at most 1/16 of the job's rows.
FAN_IN = 16

# Edges of other ranks that a leaving rank checks: each takes several store calls, and all ranks may leave at once. So
# in a large job it is half as many.
WATCHED = 4
_MANY_RANKS = 1024

# Maximum extra time that a rank waits for its children, compared with how long they wait for theirs.
_MAX_LEAD_S = 2.5


def num_watched(world_size: int) -> int:
    """Number of other ranks whose edges a leaving rank checks."""
    return WATCHED if world_size <= _MANY_RANKS else WATCHED // 2


@dataclass(frozen=True)
class Tree:
    """One rank's place. Groups of ``fan_in`` ranks, the leader included, are merged at once."""

    rank: int
    world_size: int
    fan_in: int = FAN_IN

    @classmethod
    def of(cls, job: Job) -> Tree:
        """The place of this process in its job."""
        return cls(job.rank, job.world_size, FAN_IN)

    @property
    def level(self) -> int:
        """Levels below this rank: 0 for a rank without children, the maximum for rank 0."""
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
        """Ranks whose edge to their parent this rank checks when it leaves: their messages may be stale.

        They lie between this rank and the opposite one in the ring of all ranks, at evenly growing distances: ranks
        that die together usually have consecutive numbers, as on a node.
        """
        farthest, number = self.world_size / 2, num_watched(self.world_size)
        near = [round(farthest ** (place / (number - 1))) for place in range(number)]
        distances = [max(place + 1, distance) for place, distance in enumerate(near)]  # all different
        ranks = {(self.rank + distance) % self.world_size for distance in distances}
        return tuple(sorted(ranks - {0, self.rank, *self.children}))  # their edges are this rank's own, or do not exist

    def members_without(self, runs: Sequence[Run]) -> tuple[int, ...]:
        """This rank and those below it, except the ranks in ``runs`` (joined)."""
        members = self.members
        if list(runs) == [(members.start, members.stop - 1)]:
            return ()  # the usual case, with any number of ranks
        others = set(in_runs(runs))
        return tuple([rank for rank in members if rank not in others])

    def patience_s(self, timeout_s: float) -> float:
        """How long this rank waits for its children, so that its message still reaches rank 0 within ``timeout_s``."""
        levels = max(1, self.num_levels)
        return timeout_s - (levels - self.level) * min(_MAX_LEAD_S, timeout_s / (2 * levels))


# -- messages


# Message slots on an edge, per direction.
SLOTS = 4
# Maximum number of missing ranks below a leaving rank, or below a lost parent, whose messages it deletes: each takes
# several store calls, and many ranks may leave at once.
MAX_UNHEARD = 1024
MAX_ORPHANS = 256
# While waiting for one child, check the others this often.
_ROUND_S = 0.5
# Number of finished exchanges whose keys are remembered, so that late messages can be recognised.
_REMEMBERED = 64


class Exchange:
    """One kind of message, up the tree and, if answered, down again. Used by one thread.

    ``kind`` names the messages. ``unheard``: ranks below this one missing from the last exchange; see ``leave``.

    Each exchange has a ``key``: the same on every rank, and never reused. Waiting ends early when ``stop`` returns
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
        """Delete unread messages of an earlier process with this rank. Sends nothing yet."""
        if self.tree.parent is not None:
            self._empty("up", self.tree.rank)
        if "down" in self._directions:
            for child in self._to:
                self._empty("down", child)

    def send_up(self, key: str, message: bytes, patience_s: float, stop: Callable[[], bool]) -> bool:
        """Send ``message`` to the parent. Returns False if no slot was free within ``patience_s``."""
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
            # All must come, so it is usually enough to check the first missing one.
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
        """Answer all children, except those that took none of the last answers."""
        for sender in self._to.values():
            sender.offer(key, message)

    def await_answer(
        self, key: str, timeout_s: float, stop: Callable[[], bool], *, taken_within_s: float | None = None
    ) -> bytes | None:
        """The parent's answer; None if there was none in time.

        A parent that has not taken this rank's message within ``taken_within_s`` is considered dead, and the wait ends;
        None to wait for the whole time.
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
        """Withdraw the last message sent up, if the parent has not taken it: its answer is no longer needed."""
        self._to_parent.withdraw()

    def _poll_answer(self, key: str, timeout_s: float, stop: Callable[[], bool]) -> bytes | None:
        answer = poll(lambda: self._from_parent.look(key, self._answered), timeout_s, stop)
        return self._from_parent.search(key, self._answered) if answer is None else answer

    def await_taken(self, timeout_s: float, stop: Callable[[], bool]) -> bool:
        """Wait until all messages of this rank were taken. Returns whether the parent took all of those sent to it."""
        waiting = [self._to_parent, *self._to.values()]

        def look() -> bool | None:
            waiting[:] = [sender for sender in waiting if not sender.is_empty()]
            return None if waiting else True

        poll(look, timeout_s, stop)
        return self._to_parent not in waiting

    def stale_messages(self) -> StaleMessages:
        """Messages on the edges that this rank watches. Call it before waiting for anything else."""
        edges = [self._edge(direction, rank) for rank in self.tree.watched for direction in self._directions]
        return StaleMessages(self._channel, edges)

    def leave(self, *, parent_is_gone: bool = False) -> None:
        """Delete what is left in the store; nothing is sent or gathered afterwards.

        ``parent_is_gone``: nobody read this rank's messages while it waited.
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
        self._channel.delete(*[_slot(edge, number) for number in range(SLOTS)])

    def _edge(self, direction: str, child: int) -> str:
        return f"{self._kind}/{direction}/{child}"


class StaleMessages:
    """Messages between other ranks that are in the store now; usually none."""

    def __init__(self, channel: StoreChannel, edges: Iterable[str]) -> None:
        self._channel = channel
        self._seen_s = time.monotonic()
        slots = [_slot(edge, number) for edge in edges for number in range(SLOTS)]
        found = [(slot, channel.peek(slot)) for slot in slots]
        self._unread = {slot: message for slot, message in found if message is not None}

    def delete_unread(self, timeout_s: float, stop: Callable[[], bool], *, after_s: float) -> None:
        """Wait until they are read; delete unread ones if they were first seen at least ``after_s`` ago."""

        def look() -> bool | None:
            for slot in list(self._unread):
                if not self._channel.has(slot):
                    del self._unread[slot]
            return None if self._unread else True

        if poll(look, timeout_s, stop) is None and time.monotonic() - self._seen_s >= after_s:
            for slot, message in self._unread.items():
                # A different message in the same slot belongs to live ranks.
                if self._channel.peek(slot) == message:
                    self._channel.delete(slot)


class _Sender:
    """The sender's end of an edge."""

    def __init__(self, channel: StoreChannel, edge: str) -> None:
        self._channel = channel
        self._edge = edge
        self._number = 0

    def offer(self, key: str, message: bytes) -> bool:
        """Send, if the next slot is free."""
        slot = _slot(self._edge, self._number)
        if self._number >= SLOTS and self._channel.has(slot):
            return False
        self._channel.publish(slot, f"{self._number} {key}\n".encode() + message)
        self._number += 1
        return True

    def withdraw(self) -> None:
        """Withdraw the last message, unless it was taken."""
        # A FileStore reports every delete as successful, so check first.
        if not self.is_empty() and self._channel.delete(_slot(self._edge, self._number - 1)):
            self._number -= 1

    def is_empty(self) -> bool:
        """Whether all messages were taken. They are taken in order."""
        return self._number == 0 or not self._channel.has(_slot(self._edge, self._number - 1))


class _Receiver:
    """The reader's end of an edge."""

    def __init__(self, channel: StoreChannel, edge: str) -> None:
        self._channel = channel
        self._edge = edge
        self._number = 0
        self._early: dict[str, bytes] = {}  # messages taken before they were asked for

    def look(self, key: str, over: Iterable[str]) -> bytes | None:
        """The message under ``key``, or None if it has not come yet. Keys in ``over`` will not be asked for again."""
        while key not in self._early:
            slot = _slot(self._edge, self._number)
            data = self._channel.peek(slot)
            # The sender may withdraw it between our two calls. Only one side's delete succeeds, and both know which:
            # otherwise the two ends would continue from different numbers and miss each other in every later window.
            if data is None or not self._channel.delete(slot):
                return None
            number, sent_key, message = _opened(data)
            self._number = number + 1
            if sent_key not in over:
                self._early[sent_key] = message
                if len(self._early) > SLOTS:
                    self._early.pop(next(iter(self._early)))
        return self._early.pop(key)

    def search(self, key: str, over: Iterable[str]) -> bytes | None:
        """Like ``look``, in all slots.

        If others deleted a message, the next one is in another slot. The sender may also reuse a number after a
        withdrawal that raced with a read, so accept any number.
        """
        found = self.look(key, over)
        if found is None:
            slots = [self._channel.peek(_slot(self._edge, number)) for number in range(SLOTS)]
            numbers = [_opened(data)[0] for data in slots if data is not None]
            if numbers:
                self._number = min(numbers)
                found = self.look(key, over)
        return found


def _opened(data: bytes) -> tuple[int, str, bytes]:
    """Decode a message: its number on the edge, the key of its exchange, and the content."""
    head, _, message = data.partition(b"\n")
    number, _, key = head.decode().partition(" ")
    return int(number), key, message


def _slot(edge: str, number: int) -> str:
    return f"{edge}/{number % SLOTS}"
