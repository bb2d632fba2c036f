"""One row of messages: what a rank sends alike in one step. Predicted and measured messages share it."""

from __future__ import annotations

import msgspec

from overlap_callbacks.analysis.bus_bandwidth import bus_factor
from overlap_callbacks.analysis.name_rules import collective_of

# How often a ring passes all parts of a message on to the other n-1 ranks.
_ROUNDS_OF_RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


class MessageRow(msgspec.Struct, frozen=True):
    """Messages of one rank and one step that have the same dimension, operator, size and number of ranks.

    Two conventions of volume stand side by side. ``bytes`` is messages times size, as the APNet '24 study counts;
    ``wire_bytes`` is what passes the rank's link if the collective runs as a ring, as nccl-tests counts for its bus
    bandwidth. A time is ``wire_bytes`` divided by the effective bandwidth.

    Attributes:
        rank: global rank.
        dimension: of parallelism that the group serves: ``data``, ``tensor``, ``pipeline``, ``embedding``, ...
        operator: as the gate names it: ``allreduce_``, ``send``, ...
        messages: calls in a step.
        bytes_each: the larger of the bytes that one call reads and writes on this rank: a whole all-gather's output,
            a whole reduce-scatter's input.
        bytes: ``messages`` times ``bytes_each``.
        wire_bytes: ``bytes`` times the factor of a ring: 2(n-1)/n for an all-reduce, (n-1)/n for an all-gather, a
            reduce-scatter and an all-to-all, 1 for a broadcast, a send and a receive; 0 in groups of one rank.
        group_size: ranks of the group, n above; 0 if unknown.
        peer: global rank of the other side of a send or receive; -1 for collectives, and where it is unknown.
    """

    rank: int
    dimension: str
    operator: str
    messages: int
    bytes_each: int
    bytes: int
    wire_bytes: float
    group_size: int = 0
    peer: int = -1


def wire_factor(operator: str, group_size: int) -> float:
    """``wire_bytes`` over ``bytes`` of a call of this operator; 1 where its algorithm is not known, 0 with one rank."""
    if group_size == 1:
        return 0.0
    factor = bus_factor(collective_of(operator), group_size)
    return 1.0 if factor is None else factor


def ring_steps(operator: str, group_size: int) -> int:
    """Steps in which a call of this operator sends one after the other, if it runs as a ring; 0 with one rank.

    An all-reduce takes 2(n-1), an all-gather, a reduce-scatter and an all-to-all n-1, all others are taken as one.
    """
    if group_size == 1:
        return 0
    rounds = _ROUNDS_OF_RING.get(collective_of(operator))
    return 1 if rounds is None or group_size < 1 else rounds * (group_size - 1)
