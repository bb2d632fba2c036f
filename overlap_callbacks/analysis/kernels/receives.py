"""Tells the transfer of a receive from the time for which it waited for its sender.

A kernel of NCCL that receives occupies its stream from its launch, and spins until the sender has come. A profile does
not tell when that was, and the ranks' clocks do not agree well enough to compare. But as many bytes from the same peer
take as long to transfer each time, so the shortest receive of a window waited least. What another took beyond that it
waited, at its beginning. The waiting is a lower bound: the shortest may have waited too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind

_SEND_RECV = "send_recv"


class IssuedMessage(Protocol):
    """What this module needs of a send or a receive as the gate saw it."""

    @property
    def operator(self) -> str:
        """The ``c10d`` operator."""
        ...

    @property
    def bytes_in(self) -> int:
        """Bytes that it sends."""
        ...

    @property
    def bytes_out(self) -> int:
        """Bytes that it receives."""
        ...

    @property
    def coalesced(self) -> int:
        """Number of the batch that is issued as one kernel, from 1; 0 for none."""
        ...

    @property
    def peer(self) -> int:
        """Group rank of the other side."""
        ...


class Message(NamedTuple):
    """What one kernel sends and receives.

    Attributes:
        bytes_sent, bytes_received: of all its messages.
        peers: group ranks of their other sides, in the order of issue.
    """

    bytes_sent: int
    bytes_received: int
    peers: tuple[int, ...]

    @property
    def direction(self) -> str:
        """``recv`` where it receives, else ``send``."""
        return "recv" if self.bytes_received else "send"


def transfer_starts(kernels: KernelTable, issued: Mapping[int, Sequence[IssuedMessage]]) -> Indices | None:
    """When each row began to do work, in nanoseconds: a receive, once it waited no longer; any other row, at its start.

    Args:
        kernels: the whole profile.
        issued: what was issued in each step, by its index, in that order: collectives, sends and receives.

    Returns:
        The times; shape (n,). None where the kernels of a step cannot be matched to its sends and receives.
    """
    starts = kernels.intervals.start_ns.copy()
    durations = kernels.intervals.durations_ns
    rows_of: dict[Message, list[int]] = defaultdict(list)
    for step, calls in issued.items():
        messages = messages_of(calls)
        rows = send_recv_rows(kernels, step).tolist()
        if len(rows) != len(messages):
            return None
        directions = [_direction(kernels.names[kernels.name[row]]) for row in rows]
        for direction in set(directions):
            named = [row for row, its in zip(rows, directions, strict=True) if its == direction]
            meant = [message for message in messages if direction in ("", message.direction)]
            if len(named) != len(meant):
                return None
            for row, message in zip(named, meant, strict=True):
                if message.bytes_received:
                    rows_of[message].append(row)
    for of_size in rows_of.values():
        rows = np.array(of_size)
        starts[rows] = kernels.intervals.end_ns[rows] - durations[rows].min()
    return starts


def _direction(name: str) -> str:
    """``send`` or ``recv``, as Gloo names its ranges; empty for NCCL's one kernel for both."""
    sends, receives = "send" in name.lower(), "recv" in name.lower()
    return "" if sends == receives else "send" if sends else "recv"


def send_recv_rows(kernels: KernelTable, step: int) -> Indices:
    """The rows of a step that send or receive, in order of their starts."""
    kind = kernels.collectives.index(_SEND_RECV) if _SEND_RECV in kernels.collectives else -2  # -2 is in no row
    rows = np.flatnonzero((kernels.kind == Kind.COMMUNICATION) & (kernels.collective == kind) & (kernels.step == step))
    return rows[np.argsort(kernels.intervals.start_ns[rows], kind="stable")]


def messages_of(calls: Sequence[IssuedMessage]) -> list[Message]:
    """What each kernel of a step sends and receives, in the order of issue: a batch is one kernel."""
    messages: dict[tuple[int, int], Message] = {}
    for number, call in enumerate(calls):
        if call.operator != "send" and not call.operator.startswith("recv_"):
            continue
        key = (call.coalesced, 0) if call.coalesced else (0, number + 1)
        sent, received, peers = messages.get(key, Message(0, 0, ()))
        messages[key] = Message(sent + call.bytes_in, received + call.bytes_out, (*peers, call.peer))
    return list(messages.values())
