"""Estimates from one trace what compute loses beside communication: an association, not an experiment."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.attribution import labels_of
from overlap_callbacks.analysis.kernels.call_table import Calls
from overlap_callbacks.analysis.kernels.same_calls import IN_TURN, SAME_LAUNCH, Level, match
from overlap_callbacks.analysis.kernels.table import Indices, Kind
from overlap_callbacks.traces.figures import SlowdownEstimate
from overlap_callbacks.traces.trace import Trace

BY_TURN = "calls of one kernel in the same turn of different steps"
BY_LAUNCH = "calls of one kernel with the same grid and block"
# A kernel counts as beside communication if at least the first share of its time is, as alone if at most the second is.
_MIN_BESIDE, _MAX_ALONE = 0.9, 0.1


def slowdown_estimate(trace: Trace) -> SlowdownEstimate | None:
    """An estimate of the slowdown: calls beside communication against calls of the same kernels alone."""
    calls = Calls.of(trace.kernels)
    beside, alone = beside_and_alone(trace, calls)
    if not beside.any() or not alone.any():
        return None
    # Turns need several steps to compare; and without launch shapes, a name alone does not identify a kernel.
    methods: list[tuple[tuple[Level, ...], str]] = []
    if len(trace.steps) > 1 and not trace.is_cut:
        methods.append((IN_TURN, BY_TURN))
    if any(trace.kernels.shapes):
        methods.append((SAME_LAUNCH, BY_LAUNCH))
    for levels, method in methods:
        matches = match(calls, beside, calls, alone, levels)
        rows = np.flatnonzero(np.isfinite(matches.alone_ns))
        if len(rows):
            left_out = np.flatnonzero(beside & ~np.isfinite(matches.alone_ns))
            return _slowdown(calls, rows, matches.alone_ns, np.flatnonzero(matches.used), left_out, method)
    return None


def beside_and_alone(trace: Trace, calls: Calls) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which calls that compute ran beside communication, and which alone; shape (calls,) each."""
    compute = (calls.kind == Kind.COMPUTE) & (calls.duration_ns > 0)
    if trace.steps:
        compute &= calls.step >= 0  # outside the steps, the turn of a call is unknown
    covered = calls.covered_ns(trace.kernels.of(Kind.COMMUNICATION)) / np.maximum(calls.duration_ns, 1)
    return compute & (covered >= _MIN_BESIDE), compute & (covered <= _MAX_ALONE)


def _slowdown(
    calls: Calls, rows: Indices, alone_ns: npt.NDArray[np.float64], used: Indices, left_out: Indices, method: str
) -> SlowdownEstimate:
    """The estimate, over all calls and by family.

    Args:
        calls: all calls of the trace.
        rows: calls beside communication that match calls alone.
        alone_ns: time of the same call alone; shape (calls,).
        used: the calls alone that they match.
        left_out: calls beside communication without a match.
        method: what counts as the same call, in words.
    """
    label, labels = labels_of(calls.kernels)

    def over(
        rows: Indices, used: Indices, left_out: Indices, families: dict[str, SlowdownEstimate]
    ) -> SlowdownEstimate:
        time_ns = float(calls.duration_ns[rows].sum())
        return SlowdownEstimate(
            slowdown=time_ns / float(alone_ns[rows].sum()) - 1,
            method=method,
            kernels=len(distinct_values(calls.kernels.name[calls.row[rows]])),
            calls_beside=len(rows),
            calls_alone=len(used),
            calls_left_out=len(left_out),
            time_beside_ms=time_ns / 1e6,
            families=families,
        )

    of_rows, of_used, of_left_out = (label[calls.row[part]] for part in (rows, used, left_out))
    families = {
        labels[i]: over(rows[of_rows == i], used[of_used == i], left_out[of_left_out == i], {})
        for i in distinct_values(of_rows).tolist()
    }
    return over(rows, used, left_out, dict(sorted(families.items(), key=lambda item: -item[1].time_beside_ms)))
