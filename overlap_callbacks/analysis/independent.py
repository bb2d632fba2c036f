"""Estimates that were measured independently of each other, together: their mean, difference and ratio. Pure.

Limits of sums and differences follow from the limits of their parts by "MOVER" (Zou and Donner, Statistics in Medicine
27, 2008): of x - y, the lower one is x - y - sqrt((x - l_x)^2 + (u_y - y)^2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from overlap_callbacks.analysis.results.estimate import Estimate


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of one figure or more, which were measured independently of each other."""
    number = len(estimates)
    value = math.fsum([one.value for one in estimates]) / number
    low, high = _root([_below(one) for one in estimates]), _root([_above(one) for one in estimates])
    return _estimate(
        value, None if low is None else value - low / number, None if high is None else value + high / number, estimates
    )


def difference(base: Estimate, other: Estimate) -> Estimate:
    """Other less base, which were measured independently of each other."""
    value = other.value - base.value
    low = _root([_below(other), _above(base)])
    high = _root([_above(other), _below(base)])
    return _estimate(value, None if low is None else value - low, None if high is None else value + high, (base, other))


def relative_change(base: Estimate, other: Estimate) -> Estimate | None:
    """Other over base, less one; None unless both are above zero. On the scale of logarithms it is a difference."""
    if base.value <= 0 or other.value <= 0:
        return None
    logs = difference(_log(base), _log(other))
    low, high = (None if bound is None else math.expm1(min(bound, 700)) for bound in (logs.ci_low, logs.ci_high))
    return _estimate(math.expm1(min(logs.value, 700)), low, high, (base, other))


def _log(one: Estimate) -> Estimate:
    low, high = (None if bound is None or bound <= 0 else math.log(bound) for bound in (one.ci_low, one.ci_high))
    return Estimate(math.log(one.value), low, high, one.num_steps, one.num_blocks)


def _below(one: Estimate) -> float | None:
    return None if one.ci_low is None else one.value - one.ci_low


def _above(one: Estimate) -> float | None:
    return None if one.ci_high is None else one.ci_high - one.value


def _root(widths: Sequence[float | None]) -> float | None:
    """The root of the sum of squares; None if one is not known."""
    known = [width for width in widths if width is not None]
    return math.hypot(*known) if len(known) == len(widths) else None


def _estimate(value: float, low: float | None, high: float | None, parts: Sequence[Estimate]) -> Estimate:
    whole = low is not None and high is not None  # half an interval says nothing
    steps, blocks = sum([one.num_steps for one in parts]), sum([one.num_blocks for one in parts])
    return Estimate(value, low if whole else None, high if whole else None, steps, blocks)
