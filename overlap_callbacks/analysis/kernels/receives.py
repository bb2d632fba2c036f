"""Tells the transfer of a receive from the time for which it waited for its sender.

A kernel of NCCL that receives occupies its stream from its launch, and spins until the sender has come. A profile does
not tell when that was, and the ranks' clocks do not agree well enough to compare. But messages of one peer bound each
other's transfer: a smaller one takes no longer than a larger one, and a larger one no longer than in proportion to its
bytes. (That holds for a latency and a bandwidth, and also where NCCL takes a faster protocol for larger messages. A
line fitted through all sizes would not hold there.) Where the shortest receives of most sizes lie on one line, a size
between them takes no longer than the line says (``bandwidth.py``). What a receive took beyond the least of these bounds
it waited, at its beginning. The waiting is a lower bound: those that waited least may have waited too. Rank 0 knows
more where it has both kernels of a message (``overlap_callbacks.analysis.job.waiting``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.kernels.bandwidth import Bandwidth, fitted_bandwidth
from overlap_callbacks.analysis.kernels.issued import SEND_RECV, IssuedGroup
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind

Floats = npt.NDArray[np.float64]


class IssuedMessage(Protocol):
    """What this module needs of a send or a receive as the gate saw it."""

    @property
    def group(self) -> IssuedGroup:
        """Its process group."""
        ...

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
        group: name of the process group of the first.
    """

    bytes_sent: int
    bytes_received: int
    peers: tuple[int, ...]
    group: str

    @property
    def direction(self) -> str:
        """``recv`` where it receives, else ``send``."""
        return "recv" if self.bytes_received else "send"


class Transfers(NamedTuple):
    """When the transfers of a profile began.

    Attributes:
        start_ns: when each row began to do work: a receive, once it waited no longer; any other row, at its start;
            shape (n,). None where the kernels of a step cannot be matched to its sends and receives.
        messages: what each row sends and receives; empty where that is not known.
        notes: in words, which receives' waiting rests on a fitted bandwidth.
    """

    start_ns: Indices | None
    messages: Mapping[int, Message]
    notes: tuple[str, ...] = ()


def transfer_starts(kernels: KernelTable, issued: Mapping[int, Sequence[IssuedMessage]]) -> Transfers:
    """When each row began to do work.

    Args:
        kernels: the whole profile.
        issued: what was issued in each step, by its index, in that order: collectives, sends and receives.
    """
    starts = kernels.intervals.start_ns.copy()
    durations = kernels.intervals.durations_ns
    of_rows: dict[int, Message] = {}
    for step, calls in issued.items():
        messages = messages_of(calls)
        rows = send_recv_rows(kernels, step).tolist()
        if len(rows) != len(messages):
            return Transfers(None, {})
        directions = [_direction(kernels.names[kernels.name[row]]) for row in rows]
        for direction in set(directions):
            named = [row for row, its in zip(rows, directions, strict=True) if its == direction]
            meant = [message for message in messages if direction in ("", message.direction)]
            if len(named) != len(meant):
                return Transfers(None, {})
            of_rows |= zip(named, meant, strict=True)
    rows_of: dict[Message, list[int]] = defaultdict(list)
    for row, message in of_rows.items():
        if message.bytes_received:
            rows_of[message].append(row)
    least_ns = {message: int(durations[rows].min()) for message, rows in rows_of.items()}
    longest_ns = _longest_transfers_ns(least_ns)
    fitted = _fitted_transfers(least_ns, longest_ns)
    longest_ns |= {message: of_line.transfer_ns(_size(message)) for message, of_line in fitted.items()}
    for message, rows in rows_of.items():
        starts[rows] = kernels.intervals.end_ns[rows] - longest_ns[message]
    return Transfers(starts, of_rows, _notes(fitted, len(least_ns)))


def _size(message: Message) -> int:
    return max(message.bytes_sent, message.bytes_received)


def _fitted_transfers(least_ns: Mapping[Message, int], longest_ns: Mapping[Message, int]) -> dict[Message, Bandwidth]:
    """The messages whose transfer a fitted bandwidth bounds more tightly than other sizes do.

    Only messages alike are fitted together: of one peer, and either received alone or with as many bytes sent.
    """
    alike: dict[tuple[str, tuple[int, ...], bool], list[Message]] = defaultdict(list)
    for message in least_ns:
        if message.bytes_sent in (0, message.bytes_received):
            alike[message.group, message.peers, bool(message.bytes_sent)].append(message)
    found: dict[Message, Bandwidth] = {}
    for messages in alike.values():
        fit = fitted_bandwidth([(_size(message), least_ns[message]) for message in messages])
        if fit is not None:
            found |= {
                message: fit
                for message in messages
                if fit.bounds(_size(message), least_ns[message])
                and fit.transfer_ns(_size(message)) < longest_ns[message]
            }
    return found


def _notes(fitted: Mapping[Message, Bandwidth], num_messages: int) -> tuple[str, ...]:
    if not fitted:
        return ()
    rates = [f"{rate:.3g}" for rate in sorted(fit.bytes_per_ns for fit in fitted.values())]
    told = rates[0] if rates[0] == rates[-1] else f"{rates[0]} to {rates[-1]}"
    note = (
        f"the waiting of receives of {len(fitted)} of {num_messages} kinds of messages is what exceeds their bytes "
        f"over a fitted bandwidth ({told} GB/s); that of the others rests on the shortest receives of all sizes"
    )
    return (note,)


def _longest_transfers_ns(least_ns: Mapping[Message, int]) -> dict[Message, int]:
    """The longest that the transfer of each message can take, by the shortest kernels of all messages of its peers.

    Args:
        least_ns: the shortest kernel of each message.
    """
    of_peers: dict[tuple[str, tuple[int, ...]], list[Message]] = defaultdict(list)
    for message in least_ns:
        of_peers[message.group, message.peers].append(message)
    longest: dict[Message, int] = {}
    for messages in of_peers.values():
        times_ns = np.array([least_ns[message] for message in messages])
        sent, received = (np.array(column, dtype=float) for column in list(zip(*messages, strict=True))[:2])
        for number, message in enumerate(messages):
            factors = np.maximum(1.0, np.maximum(_times(sent[number], sent), _times(received[number], received)))
            longest[message] = int((times_ns * factors).min())
    return longest


def _times(num_bytes: float, than: Floats) -> Floats:
    """How many times as many bytes this is; infinite against none."""
    times = np.full(len(than), np.inf if num_bytes else 0.0)
    np.divide(num_bytes, than, out=times, where=than > 0)
    return times


def _direction(name: str) -> str:
    """``send`` or ``recv``, as Gloo names its ranges; empty for NCCL's one kernel for both."""
    sends, receives = "send" in name.lower(), "recv" in name.lower()
    return "" if sends == receives else "send" if sends else "recv"


def send_recv_rows(kernels: KernelTable, step: int) -> Indices:
    """The rows of a step that send or receive, in the order of their launches, else of their starts.

    NCCL has a stream for each peer of messages that are not posted together: a later one may start earlier.
    """
    kind = kernels.collectives.index(SEND_RECV) if SEND_RECV in kernels.collectives else -2  # -2 is in no row
    rows = np.flatnonzero((kernels.kind == Kind.COMMUNICATION) & (kernels.collective == kind) & (kernels.step == step))
    times_ns = kernels.intervals.start_ns[rows]
    if kernels.launched_ns is not None and bool((kernels.launched_ns[rows] >= 0).all()):
        times_ns = kernels.launched_ns[rows]
    return rows[np.argsort(times_ns, kind="stable")]


def messages_of(calls: Sequence[IssuedMessage]) -> list[Message]:
    """What each kernel of a step sends and receives, in the order of issue: a batch is one kernel."""
    messages: dict[tuple[int, int], Message] = {}
    for number, call in enumerate(calls):
        if call.operator != "send" and not call.operator.startswith("recv_"):
            continue
        key = (call.coalesced, 0) if call.coalesced else (0, number + 1)
        sent, received, peers, group = messages.get(key, Message(0, 0, (), call.group.name))
        messages[key] = Message(sent + call.bytes_in, received + call.bytes_out, (*peers, call.peer), group)
    return list(messages.values())
