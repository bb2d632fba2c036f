"""What bounds a step: compute, communication, launches, the bubble of a pipeline, or a late rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from overlap_callbacks.analysis.results.estimate import Estimate, Spread
from overlap_callbacks.analysis.results.step_parts import StepParts, measured_parts

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

    @property
    def key(self) -> str:
        """The key of its metric: 1 where it bounds the window's steps, else 0."""
        return f"verdict/{self.value}_bound"


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


def bound_metrics(figures: Mapping[str, Estimate], spread: Mapping[str, Spread], *, compared: bool) -> dict[str, float]:
    """The parts of a window's step as shares of it, and what bounds it; empty where that was not measured.

    Args:
        figures: means over the ranks.
        spread: the extremes over the ranks.
        compared: whether the window has sequential steps that were sequential.
    """
    found = measured_parts(figures, spread, compared=compared)
    if found is None:
        return {}
    parts, _ = found
    shares = {
        f"verdict/{name.removesuffix('_ms')}_fraction": ms / parts.total_ms for name, ms in parts._asdict().items()
    }
    if not compared:
        del shares["verdict/contention_fraction"]
    bound, _ = bound_of(parts)
    return {**shares, **{each.key: float(each is bound) for each in Bound}}
