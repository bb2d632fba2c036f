"""Block means of a window over its ranks, from sums over the ranks, even if ranks lack blocks.

A rank excludes steps of its own (an odd number of kernels, a compilation), so ranks may lack blocks. Averaging each
block over the ranks that have it would compare different ranks in the two modes: with ranks of 100 and 200 ms, one
missing block looks like a slowdown of 9 %. So each rank's own mean of the mode (``overlap_callbacks.analysis.design``)
replaces the blocks that it lacks. The mean of a mode over the ranks is the mean of these, and the tables of kernels add
up to it.

A rank counts if it has more than half of the blocks of each mode, otherwise it is left out of both. Which ranks these
are is known only at the end, so sums are kept by the number of blocks of each mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from overlap_callbacks.analysis.design import Design, design_of
from overlap_callbacks.analysis.job.tables import ProfileTables, add_tables
from overlap_callbacks.analysis.rank_set import RankSet, union
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.sums import Floats, array_max, array_sum, distinct, grouped, table_sum

# Maximum groups of ranks kept apart by their number of blocks.
MAX_GROUPS = 4


class Block(NamedTuple):
    """One block of one rank, with the means of its counted steps; ``covariates`` as in ``design_of``."""

    mode: Mode
    number: int
    num_steps: int
    quantities: Sequence[float]
    covariates: Sequence[float]


class ModeSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sums over ranks of the block means of one mode.

    A row has a block's quantities, its covariates and its number of counted steps: C columns.

    Attributes:
        blocks: numbers of the B blocks that any rank has, ascending.
        num_steps: counted steps of each block, the maximum over the ranks; B.
        num_ranks: ranks.
        table: per block the sum of its rows, the sum of the own means of the ranks that have it, and their number; B
            times 2C + 1 numbers.
        own_means: sum over the ranks of their own means of the mode; shape (C,).
        most: the largest of these means; shape (C,).
    """

    blocks: tuple[int, ...] = ()
    num_steps: tuple[int, ...] = ()
    num_ranks: int = 0
    table: Floats = np.empty(0)
    own_means: Floats = np.empty(0)
    most: Floats = np.empty(0)

    def __post_init__(self) -> None:
        columns = len(self.own_means)
        lengths = len(self.num_steps), self.table.size, len(self.most)
        if lengths != (len(self.blocks), len(self.blocks) * (2 * columns + bool(columns)), columns):
            raise ValueError("the blocks of a mode and their sums do not belong together")

    @classmethod
    def of(cls, blocks: Mapping[int, tuple[int, Floats]], own_means: Floats) -> ModeSums:
        """The blocks of one rank: by number, the counted steps and the row."""
        if not blocks:
            return cls()
        numbers = sorted(blocks)
        table = np.array([[*blocks[number][1], *own_means, 1.0] for number in numbers])
        return cls(
            tuple(numbers), tuple([blocks[number][0] for number in numbers]), 1, table.ravel(), own_means, own_means
        )

    @property
    def mean(self) -> Floats:
        """The mean over the ranks of their own means of the mode; shape (C,)."""
        return self.own_means / max(1, self.num_ranks)

    def rows(self) -> Floats:
        """The mean of each block over the ranks; shape (B, C)."""
        values, having, num_having = self._parts()
        if (num_having == self.num_ranks).all():
            return values / max(1, self.num_ranks)
        return np.asarray((values + (self.own_means - having)) / self.num_ranks)

    def weights(self) -> Floats:
        """Counted steps of each block divided by the number of ranks; shape (B,)."""
        return self._parts()[0][:, -1] / max(1, self.num_ranks)

    def _parts(self) -> tuple[Floats, Floats, Floats]:
        columns = len(self.own_means)
        table = self.table.reshape(len(self.blocks), 2 * columns + 1)
        return table[:, :columns], table[:, columns:-1], table[:, -1]


def add_modes(parts: Sequence[ModeSums]) -> ModeSums:
    parts = [part for part in parts if part.blocks]
    if len(parts) <= 1:
        return parts[0] if parts else ModeSums()
    blocks = distinct([part.blocks for part in parts])
    place = {block: number for number, block in enumerate(blocks)}
    table = np.zeros((len(blocks), 2 * len(parts[0].own_means) + 1))
    num_steps = np.zeros(len(blocks), dtype=np.int64)
    for part in parts:
        rows = [place[block] for block in part.blocks]
        table[rows] += part.table.reshape(len(rows), -1)
        num_steps[rows] = np.maximum(num_steps[rows], part.num_steps)
    return ModeSums(
        blocks, tuple(num_steps.tolist()), sum(part.num_ranks for part in parts), table.ravel(),
        array_sum([part.own_means for part in parts]), array_max([part.most for part in parts]),
    )  # fmt: skip


def _add_each_mode(parts: Sequence[Sequence[ModeSums]]) -> tuple[ModeSums, ...]:
    return tuple([add_modes(of_mode) for of_mode in zip(*parts, strict=True)])


class Group(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Ranks with the same number of blocks of each mode.

    Attributes:
        counts: blocks of each mode, in the order of ``Mode``; for merged groups, the minimum.
        ranks: the ranks.
        modes: their sums, in the order of ``Mode``.
        tables: other data that counts only if the ranks do.
    """

    counts: tuple[int, ...]
    ranks: Annotated[RankSet, union]
    modes: Annotated[tuple[ModeSums, ...], _add_each_mode]
    tables: Annotated[ProfileTables, add_tables]


_add_groups = table_sum(Group, 1, order=lambda group: -group.ranks.count)


class BlockSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The blocks of a set of ranks, timed or profiled.

    Attributes:
        seen: numbers of the blocks that any rank has, of each mode in the order of ``Mode``.
        groups: the ranks that may count.
        left_out: ranks with at most half of the blocks of a mode.
    """

    seen: tuple[tuple[int, ...], ...]
    groups: tuple[Group, ...]
    left_out: RankSet

    def modes(self) -> tuple[ModeSums, ...]:
        """The sums of each mode over all ranks that count, in the order of ``Mode``."""
        return _add_each_mode([(ModeSums(),) * len(Mode), *[group.modes for group in self.groups]])


def block_sums(rank: int, blocks: Iterable[Block], tables: ProfileTables | None = None) -> BlockSums:
    """The blocks of one rank; ``tables``: other data that counts only if the rank does."""
    kept = {(block.mode, block.number): block for block in blocks}.values()
    numbers_of, numbers, num_steps, quantities, covariates = zip(*kept, strict=True) if kept else ((),) * 5
    modes = tuple([ModeSums() for _ in Mode])
    if kept:
        rows = np.column_stack([np.array(part, dtype=np.float64) for part in (quantities, covariates, num_steps)])
        design = design_of(numbers_of, numbers, num_steps, np.array(covariates, dtype=np.float64))
        modes = tuple(
            [
                ModeSums.of({n: (num_steps[at], rows[at]) for at, n in enumerate(numbers) if own[at]}, mean)
                for own, mean in zip(design.of_mode, design.means(rows), strict=True)
            ]
        )
    seen = tuple([of_mode.blocks for of_mode in modes])
    return BlockSums(
        seen,
        (Group(tuple([len(blocks) for blocks in seen]), RankSet.of((rank, rank)), modes, tables or ProfileTables()),),
        RankSet(),
    )


def design_over_ranks(modes: Sequence[ModeSums], num_covariates: int) -> tuple[Design, Floats]:
    """The design of the blocks over all ranks, and the blocks' rows; at least one mode has blocks."""
    having = [(mode, sums) for mode, sums in zip(Mode, modes, strict=True) if sums.blocks]
    rows = np.concatenate([sums.rows() for _, sums in having])
    of_blocks = [mode for mode, sums in having for _ in sums.blocks]
    places = [number for _, sums in having for number in sums.blocks]
    weights = np.concatenate([sums.weights() for _, sums in having])
    return design_of(of_blocks, places, weights.tolist(), rows[:, -1 - num_covariates : -1]), rows


def add_blocks(parts: Sequence[BlockSums]) -> BlockSums:
    """The blocks of all parts, which have distinct ranks.

    A rank with too few blocks now has too few whatever ranks follow. If there are too many groups, the smallest are
    merged. That changes no sum unless later ranks have so many more blocks that none of the merged group counts.
    """
    seen = tuple([distinct(of_mode) for of_mode in zip(*[part.seen for part in parts], strict=True)])
    totals = [len(blocks) for blocks in seen]
    groups = [group for part in parts for group in part.groups]
    may_count = grouped(groups, lambda group: not any(group.counts) or has_enough(group.counts, totals))
    left_out = union([*[part.left_out for part in parts], *[group.ranks for group in may_count.get(False, ())]])
    added = _add_groups([may_count.get(True, ())])
    having, without = ([group for group in added if any(group.counts) is has] for has in (True, False))
    if len(having) > MAX_GROUPS:
        rest = having[MAX_GROUPS - 1 :]
        least = tuple([min(counts) for counts in zip(*[group.counts for group in rest], strict=True)])
        joined = _add_groups([[msgspec.structs.replace(group, counts=least) for group in rest]])
        having = [*having[: MAX_GROUPS - 1], *joined]
    return BlockSums(seen, (*without, *having), left_out)


def has_enough(counts: Sequence[int], totals: Sequence[int]) -> bool:
    """Whether ranks have more than half of the blocks of each mode that any rank has."""
    return all(2 * count > total for count, total in zip(counts, totals, strict=True) if total)
