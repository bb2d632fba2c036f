"""Means of a window's blocks over its ranks, also where some ranks lack some blocks, from sums over the ranks.

A rank leaves out steps of its own (an odd number of kernels, a compilation), so ranks may lack blocks that others
have. A plain mean of each block over the ranks that have it would then compare other ranks in one mode than in the
other: with ranks of 100 and 200 ms, one missing block looks like a slowdown of 9 %. So what is missing is filled in: a
block of a rank is taken to be what that rank usually takes, and what that block has more or less than others on the
ranks that have it. That fits the means of ranks and blocks by least squares. Where no block is missing, the result is
the plain mean.

This needs blocks that ranks have in common. Two ranks that have more than half of the blocks each, have one in common.
Other ranks are left out of both modes.

The normal equations of the fit value = rank + block, without the ranks, have one row for each block, and each of their
terms is a sum over ranks. So sums over ranks are all that is needed. They are kept apart by how many blocks of each
mode the ranks have: which ranks have too few to count is known only once all ranks are heard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.rank_set import RankSet, union_of
from overlap_callbacks.analysis.results.mode import Mode

Floats = npt.NDArray[np.float64]
Counts = tuple[int, ...]

_Tables = TypeVar("_Tables")


class ArmSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sums over ranks of the block means of one mode. Arrays are 64-bit floats, row by row.

    Attributes:
        blocks: numbers of the blocks that any of the ranks has, ascending; B of them.
        num_ranks: ranks.
        num_having: ranks that have each block; B.
        num_steps: counted steps of each block, the most of any rank; B.
        values: sum over the ranks of each block's quantities; shape (B, quantities).
        rank_means: sum over the ranks of their own means over the blocks that they have; shape (quantities,). Empty
            where every rank has every block: then it follows from ``values``. So do the next two.
        cross: for each block, the sum of the own means of the ranks that have it; shape (B, quantities).
        joint: for each two blocks, the sum over the ranks that have both of one over the number of the rank's blocks;
            shape (B, B).
    """

    blocks: tuple[int, ...] = ()
    num_ranks: int = 0
    num_having: tuple[int, ...] = ()
    num_steps: tuple[int, ...] = ()
    values: bytes = b""
    rank_means: bytes = b""
    cross: bytes = b""
    joint: bytes = b""

    @classmethod
    def of(cls, blocks: Mapping[int, tuple[int, Sequence[float]]]) -> ArmSums:
        """The blocks of one rank: by number, the counted steps and the quantities."""
        if not blocks:
            return cls()
        numbers = sorted(blocks)
        values = np.array([blocks[number][1] for number in numbers], dtype=np.float64)
        steps = tuple([blocks[number][0] for number in numbers])
        return cls(tuple(numbers), 1, (1,) * len(numbers), steps, values.tobytes())

    @property
    def is_uniform(self) -> bool:
        """Whether every rank has every block."""
        return not self.joint

    def means(self) -> Floats:
        """The mean over the ranks of each block; shape (B, quantities)."""
        values = _table(self.values, len(self.blocks))
        if self.is_uniform:
            return values / max(1, self.num_ranks)
        joint, cross = _table(self.joint, len(self.blocks)), _table(self.cross, len(self.blocks))
        rank_means = np.frombuffer(self.rank_means)
        # Only differences between blocks are determined, and the pseudo-inverse makes their sum zero.
        matrix = np.diag(np.array(self.num_having, dtype=np.float64)) - joint
        of_block = np.linalg.pinv(matrix, hermitian=True) @ (values - cross)
        # The diagonal of ``joint`` is, for each block, the sum of one over the number of blocks of the ranks.
        of_rank_alone = (rank_means - np.diag(joint) @ of_block) / self.num_ranks
        return np.asarray(of_rank_alone + of_block)


def _table(content: bytes, rows: int) -> Floats:
    return np.frombuffer(content).reshape(rows, -1) if rows else np.empty((0, 0))


def add_arms(arms: Sequence[ArmSums]) -> ArmSums:
    """The sums over the ranks of all."""
    arms = [arm for arm in arms if arm.blocks]
    if len(arms) <= 1:
        return arms[0] if arms else ArmSums()
    num_ranks = sum(arm.num_ranks for arm in arms)
    first = arms[0]
    if all(arm.is_uniform and arm.blocks == first.blocks for arm in arms):
        num_steps = tuple([max(steps) for steps in zip(*[arm.num_steps for arm in arms], strict=True)])
        values = np.sum([np.frombuffer(arm.values) for arm in arms], axis=0)
        return ArmSums(first.blocks, num_ranks, (num_ranks,) * len(first.blocks), num_steps, values.tobytes())
    blocks = sorted(set().union(*[arm.blocks for arm in arms]))
    place = {block: number for number, block in enumerate(blocks)}
    width = _table(first.values, len(first.blocks)).shape[1]
    values, cross, rank_means = np.zeros((len(blocks), width)), np.zeros((len(blocks), width)), np.zeros(width)
    joint = np.zeros((len(blocks), len(blocks)))
    num_having, num_steps_of = np.zeros(len(blocks), dtype=np.int64), np.zeros(len(blocks), dtype=np.int64)
    for arm in arms:
        rows = np.array([place[block] for block in arm.blocks])
        own = _table(arm.values, len(arm.blocks))
        values[rows] += own
        num_having[rows] += arm.num_having
        num_steps_of[rows] = np.maximum(num_steps_of[rows], arm.num_steps)
        if arm.is_uniform:
            own_means = own.mean(axis=0)
            rank_means += own_means
            cross[rows] += own_means
            joint[np.ix_(rows, rows)] += arm.num_ranks / len(arm.blocks)
        else:
            rank_means += np.frombuffer(arm.rank_means)
            cross[rows] += _table(arm.cross, len(arm.blocks))
            joint[np.ix_(rows, rows)] += _table(arm.joint, len(arm.blocks))
    return ArmSums(
        tuple(blocks), num_ranks, tuple(num_having.tolist()), tuple(num_steps_of.tolist()),
        values.tobytes(), rank_means.tobytes(), cross.tobytes(), joint.tobytes(),
    )  # fmt: skip


class Group(msgspec.Struct, Generic[_Tables], frozen=True, array_like=True, gc=False):
    """Ranks that have as many blocks of each mode as each other.

    Attributes:
        counts: blocks of each mode, in the order of ``Mode``; of groups that were joined, the least.
        ranks: the ranks.
        arms: their sums, of each mode in the order of ``Mode``.
        tables: what else counts only if the ranks do.
    """

    counts: Counts
    ranks: RankSet
    arms: tuple[ArmSums, ...]
    tables: _Tables


class BlockSums(msgspec.Struct, Generic[_Tables], frozen=True, array_like=True, gc=False):
    """The blocks of all ranks of a part, timed or profiled.

    Attributes:
        seen: numbers of the blocks that any rank has, of each mode in the order of ``Mode``.
        groups: the ranks that may count.
        left_out: ranks that have half of the blocks of a mode or fewer, of those that any rank has.
    """

    seen: tuple[tuple[int, ...], ...]
    groups: tuple[Group[_Tables], ...]
    left_out: RankSet

    def of(self, mode: Mode) -> ArmSums:
        """The sums of one mode over all ranks that count."""
        place = list(Mode).index(mode)
        return add_arms([group.arms[place] for group in self.groups])


def block_sums(
    rank: int, blocks: Iterable[tuple[Mode, int, int, Sequence[float]]], tables: _Tables
) -> BlockSums[_Tables]:
    """The blocks of one rank.

    Args:
        rank: the rank.
        blocks: of each, its mode, its number, its counted steps and its quantities.
        tables: what counts only if the rank does.
    """
    by_mode: dict[Mode, dict[int, tuple[int, Sequence[float]]]] = {mode: {} for mode in Mode}
    for mode, number, num_steps, quantities in blocks:
        by_mode[mode][number] = (num_steps, quantities)
    arms = tuple([ArmSums.of(of_mode) for of_mode in by_mode.values()])
    counts = tuple([len(arm.blocks) for arm in arms])
    return BlockSums(tuple([arm.blocks for arm in arms]), (Group(counts, RankSet.of(rank), arms, tables),), RankSet())


def merge_blocks(
    parts: Sequence[BlockSums[_Tables]], add_tables: Callable[[Sequence[_Tables]], _Tables], max_groups: int
) -> BlockSums[_Tables]:
    """The blocks of all parts.

    A rank that has too few blocks now has too few however many more ranks are heard. Where there are too many groups,
    the smallest become one. That changes no sum, unless blocks are seen later of which so many are missing in this
    group that none of it counts any more.

    Args:
        parts: of distinct ranks.
        add_tables: adds up the tables of several groups.
        max_groups: that are kept, of ranks that have any block.
    """
    arms = range(len(list(Mode)))
    seen = tuple([tuple(sorted(set().union(*[part.seen[arm] for part in parts]))) for arm in arms])
    totals = [len(blocks) for blocks in seen]
    by_counts: dict[Counts, list[Group[_Tables]]] = {}
    left_out = [part.left_out for part in parts]
    for part in parts:
        for group in part.groups:
            if not any(group.counts) or has_enough(group.counts, totals):
                by_counts.setdefault(group.counts, []).append(group)
            else:
                left_out.append(group.ranks)
    groups = [_joined(counts, alike, add_tables) for counts, alike in by_counts.items()]
    with_blocks = sorted((group for group in groups if any(group.counts)), key=lambda group: -group.ranks.count)
    kept, rest = with_blocks[: max_groups - 1], with_blocks[max_groups - 1 :]
    if len(rest) > 1:
        least = tuple([min(counts) for counts in zip(*[group.counts for group in rest], strict=True)])
        rest = [_joined(least, rest, add_tables)]
    without = [group for group in groups if not any(group.counts)]
    return BlockSums(seen, (*without, *kept, *rest), union_of(left_out))


def has_enough(counts: Sequence[int], totals: Sequence[int]) -> bool:
    """Whether ranks with so many blocks of each mode count: more than half of those that any rank has."""
    return all(2 * count > total for count, total in zip(counts, totals, strict=True) if total)


def _joined(
    counts: Counts, groups: Sequence[Group[_Tables]], add_tables: Callable[[Sequence[_Tables]], _Tables]
) -> Group[_Tables]:
    if len(groups) == 1:
        return groups[0]
    arms = tuple([add_arms(of_arm) for of_arm in zip(*[group.arms for group in groups], strict=True)])
    ranks = union_of(group.ranks for group in groups)
    return Group(counts, ranks, arms, add_tables([group.tables for group in groups]))
