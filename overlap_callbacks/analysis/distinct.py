"""The distinct values of an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def distinct_values(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The distinct values, ascending; shape (number of them,).

    ``np.unique`` of values alone looks whether they are masked, and imports ``numpy.ma`` for that. With counts it does
    not look.

    Args:
        values: shape (n,).
    """
    return np.unique(values, return_counts=True)[0]
