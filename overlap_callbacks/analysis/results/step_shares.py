"""What each dimension of parallelism takes of an overlapped step, and the bubble beside it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.step_parts import StepParts
from overlap_callbacks.analysis.results.window import DimensionTime

BUBBLE, COMPUTE, IDLE = "bubble", "compute", "idle"
_PIPELINE = "pipeline"
# No step takes as many milliseconds.
_TOO_LONG = 1e15


class StepShare(NamedTuple):
    """A part of the step.

    Attributes:
        name: a dimension of parallelism; ``bubble``, ``compute`` (with contention) or ``idle``.
        ms: per step.
        fraction: of the step.
    """

    name: str
    ms: float
    fraction: float


def step_shares(
    dimensions: Sequence[DimensionTime], parts: StepParts, figures: Mapping[str, Estimate]
) -> tuple[StepShare, ...]:
    """Parts of an overlapped step that add up to it: dimensions, the largest first, then the rest.

    A dimension has the time in which it is in flight and no compute runs. Messages that wait for their peer are the
    bubble's. Where several dimensions are in flight at once, their times are scaled down to the exposed communication
    of the step.

    Args:
        dimensions: of a window.
        parts: of its step.
        figures: of the window.
    """
    total_ms = parts.total_ms
    if not dimensions or not 0 < total_ms < _TOO_LONG:
        return ()
    if not all([abs(row.exposed_ms) < _TOO_LONG for row in dimensions]):  # in a record that somebody else has written
        return ()
    idle = figures.get("idle_ms")
    waiting_ms = max(0.0, parts.bubble_ms - (idle.value if idle else 0.0)) if parts.bubble_ms else 0.0
    exposed = {row.dimension: max(0.0, row.exposed_ms) for row in dimensions}
    if _PIPELINE in exposed:
        exposed[_PIPELINE] = max(0.0, exposed[_PIPELINE] - waiting_ms)
    transfer_ms, known_ms = parts.transfer_ms + parts.waiting_ms, sum(exposed.values())
    scale = transfer_ms / known_ms if known_ms > 0 else 0.0
    rows = [(name, ms * scale) for name, ms in exposed.items()]
    rows.sort(key=lambda row: (-row[1], row[0]))
    others = ((BUBBLE, parts.bubble_ms), (IDLE, parts.idle_ms), (COMPUTE, parts.compute_ms + parts.contention_ms))
    rows += [(name, ms) for name, ms in others if ms > 0]
    return tuple([StepShare(name, ms, ms / total_ms) for name, ms in rows])
