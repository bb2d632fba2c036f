"""What bounds a step: compute, communication, launches, the bubble of a pipeline, or a late rank. Pure."""

from __future__ import annotations

from enum import Enum

from overlap_callbacks.analysis.results.step_parts import StepParts

# From this share of a step on, compute bounds it: without anything else it would be a fifth shorter at most.
COMPUTE_BOUND_FROM = 0.8
# What comes second is named too if it takes so much of the first.
_NEARLY = 0.7


class Bound(Enum):
    """What bounds a step."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    LAUNCH = "launch"
    BUBBLE = "bubble"
    STRAGGLER = "straggler"


def times_ms(parts: StepParts) -> dict[Bound, float]:
    """What each of them takes of a step."""
    return {
        Bound.COMPUTE: parts.compute_ms + parts.contention_ms,
        Bound.COMMUNICATION: parts.transfer_ms,
        Bound.STRAGGLER: parts.waiting_ms,
        Bound.BUBBLE: parts.bubble_ms,
        Bound.LAUNCH: parts.idle_ms,
    }


def bound_of(parts: StepParts) -> tuple[Bound, Bound | None]:
    """What bounds a step, and what takes nearly as much; None if nothing does."""
    losses = times_ms(parts)
    if losses.pop(Bound.COMPUTE) >= COMPUTE_BOUND_FROM * parts.total_ms:
        return Bound.COMPUTE, None
    first, second = sorted(losses, key=lambda bound: -losses[bound])[:2]
    return first, second if losses[second] >= _NEARLY * losses[first] else None
