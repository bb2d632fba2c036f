"""A compact form for sets of ranks in regular layouts: grids of a few strides each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import distinct_values

# The first rank, and (stride, count) of each level, innermost first: ``(0, ((1, 8), (64, 4)))`` is ranks 0-7, 64-71,
# 128-135 and 192-199.
Grid = tuple[int, tuple[tuple[int, int], ...]]
Grids = tuple[Grid, ...]
Ranks = npt.NDArray[np.int64]

# Maximum grids kept for a set of ranks. Layouts of frameworks need one; irregular sets need many.
MAX_GRIDS = 16
_MAX_LEVELS = 4


def grids_of(ranks: Iterable[int]) -> Grids:
    return _grids(distinct_values(np.fromiter(ranks, dtype=np.int64)))


def in_order(ranks: Sequence[int]) -> Grids:
    """Ranks in a given order, e.g. a group's."""
    return _grids(np.array(ranks, dtype=np.int64))


def _grids(ranks: Ranks) -> Grids:
    items = _rows(ranks)
    for _ in range(_MAX_LEVELS - 1):
        combined = _combined(items)
        if len(combined) == len(items):
            break
        items = combined
    return tuple(items)


def _rows(ranks: Ranks) -> list[Grid]:
    """Merge runs of single ranks at equal distances; like ``_combined``, for many single ranks."""
    if not ranks.size:
        return []
    distances = np.diff(ranks)
    changes = (np.flatnonzero(np.diff(distances)) + 1).tolist()
    found: list[Grid] = []
    at = 0
    for end in [*changes, len(distances)] if distances.size else []:
        if end > at:  # otherwise its only distance leads back to the previous row
            found.append((int(ranks[at]), ((int(distances[at]), end - at + 1),)))
            at = end + 1
    if at < len(ranks):
        found.append((int(ranks[at]), ()))
    return found


def _combined(items: Sequence[Grid]) -> list[Grid]:
    """Merge neighbouring items of equal shape at equal distances."""
    found: list[Grid] = []
    at = 0
    while at < len(items):
        first, shape = items[at]
        end = at + 1
        if end < len(items) and items[end][1] == shape:
            stride = items[end][0] - first
            while end < len(items) and items[end][1] == shape and items[end][0] - items[end - 1][0] == stride:
                end += 1
            found.append((first, (*shape, (stride, end - at))))
        else:
            found.append((first, shape))
        at = end
    return found


def ranks_in(grids: Grids) -> Ranks:
    """The ranks, in their original order."""
    parts = [_expanded(grid) for grid in grids]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _expanded(grid: Grid) -> Ranks:
    first, levels = grid
    ranks = np.array([first], dtype=np.int64)
    for stride, count in levels:
        ranks = (np.arange(count, dtype=np.int64)[:, None] * stride + ranks).ravel()
    return ranks


def number_in(grids: Grids) -> int:
    total = 0
    for _, levels in grids:
        size = 1
        for _, count in levels:
            size *= count
        total += size
    return total


def union(sets: Sequence[Grids]) -> Grids:
    """The ranks of all sets; a rank may be in several."""
    if len(sets) == 1:
        return sets[0]
    distinct = dict.fromkeys(sets)
    if len(distinct) == 1:
        return sets[0]
    return _grids(distinct_values(np.concatenate([ranks_in(grids) for grids in distinct])))


def cut(grids: Grids) -> Grids:
    """The first grids, up to the maximum kept."""
    return grids[:MAX_GRIDS]
