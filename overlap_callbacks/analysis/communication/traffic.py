"""Bytes that each rank sends to each other rank in a step, from the groups that send and their algorithms.

Ring: each rank sends to the next; a host's ranks are adjacent, as NCCL orders them, so that each host is entered once.
Tree: NCCL's double binary tree over the hosts, half of the bytes on each, up and down again; the ranks of a host form a
chain (`ncclGetDtree` in NCCL's src/graph/trees.cc). Direct: each rank sends to every other one. The actual order of
ranks in NCCL's rings depends on its channels and on the machine; the totals do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from overlap_callbacks import _validation
from overlap_callbacks.analysis.communication.placement import UNKNOWN, host_numbers
from overlap_callbacks.analysis.communication.rank_grids import MAX_GRIDS, Grids, Ranks, number_in, ranks_in
from overlap_callbacks.analysis.communication.sums import MAX_HEARD, MessageSums, job_messages
from overlap_callbacks.analysis.equations import wire_factor
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.messages import DimensionTraffic, JobMessages, MessageGroup, Traffic
from overlap_callbacks.analysis.sums import grouped

Matrix = npt.NDArray[np.float64]
# Number of pairs added at once, so that a large job needs no more memory than its matrix.
_PAIRS_AT_ONCE = 1 << 18

RING, TREE, AUTO = "ring", "tree", "auto"
ALGORITHMS = (AUTO, RING, TREE)
# The rule of ``AUTO``: an all-reduce runs as a tree if its group spans at least two hosts and its message has fewer
# bytes than this per host. A ring's latency grows with the hosts, a tree's with their logarithm; NCCL's tuning weighs
# latency and bandwidth of the machine, which a record does not know.
TREE_BYTES_PER_HOST = 4 * 2**20

# Each member sends to the next.
_RINGS = ("all_reduce", "all_gather", "reduce_scatter")
# Data goes along the ring from the group's first rank, or to it: one link carries nothing.
_CHAINS = ("broadcast", "reduce")
# From one rank to the others, or from the others to it: an n-th of the size each.
_ROOTED = ("scatter", "gather")
_DIRECT, _POINT_TO_POINT = "all_to_all", "send_recv"
_KNOWN = (*_RINGS, *_CHAINS, *_ROOTED, _DIRECT, _POINT_TO_POINT)


@dataclass(frozen=True)
class TrafficMatrix:
    """Bytes per step: ``sent[i, j]`` from label i to j (ranks, say, or hosts), the rest between unknown ranks."""

    sent: Matrix
    unplaced_bytes: float


def traffic_matrix(
    groups: Iterable[MessageGroup],
    heard: Ranks,
    hosts: Ranks,
    labels: Ranks | None = None,
    algorithm: str = RING,
) -> TrafficMatrix:
    """The matrix of these messages.

    Args:
        groups: of messages.
        heard: the ranks that reported; others are assumed to send what the rest of their group does.
        hosts: the number of each rank's host, ``UNKNOWN`` where it is not known.
        labels: the label of each rank, from 0, by default its number; ranks with a negative label are omitted.
        algorithm: of all-reduces; ValueError unless it is one of ``ALGORITHMS``.
    """
    _validation.one_of("algorithm", algorithm, ALGORITHMS)
    adder = _Adder(np.arange(len(hosts), dtype=np.int64) if labels is None else labels, hosts, heard, algorithm)
    for group in groups:
        adder.add(group)
    return TrafficMatrix(adder.sent, adder.unplaced_bytes)


def matrix_of(messages: JobMessages, hosts: Ranks, labels: Ranks | None = None, algorithm: str = RING) -> TrafficMatrix:
    """``traffic_matrix`` of all messages of a job."""
    return traffic_matrix(messages.groups, ranks_in(messages.ranks), hosts, labels, algorithm)


# -- in numbers


def traffic_of(sums: MessageSums, world_size: int) -> tuple[JobMessages | None, Traffic | None]:
    """The job's messages in a step, and their amount; None if no rank reported any."""
    messages = job_messages(sums)
    if messages is None:
        return None, None
    dimensions, unplaced = _dimensions(messages, world_size)
    return messages, Traffic(dimensions, sums.num_steps, sums.num_alike, unplaced)


# The messages of a window usually equal those of the previous one.
@lru_cache(maxsize=2)
def _dimensions(messages: JobMessages, world_size: int) -> tuple[tuple[DimensionTraffic, ...], float]:
    return dimension_totals(messages, host_numbers(messages, world_size))


def dimension_totals(
    messages: JobMessages, hosts: Ranks, algorithm: str = RING
) -> tuple[tuple[DimensionTraffic, ...], float]:
    """Totals over all ranks by dimension, most bytes sent first; and the bytes sent between unknown ranks."""
    heard = ranks_in(messages.ranks)
    known = bool((hosts != UNKNOWN).all())
    labels = hosts if known else np.zeros(len(hosts), dtype=np.int64)
    totals, unplaced = [], 0.0
    for dimension, groups in grouped(messages.groups, lambda group: group.dimension).items():
        matrix = traffic_matrix(groups, heard, hosts, labels, algorithm)
        unplaced += matrix.unplaced_bytes
        totals.append(
            DimensionTraffic(
                dimension=dimension,
                messages=sum([group.messages for group in groups]),
                bytes=sum([group.bytes for group in groups]),
                sent_bytes=float(matrix.sent.sum()) + matrix.unplaced_bytes,
                between_hosts_bytes=float(matrix.sent.sum() - np.trace(matrix.sent)) if known else None,
            )
        )
    return tuple(sorted(totals, key=lambda row: (-row.sent_bytes, row.dimension))), unplaced


# -- between ranks


class _Adder:
    """Adds groups of messages to a matrix."""

    def __init__(self, labels: Ranks, hosts: Ranks, heard: Ranks, algorithm: str) -> None:
        self._labels, self._hosts, self._algorithm = labels, hosts, algorithm
        self._is_heard = self._mask(heard[heard < len(hosts)])
        self._size = int(labels.max(initial=-1)) + 1
        self.sent: Matrix = np.zeros((self._size, self._size))
        self._flat = self.sent.reshape(-1)
        self.unplaced_bytes = 0.0

    def _mask(self, ranks: Ranks) -> npt.NDArray[np.bool_]:
        mask = np.zeros(len(self._hosts), dtype=bool)
        mask[ranks] = True
        return mask

    def add(self, group: MessageGroup) -> None:
        kind = collective_of(group.operator)
        if kind not in _KNOWN:
            if kind != "barrier" and group.group_size != 1:
                self.unplaced_bytes += group.bytes
            return
        if group.group_size == 1 or (kind == _POINT_TO_POINT and not group.bytes):
            return
        members = self._members(group)
        if members is None:
            # The sender of a received message reports it too.
            self.unplaced_bytes += 0.0 if _receives(group) else _sent_in_all(kind, group)
        elif kind == _DIRECT:
            self._add_direct(group, members)
        else:
            pairs = self._messages if kind == _POINT_TO_POINT else self._rooted if kind in _ROOTED else self._around
            for source, target, amounts in pairs(group, members, kind):
                self._add_pairs(source, target, amounts)

    def _members(self, group: MessageGroup) -> Ranks | None:
        """Ranks of each group, of shape (groups, ranks per group); None if not known."""
        if not group.whole:
            return None
        members: Ranks = ranks_in(group.firsts)[:, None] + ranks_in(group.offsets)
        return members if members.size and members.min() >= 0 and members.max() < len(self._hosts) else None

    def _weights(self, group: MessageGroup, members: Ranks) -> Matrix:
        """The share of a message that each member sends: 1 if it reported so, 0 if it reported otherwise.

        A member that did not report sends what the others of its group do: its share of each row, if these differ.
        """
        sends, heard = self._mask(ranks_in(group.ranks))[members], self._is_heard[members]
        if heard.all():
            return sends.astype(np.float64)
        part = sends.sum(axis=1, keepdims=True) / np.maximum(1, heard.sum(axis=1, keepdims=True))
        return np.where(heard, sends, part)

    def _messages(self, group: MessageGroup, members: Ranks, kind: str) -> Iterator[tuple[Ranks, Ranks, Matrix]]:
        """Sends of ranks that reported; a receive counts only if its sender did not report."""
        counted = members[self._is_heard[members[:, 0]] != _receives(group)]
        yield counted[:, 0], counted[:, 1], np.full(len(counted), group.bytes / group.num_members)

    def _add_direct(self, group: MessageGroup, members: Ranks) -> None:
        share = group.bytes_in / group.num_members / members.shape[1]
        for ranks, sends in zip(members, self._weights(group, members), strict=True):
            labels = self._labels[ranks]
            known = labels >= 0
            receiving, number = np.unique(labels[known], return_counts=True)
            amounts = np.bincount(labels[known], weights=sends[known], minlength=self._size) * share
            for label in np.flatnonzero(amounts):
                self.sent[label, receiving] += amounts[label] * number
                self.sent[label, label] -= amounts[label]

    def _rooted(self, group: MessageGroup, members: Ranks, kind: str) -> Iterator[tuple[Ranks, Ranks, Matrix]]:
        """Messages that roots scatter or gather: only the root reads, or writes, all parts.

        A rank that did not report counts as the root if none that reported is.
        """
        n, number = members.shape[1], group.num_members
        # The root's own part is not sent.
        each = group.bytes_in / number / n if kind == "scatter" else (group.bytes - group.bytes_in) / number / (n - 1)
        reported = self._mask(ranks_in(group.ranks))[members]
        if each > 0:
            roots = reported.astype(np.float64)
        else:
            each = group.bytes / number
            heard = self._is_heard[members]
            alone = ~(heard & ~reported).any(axis=1) & ~heard.all(axis=1)
            roots = np.zeros(members.shape)
            roots[alone, np.argmin(heard[alone], axis=1)] = 1.0
        for place in np.flatnonzero(roots.any(axis=0)):
            others = np.delete(members, place, axis=1)
            root = np.broadcast_to(members[:, place : place + 1], others.shape)
            amounts = np.broadcast_to(roots[:, place : place + 1] * each, others.shape)
            yield (root, others, amounts) if kind == "scatter" else (others, root, amounts)

    def _around(self, group: MessageGroup, members: Ranks, kind: str) -> Iterator[tuple[Ranks, Ranks, Matrix]]:
        ordered = np.take_along_axis(members, in_ring_order(members, self._hosts), axis=1)
        n = members.shape[1]
        total = group.bytes / group.num_members
        weights = self._weights(group, ordered)
        if kind in _CHAINS:
            # The ring begins at the group's first rank: hosts are ordered by first occurrence.
            before, after = ordered[:, :-1], ordered[:, 1:]
            source, target = (before, after) if kind == "broadcast" else (after, before)
            yield source, target, weights[:, :-1] * total
            return
        by_tree = self._tree_bytes(group, ordered) if kind == "all_reduce" else np.zeros(len(ordered))
        yield ordered, np.roll(ordered, -1, axis=1), weights * (total - by_tree)[:, None] * wire_factor(kind, n)
        for index in np.flatnonzero(by_tree):
            hosts = self._hosts[ordered[index]]
            bounds = np.flatnonzero(np.diff(hosts)) + 1
            places = np.array(tree_edges(tuple(np.diff([0, *bounds.tolist(), len(hosts)]).tolist())), dtype=np.int64)
            child, parent = ordered[index][places[:, 0]], ordered[index][places[:, 1]]
            amounts = np.full(child.shape, weights[index].mean() * by_tree[index] / 2)
            yield child, parent, amounts
            yield parent, child, amounts

    def _tree_bytes(self, group: MessageGroup, members: Ranks) -> Matrix:
        """The bytes of each all-reducing group that use a tree."""
        if self._algorithm == RING:
            return np.zeros(len(members))
        hosts = _num_hosts(members, self._hosts)
        several = hosts > 1
        if self._algorithm == TREE:
            return np.where(several, group.bytes / group.num_members, 0.0)
        found = np.zeros(len(members))
        for _, number, total in group.sizes:
            is_tree = several & (total < number * TREE_BYTES_PER_HOST * hosts)
            found += np.where(is_tree, total / group.num_members, 0.0)
        return found

    def _add_pairs(self, source: Ranks, target: Ranks, amounts: Matrix) -> None:
        """Add each amount between its two ranks; all arrays have one shape."""
        source, target, amounts = self._labels[source.ravel()], self._labels[target.ravel()], amounts.ravel()
        kept = (source >= 0) & (target >= 0) & (amounts > 0)
        source, target, amounts = source[kept], target[kept], amounts[kept]
        for at in range(0, len(source), _PAIRS_AT_ONCE):
            part = slice(at, at + _PAIRS_AT_ONCE)
            np.add.at(self._flat, source[part] * self._size + target[part], amounts[part])


def _receives(group: MessageGroup) -> bool:
    return group.operator.startswith("recv")


def _sent_in_all(kind: str, group: MessageGroup) -> float:
    """Bytes sent by the members of a group whose ranks are not known."""
    n = group.group_size
    if kind == _POINT_TO_POINT or n < 2:
        return float(group.bytes)
    if kind in _CHAINS:
        return group.bytes * (n - 1) / n
    return (group.bytes_in if kind == _DIRECT or kind in _ROOTED else group.bytes) * wire_factor(kind, n)


# -- algorithms


def in_ring_order(members: Ranks, hosts: Ranks) -> Ranks:
    """The positions of each group's members in ring order: hosts in order of first occurrence.

    ``members`` has shape (groups, ranks per group); ``hosts`` is of all ranks.
    """
    places = np.broadcast_to(np.arange(members.shape[1]), members.shape)
    of_member = hosts[members]
    changes = (np.diff(of_member, axis=1) != 0).sum(axis=1) + 1
    distinct = (np.diff(np.sort(of_member, axis=1), axis=1) != 0).sum(axis=1) + 1
    scattered = np.flatnonzero((changes != distinct) & (of_member >= 0).all(axis=1))
    if not scattered.size:
        return places
    ordered = places.copy()
    for group in scattered:
        _, first, inverse = np.unique(of_member[group], return_index=True, return_inverse=True)
        ordered[group] = np.argsort(first[inverse], kind="stable")
    return ordered


def _num_hosts(members: Ranks, hosts: Ranks) -> Ranks:
    """Number of hosts of each group's members; 1 if a host is not known."""
    of_member = np.sort(hosts[members], axis=1)
    distinct: Ranks = (np.diff(of_member, axis=1) != 0).sum(axis=1) + 1
    return np.where((of_member == UNKNOWN).any(axis=1), 1, distinct)


@lru_cache(maxsize=256)
def tree_edges(ranks_of_hosts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The edges of both trees, from child to parent, as ring positions; each carries half, in both directions."""
    heads = np.cumsum([0, *ranks_of_hosts[:-1]]).tolist()
    chains = [
        (head + place, head + place - 1)
        for head, size in zip(heads, ranks_of_hosts, strict=True)
        for place in range(1, size)
    ]
    n = len(ranks_of_hosts)
    edges = list(chains * 2)
    for host in range(n):
        first = _parent(n, host)
        if first >= 0:
            edges.append((heads[host], heads[first]))
        # The second tree is the first one mirrored, or shifted by one if the number is odd.
        mirrored = (host - 1 + n) % n if n % 2 else n - 1 - host
        second = _parent(n, mirrored)
        if second >= 0:
            edges.append((heads[host], heads[(second + 1) % n if n % 2 else n - 1 - second]))
    return tuple(edges)


def _parent(n: int, node: int) -> int:
    """The parent of a node in NCCL's binary tree of n; -1 for the root."""
    if node == 0:
        return -1
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return up if up < n else node ^ bit


# -- are a record's messages possible?

# Maximum ranks of a job, far above any real one.
MAX_RANKS = 1 << 20
_MAX_EXPONENT = 63
_MAX_AMOUNT = 1 << 63


def are_sound(messages: JobMessages, world_size: int) -> bool:
    """Whether ranks, hosts and amounts are possible in a job of this size."""
    if not 0 < world_size <= MAX_RANKS or len(messages.ranks) > MAX_HEARD:
        return False
    if not all(_are_ranks((grid,), world_size) for grid in messages.ranks) or number_in(messages.ranks) > world_size:
        return False
    for shape in messages.hosts:
        if not shape.firsts or not _are_ranks(shape.firsts, world_size) or not _fit(shape.offsets, world_size):
            return False
        if not 0 < number_in(shape.offsets) * number_in(shape.firsts) <= world_size:
            return False
    return all(_is_sound(group, world_size) for group in messages.groups)


def _is_sound(group: MessageGroup, world_size: int) -> bool:
    amounts = (group.messages, group.bytes, group.bytes_in, group.group_size)
    if group.num_members < 1 or min(amounts) < 0 or max(amounts) > _MAX_AMOUNT or group.group_size > world_size:
        return False
    for size, number, total in group.sizes:
        if not (-1 <= size <= _MAX_EXPONENT and 0 <= number <= _MAX_AMOUNT and 0 <= total <= _MAX_AMOUNT):
            return False
    if group.whole and (not group.firsts or not group.offsets):
        return False
    if number_in(group.firsts) * number_in(group.offsets) > max(group.num_members, 2) * world_size:
        return False
    return (
        _are_ranks(group.ranks, world_size)
        and _are_ranks(group.firsts, world_size)
        and _fit(group.offsets, world_size)
        and -2 <= group.stage < world_size
    )


def _are_ranks(grids: Grids, world_size: int) -> bool:
    return _fit(grids, world_size) and all(first >= 0 for first, _ in grids)


def _fit(grids: Grids, world_size: int) -> bool:
    """Whether all ranks lie within the job, and no grid has more ranks than the job."""
    if len(grids) > MAX_GRIDS:
        return False
    for first, levels in grids:
        low = high = first
        total = 1
        for stride, count in levels:
            total *= count
            if count < 1 or total > world_size or abs(stride) > world_size:
                return False
            reach = stride * (count - 1)
            low, high = low + min(0, reach), high + max(0, reach)
        if low <= -world_size or high >= world_size:
            return False
    return number_in(grids) <= world_size
