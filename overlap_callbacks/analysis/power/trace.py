"""The trace of power over time in one window, thinned for the page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.power.phases import StepPhases
from overlap_callbacks.analysis.power.readings import Floats, Readings, Segment
from overlap_callbacks.analysis.results.power import PowerTrace, TraceSegment

# Thousandths of a millisecond and of a watt exceed any sensor's precision, and keep a record short.
_DIGITS = 3
# Maximum intervals kept per profiled step: power sensors resolve only a few.
_MAX_INTERVALS = 60
# Maximum points kept.
MAX_POINTS = 600


def power_trace(
    readings: Readings,
    segments: Sequence[Segment],
    *,
    averaging_s: float | None,
    tdp_w: float | None = None,
    phases: Sequence[StepPhases] = (),
) -> PowerTrace | None:
    """The trace of a window, limited to its segments if there are any; None without power readings.

    Peaks are preserved: thinning keeps the extremes of each stretch of time.
    """
    rows = np.flatnonzero(~np.isnan(readings.power_w))
    if segments:
        start_ns, end_ns = min(s.start_ns for s in segments), max(s.end_ns for s in segments)
        rows = rows[(readings.time_ns[rows] >= start_ns) & (readings.time_ns[rows] <= end_ns)]
    elif len(rows):
        start_ns = int(readings.time_ns[rows[0]])
    if not len(rows):
        return None
    points = thin(readings.power_w[rows], MAX_POINTS)
    kept = rows[points]
    clocks, limits = fill_forward(readings.sm_clock_mhz[rows])[points], readings.limit_w[rows]
    return PowerTrace(
        start_ns=start_ns,
        time_ms=_rounded((readings.time_ns[kept] - start_ns) / 1e6),
        power_w=_rounded(readings.power_w[kept]),
        sm_clock_mhz=() if np.isnan(clocks).all() else _rounded(clocks),
        averaging_s=averaging_s,
        tdp_w=tdp_w,
        limit_w=None if np.isnan(limits).all() else float(np.nanmin(limits)),
        segments=tuple(
            [
                TraceSegment(
                    s.mode,
                    round((s.start_ns - start_ns) / 1e6, _DIGITS),
                    round((s.end_ns - start_ns) / 1e6, _DIGITS),
                    s.counted,
                    s.profiled,
                )
                for s in sorted(segments, key=lambda s: s.start_ns)
            ]
        ),
        num_readings=len(rows),
        communication=_thinned([step.communication for step in phases], start_ns),
        both=_thinned([step.both for step in phases], start_ns),
    )


def _thinned(of_steps: Sequence[Intervals], start_ns: int) -> tuple[tuple[float, float], ...]:
    """Some intervals of each step, in milliseconds from the start of the trace; none that rounding would make empty."""
    found: list[tuple[float, float]] = []
    for intervals in of_steps:
        thin = intervals.thinned(_MAX_INTERVALS)
        starts, ends = (_rounded((side - start_ns) / 1e6) for side in (thin.start_ns, thin.end_ns))
        found += [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
    return tuple(found)


def fill_forward(values: Floats) -> Floats:
    """Replace each NaN by the last value before it, or by the first value if there is none before it; shape (n,)."""
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        return values
    last: Floats = values[known[np.maximum(np.searchsorted(known, np.arange(len(values)), side="right") - 1, 0)]]
    return last


def thin(values: Floats, max_points: int) -> npt.NDArray[np.intp]:
    """Indices of at most ``max_points`` values: the first, the last, and the extremes of each stretch in between."""
    if len(values) <= max_points:
        return np.arange(len(values))
    # The two ends take two points, and so does each stretch.
    edges = np.linspace(0, len(values), (max_points - 2) // 2 + 1).astype(np.intp)
    kept = {0, len(values) - 1}
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        stretch = values[low:high]
        kept.update((low + int(stretch.argmin()), low + int(stretch.argmax())))
    return np.array(sorted(kept), dtype=np.intp)


def _rounded(values: Floats) -> tuple[float, ...]:
    return tuple(np.round(values, _DIGITS).tolist())
