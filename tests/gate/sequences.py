"""Sequences of collectives by hand, for tests of the order check."""

from __future__ import annotations

from overlap_callbacks.gate.deadlock import CollectiveSequence, Conflict, Item, find_conflict

WORLD = (0, 1)
GROUPS = {"a": WORLD, "b": WORLD, "c": WORLD, "p2p": WORLD}


def collective(group, operator="allreduce_", *, coalesced=0) -> Item:
    return Item(operator, group, coalesced)


def send(source, target, tag=0, *, coalesced=0, posted=0) -> Item:
    return Item("send", "p2p", coalesced, source, target, tag, posted)


def receive(source, target, tag=0, *, coalesced=0, posted=0) -> Item:
    return Item("recv_", "p2p", coalesced, source, target, tag, posted)


A, B, C = collective("a"), collective("b", "reduce_scatter_"), collective("c", "alltoall_base_")


def order(*items, groups=GROUPS) -> CollectiveSequence:
    used = {item.group: groups[item.group] for item in items}
    return CollectiveSequence(items=items, groups=used)


def conflict_of(*sequences, groups=GROUPS) -> Conflict | None:
    """Of rank 0, rank 1, and so on, each a list of items."""
    return find_conflict({rank: order(*items, groups=groups) for rank, items in enumerate(sequences)})
