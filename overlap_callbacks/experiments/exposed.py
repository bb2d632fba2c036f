"""Whose communication is exposed, by what a record holds. Pure.

A record has the exposed time of each dimension of parallelism, a mean over ranks and steps, and which collectives a
dimension issues in a step. A collective is named as the cause of it where it is the only kind that its dimension has.

It also has the collectives of one profiled step of the lowest rank, one by one. The place of a collective among those
of its name tells the bucket or the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from overlap_callbacks.analysis.formatting import PLAIN, bytes_in_words, count
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.results.kernel_times import StepTimeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import CollectiveTime, DimensionTime
from overlap_callbacks.report.record import Record

_LATEST_MS = 1e12
# Collectives of one dimension that a line names, and collectives of one step that have a line.
_MAX_NAMED = 3


def exposed_lines(record: Record) -> list[str]:
    """Whose communication is exposed, of the last window that counts: by dimension, then by collective."""
    return [*_dimension_lines(record), *_collective_lines(record)]


def _dimension_lines(record: Record) -> list[str]:
    """A line for each dimension that has exposed communication, the most first."""
    window = record.latest_valid("dimensions")
    if window is None:
        return []
    rows = sorted([row for row in window.dimensions if row.exposed_ms > 0], key=lambda row: -row.exposed_ms)
    return [_line(row, window) for row in rows]


def _line(row: DimensionTime, window: OverlapReport) -> str:
    shown = f"{PLAIN.quantity(row.exposed_ms, 'ms')} of {PLAIN.quantity(row.comm_ms, 'ms')}"
    line = f"window {window.window}, dimension {row.dimension}: {shown} in flight are exposed"
    kinds = [found for found in window.collectives if found.dimension == row.dimension]
    if not kinds:
        return line
    kinds.sort(key=lambda kind: -kind.size_bytes)
    names = "; ".join(map(_name, kinds[:_MAX_NAMED])) + ("; ..." if len(kinds) > _MAX_NAMED else "")
    # Rank 0's collectives; the dimension's messages are a mean over ranks, sends and receives included.
    if len(kinds) == 1 and kinds[0].messages == row.messages:
        return f"{line}, all of it by {names}"
    return f"{line}; rank {window.first_rank} issues {names} in it (which of them is exposed, the record does not tell)"


def _name(kind: CollectiveTime) -> str:
    ranks = count(kind.group_size, "rank")
    return (
        f"{kind.operator.strip('_')} on group {kind.group} of {ranks} "
        f"({kind.messages} a step, {bytes_in_words(kind.size_bytes)} in all)"
    )


def _collective_lines(record: Record) -> list[str]:
    """A line for each of the collectives of one step that are exposed most."""
    window = record.latest_valid("pictures")
    if window is None:
        return []
    return [
        f"window {window.window}, one step of rank {window.first_rank}: {_one(row)} is exposed for "
        f"{PLAIN.quantity(row.exposed_ms, 'ms')} of {PLAIN.quantity(row.in_flight_ms, 'ms')}"
        for row in _of_one_step(window)[:_MAX_NAMED]
    ]


def _one(row: ExposedCollective) -> str:
    place = f" {row.place} of {row.of}" if row.of else ""
    return f"{row.name}{place}" + (f" ({bytes_in_words(row.size_bytes)})" if row.size_bytes else "")


def _of_one_step(window: OverlapReport) -> list[ExposedCollective]:
    pictures = (picture for picture in window.pictures if picture.mode is Mode.OVERLAPPED)
    return [row for picture in pictures for row in exposed_collectives(picture)]


def exposed_as_data(record: Record) -> dict[str, Sequence[Any]]:
    """The same as plain data: ``dimensions``, and ``collectives`` of one step of the lowest rank."""
    dimensions, pictures = (record.latest_valid(part) for part in ("dimensions", "pictures"))
    return {
        "dimensions": () if dimensions is None else dimensions.dimensions,
        "collectives": [] if pictures is None else [row._asdict() for row in _of_one_step(pictures)],
    }


class ExposedCollective(NamedTuple):
    """A collective of a step, and how much of it compute does not hide.

    Attributes:
        name: of its kernel; on CPU of its operator.
        place: number among those of its name in the step, by start, from 1; 0 where the record does not keep them all.
        of: how many of its name the step has; 0 likewise.
        size_bytes: the larger of what it reads and writes; 0 if unknown.
        in_flight_ms: its length.
        exposed_ms: its time without compute. Where several collectives are in flight at once, the time counts for the
            one that began first. So the rows add up to the step's exposed communication.
    """

    name: str
    place: int
    of: int
    size_bytes: int
    in_flight_ms: float
    exposed_ms: float


def exposed_collectives(picture: StepTimeline) -> list[ExposedCollective]:
    """The exposed collectives of one step, the most exposed first; empty where the record keeps no kernels of it.

    A gap in compute that is too short for the record counts as compute: see ``StepTimeline.closed_compute_ms``.
    """
    detail = picture.detail
    if detail is None:
        return []
    rows = [row for row in detail.named_slices if row.communicates]
    if not rows:
        return []
    start_ns = _nanoseconds([row.start_ms for row in rows])
    end_ns = _nanoseconds([row.start_ms + row.length_ms for row in rows])
    # In order of start, so what the ones before cover of a collective is all that lies before their latest end.
    latest_ns = np.maximum.accumulate(np.append(start_ns[0], end_ns[:-1]))
    own = Intervals(np.maximum(start_ns, latest_ns), end_ns)
    compute = Intervals(
        _nanoseconds([start for start, _ in picture.compute]), _nanoseconds([end for _, end in picture.compute])
    )
    exposed_ns = np.maximum(own.durations_ns, 0) - own.covered_ns(compute)
    counts = Counter(row.name for row in rows)
    seen: Counter[int] = Counter()
    found = []
    for row, exposed in zip(rows, exposed_ns.tolist(), strict=True):
        seen[row.name] += 1
        of = counts[row.name] if detail.communication_left_out == 0 else 0
        place = seen[row.name] if of else 0
        name = detail.names[row.name]
        found.append(ExposedCollective(name, place, of, row.size_bytes, row.length_ms, exposed / 1e6))
    return sorted([row for row in found if row.exposed_ms > 0], key=lambda row: -row.exposed_ms)


def _nanoseconds(milliseconds: list[float]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    # A damaged record may have any time: as far as 64 bits go.
    times_ms = np.array(milliseconds, np.float64).clip(-_LATEST_MS, _LATEST_MS)
    return np.rint(times_ms * 1e6).astype(np.int64)
