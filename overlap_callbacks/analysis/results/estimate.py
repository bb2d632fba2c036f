"""A figure with its interval, and a figure over the ranks: plain data."""

from __future__ import annotations

import msgspec

# Of a long run there are hundreds of thousands, which the garbage collector need not look at: they hold numbers alone.


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """A figure with its 95% confidence interval.

    Attributes:
        value: the figure.
        ci_low, ci_high: bounds of the interval; None where there are too few blocks for one.
        num_steps: counted steps that the figure rests on.
        num_blocks: blocks (or, for a run, windows) that it rests on.
    """

    value: float
    ci_low: float | None
    ci_high: float | None
    num_steps: int
    num_blocks: int


class Spread(msgspec.Struct, frozen=True, gc=False):
    """One figure over the ranks.

    Attributes:
        low, high: the smallest and largest of the ranks' values.
        low_rank, high_rank: the ranks that have them.
        std: standard deviation over ranks; None for one rank.
    """

    low: float
    high: float
    low_rank: int
    high_rank: int
    std: float | None
