"""Bandwidths of a job's messages by dimension of parallelism: from a record, or from a benchmark's times.

A ring passes a message on in steps, each to the next rank. So a collective takes
``steps * latency + wire_bytes / bandwidth``: R. Hockney, "The communication challenge for MPP" (Parallel Computing 20,
1994), as in R. Thakur et al., "Optimization of Collective Communication Operations in MPICH" (IJHPCA 19, 2005), section
4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from overlap_callbacks.analysis.bench import TransferFigures
from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.predicted import sent_rows
from overlap_callbacks.analysis.equations import ring_steps, wire_factor
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.arrivals import SizeTransfer
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.analysis.sums import each_sum, grouped

TENSOR, PIPELINE, DATA = "tensor", "pipeline", "data"
_MS_PER_S = 1e3
# The default group, which is all that purely data-parallel jobs use.
_WORLD = "world"
# Sizes must differ by at least this factor to separate latency and bandwidth.
_LEAST_SPREAD = 2.0


def term_of(dimension: str) -> str:
    """The term of step time for these messages: those of the norm and the embeddings count with the gradients."""
    return dimension if dimension in (TENSOR, PIPELINE) else DATA


class Link(msgspec.Struct, frozen=True):
    """A link: bandwidth of bytes on the wire, and the time of each step of the ring, whatever its bytes."""

    bytes_per_s: float
    latency_s: float = 0.0


def _bytes_per_s(messages: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Bytes a second by dimension, from dimension, bytes on the wire and milliseconds of a rank's messages."""
    by_dimension = grouped(messages, lambda message: message[0])
    sums = {name: each_sum([amounts for _, *amounts in rows]) for name, rows in by_dimension.items()}
    return {name: wire / ms * _MS_PER_S for name, (wire, ms) in sums.items() if wire > 0 and ms > 0}


def _dimension(recorded: str) -> str:
    return DATA if recorded == _WORLD else recorded


# -- of a record


class RecordedRates(msgspec.Struct, frozen=True):
    """Links by dimension, and FLOP a second of one device (None if unknown), as a record's job had them."""

    links: dict[str, Link] = {}
    compute_flop_per_s: float | None = None

    def completed_by(self, other: RecordedRates) -> RecordedRates:
        """This, with values that only the other has."""
        rate = other.compute_flop_per_s if self.compute_flop_per_s is None else self.compute_flop_per_s
        return RecordedRates({**other.links, **self.links}, rate)


def recorded_rates(windows: Sequence[OverlapReport]) -> RecordedRates:
    """Rates from complete windows of one run; links have a latency if messages have several sizes."""
    effective = effective_bandwidths([row for window in windows for row in window.collectives])
    fitted = fitted_links([row for window in windows if window.valid for row in window.transfers])
    # Average the time per FLOP.
    rates = [rate for window in windows if (rate := compute_flop_per_s(window)) is not None]
    return RecordedRates(
        {**{name: Link(bandwidth) for name, bandwidth in effective.items()}, **fitted},
        len(rates) / sum([1 / rate for rate in rates]) if rates else None,
    )


def effective_bandwidths(collectives: Iterable[CollectiveTime]) -> dict[str, float]:
    """Bytes on the wire per second, by dimension: from transfers (the minimum over the ranks), never from waiting."""
    timed = [(row, *row.transfer) for row in collectives if row.group_size >= 2 and row.transfer is not None]
    return _bytes_per_s(
        [
            (_dimension(row.dimension), size * wire_factor(collective_of(row.operator), row.group_size), ms)
            for row, size, ms in timed
        ]
    )


def fitted_links(transfers: Iterable[SizeTransfer]) -> dict[str, Link]:
    """The links by dimension, by least squares of relative errors, with non-negative coefficients.

    Each size is weighted by how often it was timed. Dimensions without a second size or a bandwidth are missing.
    """
    known = [row for row in transfers if row.is_valid and row.group_size != 1]
    by_dimension = grouped(known, lambda row: _dimension(row.dimension))
    found = {dimension: _fitted(rows) for dimension, rows in by_dimension.items()}
    return {dimension: link for dimension, link in found.items() if link is not None}


def _fitted(rows: Sequence[SizeTransfer]) -> Link | None:
    from scipy.optimize import nnls  # takes a third of a second to import

    sizes = [row.bytes / row.calls for row in rows]
    if max(sizes) < _LEAST_SPREAD * min(sizes):
        return None
    kinds = [(collective_of(row.operator), row.group_size) for row in rows]
    steps = np.array([row.calls * ring_steps(*kind) for row, kind in zip(rows, kinds, strict=True)], dtype=float)
    wire = np.array([row.bytes * wire_factor(*kind) for row, kind in zip(rows, kinds, strict=True)])
    seconds = np.array([row.transfer_ms / _MS_PER_S for row in rows])
    weight = np.sqrt([row.calls for row in rows]) / seconds
    # Scale the columns to similar size: bytes are many, and seconds per byte few.
    unit = wire.max() / steps.max()
    (latency_s, per_unit), _ = nnls(np.stack((steps, wire / unit), axis=1) * weight[:, None], seconds * weight)
    bytes_per_s = unit / per_unit if per_unit > 0 else math.inf
    return Link(float(bytes_per_s), float(latency_s)) if math.isfinite(bytes_per_s) else None


def compute_flop_per_s(window: OverlapReport) -> float | None:
    """Model FLOP per second of one device, in the time of a sequential step without its transfers.

    That time is kernels, the optimizer, and the host's work that no kernel hides. None without FLOP or a sequential
    step, and with a pipeline, whose bubble is in that time too.
    """
    work = window.throughput
    if work is None or work.flop_per_step is None or work.num_devices < 1 or window.e2e_sequential_ms is None:
        return None
    if not window.valid or any([row.dimension == PIPELINE for row in window.collectives]):
        return None
    rest_ms = window.e2e_sequential_ms.value - _transfer_ms(window.collectives)
    return work.flop_per_step / work.num_devices / rest_ms * _MS_PER_S if rest_ms > 0 else None


def _transfer_ms(collectives: Iterable[CollectiveTime]) -> float:
    """Transfer time of a step; transfers that were not timed count at the rate per byte of their kind."""
    found = 0.0
    for row in collectives:
        if row.group_size > 1 and row.transfer is not None:
            size, ms = row.transfer
            found += ms * max(1.0, row.size_bytes / size if size else 1.0)
    return found


# -- from a benchmark. A bandwidth depends on the size of messages. So each message of the job takes the time that
# ``overlap bench collectives`` measured at its size, and the bandwidth of a dimension is its bytes on the wire over
# these times.


class Curve(NamedTuple):
    """Times in milliseconds of one kind of collective on groups of one size, by bytes, ascending."""

    kind: str
    group_size: int
    sizes: tuple[int, ...]
    times_ms: tuple[float, ...]

    def time_ms(self, size: float) -> float:
        """The time of a message of ``size`` bytes, interpolated in logarithms.

        Outside the measured sizes, it is the time of the smallest, or follows the bandwidth of the largest.
        """
        if size >= self.sizes[-1]:
            return self.times_ms[-1] * size / self.sizes[-1]
        if size <= self.sizes[0]:
            return self.times_ms[0]
        return math.exp(np.interp(math.log(size), np.log(self.sizes), np.log(self.times_ms)))


class Measured(NamedTuple):
    """Bytes per second on the wire, by dimension, and notes on groups that were measured differently, or not at all."""

    bytes_per_s: dict[str, float]
    notes: tuple[str, ...]


def curves_of(figures: Iterable[TransferFigures]) -> tuple[Curve, ...]:
    """The curves of a benchmark: one for each kind and group size, from the first group of that size."""
    found = grouped(figures, lambda row: (row.point.kind, row.group_size, row.point.group))
    curves: dict[tuple[str, int], Curve] = {}
    for (kind, size, _), rows in found.items():
        times = sorted([(row.point.message_bytes, row.time_ms.value) for row in rows], key=lambda row: row[0])
        curves.setdefault((kind, size), Curve(kind, size, *zip(*times, strict=True)))
    return tuple(curves.values())


def measured_bandwidths(job: JobShape, curves: Sequence[Curve]) -> Measured:
    """The effective bandwidth of each dimension of a job's messages.

    A group size that was not measured uses the curve of the nearest size, with a note. A dimension with a kind of
    collective that was not measured has no bandwidth.
    """
    times: list[tuple[str, float, float]] = []
    missing: dict[str, set[str]] = {}
    stands_for: dict[tuple[str, int], int] = {}
    for row in sent_rows(job):
        dimension, kind = term_of(row.dimension), collective_of(row.operator)
        of_kind = [curve for curve in curves if curve.kind == kind]
        if not of_kind:
            missing.setdefault(dimension, set()).add(kind)
            continue
        chosen = min(of_kind, key=lambda curve: abs(math.log(curve.group_size / max(row.group_size, 2))))
        size = row.group_size or chosen.group_size
        if kind != "send_recv" and chosen.group_size != size:
            stands_for[kind, size] = chosen.group_size
        factor = wire_factor(kind, size)
        time_ms = chosen.time_ms(row.bytes_each)
        if chosen.group_size != size:  # at equal bus bandwidth
            time_ms *= factor / wire_factor(kind, chosen.group_size)
        times.append((dimension, row.bytes * factor, row.messages * time_ms))
    notes = [
        f"{kind} of {size} ranks takes the bus bandwidth that was measured with {measured}"
        for (kind, size), measured in sorted(stands_for.items())
    ]
    notes += [
        f"no bandwidth of {name} messages: {' and '.join(sorted(kinds))} was not measured"
        for name, kinds in sorted(missing.items())
    ]
    rates = {name: rate for name, rate in _bytes_per_s(times).items() if name not in missing}
    return Measured(rates, tuple(notes))
