"""Where the time of a stretch of steps goes over the ranks, and which rank holds the others up: as in the record."""

from __future__ import annotations

import msgspec


class HeldUp(msgspec.Struct, frozen=True, gc=False):
    """By how much one rank, the last in a part, was later than the mean of the ranks.

    Attributes:
        part: name of the part; one of ``analysis.step_vectors.PARTS``.
        rank: -1 for the ranks that are not named.
        ns: sum over the stretch's steps, in nanoseconds.
    """

    part: str
    rank: int
    ns: int


class StepFrontier(msgspec.Struct, frozen=True, gc=False):
    """A stretch of steps. All times are sums over its steps, in nanoseconds.

    Attributes:
        first_step, last_step: of the stretch.
        num_steps: ordinary steps among them that every rank knows: outside windows, without a pause.
        num_ranks: ranks heard.
        frontier_ns: by part, how far it moved the latest rank on. Their sum is the time of the slowest rank's steps.
        mean_ns: by part, the mean over the ranks.
        held_up: who held the others up, the most first.
        silent: ranks that were not heard at some time, 16 at most; figures are of the others then.
    """

    first_step: int
    last_step: int
    num_steps: int
    num_ranks: int
    frontier_ns: dict[str, int]
    mean_ns: dict[str, int]
    held_up: tuple[HeldUp, ...] = ()
    silent: tuple[int, ...] = ()
