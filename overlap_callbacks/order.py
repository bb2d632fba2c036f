"""The order check: may the collectives of this job be serialised without a deadlock?

Serialising makes every collective wait for those issued before it on the same rank, on any communicator. Where ranks
issue the collectives of two groups in different orders, a program that ran well would then hang: rank 0 waits in A for
rank 1, which waits in B for rank 0. So before anything is serialised, the sequences of all ranks are put together, and
the union of their orders must have no cycle.

A node of that union is one collective (the k-th of its group, the same on every member), one send or one receive. The
edges say what cannot finish before what:

- a collective follows whatever precedes it on its rank, and precedes whatever follows it;
- a send follows what precedes it, but nothing waits for it, and a member of a coalescing block likewise;
- a receive precedes what follows it, and follows the send that it matches.
"""

from __future__ import annotations

import graphlib
import hashlib
import itertools
from collections import defaultdict
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
        coalesced: whether it is a member of a coalescing block.
        source, target: global ranks of a send or receive, -1 where unknown or not p2p.
        tag: of a send or receive.
    """

    operator: str
    group: str
    coalesced: bool = False
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
    """

    items: tuple[Item, ...]
    groups: dict[str, tuple[int, ...]]
    incomplete: bool = False

    @classmethod
    def of(cls, collectives: Iterable[Collective], rank: int, incomplete: bool = False) -> IssueOrder:
        """The sequence of the collectives that the training and autograd threads of ``rank`` issued."""
        items, groups = [], {}
        for collective in collectives:
            group = collective.group
            groups[group.name] = group.ranks
            source = target = -1
            if collective.operator in POINT_TO_POINT:
                peer = group.ranks[collective.peer] if collective.peer >= 0 else -1
                source, target = (rank, peer) if collective.operator in SENDS else (peer, rank)
            items.append(Item(collective.operator, group.name, collective.coalesced, source, target, collective.tag))
        return cls(items=tuple(items), groups=groups, incomplete=incomplete)

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


# A collective (group name and ranks, number within the group) or a message (group, channel, kind, number).
_Node = tuple[Any, ...]


def find_conflict(sequences: Mapping[int, IssueOrder]) -> Conflict | None:
    """Search the union of the ranks' orders for a cycle.

    Args:
        sequences: the sequence of each rank. Ranks may share one object: its edges are then added once.

    Returns:
        The cycle, or None where the sequences can be serialised.
    """
    predecessors: dict[_Node, set[_Node]] = defaultdict(set)
    by_rank: dict[tuple[_Node, _Node], int] = {}  # which rank demands an edge, for the message
    names: dict[_Node, str] = {}
    seen: set[int] = set()
    for rank, sequence in sorted(sequences.items()):
        if id(sequence) in seen:
            continue
        seen.add(id(sequence))
        for before, after in _edges(sequence, names):
            predecessors[after].add(before)
            by_rank.setdefault((before, after), rank)
    try:
        graphlib.TopologicalSorter(predecessors).prepare()
    except graphlib.CycleError as error:
        cycle: list[_Node] = error.args[1]  # each node precedes the next; the first is the last
        return Conflict(_legs(cycle, by_rank, names))
    return None


def _edges(sequence: IssueOrder, names: dict[_Node, str]) -> Iterable[tuple[_Node, _Node]]:
    counts: dict[_Node, int] = defaultdict(int)
    frontier: list[_Node] = []  # what must be done before whatever follows
    for item in sequence.items:
        if item.operator in POINT_TO_POINT:
            channel = (item.group, item.source, item.target, item.tag)
            kind = "send" if item.operator in SENDS else "recv"
            number = counts[(kind, *channel)]
            counts[(kind, *channel)] += 1
            node: _Node = (kind, *channel, number)
            if item.operator in RECEIVES:
                names[node] = f"receive {number} from rank {item.source} on group {item.group!r}"
                if item.source >= 0:
                    sent = ("send", *channel, number)
                    names.setdefault(sent, f"send {number} to rank {item.target} on group {item.group!r}")
                    yield sent, node
                frontier.append(node)
            else:
                names[node] = f"send {number} to rank {item.target} on group {item.group!r}"
                for before in frontier:
                    yield before, node
            continue
        base: _Node = ("collective", item.group, sequence.groups[item.group])
        number = counts[base]
        counts[base] += 1
        node = (*base, number)
        names[node] = f"{item.operator} (number {number} of group {item.group!r}, ranks {_ranks(base[2])})"
        for before in frontier:
            yield before, node
        if not item.coalesced:
            frontier = [node]


def _legs(
    cycle: Sequence[_Node], by_rank: Mapping[tuple[_Node, _Node], int], names: Mapping[_Node, str]
) -> tuple[Step, ...]:
    """The cycle's legs, consecutive edges of one rank put together."""
    ranks = [by_rank[edge] for edge in itertools.pairwise(cycle)]
    # Start where the rank changes, so that no leg is cut in two by the start of the list.
    start = next((i for i, rank in enumerate(ranks) if rank != ranks[i - 1]), 0)
    nodes = [*cycle[start:-1], *cycle[: start + 1]]
    ranks = ranks[start:] + ranks[:start]
    legs: list[Step] = []
    for rank, first, second in zip(ranks, nodes, nodes[1:], strict=False):
        if legs and legs[-1].rank == rank:
            legs[-1] = Step(rank, legs[-1].first, names[second])
        else:
            legs.append(Step(rank, names[first], names[second]))
    return tuple(legs)


def _ranks(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, ..., {ranks[-1]}]"
