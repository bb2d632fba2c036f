"""The kernels of single collectives in the profiled steps of a rank, for the comparison with other ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.attribution import labels_of
from overlap_callbacks.analysis.kernels.issued import SEND_RECV, Issued, IssuedCollective, is_device_profile
from overlap_callbacks.analysis.kernels.matching import Match
from overlap_callbacks.analysis.kernels.receives import Message, Transfers
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.analysis.results.collective_calls import CollectiveCalls, ProfiledStep

# What is sent: kinds of collectives on groups, kinds of messages with a peer, and times of each in a step.
MAX_ROWS, MAX_MESSAGES, MAX_BINS = 32, 16, 24


class _Key(NamedTuple):
    """What is compared with other ranks.

    Attributes:
        first_rank: lowest rank of the group; -1 if unknown.
        group: its name; of messages, with both ranks and what they send each other.
        kind: of collective.
        group_size: its ranks.
        dimension: of parallelism.
    """

    first_rank: int
    group: str
    kind: str
    group_size: int
    dimension: str


# Rows of the profile of each step, by its index.
_Rows = dict[_Key, dict[int, list[int]]]


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
    chosen = sorted([key for key in rows if key.group_size > 1])[:MAX_ROWS]
    messages, others = _message_rows(kernels, matches, known, steps, rank, transfers)
    if not is_device_profile(kernels, issued):
        messages, others = {}, {}  # Gloo's send ends before the message has come
    rows |= messages
    label, labels = labels_of(kernels)
    is_compute = kernels.kind == Kind.COMPUTE
    compute = kernels.of(Kind.COMPUTE).union()
    families = {
        labels[code]: kernels.intervals[is_compute & (label == code)].union()
        for code in np.unique(label[is_compute]).tolist()
    }
    found = []
    for key in (*chosen, *messages):
        number = Counter(map(len, rows[key].values())).most_common(1)[0][0]
        whole = [step for step, of_step in rows[key].items() if len(of_step) == number]
        order = sorted(whole, key=lambda step: steps[step].number)
        of_steps = np.array(
            [sorted(rows[key][step], key=lambda row: kernels.intervals.start_ns[row]) for step in order]
        )
        calls = kernels.intervals[of_steps.ravel()]

        def binned(values: npt.NDArray[np.int64], shape: tuple[int, int] = of_steps.shape) -> npt.NDArray[np.float64]:
            num_bins = min(shape[1], MAX_BINS)
            starts = -(-np.arange(num_bins) * shape[1] // num_bins)
            return np.asarray(np.add.reduceat(values.reshape(shape).astype(float), starts, axis=1))

        hidden = binned(calls.covered_ns(compute))
        by_family = {family: binned(calls.covered_ns(busy)) for family, busy in families.items()}
        by_family = {family: covered for family, covered in by_family.items() if covered.any()}
        beside = np.stack([*by_family.values()], axis=2) if by_family else np.empty((*hidden.shape, 0))
        total = beside.sum(axis=2, keepdims=True)
        found.append(
            CollectiveCalls(
                key.kind,
                key.group,
                key.first_rank,
                key.group_size,
                number,
                tuple([steps[step] for step in order]),
                tuple(by_family),
                _in_us(binned(calls.durations_ns)),
                _in_us(hidden),
                np.rint(255 * beside / np.where(total > 0, total, 1)).astype(np.uint8).tobytes(),
                key.dimension,
                _in_us(binned(_open_ns(kernels, of_steps.ravel(), transfers))) if key in messages else b"",
            )
        )
    return (*found, *_apart(kernels, others, steps, rank))


def _in_us(times_ns: npt.NDArray[np.float64]) -> bytes:
    return (times_ns / 1e3).astype(np.float32).tobytes()


def _message_rows(
    kernels: KernelTable,
    matches: Mapping[int, Match],
    known: Mapping[str, IssuedCollective],
    steps: Mapping[int, ProfiledStep],
    rank: int,
    transfers: Transfers,
) -> tuple[_Rows, dict[int, list[int]]]:
    """The rows of messages with one peer, by both ranks and what they send each other; and those of other messages.

    A kernel with several peers ends with the last of them, so its messages cannot be told apart.
    """
    rows: _Rows = defaultdict(lambda: defaultdict(list))
    others: dict[int, list[int]] = defaultdict(list)
    for row in [row for row, match in matches.items() if match.kind == SEND_RECV]:
        step = int(kernels.step[row])
        if step not in steps:
            continue
        message = transfers.messages.get(row)
        peer = None if message is None else _only_peer(message, known)
        if message is None or peer is None or peer == rank:
            others[step].append(row)
            continue
        low, high = sorted((rank, peer))
        sizes = (message.bytes_sent, message.bytes_received)
        up, down = sizes if rank == low else sizes[::-1]
        name = f"{message.group}: {up} bytes from {low} to {high}, {down} back"
        rows[_Key(low, name, SEND_RECV, 2, known[message.group].dimension)][step].append(row)
    for key in sorted(rows)[MAX_MESSAGES:]:
        for step, of_step in rows.pop(key).items():
            others[step] += of_step
    return rows, others


def _only_peer(message: Message, known: Mapping[str, IssuedCollective]) -> int | None:
    """The global rank of the other side; None where there are several, or it is not known."""
    ranks = known[message.group].group.ranks if message.group in known else ()
    peers = set(message.peers)
    peer = peers.pop()
    return ranks[peer] if not peers and 0 <= peer < len(ranks) else None


def _open_ns(kernels: KernelTable, rows: Indices, transfers: Transfers) -> npt.NDArray[np.int64]:
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


def _apart(
    kernels: KernelTable, rows: Mapping[int, list[int]], steps: Mapping[int, ProfiledStep], rank: int
) -> tuple[CollectiveCalls, ...]:
    """The messages that cannot be compared with the other side's, together."""
    if not rows:
        return ()
    order = sorted(rows, key=lambda step: steps[step].number)
    times_ns = np.array([float(kernels.intervals[np.array(rows[step])].sum_ns) for step in order])
    told = tuple([steps[step] for step in order])
    none = _in_us(np.zeros(len(order)))
    return (CollectiveCalls(SEND_RECV, f"rank {rank}", rank, 1, 1, told, (), _in_us(times_ns), none, b"", "", none),)
