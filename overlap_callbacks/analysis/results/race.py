"""The race check: are a step's gradients the same in both modes? Plain data."""

from __future__ import annotations

import enum

import msgspec

# Maximum gradients listed one by one in a report.
MAX_DIFFERENCES = 16


class RaceVerdict(enum.Enum):
    """Result of repeating steps. Over several ranks, the first result in this order applies to the job."""

    # The same sequential step gave different gradients twice: nothing can be said about overlap.
    NOT_REPEATABLE = "not_repeatable"

    # Sequential steps gave the same gradients twice, and an overlapped one gave others.
    RACE = "race"

    # No step was repeated, or its repetitions do not count.
    NOT_CHECKED = "not_checked"

    # All gradients of all repetitions were the same, bit by bit.
    EQUAL = "equal"


class GradientDifference(msgspec.Struct, frozen=True):
    """A parameter whose gradient was not the same, on the lowest rank that saw this.

    Attributes:
        bucket: the framework's bucket, whose gradients are reduced together; empty if unknown.
        collective: the collective that reduces it, with its position in the step; empty if unknown.
        num_different: elements of this rank's gradient that differ, the maximum over pairs of repetitions.
    """

    rank: int
    parameter: str
    bucket: str
    collective: str
    num_different: int
    num_elements: int


class RaceCheck(msgspec.Struct, frozen=True):
    """Result of one rank, or of all. Numbers of gradients, time and memory are maxima over the ranks.

    Attributes:
        num_differing: ranks that saw a difference of the verdict's kind.
        differences: the first of them, from the lowest rank with any.
        reason: why the step was not checked; empty if it was.
        took_ms, held_bytes: time that training was stopped for it, and memory of the copies meanwhile.
    """

    verdict: RaceVerdict
    num_ranks: int = 1
    num_differing: int = 0
    num_gradients: int = 0
    num_differences: int = 0
    differences: tuple[GradientDifference, ...] = ()
    reason: str = ""
    took_ms: float = 0.0
    held_bytes: int = 0
