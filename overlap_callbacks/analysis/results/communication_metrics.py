"""Who comes last, shares of a step by dimension of parallelism, and the bubble, as flat keys."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.results.arrivals import Arrivals
from overlap_callbacks.analysis.results.stages import PipelineBubble
from overlap_callbacks.analysis.results.step_shares import COMPUTE, IDLE, StepShare

WAITING = "comm/waiting_fraction"
# Stages that have a key of their own.
_MAX_STAGES = 16


def arrival_metrics(arrivals: Arrivals | None, *, valid: bool) -> dict[str, float]:
    """The share of collectives' time in which ranks wait, and the rank for which they wait longest.

    Args:
        arrivals: of a window.
        valid: whether its sequential steps were sequential.
    """
    if arrivals is None or not valid:
        return {}
    flat: dict[str, float] = {}
    dimensions = [row for row in arrivals.dimensions if row.sound]
    waiting_ms = sum([row.calls * row.waiting_ms for row in dimensions])
    total_ms = sum([row.calls * (row.waiting_ms + row.transfer_ms) for row in dimensions])
    if total_ms > 0:
        flat[WAITING] = waiting_ms / total_ms
    first = next(iter(arrivals.ranks), None)
    if first is not None and first.sound:
        flat["straggler/rank"] = first.rank
        flat["straggler/worst_fraction"] = first.worst / first.steps
        flat["straggler/last_fraction"] = first.last / first.calls
        flat["straggler/chance_fraction"] = first.chance
        flat["straggler/lost_fraction"] = first.lost_fraction
    return flat


def share_metrics(shares: Sequence[StepShare]) -> dict[str, float]:
    """The share of a step of each dimension's communication that no compute hides; of the rest, ``verdict/`` tells."""
    kept = [share for share in shares if share.name not in (COMPUTE, IDLE, "bubble")]
    return {f"dimension/{share.name.replace('+', '_')}_step_fraction": share.fraction for share in kept}


def bubble_metrics(pipeline: PipelineBubble | None) -> dict[str, float]:
    """The bubble of a pipeline as its schedule should give it, and as measured, of all ranks and by stage."""
    if pipeline is None or not pipeline.sound:
        return {}
    flat: dict[str, float] = {}
    expected, measured = pipeline.expected_fraction, pipeline.fraction
    if expected is not None:
        flat["pipeline/expected_bubble_fraction"] = expected
    if measured is not None:
        flat["pipeline/bubble_fraction"] = measured
    for stage in pipeline.stages[:_MAX_STAGES]:
        flat[f"pipeline/stage_{stage.stage}_bubble_fraction"] = stage.fraction
    return flat
