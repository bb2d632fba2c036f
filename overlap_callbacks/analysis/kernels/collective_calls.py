"""The kernels of single collectives in the profiled steps of a rank, for the comparison with other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.attribution import labels_of
from overlap_callbacks.analysis.kernels.issued import SEND_RECV, Issued, IssuedCollective, is_device_profile
from overlap_callbacks.analysis.kernels.matching import Match
from overlap_callbacks.analysis.kernels.receives import Message, Transfers
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.analysis.results.arrivals import MAX_BINS, CollectiveCalls, ProfiledStep

# What is sent: kinds of collectives on groups, and kinds of messages with a peer.
MAX_ROWS, MAX_MESSAGES = 32, 16


class _Key(NamedTuple):
    """What is compared with other ranks.

    Attributes:
        first_rank: lowest rank of the group; -1 if unknown.
        group: its name; of messages, with both ranks and what they send each other.
        kind: of collective.
        group_size: its ranks.
        dimension: of parallelism.
        alike: as in ``CollectiveCalls``.
    """

    first_rank: int
    group: str
    kind: str
    group_size: int
    dimension: str
    alike: str = ""


# Rows of the profile of each step, by its index.
_Rows = dict[_Key, dict[int, list[int]]]
_Times = npt.NDArray[np.float64]


def collective_calls(
    kernels: KernelTable,
    matches: Mapping[int, Match],
    issued: Issued,
    steps: Mapping[int, ProfiledStep],
    rank: int,
    transfers: Transfers,
) -> tuple[CollectiveCalls, ...]:
    """The kernels of each kind of collective on each group; all ranks of a group choose and divide them alike.

    Args:
        kernels: the whole profile.
        matches: what the gate's log tells of its communication kernels, by row.
        issued: the collectives of each step, by its index, in the order of issue.
        steps: the profiled steps that count, by their index.
        rank: of this process.
        transfers: what its kernels send and receive, and since when.
    """
    known = {collective.group.name: collective for step in steps for collective in issued.get(step, ())}
    rows: _Rows = defaultdict(lambda: defaultdict(list))
    for row, match in matches.items():
        step = int(kernels.step[row])
        if match.group in known and match.kind not in (None, SEND_RECV, "barrier") and step in steps:
            collective = known[match.group]
            ranks = collective.group.ranks
            key = _Key(min(ranks, default=-1), match.group, match.kind or "", len(ranks), collective.dimension)
            rows[key][step].append(row)
    # Gloo's send ends before the message has come.
    on_device = is_device_profile(kernels, issued)
    messages = _message_rows(kernels, known, steps, rank, transfers) if on_device else {}
    chosen = _by_number({key: of_key for key, of_key in rows.items() if key.group_size > 1})[:MAX_ROWS]
    of_messages = _by_number(messages)[:MAX_MESSAGES]
    order = sorted(steps, key=lambda step: steps[step].number)
    numbered = tuple([steps[step] for step in order])
    label, labels = labels_of(kernels)
    is_compute = kernels.kind == Kind.COMPUTE
    compute = kernels.of(Kind.COMPUTE).union()
    families = {
        labels[code]: kernels.intervals[is_compute & (label == code)].union()
        for code in np.unique(label[is_compute]).tolist()
    }
    found = []
    for key, by_step in (*chosen, *of_messages):
        having = [place for place, step in enumerate(order) if step in by_step]
        start_ns = kernels.intervals.start_ns
        of_steps = np.array([sorted(by_step[order[place]], key=lambda row: start_ns[row]) for place in having])
        calls = kernels.intervals[of_steps.ravel()]
        number = of_steps.shape[1]

        def binned(values: Indices, having: Sequence[int] = having, number: int = number) -> _Times:
            num_bins = min(number, MAX_BINS)
            starts = -(-np.arange(num_bins) * number // num_bins)
            table = np.zeros((len(order), num_bins))
            table[having] = np.add.reduceat(values.reshape(-1, number).astype(float), starts, axis=1)
            return table

        hidden = binned(calls.covered_ns(compute))
        by_family = {family: binned(calls.covered_ns(busy)) for family, busy in families.items()}
        # Messages are no victims: in both modes they run beside compute.
        by_family = {family: covered for family, covered in by_family.items() if covered.any() and not key.alike}
        beside = np.stack([*by_family.values()], axis=2) if by_family else np.empty((*hidden.shape, 0))
        total = beside.sum(axis=2, keepdims=True)
        found.append(
            CollectiveCalls(
                key.kind,
                key.group,
                key.first_rank,
                key.group_size,
                number,
                numbered,
                tuple(by_family),
                _in_us(binned(calls.durations_ns)),
                _in_us(hidden),
                np.rint(255 * beside / np.where(total > 0, total, 1)).astype(np.uint8).tobytes(),
                key.dimension,
                f"{key.alike} x {number}" if key.alike else "",
                _in_us(binned(_open_ns(kernels, of_steps.ravel(), transfers))) if key.alike else b"",
            )
        )
    return tuple(found)


def _in_us(times_ns: _Times) -> bytes:
    return (times_ns / 1e3).astype(np.float32).tobytes()


def _by_number(rows: _Rows) -> list[tuple[_Key, dict[int, list[int]]]]:
    """The rows of each key in the steps that have so many, for each number that any step has; the same on all ranks."""
    found = {
        (key, number): {step: of_step for step, of_step in by_step.items() if len(of_step) == number}
        for key, by_step in rows.items()
        for number in {len(of_step) for of_step in by_step.values()}
    }
    return [(key, found[key, number]) for key, number in sorted(found)]


def _message_rows(
    kernels: KernelTable,
    known: Mapping[str, IssuedCollective],
    steps: Mapping[int, ProfiledStep],
    rank: int,
    transfers: Transfers,
) -> _Rows:
    """The rows of messages with one peer, by both ranks and what they send each other.

    A kernel with several peers ends with the last of them, so its messages cannot be told apart.
    """
    rows: _Rows = defaultdict(lambda: defaultdict(list))
    for row, message in transfers.messages.items():
        step, peer = int(kernels.step[row]), _only_peer(message, known)
        if step not in steps or peer is None or peer == rank:
            continue
        low, high = sorted((rank, peer))
        sizes = (message.bytes_sent, message.bytes_received)
        up, down = sizes if rank == low else sizes[::-1]
        name = f"{message.group}: {up} bytes from {low} to {high}, {down} back"
        alike = f"{up} up, {down} down, {'low' if rank == low else 'high'}"
        rows[_Key(low, name, SEND_RECV, 2, known[message.group].dimension, alike)][step].append(row)
    return rows


def _only_peer(message: Message, known: Mapping[str, IssuedCollective]) -> int | None:
    """The global rank of the other side; None where there are several, or it is not known."""
    ranks = known[message.group].group.ranks if message.group in known else ()
    peers = set(message.peers)
    peer = peers.pop()
    return ranks[peer] if not peers and 0 <= peer < len(ranks) else None


def _open_ns(kernels: KernelTable, rows: Indices, transfers: Transfers) -> Indices:
    """Of messages, the time since when their waiting is not known in which nothing else runs; shape (len(rows),)."""
    assert transfers.start_ns is not None  # messages are known only with it
    comm = kernels.of(Kind.COMMUNICATION)
    order = np.argsort(comm.start_ns, kind="stable")
    start_ns, end_ns = comm.start_ns[order], comm.end_ns[order]
    latest_ns = np.maximum.accumulate(end_ns)[:-1]
    several = Intervals(start_ns[1:], np.minimum(end_ns[1:], latest_ns))  # some are empty or inverted: a union has none
    beside = kernels.of(Kind.COMPUTE).with_others(several).union()
    unknown = Intervals(transfers.start_ns[rows], kernels.intervals.end_ns[rows])
    return unknown.durations_ns - unknown.covered_ns(beside)
