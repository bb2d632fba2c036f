"""The timeline of one step: when compute ran and when communication was in flight, thinned to what a page can draw."""

from __future__ import annotations

import numpy as np

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.results.kernel_times import StepTimeline
from overlap_callbacks.analysis.results.mode import Mode

# Intervals of each kind. A chart that is a thousand pixels wide cannot show more.
MAX_INTERVALS = 400


def step_timeline(
    kernels: KernelTable, step: int, arm: Mode, max_intervals: int = MAX_INTERVALS
) -> StepTimeline | None:
    """The timeline of one step, from its first kernel to its last; None if it has no kernels.

    Args:
        kernels: the whole profile. Communication of other steps that is in flight during this one is shown too.
        step: index of the step.
        arm: the side of the comparison on which the step counts.
        max_intervals: maximum number of intervals of each kind.
    """
    shown = (kernels.kind == Kind.COMPUTE) | (kernels.kind == Kind.COMMUNICATION)
    own = kernels.intervals[shown & (kernels.step == step)]
    if not len(own):
        return None
    start, end = int(own.start_ns.min()), int(own.end_ns.max())

    def within(kind: Kind) -> tuple[tuple[tuple[float, float], ...], float]:
        intervals = kernels.of(kind)
        union = Intervals(np.clip(intervals.start_ns, start, end), np.clip(intervals.end_ns, start, end)).union()
        thin = union.thinned(max_intervals)
        pairs = zip((thin.start_ns - start).tolist(), (thin.end_ns - start).tolist(), strict=True)
        return tuple([(a / 1e6, b / 1e6) for a, b in pairs]), (thin.sum_ns - union.sum_ns) / 1e6

    compute, closed_compute = within(Kind.COMPUTE)
    communication, closed_communication = within(Kind.COMMUNICATION)
    return StepTimeline(arm, (end - start) / 1e6, compute, communication, closed_compute, closed_communication)
