"""Between which ranks the bytes of a collective travel, by algorithm.

Ring: each rank sends to the next; a host's ranks follow each other, as NCCL orders them, so that each host is entered
once. Tree: NCCL's double binary tree over the hosts, half of the bytes on each, up and down again; the ranks of a host
form a chain (`ncclGetDtree` in NCCL's src/graph/trees.cc). Direct: each rank sends to each other one.

Which of NCCL's rings passes which ranks depends on its channels and on the machine. The totals do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from overlap_callbacks.analysis.communication.hosts import UNKNOWN
from overlap_callbacks.analysis.communication.rank_grids import Ranks

RING, TREE, AUTO = "ring", "tree", "auto"
ALGORITHMS = (AUTO, RING, TREE)
# The rule of ``AUTO``: an all-reduce runs as a tree where its group spans two hosts or more and its message has fewer
# bytes than this for each host. A ring's latency grows with the hosts, a tree's with their logarithm; NCCL's tuning
# weighs latency and bandwidth of the machine, of which a record knows nothing.
TREE_BYTES_PER_HOST = 4 * 2**20

# What a member sends to the next in a ring of n, as a multiple of its size; the last member of a chain sends nothing.
_RING: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
}
# The data goes along the ring from the group's first rank, or to it: one link has nothing to carry.
CHAINS = ("broadcast", "reduce")
# Of one rank to the others, or of the others to it: an n-th of the size each.
ROOTED = ("scatter", "gather")
DIRECT = "all_to_all"
POINT_TO_POINT = "send_recv"
KNOWN = (*_RING, *CHAINS, *ROOTED, DIRECT, POINT_TO_POINT)


def ring_share(kind: str, size: int) -> float:
    """Bytes that each member sends to the next, over the size of the collective."""
    return _RING[kind](size)


def in_ring_order(members: Ranks, hosts: Ranks) -> Ranks:
    """The places of each group's members in the order of the ring: hosts follow each other as they first come.

    Args:
        members: of shape (groups, ranks of a group).
        hosts: of all ranks.
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


def num_hosts(members: Ranks, hosts: Ranks) -> Ranks:
    """On how many hosts each group's members are; 1 where a host is not known."""
    of_member = np.sort(hosts[members], axis=1)
    distinct: Ranks = (np.diff(of_member, axis=1) != 0).sum(axis=1) + 1
    return np.where((of_member == UNKNOWN).any(axis=1), 1, distinct)


@lru_cache(maxsize=256)
def tree_edges(ranks_of_hosts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The edges of both trees, each from child to parent, between places in the order of the ring.

    Each edge carries half of the bytes, and carries them back again.

    Args:
        ranks_of_hosts: how many members each host has, in the order of the ring.
    """
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
        # The second tree is the first one mirrored, or shifted by one where the number is odd.
        mirrored = (host - 1 + n) % n if n % 2 else n - 1 - host
        second = _parent(n, mirrored)
        if second >= 0:
            edges.append((heads[host], heads[(second + 1) % n if n % 2 else n - 1 - second]))
    return tuple(edges)


def _parent(n: int, node: int) -> int:
    """The parent of a node in NCCL's binary tree of n; -1 of the root."""
    if node == 0:
        return -1
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return up if up < n else node ^ bit
