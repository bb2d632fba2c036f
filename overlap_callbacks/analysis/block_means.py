"""Means of a window's blocks over its ranks, also where some ranks lack some blocks.

A rank leaves out steps of its own (an odd number of kernels, a compilation), so ranks may lack blocks that others
have. A plain mean of each block over the ranks that have it would then compare other ranks in one mode than in the
other: with ranks of 100 and 200 ms, one missing block looks like a slowdown of 9 %. So what is missing is filled in: a
block of a rank is taken to be what that rank usually takes, and what that block has more or less than others on the
ranks that have it. That fits the means of ranks and blocks by least squares. Where no block is missing, the result is
the plain mean.

This needs blocks that ranks have in common. Two ranks that have more than half of the blocks each, have one in common.
Other ranks are left out of both modes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.formatting import name_ranks
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow, TimedBlock

Blocks = Sequence[TimedBlock] | Sequence[ProfiledBlock]


def timed_blocks(window: RankWindow) -> Sequence[TimedBlock]:
    """The timed blocks of a rank whose steps have a time."""
    return [block for block in window.timed if block.step_ms and min(block.step_ms) > 0]


def profiled_blocks(window: RankWindow) -> Sequence[ProfiledBlock]:
    """The profiled blocks of a rank."""
    return window.profiled


def ranks_with_most_blocks(
    windows: Sequence[RankWindow], blocks_of: Callable[[RankWindow], Blocks]
) -> tuple[RankWindow, ...]:
    """The ranks that have more than half of the blocks of each mode, of those that any rank has."""
    blocks_by_rank = [{(block.arm, block.block) for block in blocks_of(window)} for window in windows]
    total = Counter(arm for arm, _ in set().union(*blocks_by_rank))
    counts = [Counter(arm for arm, _ in blocks) for blocks in blocks_by_rank]
    return tuple(
        [
            window
            for window, count in zip(windows, counts, strict=True)
            if total and all(2 * count[arm] > number for arm, number in total.items())
        ]
    )


def ranks_left_out(windows: Sequence[RankWindow]) -> list[str]:
    """Which ranks have blocks, and too few to count, in words."""
    problems = []
    for what, blocks_of in (("kernel times", profiled_blocks), ("step times", timed_blocks)):
        counted = {window.rank for window in ranks_with_most_blocks(windows, blocks_of)}
        ranks = [window.rank for window in windows if blocks_of(window) and window.rank not in counted]
        if ranks:
            problems.append(
                f"{what} of {name_ranks(ranks)} are left out: half or more of the blocks of a mode are missing there"
            )
    return problems


def with_whole_tables(windows: Sequence[RankWindow]) -> tuple[RankWindow, ...]:
    """The ranks whose tables of kernels may be averaged: not those whose profile lacks too much of a mode."""
    counted = {window.rank for window in ranks_with_most_blocks(windows, profiled_blocks)}
    return tuple([window for window in windows if not window.profiled or window.rank in counted])


def block_means(ranks: Sequence[Mapping[int, Sequence[float]]]) -> list[npt.NDArray[np.float64]]:
    """The mean over the ranks of each block that any of them has, in the order of blocks.

    Args:
        ranks: quantities of each rank's blocks, by the block's number. Any two ranks have a block in common.
    """
    blocks = sorted(set().union(*ranks))
    if not blocks:
        return []
    if all(len(of_rank) == len(blocks) for of_rank in ranks):
        return [np.mean([of_rank[block] for of_rank in ranks], axis=0) for block in blocks]
    width = len(next(iter(next(of_rank for of_rank in ranks if of_rank).values())))
    has = np.array([[block in of_rank for block in blocks] for of_rank in ranks], dtype=np.float64)
    values = np.array([[of_rank.get(block, (0.0,) * width) for block in blocks] for of_rank in ranks], dtype=np.float64)
    number = has.sum(axis=1)
    rank_mean = values.sum(axis=1) / number[:, None]  # over the blocks that the rank has
    # The normal equations of value = rank + block, without the ranks: they have one row for each block, however many
    # ranks there are. Only differences between blocks are determined, and the pseudo-inverse makes their sum zero.
    matrix = np.diag(has.sum(axis=0)) - has.T @ (has / number[:, None])
    right = values.sum(axis=0) - has.T @ rank_mean
    of_block = np.linalg.pinv(matrix, hermitian=True) @ right
    of_rank_alone = rank_mean - (has @ of_block) / number[:, None]
    return list(of_rank_alone.mean(axis=0) + of_block)
