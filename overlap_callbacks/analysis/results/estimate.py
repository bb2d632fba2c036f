"""A figure with its interval, and a figure over the ranks: plain data."""

from __future__ import annotations

from typing import Any

import msgspec

# A long run has hundreds of thousands, which the garbage collector need not scan: they only hold numbers.


class Estimate(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A figure with its 95% confidence interval; the bounds are None with too few blocks.

    Attributes:
        num_steps, num_blocks: counted steps, and blocks (for a run, windows), behind the figure.
        standard_error: of the figure on the scale on which its interval is symmetric: for step times and sums of
            compute, their logarithm; for changes, the logarithm of one plus the change; else the figure itself. None
            without an interval, and in records of earlier versions.
    """

    value: float
    ci_low: float | None
    ci_high: float | None
    num_steps: int
    num_blocks: int
    standard_error: float | None = None
    degrees_of_freedom: float | None = None


class Spread(msgspec.Struct, frozen=True, gc=False):
    """The smallest and largest value of a figure over the ranks, and the ranks that have them.

    ``std`` is the standard deviation over ranks; None for one rank.
    """

    low: float
    high: float
    low_rank: int
    high_rank: int
    std: float | None


def stored_estimate(part: Any, name: str, num_steps: int = 0) -> Estimate | None:
    """A window's figure that the record stores as ``<name>``, ``<name>_ci_low`` and ``<name>_ci_high`` of ``part``.

    It has an interval if both ends are known; None if it was not measured.
    """
    value, low, high = (getattr(part, f"{name}{end}") for end in ("", "_ci_low", "_ci_high"))
    if low is None or high is None:
        low = high = None
    return None if value is None else Estimate(value, low, high, num_steps, 1)
