"""Fits a latency and a bandwidth to the shortest transfers of messages of several sizes, some of which waited.

NCCL takes one of several protocols by the size of a message, each with a latency and a bandwidth. If it takes the
fastest, the time of a transfer is a concave function of its bytes. A concave function that meets a straight line at
three places is that line between the outer two of them. So between sizes that lie on one line a transfer takes what the
line says, although other sizes may lie on another line. Outside of them nothing follows. A message that waited lies
above its transfer, never below it. So a line below which any message lies is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]

# A size lies on the line if its time is this close. Real transfers of one size differ by as much.
_ON_LINE = 0.03
# A line needs so many sizes on it, and more than half of all.
_MIN_SIZES = 3
# Of more sizes than this, none is fitted: there are no jobs with so many, and each pair of sizes is tried.
_MAX_SIZES = 64


@dataclass(frozen=True)
class Bandwidth:
    """A line.

    Attributes:
        latency_ns: time of a message without bytes.
        bytes_per_ns: bandwidth, in 10^9 bytes a second.
        smallest, largest: sizes between which the line holds, in bytes.
    """

    latency_ns: float
    bytes_per_ns: float
    smallest: float
    largest: float

    def transfer_ns(self, num_bytes: float) -> int:
        """Time of a transfer."""
        return round(self.latency_ns + num_bytes / self.bytes_per_ns)

    def bounds(self, num_bytes: float, least_ns: float) -> bool:
        """Whether the shortest message of a size, between those on the line, took clearly longer than the line says."""
        within = self.smallest < num_bytes < self.largest
        return within and least_ns > (1 + _ON_LINE) * self.transfer_ns(num_bytes)


def fitted_bandwidth(least: Sequence[tuple[float, float]]) -> Bandwidth | None:
    """The line on which the shortest messages of most sizes lie; of several such lines, the one with most on it.

    Args:
        least: bytes of a size, and the time in nanoseconds of the shortest message of it.

    Returns:
        None without three sizes, or more than half of them, on one line; and where that line has no bandwidth, or a
        latency below zero.
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


def _least_squares(sizes: _Floats, times: _Floats) -> Bandwidth | None:
    """The line through sizes that lie on one, by the least relative errors."""
    weight = 1 / times
    matrix = np.stack((np.ones_like(sizes), sizes), axis=1) * weight[:, None]
    (latency_ns, per_byte), *_ = np.linalg.lstsq(matrix, times * weight, rcond=None)
    if per_byte <= 0:
        return None
    return Bandwidth(float(latency_ns), float(1 / per_byte), float(sizes[0]), float(sizes[-1]))
