"""The median of numbers that lie in a file: exact, without sorting them all."""

from __future__ import annotations

import numpy as np

from overlap_callbacks.traces.long import columns
from overlap_callbacks.traces.long.columns import RowsFile

_BINS = 2**12


def median(file: RowsFile) -> float | None:
    """The median of the column ``value`` of whole numbers, as NumPy defines it; None of no numbers."""
    count = len(file)
    if not count:
        return None
    middle = {(count - 1) // 2, count // 2}
    return sum(_ranked(file, rank) for rank in middle) / len(middle)


def _ranked(file: RowsFile, rank: int) -> int:
    """The number of a rank in ascending order, from zero: it is looked for in ever smaller bins."""
    low = min(int(rows["value"].min()) for rows in file)
    high = max(int(rows["value"].max()) for rows in file)
    while True:
        width = max(-(-(high - low + 1) // _BINS), 1)
        counts = np.zeros(_BINS, dtype=np.int64)
        for rows in file:
            values = rows["value"][(rows["value"] >= low) & (rows["value"] <= high)]
            counts += np.bincount((values - low) // width, minlength=_BINS)
        before = np.cumsum(counts) - counts
        found = int(np.flatnonzero(before <= rank)[-1])
        rank -= int(before[found])
        low, high = low + found * width, min(low + (found + 1) * width - 1, high)
        if width == 1:
            return low
        if counts[found] <= columns.AT_ONCE:
            parts = [rows["value"][(rows["value"] >= low) & (rows["value"] <= high)] for rows in file]
            return int(np.sort(np.concatenate(parts))[rank])
