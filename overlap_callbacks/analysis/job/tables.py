"""Sums of the ranks' tables: kernels, pairs of kernels, dimensions of parallelism, and losses to SMs taken."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from overlap_callbacks.analysis.figures import FigureSums
from overlap_callbacks.analysis.results.kernel_times import OTHER_KERNELS, KernelTime, PairTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import DimensionTime, RankWindow, SmLoss

# What a part keeps of kernels: the rows with the most time. A rank sends 50 at most, and ranks differ in few. The rows
# are those of each group of ranks, or of all where there is one; the bytes are those of all groups.
MAX_KERNEL_ROWS = 120
MIN_KERNEL_ROWS = 64
MAX_KERNEL_BYTES = 48_000
# Families of kernels, kinds of collectives and dimensions are few.
MAX_PAIRS = 100
MAX_DIMENSIONS = 32

_ROW_BYTES = 60  # of a row, beside its name

_KERNEL_FIELDS = ("overlapped_calls", "sequential_calls", "overlapped_ms", "sequential_ms")
_PAIR_FIELDS = ("calls", "concurrent_ms", "time_ms", "alone_ms")
_DIMENSION_FIELDS = ("messages", "bytes_in", "comm_ms", "exposed_ms", "kernels_ms", "kernels_isolated_ms")


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One row of a table, summed over ranks.

    Attributes:
        name: of the kernel, the victim or the dimension.
        communication: whether it communicates.
        beside: of a pair, what ran beside it; else empty.
        first: rank and place at which the row first stands: of equal rows, that comes first which came first.
        num_rows: rows of which it is the sum.
        num_blocks: of a kernel, the most thread blocks.
        sums: of its fields.
    """

    name: str
    communication: bool
    beside: str
    first: tuple[int, int]
    num_rows: int
    num_blocks: int
    sums: tuple[float, ...]


class Table(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A table of the ranks.

    Attributes:
        num_ranks: ranks that have any row.
        rows: its rows.
    """

    num_ranks: int = 0
    rows: tuple[Row, ...] = ()


class LossSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The model's losses to SMs that communication holds, of the ranks that have a result.

    Attributes:
        num_ranks: ranks that have one.
        compute_ms: sum of their sequential compute.
        from_sms_ms, from_waves_ms, beside_ms, modelled_ms: sums of these fields of ``SmLoss``.
        held_ms: sum of ``sms_held`` times ``modelled_ms``.
        num_sms: the most of any rank.
    """

    num_ranks: int = 0
    compute_ms: float = 0.0
    from_sms_ms: float = 0.0
    from_waves_ms: float = 0.0
    beside_ms: float = 0.0
    modelled_ms: float = 0.0
    held_ms: float = 0.0
    num_sms: int = 0


class ProfileTables(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tables of a group of ranks that come from their profiles."""

    kernels: Table = Table()
    pairs: Table = Table()
    dimension_pairs: Table = Table()
    dimensions: Table = Table()
    losses: LossSums = LossSums()


def tables_of(window: RankWindow) -> ProfileTables:
    """The tables of one rank."""
    rank = window.rank
    return ProfileTables(
        kernels=_table(rank, [(k.name, k.communication, "", k.num_blocks, k) for k in window.kernels], _KERNEL_FIELDS),
        pairs=_pairs(rank, window.pairs),
        dimension_pairs=_pairs(rank, window.dimension_pairs),
        dimensions=_table(rank, [(d.dimension, False, "", 0, d) for d in window.dimensions], _DIMENSION_FIELDS),
        losses=_losses(window),
    )


def _pairs(rank: int, pairs: Sequence[PairTime]) -> Table:
    return _table(
        rank, [(pair.kernel_family, pair.communication, pair.concurrent_with, 0, pair) for pair in pairs], _PAIR_FIELDS
    )


def _table(rank: int, rows: Sequence[tuple[str, bool, str, int, msgspec.Struct]], fields: Sequence[str]) -> Table:
    made = [
        Row(name, communication, beside, (rank, place), 1, num_blocks,
            tuple([float(getattr(row, field)) for field in fields]))
        for place, (name, communication, beside, num_blocks, row) in enumerate(rows)
    ]  # fmt: skip
    return Table(int(bool(made)), _summed(made))


def _losses(window: RankWindow) -> LossSums:
    """A rank whose compute never runs beside communication has no result, and loses nothing.

    Without it, the loss of the others would count as that of all.
    """
    alone_ms = [block.compute_ms for block in window.profiled if block.mode is Mode.SEQUENTIAL]
    overlapped = [block for block in window.profiled if block.mode is Mode.OVERLAPPED]
    loses_nothing = bool(overlapped) and not any(block.covered_compute_ms for block in overlapped)
    loss = window.sm_loss or (SmLoss(window.num_sms, 0.0, 0.0, 0.0, 0.0, 0.0) if loses_nothing else None)
    if not alone_ms or loss is None:
        return LossSums()
    return LossSums(
        1, statistics.fmean(alone_ms), loss.from_sms_ms, loss.from_waves_ms, loss.concurrent_ms, loss.modelled_ms,
        loss.sms_held * loss.modelled_ms, loss.num_sms,
    )  # fmt: skip


def add_tables(parts: Sequence[ProfileTables]) -> ProfileTables:
    """The sums of several groups of ranks."""
    return ProfileTables(
        kernels=_add([part.kernels for part in parts]),
        pairs=_most(_add([part.pairs for part in parts]), MAX_PAIRS, lambda row: row.sums[2] + row.sums[3]),
        dimension_pairs=_most(
            _add([part.dimension_pairs for part in parts]), MAX_PAIRS, lambda row: row.sums[2] + row.sums[3]
        ),
        dimensions=_most(_add([part.dimensions for part in parts]), MAX_DIMENSIONS, lambda row: row.sums[2]),
        losses=_add_losses([part.losses for part in parts]),
    )


def _add_losses(parts: Sequence[LossSums]) -> LossSums:
    return LossSums(
        num_ranks=sum(part.num_ranks for part in parts),
        compute_ms=sum(part.compute_ms for part in parts),
        from_sms_ms=sum(part.from_sms_ms for part in parts),
        from_waves_ms=sum(part.from_waves_ms for part in parts),
        beside_ms=sum(part.beside_ms for part in parts),
        modelled_ms=sum(part.modelled_ms for part in parts),
        held_ms=sum(part.held_ms for part in parts),
        num_sms=max((part.num_sms for part in parts if part.num_ranks), default=0),
    )


def _add(tables: Sequence[Table]) -> Table:
    rows = _summed([row for table in tables for row in table.rows])
    return Table(sum(table.num_ranks for table in tables), rows)


def _summed(rows: Iterable[Row]) -> tuple[Row, ...]:
    """One row of each key."""
    by_key: dict[tuple[str, bool, str], list[Row]] = {}
    for row in rows:
        by_key.setdefault((row.name, row.communication, row.beside), []).append(row)
    return tuple([_sum(of_key) for of_key in by_key.values()])


def _sum(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    columns = zip(*[row.sums for row in rows], strict=True)
    return Row(
        name=rows[0].name,
        communication=rows[0].communication,
        beside=rows[0].beside,
        first=min([row.first for row in rows]),
        num_rows=sum([row.num_rows for row in rows]),
        num_blocks=max([row.num_blocks for row in rows]),
        sums=tuple([sum(column) for column in columns]),
    )


def _most(table: Table, number: int, time_ms: Callable[[Row], float]) -> Table:
    if len(table.rows) <= number:
        return table
    return Table(table.num_ranks, tuple(sorted(table.rows, key=lambda row: (-time_ms(row), row.first))[:number]))


def bounded_kernels(sums: FigureSums[ProfileTables]) -> FigureSums[ProfileTables]:
    """With the kernels of the most time in each group of ranks, and one row for the others, whose times are in it.

    A kernel has its own row wherever it is among the first of a part. The sum over all rows is always whole.
    """
    profiled = sums.profiled
    number = len(profiled.groups)
    groups = [
        msgspec.structs.replace(
            group, tables=msgspec.structs.replace(group.tables, kernels=_bounded(group.tables.kernels, number))
        )
        for group in profiled.groups
    ]
    return msgspec.structs.replace(sums, profiled=msgspec.structs.replace(profiled, groups=tuple(groups)))


def _bounded(table: Table, num_groups: int) -> Table:
    kept: list[Row] = []
    other: list[Row] = []
    left_bytes = MAX_KERNEL_BYTES // num_groups
    max_rows = max(MIN_KERNEL_ROWS, MAX_KERNEL_ROWS // num_groups)
    rows = sorted(table.rows, key=lambda row: (-(row.sums[2] + row.sums[3]), row.first))
    for row in rows:
        left_bytes -= len(row.name) + _ROW_BYTES
        is_kept = len(kept) < max_rows and left_bytes >= 0 and row.name != OTHER_KERNELS
        (kept if is_kept else other).append(row)
    if not other:
        return table
    others = [msgspec.structs.replace(row, name=OTHER_KERNELS, num_blocks=0) for row in other]
    return Table(table.num_ranks, (*kept, *_summed(others)))


# -- means over the ranks

_Result = TypeVar("_Result")


def mean_kernels(table: Table) -> tuple[KernelTime, ...]:
    """Means over the ranks that have kernels; those that lose most time first."""
    kernels = []
    for row in _in_order(table):
        calls, calls_alone, time_ms, alone_ms = [value / table.num_ranks for value in row.sums]
        kernels.append(
            KernelTime(row.name, row.communication, calls, calls_alone, time_ms, alone_ms, num_blocks=row.num_blocks)
        )
    return tuple(sorted(kernels, key=lambda kernel: -kernel.lost_ms))


def mean_pairs(table: Table) -> tuple[PairTime, ...]:
    """Means over the ranks that have such pairs; those that lose most time first."""
    pairs = [
        PairTime(row.name, row.communication, row.beside, *[value / table.num_ranks for value in row.sums])
        for row in _in_order(table)
    ]
    return tuple(sorted(pairs, key=lambda pair: (-pair.lost_ms, -pair.time_ms)))


def mean_dimensions(table: Table) -> tuple[DimensionTime, ...]:
    """Each dimension's mean over the ranks that have it: in a pipeline of data-parallel stages, not all have all."""
    times = []
    for row in _in_order(table):
        messages, bytes_in, *times_ms = [value / row.num_rows for value in row.sums]
        times.append(DimensionTime(row.name, round(messages), round(bytes_in), *times_ms))
    return tuple(sorted(times, key=lambda row: -row.comm_ms))


def _in_order(table: Table) -> list[Row]:
    return sorted(table.rows, key=lambda row: row.first)


def mean_loss(sums: LossSums) -> tuple[list[SmLoss], float | None]:
    """The mean loss of the ranks that have one, and their mean sequential compute in milliseconds; empty without one.

    The mean stands for all: the shares of a slowdown are quotients of sums over the ranks.
    """
    if not sums.modelled_ms:
        return [], None
    number = sums.num_ranks
    loss = SmLoss(
        num_sms=sums.num_sms,
        sms_held=sums.held_ms / sums.modelled_ms,
        concurrent_ms=sums.beside_ms / number,
        modelled_ms=sums.modelled_ms / number,
        from_sms_ms=sums.from_sms_ms / number,
        from_waves_ms=sums.from_waves_ms / number,
    )
    return [loss], sums.compute_ms / number
