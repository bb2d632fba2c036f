"""Bytes that each rank sends to each other in a step, from the groups that send and their algorithms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.communication import algorithms
from overlap_callbacks.analysis.communication.rank_grids import Ranks, ranks_in
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.messages import JobMessages, MessageGroup

Matrix = npt.NDArray[np.float64]
# Pairs that are added at once, so that a large job takes no more memory than its matrix.
_PAIRS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class TrafficMatrix:
    """Bytes of a step between labels: ranks, or sets of ranks such as hosts.

    Attributes:
        sent: ``sent[i, j]`` bytes go from label i to label j. Between ranks of one label, ``sent[i, i]``.
        unplaced_bytes: bytes that are sent as well, but between which ranks is not known.
    """

    sent: Matrix
    unplaced_bytes: float


def traffic_matrix(
    groups: Iterable[MessageGroup],
    heard: Ranks,
    hosts: Ranks,
    labels: Ranks | None = None,
    algorithm: str = algorithms.RING,
) -> TrafficMatrix:
    """The matrix of these messages.

    Args:
        groups: of messages.
        heard: the ranks that told their messages. Others of its group tell what a further rank sends.
        hosts: the number of each rank's host, ``hosts.UNKNOWN`` where it is not known.
        labels: the label of each rank, from 0; by default its own number. Ranks with a label below 0 are left out.
        algorithm: of all-reduces, one of ``algorithms.ALGORITHMS``.

    Raises:
        ValueError: no such algorithm.
    """
    if algorithm not in algorithms.ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(algorithms.ALGORITHMS)}, got {algorithm!r}")
    world_size = len(hosts)
    labels = np.arange(world_size, dtype=np.int64) if labels is None else labels
    is_heard = np.zeros(world_size, dtype=bool)
    is_heard[heard[heard < world_size]] = True
    adder = _Adder(labels, hosts, is_heard, algorithm)
    for group in groups:
        adder.add(group)
    return TrafficMatrix(adder.sent, adder.unplaced_bytes)


def matrix_of(
    messages: JobMessages, hosts: Ranks, labels: Ranks | None = None, algorithm: str = algorithms.RING
) -> TrafficMatrix:
    """As ``traffic_matrix``, of all messages of a job."""
    return traffic_matrix(messages.groups, ranks_in(messages.ranks), hosts, labels, algorithm)


def off_diagonal(matrix: Matrix) -> float:
    """Bytes between different labels."""
    return float(matrix.sum() - np.trace(matrix))


class _Adder:
    """Adds groups of messages to a matrix."""

    def __init__(self, labels: Ranks, hosts: Ranks, is_heard: npt.NDArray[np.bool_], algorithm: str) -> None:
        self._labels, self._hosts, self._is_heard, self._algorithm = labels, hosts, is_heard, algorithm
        self._size = int(labels.max(initial=-1)) + 1
        self.sent: Matrix = np.zeros((self._size, self._size))
        self._flat = self.sent.reshape(-1)
        self.unplaced_bytes = 0.0

    def add(self, group: MessageGroup) -> None:
        kind = collective_of(group.operator)
        if kind not in algorithms.KNOWN:
            if kind != "barrier" and group.group_size != 1:
                self.unplaced_bytes += group.bytes
            return
        if group.group_size == 1 or (kind == algorithms.POINT_TO_POINT and not group.bytes):
            return
        members = self._members(group)
        if members is None:
            # A receive is told by its sender too.
            self.unplaced_bytes += 0.0 if _receives(group) else _sent_by_ring(kind, group)
            return
        if kind == algorithms.POINT_TO_POINT:
            self._add_messages(group, members)
        elif kind == algorithms.DIRECT:
            self._add_direct(group, members)
        elif kind in algorithms.ROOTED:
            self._add_rooted(group, members, kind)
        else:
            self._add_around(group, members, kind)

    def _members(self, group: MessageGroup) -> Ranks | None:
        """Ranks of each group, of shape (groups, ranks of a group); None where they are not known."""
        if not group.whole:
            return None
        members: Ranks = ranks_in(group.firsts)[:, None] + ranks_in(group.offsets)
        return members if members.size and members.min() >= 0 and members.max() < len(self._hosts) else None

    def _weights(self, group: MessageGroup, members: Ranks) -> Matrix:
        """How much of a message each member sends: 1 if it told so, 0 if it told otherwise.

        A member that was not heard sends what the others of its group do. If these differ, they stand in several rows,
        and it takes its part of each.
        """
        told = np.zeros(len(self._hosts), dtype=bool)
        told[ranks_in(group.ranks)] = True
        tells, heard = told[members], self._is_heard[members]
        if heard.all():
            return tells.astype(np.float64)
        part = tells.sum(axis=1, keepdims=True) / np.maximum(1, heard.sum(axis=1, keepdims=True))
        return np.where(heard, tells, part)

    def _add_messages(self, group: MessageGroup, members: Ranks) -> None:
        source, target = members[:, 0], members[:, 1]
        if _receives(group):  # sends tell the same, but for senders that were not heard
            unheard = ~self._is_heard[source]
            source, target = source[unheard], target[unheard]
        else:
            told = self._is_heard[source]
            source, target = source[told], target[told]
        self._add_pairs(source, target, np.full(len(source), group.bytes / group.num_members))

    def _add_direct(self, group: MessageGroup, members: Ranks) -> None:
        n = members.shape[1]
        weights = self._weights(group, members)
        share = group.bytes_in / group.num_members / n
        for ranks, sends in zip(members, weights, strict=True):
            labels = self._labels[ranks]
            known = labels >= 0
            receiving, number = np.unique(labels[known], return_counts=True)
            amounts = np.bincount(labels[known], weights=sends[known], minlength=self._size) * share
            for label in np.flatnonzero(amounts):
                self.sent[label, receiving] += amounts[label] * number
                self.sent[label, label] -= amounts[label]

    def _add_rooted(self, group: MessageGroup, members: Ranks, kind: str) -> None:
        """What roots scatter or gather, as they tell it: the root alone reads all parts, or writes them.

        A rank that was not heard may be a root. It is taken for one where all that were heard are none.
        """
        n, number = members.shape[1], group.num_members
        # The root's own part does not travel.
        each = group.bytes_in / number / n if kind == "scatter" else (group.bytes - group.bytes_in) / number / (n - 1)
        told = np.zeros(len(self._hosts), dtype=bool)
        told[ranks_in(group.ranks)] = True
        if each > 0:
            roots = told[members].astype(np.float64)
        else:
            each = group.bytes / number
            heard = self._is_heard[members]
            alone = ~(heard & ~told[members]).any(axis=1) & ~heard.all(axis=1)
            roots = np.zeros(members.shape)
            roots[alone, np.argmin(heard[alone], axis=1)] = 1.0
        for place in np.flatnonzero(roots.any(axis=0)):
            others = np.delete(members, place, axis=1)
            root = np.broadcast_to(members[:, place : place + 1], others.shape)
            amounts = np.broadcast_to(roots[:, place : place + 1] * each, others.shape)
            self._add_pairs(*((root, others) if kind == "scatter" else (others, root)), amounts)

    def _add_around(self, group: MessageGroup, members: Ranks, kind: str) -> None:
        ordered = np.take_along_axis(members, algorithms.in_ring_order(members, self._hosts), axis=1)
        n = members.shape[1]
        total = group.bytes / group.num_members
        weights = self._weights(group, ordered)
        if kind in algorithms.CHAINS:
            # The ring begins at the group's first rank: hosts are ordered as they first come.
            before, after = ordered[:, :-1], ordered[:, 1:]
            source, target = (before, after) if kind == "broadcast" else (after, before)
            self._add_pairs(source, target, weights[:, :-1] * total)
            return
        by_tree = self._tree_bytes(group, ordered) if kind == "all_reduce" else np.zeros(len(ordered))
        around = weights * (total - by_tree)[:, None] * algorithms.ring_share(kind, n)
        self._add_pairs(ordered, np.roll(ordered, -1, axis=1), around)
        for index in np.flatnonzero(by_tree):
            amount = np.array(weights[index].mean() * by_tree[index] / 2)
            sizes = _runs(self._hosts[ordered[index]])
            places = np.array(algorithms.tree_edges(sizes), dtype=np.int64)
            child, parent = ordered[index][places[:, 0]], ordered[index][places[:, 1]]
            self._add_pairs(child, parent, np.broadcast_to(amount, child.shape))
            self._add_pairs(parent, child, np.broadcast_to(amount, child.shape))

    def _tree_bytes(self, group: MessageGroup, members: Ranks) -> Matrix:
        """How many of the bytes of each all-reducing group run as a tree."""
        hosts = algorithms.num_hosts(members, self._hosts)
        several = hosts > 1
        if self._algorithm == algorithms.RING:
            return np.zeros(len(members))
        if self._algorithm == algorithms.TREE:
            return np.where(several, group.bytes / group.num_members, 0.0)
        found = np.zeros(len(members))
        for _, number, total in group.sizes:
            is_tree = several & (total < number * algorithms.TREE_BYTES_PER_HOST * hosts)
            found += np.where(is_tree, total / group.num_members, 0.0)
        return found

    def _add_pairs(self, source: Ranks, target: Ranks, amounts: Matrix) -> None:
        """Add each amount between its two ranks; all of one shape."""
        source, target, amounts = self._labels[source.ravel()], self._labels[target.ravel()], amounts.ravel()
        kept = (source >= 0) & (target >= 0) & (amounts > 0)
        source, target, amounts = source[kept], target[kept], amounts[kept]
        for at in range(0, len(source), _PAIRS_AT_ONCE):
            part = slice(at, at + _PAIRS_AT_ONCE)
            np.add.at(self._flat, source[part] * self._size + target[part], amounts[part])


def _runs(hosts: Ranks) -> tuple[int, ...]:
    """How many members each host has, one after the other."""
    bounds = np.flatnonzero(np.diff(hosts)) + 1
    return tuple(np.diff([0, *bounds.tolist(), len(hosts)]).tolist())


def _receives(group: MessageGroup) -> bool:
    return group.operator.startswith("recv")


def _sent_by_ring(kind: str, group: MessageGroup) -> float:
    """Bytes that a group's members send, of a group whose ranks are not known."""
    n = group.group_size
    if kind == algorithms.POINT_TO_POINT or n < 2:
        return float(group.bytes)
    if kind == algorithms.DIRECT:
        return group.bytes_in * (n - 1) / n
    if kind in algorithms.CHAINS:
        return group.bytes * (n - 1) / n
    if kind in algorithms.ROOTED:
        return group.bytes_in * (n - 1) / n
    return group.bytes * algorithms.ring_share(kind, n)


def sent_bytes(matrix: TrafficMatrix) -> float:
    """All bytes that are sent."""
    return float(matrix.sent.sum()) + matrix.unplaced_bytes


def by_dimension(groups: Sequence[MessageGroup]) -> dict[str, list[MessageGroup]]:
    """The messages of each dimension of parallelism."""
    found: dict[str, list[MessageGroup]] = {}
    for group in groups:
        found.setdefault(group.dimension, []).append(group)
    return found
