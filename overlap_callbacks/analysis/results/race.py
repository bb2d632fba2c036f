"""The race check: are the gradients of a step the same overlapped and sequential? Plain data."""

from __future__ import annotations

import enum

import msgspec

# Gradients that a report lists one by one.
MAX_DIFFERENCES = 16


class RaceVerdict(enum.Enum):
    """What repeated steps showed. Of several ranks the first one in this order holds for the job."""

    # The same sequential step gave different gradients twice: nothing can be said of overlap.
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
        bucket: of the framework, whose gradients are reduced together; empty where none is known.
        collective: that reduces it, with its place in the step; empty where none is known.
        num_different: elements of this rank's gradient that differ, the most of any two repetitions.
    """

    rank: int
    parameter: str
    bucket: str
    collective: str
    num_different: int
    num_elements: int


class RaceCheck(msgspec.Struct, frozen=True):
    """What one rank or all of them saw. Numbers of gradients, time and memory are the most of any rank.

    Attributes:
        num_differing: ranks that saw a difference of the verdict's kind.
        differences: the first of them, of the lowest rank that saw any.
        reason: why the step was not checked; empty if it was.
        took_ms, held_bytes: time that training stood still for it, and memory that held copies meanwhile.
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
