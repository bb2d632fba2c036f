"""Means of a window's blocks over its ranks, also where some ranks lack some blocks, from sums over the ranks.

A rank leaves out steps of its own (an odd number of kernels, a compilation), so ranks may lack blocks that others
have. A plain mean of each block over the ranks that have it would then compare other ranks in one mode than in the
other: with ranks of 100 and 200 ms, one missing block looks like a slowdown of 9 %. So each rank tells its own mean of
each mode (``overlap_callbacks.analysis.design``), which stands for the blocks that it lacks. The mean of a mode over
the ranks is the mean of these, and so are the rows of the tables of kernels, which add up to it.

A rank counts that has more than half of the blocks of each mode. Other ranks are left out of both modes: which these
are is known only once all ranks are heard. So sums are kept apart by how many blocks of each mode the ranks have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.design import Design, design_of
from overlap_callbacks.analysis.rank_set import RankSet, union_of
from overlap_callbacks.analysis.results.mode import Mode

Floats = npt.NDArray[np.float64]
Counts = tuple[int, ...]

_Tables = TypeVar("_Tables")


class Block(NamedTuple):
    """One block of one rank.

    Attributes:
        mode, number: which.
        num_steps: its counted steps.
        quantities: its means.
        covariates: what they depend on besides the mode, as ``design_of`` takes them.
    """

    mode: Mode
    number: int
    num_steps: int
    quantities: Sequence[float]
    covariates: Sequence[float]


class ArmSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sums over ranks of the block means of one mode. Arrays are 64-bit floats, row by row.

    A row holds a block's quantities, its covariates and its number of counted steps.

    Attributes:
        blocks: numbers of the blocks that any of the ranks has, ascending; B of them.
        num_ranks: ranks.
        num_having: ranks that have each block; B.
        num_steps: counted steps of each block, the most of any rank; B.
        values: sum over the ranks of each block's row; shape (B, columns).
        own_means: sum over the ranks of their own means of the mode; shape (columns,).
        most: the largest of these means; shape (columns,).
        having: for each block, the sum of the own means of the ranks that have it; shape (B, columns). Empty where
            every rank has every block.
    """

    blocks: tuple[int, ...] = ()
    num_ranks: int = 0
    num_having: tuple[int, ...] = ()
    num_steps: tuple[int, ...] = ()
    values: bytes = b""
    own_means: bytes = b""
    most: bytes = b""
    having: bytes = b""

    @classmethod
    def of(cls, blocks: Mapping[int, tuple[int, Floats]], own_means: Floats) -> ArmSums:
        """The blocks of one rank: by number, the counted steps and the row."""
        if not blocks:
            return cls()
        numbers = sorted(blocks)
        values = np.array([blocks[number][1] for number in numbers], dtype=np.float64)
        steps = tuple([blocks[number][0] for number in numbers])
        own = own_means.tobytes()
        return cls(tuple(numbers), 1, (1,) * len(numbers), steps, values.tobytes(), own, own)

    @property
    def is_uniform(self) -> bool:
        """Whether every rank has every block."""
        return not self.having

    @property
    def mean(self) -> Floats:
        """The mean over the ranks of their own means of the mode; shape (columns,)."""
        return np.frombuffer(self.own_means) / max(1, self.num_ranks)

    def rows(self) -> Floats:
        """The mean over the ranks of each block; shape (B, columns)."""
        values = _table(self.values, len(self.blocks))
        if self.is_uniform:
            return values / max(1, self.num_ranks)
        lacking = np.frombuffer(self.own_means) - _table(self.having, len(self.blocks))
        return np.asarray((values + lacking) / self.num_ranks)

    def weights(self) -> Floats:
        """Counted steps of each block over the number of all ranks; shape (B,)."""
        return _table(self.values, len(self.blocks))[:, -1] / max(1, self.num_ranks)


def _table(content: bytes, rows: int) -> Floats:
    return np.frombuffer(content).reshape(rows, -1) if rows else np.empty((0, 1))


def add_arms(arms: Sequence[ArmSums]) -> ArmSums:
    """The sums over the ranks of all."""
    arms = [arm for arm in arms if arm.blocks]
    if len(arms) <= 1:
        return arms[0] if arms else ArmSums()
    num_ranks = sum(arm.num_ranks for arm in arms)
    own_means = np.sum([np.frombuffer(arm.own_means) for arm in arms], axis=0)
    most = np.max([np.frombuffer(arm.most) for arm in arms], axis=0)
    first = arms[0]
    if all(arm.is_uniform and arm.blocks == first.blocks for arm in arms):
        num_steps = tuple([max(steps) for steps in zip(*[arm.num_steps for arm in arms], strict=True)])
        values = np.sum([np.frombuffer(arm.values) for arm in arms], axis=0)
        having = (num_ranks,) * len(first.blocks)
        return ArmSums(
            first.blocks, num_ranks, having, num_steps, values.tobytes(), own_means.tobytes(), most.tobytes()
        )
    blocks = sorted(set().union(*[arm.blocks for arm in arms]))
    place = {block: number for number, block in enumerate(blocks)}
    values, of_having = np.zeros((len(blocks), len(own_means))), np.zeros((len(blocks), len(own_means)))
    num_having, num_steps_of = np.zeros(len(blocks), dtype=np.int64), np.zeros(len(blocks), dtype=np.int64)
    for arm in arms:
        rows = np.array([place[block] for block in arm.blocks])
        values[rows] += _table(arm.values, len(arm.blocks))
        of_having[rows] += np.frombuffer(arm.own_means) if arm.is_uniform else _table(arm.having, len(arm.blocks))
        num_having[rows] += arm.num_having
        num_steps_of[rows] = np.maximum(num_steps_of[rows], arm.num_steps)
    return ArmSums(
        tuple(blocks), num_ranks, tuple(num_having.tolist()), tuple(num_steps_of.tolist()),
        values.tobytes(), own_means.tobytes(), most.tobytes(), of_having.tobytes(),
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


def block_sums(rank: int, blocks: Iterable[Block], tables: _Tables) -> BlockSums[_Tables]:
    """The blocks of one rank.

    Args:
        rank: the rank.
        blocks: its blocks.
        tables: what counts only if the rank does.
    """
    kept = {(block.mode, block.number): block for block in blocks}.values()
    modes, numbers, num_steps, quantities, covariates = zip(*kept, strict=True) if kept else ((),) * 5
    arms = tuple([ArmSums() for _ in Mode])
    if kept:
        rows = np.column_stack([np.array(part, dtype=np.float64) for part in (quantities, covariates, num_steps)])
        design = design_of(modes, numbers, num_steps, np.array(covariates, dtype=np.float64))
        arms = tuple(
            [
                ArmSums.of({n: (num_steps[at], rows[at]) for at, n in enumerate(numbers) if own[at]}, mean)
                for own, mean in zip(design.of_mode, design.means(rows), strict=True)
            ]
        )
    counts = tuple([len(arm.blocks) for arm in arms])
    return BlockSums(tuple([arm.blocks for arm in arms]), (Group(counts, RankSet.of(rank), arms, tables),), RankSet())


def design_over_ranks(arms: Sequence[ArmSums], num_covariates: int) -> tuple[Design, Floats]:
    """The design of the blocks over all ranks, and the blocks' rows.

    Args:
        arms: of each mode, in the order of ``Mode``; at least one has blocks.
        num_covariates: of each block.
    """
    having = [(mode, arm) for mode, arm in zip(Mode, arms, strict=True) if arm.blocks]
    rows = np.concatenate([arm.rows() for _, arm in having])
    modes = [mode for mode, arm in having for _ in arm.blocks]
    places = [number for _, arm in having for number in arm.blocks]
    weights = np.concatenate([arm.weights() for _, arm in having])
    return design_of(modes, places, weights.tolist(), rows[:, -1 - num_covariates : -1]), rows


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
