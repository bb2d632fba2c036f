"""A step as a picture: when compute ran and communication was in flight, thinned to what a page can draw."""

from __future__ import annotations

import numpy as np

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import StepTimeline

# Intervals of each kind: more than a chart of a thousand pixels can tell apart would only cost.
MAX_INTERVALS = 400


def step_timeline(kernels: KernelTable, step: int, arm: Mode, most: int = MAX_INTERVALS) -> StepTimeline | None:
    """Draw one step, from the first of its kernels to the last; None where it has none.

    Args:
        kernels: of the whole profile; communication of other steps that is in flight meanwhile is drawn too.
        step: index of the step.
        arm: its mode.
        most: intervals of each kind at most.
    """
    drawn = (kernels.kind == Kind.COMPUTE) | (kernels.kind == Kind.COMMUNICATION)
    own = kernels.intervals[drawn & (kernels.step == step)]
    if not len(own):
        return None
    start, end = int(own.start_ns.min()), int(own.end_ns.max())

    def within(kind: Kind) -> tuple[tuple[tuple[float, float], ...], float]:
        found = kernels.of(kind)
        union = Intervals(np.clip(found.start_ns, start, end), np.clip(found.end_ns, start, end)).union()
        thin = union.thinned(most)
        pairs = zip((thin.start_ns - start).tolist(), (thin.end_ns - start).tolist(), strict=True)
        return tuple((a / 1e6, b / 1e6) for a, b in pairs), (thin.sum_ns - union.sum_ns) / 1e6

    compute, closed_compute = within(Kind.COMPUTE)
    communication, closed_communication = within(Kind.COMMUNICATION)
    return StepTimeline(arm, (end - start) / 1e6, compute, communication, closed_compute, closed_communication)
