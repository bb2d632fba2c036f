"""The order check: may the collectives of this job be serialised without a deadlock?

Serialising makes every collective wait for those issued before it on the same rank, on any communicator. If ranks issue
the collectives of two groups in different orders, a correct program would hang: rank 0 waits in A for rank 1, which
waits in B for rank 0. So before anything is serialised, the union of the ranks' orders must have no cycle.

A node of that union is one collective (the k-th of its group, on every member) or one message (the k-th send from one
rank to another, with its receive). Each node waits for all that precede it on its rank, even those not serialised
(single messages, members of coalescing blocks, groups of unknown ranks): the job may wait for these at once. Only
members of one coalescing block, or of one batch that sequential steps wait for (``Gate.post``), start together. (A
small message may be buffered, and its send finish before its receive is posted. The check does not rely on that.)

A cycle counts only if it goes through a node that sequential steps wait for: the job has just run without hanging in
any other.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from overlap_callbacks.gate.collectives import POINT_TO_POINT, SENDS, Collective


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One collective of a sequence, as sent between ranks; fields as in ``Collective``, the group by name.

    ``source`` and ``target``: global ranks of a send or receive, -1 if unknown.
    """

    operator: str
    group: str
    coalesced: int = 0
    source: int = -1
    target: int = -1
    tag: int = 0
    posted: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return (self.operator, self.group)

    @property
    def batch(self) -> tuple[int, int]:
        """Collectives of one batch start together. In a batch that is waited for, coalescing blocks do not matter."""
        return (self.posted, 0) if self.posted else (0, self.coalesced)


class CollectiveSequence(msgspec.Struct, frozen=True):
    """The sequence of one rank's step.

    Attributes:
        items: in the order of issue.
        groups: the global ranks of each group, by name; empty if not known.
        incomplete: whether collectives are missing, because the gate's storage was full.
        compiled: whether torch.compile compiled during the step, so that collectives may be missing.
        labels: readable names of the groups that have one.
    """

    items: tuple[Item, ...]
    groups: dict[str, tuple[int, ...]]
    incomplete: bool = False
    labels: dict[str, str] = {}
    compiled: bool = False

    @classmethod
    def of(
        cls, collectives: Iterable[Collective], rank: int, incomplete: bool = False, compiled: bool = False
    ) -> CollectiveSequence:
        items, groups, labels = [], {}, {}
        for collective in collectives:
            group = collective.group
            groups[group.name] = group.ranks
            if group.label != group.name:
                labels[group.name] = group.label
            source = target = -1
            if collective.operator in POINT_TO_POINT:
                peer = group.ranks[collective.peer] if collective.peer >= 0 and group.ranks else -1
                source, target = (rank, peer) if collective.operator in SENDS else (peer, rank)
            numbers = (collective.coalesced, source, target, collective.tag, collective.posted)
            items.append(Item(collective.operator, group.name, *numbers))
        return cls(items=tuple(items), groups=groups, incomplete=incomplete, labels=labels, compiled=compiled)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> CollectiveSequence:
        return msgspec.json.decode(data, type=cls)

    @property
    def digest(self) -> str:
        """Equal for equal sequences, on any rank."""
        return hashlib.blake2b(self.encode(), digest_size=16).hexdigest()

    @property
    def communicates(self) -> bool:
        """Whether it exchanges anything with another rank."""
        return any(len(self.groups[item.group]) != 1 for item in self.items)

    @property
    def keys(self) -> tuple[tuple[str, str], ...]:
        return tuple([item.key for item in self.items])

    @property
    def batches(self) -> tuple[tuple[tuple[str, str, int], ...], ...]:
        """The posted batches: each message's operator, group name, and the peer's rank in the group."""
        batches: list[list[tuple[str, str, int]]] = []
        for item in self.items:
            if not item.posted:
                continue
            while len(batches) < item.posted:  # an empty batch has a number too
                batches.append([])
            other = item.target if item.operator in SENDS else item.source
            ranks = self.groups[item.group]
            batches[item.posted - 1].append((item.operator, item.group, ranks.index(other) if other >= 0 else -1))
        return tuple([tuple(batch) for batch in batches])

    @property
    def single_group(self) -> str | None:
        """The only group's name, if there are no sends or receives: its communicator then enforces the order."""
        if len(self.groups) == 1 and not any(item.operator in POINT_TO_POINT for item in self.items):
            return next(iter(self.groups))
        return None


@dataclass(frozen=True)
class CycleEdge:
    """One edge of a cycle: ``rank`` issues ``first`` before ``second``."""

    rank: int
    first: str
    second: str

    def __str__(self) -> str:
        return f"rank {self.rank} issues {self.first} before {self.second}"


@dataclass(frozen=True)
class Conflict:
    """A cycle in the union of the ranks' orders: a list of edges, one rank each, each ending where the next begins."""

    steps: tuple[CycleEdge, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.steps))


# A collective (group name and ranks, number within the group) or a message (channel, number).
_Node = tuple[Any, ...]


def find_conflict(sequences: Mapping[int, CollectiveSequence]) -> Conflict | None:
    """Search the union of the ranks' orders for a cycle that would deadlock if serialised; None if there is none.

    Ranks may share one sequence object, whose edges are then added once.
    """
    distinct: dict[int, tuple[int, CollectiveSequence]] = {}
    for rank, sequence in sorted(sequences.items()):
        distinct.setdefault(id(sequence), (rank, sequence))
    if _is_clear([sequence for _, sequence in distinct.values()]):
        return None
    union = PrecedenceGraph()
    for rank, sequence in distinct.values():
        union.add(sequence, rank)
    cycle = union.cycle()
    return None if cycle is None else Conflict(union.edges(cycle))


def _is_clear(sequences: Sequence[CollectiveSequence]) -> bool:
    """Whether the union has no cycle; False if any collectives start together.

    Agrees with ``PrecedenceGraph`` in a hundredth of the time: it must not keep the interpreter from training.
    """
    if any(item.operator in POINT_TO_POINT or item.batch != (0, 0) for of in sequences for item in of.items):
        return False
    if len(sequences) <= 1:
        return True  # every edge points forward
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    nodes = []
    for sequence in sequences:
        numbers = {name: groups.setdefault((name, ranks), len(groups)) for name, ranks in sequence.groups.items()}
        group = np.array([numbers[item.group] for item in sequence.items], dtype=np.int64)
        # Number the collectives within their group.
        by_group = np.argsort(group, kind="stable")
        first = np.searchsorted(group[by_group], group[by_group])
        number = np.empty_like(group)
        number[by_group] = np.arange(len(group)) - first
        nodes.append(group << 32 | number)
    return not _has_cycle(nodes)


def _has_cycle(orders: Sequence[np.ndarray[Any, Any]]) -> bool:
    """Whether the union of total orders has a cycle; each order is an array of distinct nodes."""
    before, after = (np.concatenate(part) for part in zip(*[(of[:-1], of[1:]) for of in orders], strict=True))
    names, places = np.unique(np.concatenate([before, after]), return_inverse=True)
    size = len(names)
    if not size:
        return False
    edges = np.unique(places[: len(before)] * size + places[len(before) :])
    components, _ = _strong_components(edges // size, edges % size, size)
    return components < size


def _strong_components(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], size: int) -> tuple[int, Any]:
    """Number of strong components of a graph with ``size`` nodes, and each node's component, from its edges' ends."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ends = before.astype(np.int32), after.astype(np.int32)  # SciPy 1.11.1 and 1.11.2 raise on other indices
    graph = coo_array((np.ones(len(before), dtype=bool), ends), shape=(size, size)).tocsr()
    number, component = connected_components(graph, directed=True, connection="strong")
    return int(number), component


class PrecedenceGraph:
    """The edges of all ranks' orders, between numbered nodes."""

    def __init__(self) -> None:
        self.names: list[_Name] = []
        self.waited: list[bool] = []  # whether a sequential step on any rank waits for the node
        self.after: list[set[int]] = []
        self.rank: dict[tuple[int, int], int] = {}  # a rank with this edge, for the message
        self._numbers: dict[_Node, int] = {}

    def add(self, sequence: CollectiveSequence, rank: int) -> None:
        counts: dict[_Node, int] = defaultdict(int)
        before: list[int] = []  # the previous group that started together: the next may have to wait for it
        together: list[int] = []  # the group that starts together now
        batch = (0, 0)  # number of the posted batch, or else of the coalescing block; zeros outside both
        for item in sequence.items:
            if item.batch == (0, 0) or item.batch != batch:
                before, together = together or before, []
            batch = item.batch
            message = item.operator in POINT_TO_POINT
            node = self._message(item, counts) if message else self._of_collective(item, sequence, counts)
            for earlier in before:
                self.after[earlier].add(node)
                self.rank.setdefault((earlier, node), rank)
            if item.posted or not (message or item.coalesced or not sequence.groups[item.group]):
                self.waited[node] = True
            together.append(node)

    def cycle(self) -> list[int] | None:
        """The nodes of a shortest cycle through a node that a sequential step waits for, or None."""
        edges = [(before, after) for before, afters in enumerate(self.after) for after in afters]
        if not edges:
            return None
        before, after = np.array(edges).T
        _, component = _strong_components(before, after, len(self.names))
        members = np.bincount(component)
        for node, is_waited in enumerate(self.waited):
            if is_waited and members[component[node]] > 1:
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

    def edges(self, cycle: list[int]) -> tuple[CycleEdge, ...]:
        """The cycle's edges; consecutive edges of one rank are joined."""
        ranks = [self.rank[edge] for edge in itertools.pairwise([*cycle, cycle[0]])]
        # Start where the rank changes, so that the list's start does not split a joined edge.
        turn = next((i for i, rank in enumerate(ranks) if rank != ranks[i - 1]), 0)
        ranks, nodes = ranks[turn:] + ranks[:turn], cycle[turn:] + cycle[: turn + 1]
        edges: list[CycleEdge] = []
        for rank, first, second in zip(ranks, nodes, nodes[1:], strict=False):
            names = (self.names[first].on(rank), self.names[second].on(rank))
            if edges and edges[-1].rank == rank:
                edges[-1] = CycleEdge(rank, edges[-1].first, names[1])
            else:
                edges.append(CycleEdge(rank, *names))
        return tuple(edges)

    def _of_collective(self, item: Item, sequence: CollectiveSequence, counts: dict[_Node, int]) -> int:
        ranks, label = sequence.groups[item.group], sequence.labels.get(item.group, item.group)
        base = ("collective", item.group, ranks)
        number = counts[base]
        counts[base] += 1
        name = f"{item.operator} (number {number} of group {label!r}, ranks {_ranks(ranks)})"
        return self._node((*base, number), _Name(name))

    def _message(self, item: Item, counts: dict[_Node, int]) -> int:
        """The node of a message: one for both its ends."""
        channel = ("message", item.group, item.source, item.target, item.tag)
        sends = item.operator in SENDS
        number = counts[(*channel, sends)]
        counts[(*channel, sends)] += 1
        receive = f"receive {number} from rank {item.source} on group {item.group!r}"
        send = f"send {number} to rank {item.target} on group {item.group!r}"
        return self._node((*channel, number), _Name(receive, send, item.source))

    def _node(self, key: _Node, name: _Name) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.names)
            self.names.append(name)
            self.waited.append(False)
            self.after.append(set())
        return number


@dataclass(frozen=True)
class _Name:
    """A node's name on each rank: a message is a send on one rank and a receive on another."""

    elsewhere: str
    at_source: str = ""
    source: int = -1

    def on(self, rank: int) -> str:
        return self.at_source if self.at_source and rank == self.source else self.elsewhere


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "unknown"
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, ..., {ranks[-1]}]"
