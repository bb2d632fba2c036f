"""Latency and bandwidth of the links of a job, fitted to the transfers that a record has by size. Pure.

A ring passes a message on in steps, each of which sends a part of it to the next rank. So a collective takes
``steps * latency + wire_bytes / bandwidth``: the model of R. Hockney, "The communication challenge for MPP" (Parallel
Computing 20, 1994), in the form of R. Thakur et al., "Optimization of Collective Communication Operations in MPICH"
(IJHPCA 19, 2005), section 4. The study that the other equations are of has no latency: its messages are long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from overlap_callbacks.analysis.communication.rows import ring_steps, wire_factor
from overlap_callbacks.analysis.results.arrivals import SizeTransfer

_MS_PER_S = 1e3
# Jobs with data parallelism only use the default group.
_WORLD, _DATA = "world", "data"
# Of sizes that differ by less, latency and bandwidth cannot be told apart.
_LEAST_SPREAD = 2.0


class Link(msgspec.Struct, frozen=True):
    """What a rank's messages of one dimension of parallelism go through.

    Attributes:
        bytes_per_s: bandwidth, of bytes on the wire.
        latency_s: time of each step of the ring, whatever its bytes.
    """

    bytes_per_s: float
    latency_s: float = 0.0


def fitted_links(transfers: Iterable[SizeTransfer]) -> dict[str, Link]:
    """The links by dimension, by the least squares of relative errors, none of them below zero.

    Each size counts as often as it was timed. A dimension is missing whose messages have one size, or of which no
    bandwidth follows: then its effective bandwidth is all that there is to know.

    Args:
        transfers: of windows of one run.
    """
    by_dimension: dict[str, list[SizeTransfer]] = {}
    for row in transfers:
        if row.sound and ring_steps(row.operator, row.group_size) and wire_factor(row.operator, row.group_size):
            by_dimension.setdefault(_DATA if row.dimension == _WORLD else row.dimension, []).append(row)
    found = {dimension: _fitted(rows) for dimension, rows in by_dimension.items()}
    return {dimension: link for dimension, link in found.items() if link is not None}


def _fitted(rows: Sequence[SizeTransfer]) -> Link | None:
    from scipy.optimize import nnls  # takes a third of a second to import

    sizes = [row.bytes / row.calls for row in rows]
    if max(sizes) < _LEAST_SPREAD * min(sizes):
        return None
    steps = np.array([row.calls * ring_steps(row.operator, row.group_size) for row in rows], dtype=float)
    wire = np.array([row.bytes * wire_factor(row.operator, row.group_size) for row in rows])
    seconds = np.array([row.transfer_ms / _MS_PER_S for row in rows])
    weight = np.sqrt([row.calls for row in rows]) / seconds
    # Columns of about the same size: bytes are many, and seconds a byte few.
    unit = wire.max() / steps.max()
    (latency_s, per_unit), _ = nnls(np.stack((steps, wire / unit), axis=1) * weight[:, None], seconds * weight)
    bytes_per_s = unit / per_unit if per_unit > 0 else math.inf
    return Link(float(bytes_per_s), float(latency_s)) if math.isfinite(bytes_per_s) else None
