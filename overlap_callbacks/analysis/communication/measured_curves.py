"""Effective bandwidths of a job's messages, from the times by size that ``overlap bench collectives`` measured. Pure.

A bandwidth depends on the size of messages. So each message of the job takes the time that was measured at its size,
and the bandwidth of a dimension is its bytes on the wire over the sum of those times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.bench.figures import TransferFigures
from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.rows import MessageRow, wire_factor
from overlap_callbacks.analysis.communication.volumes import sent_rows
from overlap_callbacks.analysis.name_rules import collective_of

_MS_PER_S = 1e3
# Terms of the step time that these dimensions' messages belong to.
_TERMS = {"tensor": "tensor", "pipeline": "pipeline"}
_DATA = "data"


class Curve(NamedTuple):
    """Times of one kind of collective on groups of one size.

    Attributes:
        kind: e.g. ``all_reduce``.
        group_size: ranks of the group.
        sizes: bytes, ascending.
        times_ms: of a message of each size.
    """

    kind: str
    group_size: int
    sizes: tuple[int, ...]
    times_ms: tuple[float, ...]

    def time_ms(self, size: float) -> float:
        """The time of a message of ``size`` bytes.

        Between two sizes it follows a straight line in logarithms. A smaller message takes the time of the smallest,
        and a larger one has the bandwidth of the largest.
        """
        if size <= self.sizes[0]:
            return self.times_ms[0]
        if size >= self.sizes[-1]:
            return self.times_ms[-1] * size / self.sizes[-1]
        above = next(place for place, known in enumerate(self.sizes) if known >= size)
        low, high = self.sizes[above - 1], self.sizes[above]
        share = math.log(size / low) / math.log(high / low)
        before, after = self.times_ms[above - 1], self.times_ms[above]
        return before * math.exp(share * math.log(after / before))


class Measured(NamedTuple):
    """Bandwidths of a job's dimensions.

    Attributes:
        bytes_per_s: on the wire of a rank, by dimension: ``tensor``, ``pipeline``, ``data``.
        notes: what stands for what, as sentences.
    """

    bytes_per_s: dict[str, float]
    notes: tuple[str, ...]


def curves_of(figures: Iterable[TransferFigures]) -> tuple[Curve, ...]:
    """The curves of a benchmark: one for each kind and size of group, the first group of that size."""
    found: dict[tuple[str, int, str], list[TransferFigures]] = {}
    for row in figures:
        found.setdefault((row.point.kind, row.group_size, row.point.group), []).append(row)
    curves: dict[tuple[str, int], Curve] = {}
    for (kind, size, _), rows in found.items():
        ordered = sorted(rows, key=lambda row: row.point.message_bytes)
        curve = Curve(
            kind,
            size,
            tuple([row.point.message_bytes for row in ordered]),
            tuple([row.time_ms.value for row in ordered]),
        )
        curves.setdefault((kind, size), curve)
    return tuple(curves.values())


def measured_bandwidths(job: JobShape, curves: Sequence[Curve]) -> Measured:
    """The effective bandwidth of each dimension of a job's messages.

    A group of a size that was not measured takes the curve of the nearest size, and a note says so. A dimension with a
    kind of collective that was not measured has no bandwidth.

    Args:
        job: checked.
        curves: of ``curves_of``.
    """
    by_kind: dict[str, list[Curve]] = {}
    for curve in curves:
        by_kind.setdefault(curve.kind, []).append(curve)
    wire: dict[str, float] = {}
    time_ms: dict[str, float] = {}
    missing: dict[str, set[str]] = {}
    stands_for: dict[tuple[str, int], int] = {}
    for row in sent_rows(job):
        dimension = _TERMS.get(row.dimension, _DATA)
        kind = collective_of(row.operator)
        chosen = _nearest(by_kind, kind, row.group_size)
        if chosen is None:
            missing.setdefault(dimension, set()).add(kind)
            continue
        size = row.group_size or chosen.group_size
        if kind != "send_recv" and chosen.group_size != size:
            stands_for[kind, size] = chosen.group_size
        wire[dimension] = wire.get(dimension, 0.0) + row.bytes * wire_factor(row.operator, size)
        time_ms[dimension] = time_ms.get(dimension, 0.0) + row.messages * _time_ms(chosen, row, size)
    rates = {name: wire[name] / time_ms[name] * _MS_PER_S for name in wire if name not in missing and time_ms[name] > 0}
    notes = [
        f"{kind} of {size} ranks takes the bus bandwidth that was measured with {measured}"
        for (kind, size), measured in sorted(stands_for.items())
    ]
    notes += [
        f"no bandwidth of {name} messages: {' and '.join(sorted(kinds))} was not measured"
        for name, kinds in sorted(missing.items())
    ]
    return Measured(rates, tuple(notes))


def _nearest(by_kind: Mapping[str, Sequence[Curve]], kind: str, size: int) -> Curve | None:
    found = by_kind.get(kind, ())
    return min(found, key=lambda curve: abs(math.log(curve.group_size / max(size, 2))), default=None)


def _time_ms(curve: Curve, row: MessageRow, size: int) -> float:
    """Of one message: by the curve, at equal bus bandwidth where the group has another size."""
    time = curve.time_ms(row.bytes_each)
    if curve.group_size == size:
        return time
    return time * wire_factor(row.operator, size) / wire_factor(row.operator, curve.group_size)
