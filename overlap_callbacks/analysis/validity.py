"""Why a window does not count, and what is doubtful about its figures, in words."""

from __future__ import annotations

from overlap_callbacks.analysis.results.estimate import Estimate


def escaped_communication(residual: Estimate | None, limit: float) -> str | None:
    """Why the sequential steps were not sequential, in words; None if they were."""
    if residual is None or residual.value <= limit:
        return None
    return (
        f"residual overlap {residual.value:.3f} in sequential steps is above {limit}: some communication escaped "
        f"the gate (CUDA graphs, symmetric memory, another thread, coalesced collectives), so the comparison does not "
        f"hold"
    )
