"""The order check: may the collectives of this job be serialised without a deadlock?

Serialising makes every collective wait for those issued before it on the same rank, on any communicator. Where ranks
issue the collectives of two groups in different orders, a program that ran well would then hang: rank 0 waits in A for
rank 1, which waits in B for rank 0. So before anything is serialised, the sequences of all ranks are put together, and
the union of their orders must have no cycle.

A node of that union is one collective (the k-th of its group, the same on every member), one send or one receive. The
edges say what cannot finish before what:

- a collective follows whatever precedes it on its rank, and precedes whatever follows it;
- a send follows what precedes it, but nothing waits for it, and a member of a coalescing block likewise;
- a receive precedes what follows it (but not the rest of its batch), and follows the send that it matches.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from overlap_callbacks.collectives import POINT_TO_POINT, RECEIVES, SENDS, Collective


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One collective of a sequence, as it travels between ranks.

    Attributes:
        operator: the ``c10d`` operator.
        group: name of the group.
        coalesced: number of the coalescing block that it is a member of, from 1; 0 for none.
        source, target: global ranks of a send or receive, -1 where unknown or not p2p.
        tag: of a send or receive.
    """

    operator: str
    group: str
    coalesced: int = 0
    source: int = -1
    target: int = -1
    tag: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return (self.operator, self.group)


class IssueOrder(msgspec.Struct, frozen=True):
    """The sequence of one rank's step.

    Attributes:
        items: in the order of issue.
        groups: the global ranks of each group, by its name.
        incomplete: whether collectives are missing, for want of storage.
        labels: names of the groups for people, where they have any.
    """

    items: tuple[Item, ...]
    groups: dict[str, tuple[int, ...]]
    incomplete: bool = False
    labels: dict[str, str] = {}

    @classmethod
    def of(cls, collectives: Iterable[Collective], rank: int, incomplete: bool = False) -> IssueOrder:
        """The sequence of the collectives that the training and autograd threads of ``rank`` issued."""
        items, groups, labels = [], {}, {}
        for collective in collectives:
            group = collective.group
            groups[group.name] = group.ranks
            if group.label != group.name:
                labels[group.name] = group.label
            source = target = -1
            if collective.operator in POINT_TO_POINT:
                peer = group.ranks[collective.peer] if collective.peer >= 0 else -1
                source, target = (rank, peer) if collective.operator in SENDS else (peer, rank)
            items.append(Item(collective.operator, group.name, collective.coalesced, source, target, collective.tag))
        return cls(items=tuple(items), groups=groups, incomplete=incomplete, labels=labels)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> IssueOrder:
        return msgspec.json.decode(data, type=cls)

    @property
    def digest(self) -> str:
        """Equal for equal sequences, on any rank."""
        return hashlib.blake2b(self.encode(), digest_size=16).hexdigest()

    @property
    def keys(self) -> tuple[tuple[str, str], ...]:
        return tuple(item.key for item in self.items)

    @property
    def single_group(self) -> str | None:
        """The group's name, where all is collectives of one group: then its communicator enforces the order itself."""
        if len(self.groups) == 1 and not any(item.operator in POINT_TO_POINT for item in self.items):
            return next(iter(self.groups))
        return None


@dataclass(frozen=True)
class Step:
    """One leg of a cycle: ``rank`` issues ``first`` before ``second``."""

    rank: int
    first: str
    second: str

    def __str__(self) -> str:
        return f"rank {self.rank} issues {self.first} before {self.second}"


@dataclass(frozen=True)
class Conflict:
    """A cycle in the union of the ranks' orders.

    Attributes:
        steps: its legs; each ends where the next begins.
    """

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.steps))


# A collective (group name and ranks, number within the group) or a message (kind, channel, number).
_Node = tuple[Any, ...]


def find_conflict(sequences: Mapping[int, IssueOrder]) -> Conflict | None:
    """Search the union of the ranks' orders for a cycle that serialising would make a deadlock.

    A cycle of messages alone is none: whoever posts its receive before its send without waiting (as pipelines do) makes
    one, and the job has just run through it.

    Args:
        sequences: the sequence of each rank. Ranks may share one object: its edges are then added once.

    Returns:
        The cycle, or None where the sequences can be serialised.
    """
    union = _Union()
    seen: set[int] = set()
    for rank, sequence in sorted(sequences.items()):
        if id(sequence) not in seen:
            seen.add(id(sequence))
            union.add(sequence, rank)
    cycle = union.cycle()
    return None if cycle is None else Conflict(union.legs(cycle))


class _Union:
    """The edges of all ranks' orders, over numbered nodes."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.collective: list[bool] = []
        self.after: list[set[int]] = []
        self.rank: dict[tuple[int, int], int] = {}  # which rank demands an edge, for the message; -1 for a message sent
        self._numbers: dict[_Node, int] = {}

    def add(self, sequence: IssueOrder, rank: int) -> None:
        """Add one rank's edges."""
        counts: dict[_Node, int] = defaultdict(int)
        frontier: list[int] = []  # what must be done before whatever follows
        received: list[int] = []  # in the batch under way: its members start together
        batch = 0
        for item in sequence.items:
            if not item.coalesced or item.coalesced != batch:
                frontier, received = frontier + received, []
            batch = item.coalesced
            if item.operator in POINT_TO_POINT:
                node = self._message(item, counts)
                if item.operator in RECEIVES:
                    received.append(node)
                    if item.source >= 0:
                        self._edge(self._matching_send(item, counts), node, -1)
                else:
                    for before in frontier:
                        self._edge(before, node, rank)
                continue
            node = self._of_collective(item, sequence, counts)
            for before in frontier:
                self._edge(before, node, rank)
            if not item.coalesced:
                frontier = [node]

    def cycle(self) -> list[int] | None:
        """The nodes of a shortest cycle through some collective, or None."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        size = len(self.names)
        edges = [(before, after) for before, afters in enumerate(self.after) for after in afters]
        if not edges:
            return None
        before, after = zip(*edges, strict=True)
        graph = coo_array(([True] * len(edges), (before, after)), shape=(size, size)).tocsr()
        _, component = connected_components(graph, directed=True, connection="strong")
        members: dict[int, int] = defaultdict(int)
        for label in component:
            members[label] += 1
        for node in range(size):
            if self.collective[node] and members[component[node]] > 1:
                return self._shortest_cycle(node)
        return None

    def _shortest_cycle(self, start: int) -> list[int]:
        reached = {start: -1}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for following in self.after[node]:
                if following == start:
                    cycle = [start]
                    while node != start:
                        cycle.append(node)
                        node = reached[node]
                    return [start, *reversed(cycle[1:])]
                if following not in reached:
                    reached[following] = node
                    queue.append(following)
        raise AssertionError("a node of a strong component has a way back to itself")

    def legs(self, cycle: list[int]) -> tuple[Step, ...]:
        """The cycle's legs, consecutive edges of one rank put together, the way of a message left out."""
        ranks = [self.rank[edge] for edge in itertools.pairwise([*cycle, cycle[0]])]
        # Start where the rank changes, so that no leg is cut in two by the start of the list.
        turn = next((i for i, rank in enumerate(ranks) if rank != ranks[i - 1]), 0)
        ranks, nodes = ranks[turn:] + ranks[:turn], cycle[turn:] + cycle[: turn + 1]
        legs: list[Step] = []
        previous = None
        for rank, first, second in zip(ranks, nodes, nodes[1:], strict=False):
            if rank >= 0 and rank == previous:
                legs[-1] = Step(rank, legs[-1].first, self.names[second])
            elif rank >= 0:
                legs.append(Step(rank, self.names[first], self.names[second]))
            previous = rank
        return tuple(legs)

    def _of_collective(self, item: Item, sequence: IssueOrder, counts: dict[_Node, int]) -> int:
        ranks, label = sequence.groups[item.group], sequence.labels.get(item.group, item.group)
        base = ("collective", item.group, ranks)
        number = counts[base]
        counts[base] += 1
        name = f"{item.operator} (number {number} of group {label!r}, ranks {_ranks(ranks)})"
        return self._node((*base, number), name, collective=True)

    def _message(self, item: Item, counts: dict[_Node, int]) -> int:
        kind = "send" if item.operator in SENDS else "receive"
        base = (kind, item.group, item.source, item.target, item.tag)
        number = counts[base]
        counts[base] += 1
        return self._node((*base, number), _message_name(kind, item, number))

    def _matching_send(self, item: Item, counts: dict[_Node, int]) -> int:
        """The send that the receive just counted matches."""
        channel = (item.group, item.source, item.target, item.tag)
        number = counts[("receive", *channel)] - 1
        return self._node(("send", *channel, number), _message_name("send", item, number))

    def _node(self, key: _Node, name: str, collective: bool = False) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.names)
            self.names.append(name)
            self.collective.append(collective)
            self.after.append(set())
        return number

    def _edge(self, before: int, after: int, rank: int) -> None:
        self.after[before].add(after)
        self.rank.setdefault((before, after), rank)


def _message_name(kind: str, item: Item, number: int) -> str:
    other = f"to rank {item.target}" if kind == "send" else f"from rank {item.source}"
    return f"{kind} {number} {other} on group {item.group!r}"


def _ranks(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, ..., {ranks[-1]}]"
