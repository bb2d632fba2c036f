"""Which collectives of a step compute does not hide, one by one. Pure."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.results.kernel_times import StepTimeline

_LATEST_MS = 1e12


class ExposedCollective(NamedTuple):
    """A collective of a step, and for how long no compute runs beside it.

    Attributes:
        name: of its kernel; on CPU of its operator.
        place: which one of its name it is in the step, in the order of their starts; the first is 1; 0 where the record
            does not keep them all, so that it is not known.
        of: how many of its name the step has; 0 likewise.
        size_bytes: the larger of what it reads and writes; 0 where not known.
        in_flight_ms: its length.
        exposed_ms: the part of it beside which no compute runs. Where several collectives are in flight at once, the
            time counts for the one that began first. So the rows add up to the step's exposed communication.
    """

    name: str
    place: int
    of: int
    size_bytes: int
    in_flight_ms: float
    exposed_ms: float


def exposed_collectives(picture: StepTimeline) -> list[ExposedCollective]:
    """The collectives of one step that are exposed, the most exposed first; none where the step's kernels are not kept.

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
