"""Sums of whole numbers that are exact where 64 bits overflow: a damaged file may have times of any size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


def sum_of(values: Integers) -> int:
    """The sum of up to 2**31 values."""
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFF_FFFF).sum())


def sums_by(group: Integers, values: Integers, num_groups: int) -> list[int]:
    """The sum of the values of each group, below ``num_groups``; of up to 2**31 values. Shapes (n,)."""
    if num_groups == 1:
        return [sum_of(values)]
    order = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(num_groups), side="right")
    values = values[order]
    high, low = (
        np.diff(np.concatenate(([0], np.cumsum(part)))[np.concatenate(([0], ends))])
        for part in (values >> 32, values & 0xFFFF_FFFF)
    )
    return [(most << 32) + rest for most, rest in zip(high.tolist(), low.tolist(), strict=True)]
