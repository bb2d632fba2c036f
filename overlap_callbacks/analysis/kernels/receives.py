"""Separates a receive's transfer from the time it waited for its sender.

NCCL's receive spins until the sender arrives. A profile does not show when, and the ranks' clocks do not agree. But
messages of one peer bound each other's transfer: a smaller one takes no longer than a larger one, and a larger one no
longer than in proportion to its bytes. (This holds for a latency and a bandwidth, and also if NCCL uses a faster
protocol for larger messages.) If the shortest receives of most sizes lie on one line, it bounds the sizes between them
(``fitted_bandwidth``). Any time beyond the lowest bound is waiting, at the receive's start: a lower bound, since all
messages may have waited. Rank 0 knows more if it has both kernels of a message
(``overlap_callbacks.analysis.job.waiting``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.kernels.alignment import Alignment
from overlap_callbacks.analysis.kernels.issued import SEND_RECV, Expected
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable
from overlap_callbacks.analysis.sums import grouped

Floats = npt.NDArray[np.float64]


class Transfers(NamedTuple):
    """When the transfers of a profile began.

    Attributes:
        start_ns: when each row began to do work: a receive once it stopped waiting, others at their start; shape (n,).
            None if a step's kernels cannot be matched to its sends and receives.
        messages: what each row sends and receives; empty if not known.
        notes: which receives' waiting is based on a fitted bandwidth.
    """

    start_ns: Indices | None
    messages: Mapping[int, Expected]
    notes: tuple[str, ...] = ()


def transfer_starts(aligned: Alignment) -> Transfers:
    """When each row of the profile began to do work."""
    kernels = aligned.kernels
    starts = kernels.intervals.start_ns.copy()
    durations = kernels.intervals.durations_ns
    of_rows: dict[int, Expected] = {}
    for step, of_step in aligned.steps.items():
        messages = [part for part in of_step.expected if part.kind == SEND_RECV]
        rows = _send_recv_rows(kernels, step).tolist()
        if len(rows) != len(messages):
            return Transfers(None, {})
        directions = [_direction(kernels.names[kernels.name[row]]) for row in rows]
        for direction in set(directions):
            named = [row for row, its in zip(rows, directions, strict=True) if its == direction]
            meant = [part for part in messages if direction in ("", "recv" if part.bytes_out else "send")]
            if len(named) != len(meant):
                return Transfers(None, {})
            of_rows |= zip(named, meant, strict=True)
    rows_of = grouped([row for row, message in of_rows.items() if message.bytes_out], of_rows.__getitem__)
    least_ns = {message: int(durations[rows].min()) for message, rows in rows_of.items()}
    longest_ns = _longest_transfers_ns(least_ns)
    fitted = _fitted_transfers(least_ns, longest_ns)
    longest_ns |= {message: of_line.transfer_ns(_size(message)) for message, of_line in fitted.items()}
    for message, rows in rows_of.items():
        starts[rows] = kernels.intervals.end_ns[rows] - longest_ns[message]
    return Transfers(starts, of_rows, _notes(fitted, len(least_ns)))


def _size(message: Expected) -> int:
    return max(message.bytes_in, message.bytes_out)


def _fitted_transfers(
    least_ns: Mapping[Expected, int], longest_ns: Mapping[Expected, int]
) -> dict[Expected, Bandwidth]:
    """The messages whose transfer is bounded more tightly by a fitted bandwidth than by other sizes.

    Messages of one peer are fitted together; those only received separately from those with equally many bytes sent.
    """
    alike = [message for message in least_ns if message.bytes_in in (0, message.bytes_out)]
    of_peer = grouped(alike, lambda message: (message.group, message.peers, bool(message.bytes_in)))
    found: dict[Expected, Bandwidth] = {}
    for messages in of_peer.values():
        fit = fitted_bandwidth([(_size(message), least_ns[message]) for message in messages])
        if fit is not None:
            found |= {
                message: fit
                for message in messages
                if fit.bounds(_size(message), least_ns[message])
                and fit.transfer_ns(_size(message)) < longest_ns[message]
            }
    return found


def _notes(fitted: Mapping[Expected, Bandwidth], num_messages: int) -> tuple[str, ...]:
    if not fitted:
        return ()
    rates = [f"{rate:.3g}" for rate in sorted(fit.bytes_per_ns for fit in fitted.values())]
    rate = rates[0] if rates[0] == rates[-1] else f"{rates[0]} to {rates[-1]}"
    note = (
        f"the waiting of receives of {len(fitted)} of {num_messages} kinds of messages is what exceeds their bytes "
        f"over a fitted bandwidth ({rate} GB/s); that of the others rests on the shortest receives of all sizes "
        f"[OC380]"
    )
    return (note,)


def _longest_transfers_ns(least_ns: Mapping[Expected, int]) -> dict[Expected, int]:
    """The maximum duration of each message's transfer, from the shortest kernels of all messages of its peers."""
    longest: dict[Expected, int] = {}
    for messages in grouped(least_ns, lambda message: (message.group, message.peers)).values():
        times_ns = np.array([least_ns[message] for message in messages])
        sizes = np.array([(message.bytes_in, message.bytes_out) for message in messages], dtype=float).T
        with np.errstate(divide="ignore", invalid="ignore"):  # zero bytes are no more than zero, any others far more
            times_as_many = np.nan_to_num(sizes[:, :, None] / sizes[:, None, :], nan=0.0, posinf=np.inf)
        longest |= zip(messages, (times_ns * np.maximum(1.0, times_as_many.max(axis=0))).min(axis=1), strict=True)
    return {message: int(time_ns) for message, time_ns in longest.items()}


def _direction(name: str) -> str:
    """``send`` or ``recv``, as in Gloo's range names; empty for NCCL's single kernel for both."""
    sends, receives = "send" in name.lower(), "recv" in name.lower()
    return "" if sends == receives else "send" if sends else "recv"


def _send_recv_rows(kernels: KernelTable, step: int) -> Indices:
    """The rows of a step that send or receive, ordered by launch, otherwise by start.

    NCCL has one stream per peer, so a later message may start earlier.
    """
    rows = np.flatnonzero(kernels.runs(SEND_RECV) & (kernels.step == step))
    times_ns = kernels.intervals.start_ns[rows]
    if kernels.launched_ns is not None and bool((kernels.launched_ns[rows] >= 0).all()):
        times_ns = kernels.launched_ns[rows]
    return rows[np.argsort(times_ns, kind="stable")]


# -- the fitted bandwidth. NCCL chooses one of several protocols by message size, each with a latency and a bandwidth.
# If it chooses the fastest, transfer time is a concave function of bytes. A concave function that meets a straight line
# at three points is that line between the outer two of them. So between sizes that lie on one line a transfer takes
# what the line says, although other sizes may lie on another line. Outside them nothing follows. A message that waited
# lies above its transfer, never below. So a line with any message below it is wrong.

# A size lies on the line if its time is this close. Real transfers of one size vary by as much.
_ON_LINE = 0.03
# Minimum number of sizes on a line; more than half of all are also required.
_MIN_SIZES = 3
# Maximum number of sizes fitted: each pair of sizes is tried, and no job has this many.
_MAX_SIZES = 64


class Bandwidth(NamedTuple):
    """A line: time of a message without bytes, 10^9 bytes per second, and the range of sizes (bytes) where it holds."""

    latency_ns: float
    bytes_per_ns: float
    smallest: float
    largest: float

    def transfer_ns(self, num_bytes: float) -> int:
        """Time of a transfer."""
        return round(self.latency_ns + num_bytes / self.bytes_per_ns)

    def bounds(self, num_bytes: float, least_ns: float) -> bool:
        """Whether a size within the line's range took clearly longer in its shortest message than the line says."""
        within = self.smallest < num_bytes < self.largest
        return within and least_ns > (1 + _ON_LINE) * self.transfer_ns(num_bytes)


def fitted_bandwidth(least: Sequence[tuple[float, float]]) -> Bandwidth | None:
    """The line through the shortest messages of most sizes; if there are several, the one with most sizes on it.

    ``least``: bytes of each size, and nanoseconds of its shortest message. None unless three sizes, and more than half
    of them, lie on one line, and if that line has no bandwidth or a negative latency.
    """
    if not _MIN_SIZES <= len(least) <= _MAX_SIZES:
        return None
    sizes, times = np.array(sorted(least), dtype=float).T
    best, best_inside = None, max(_MIN_SIZES, len(sizes) // 2 + 1) - 1
    for first, last in itertools.combinations(range(len(sizes)), 2):
        per_byte = (times[last] - times[first]) / (sizes[last] - sizes[first]) if sizes[last] > sizes[first] else 0.0
        latency_ns = times[first] - per_byte * sizes[first]
        if per_byte <= 0 or latency_ns < -_ON_LINE * times[first]:
            continue
        expected = latency_ns + per_byte * sizes
        inside = np.abs(times - expected) <= _ON_LINE * expected
        within = (sizes >= sizes[inside].min()) & (sizes <= sizes[inside].max())
        if (within & (times < (1 - _ON_LINE) * expected)).any() or inside.sum() <= best_inside:
            continue
        best_inside = int(inside.sum())
        best = _least_squares(sizes[inside], times[inside])
    return best


def _least_squares(sizes: Floats, times: Floats) -> Bandwidth | None:
    """The line through collinear sizes, with least relative errors."""
    weight = 1 / times
    matrix = np.stack((np.ones_like(sizes), sizes), axis=1) * weight[:, None]
    (latency_ns, per_byte), *_ = np.linalg.lstsq(matrix, times * weight, rcond=None)
    if per_byte <= 0:
        return None
    return Bandwidth(float(latency_ns), float(1 / per_byte), float(sizes[0]), float(sizes[-1]))
