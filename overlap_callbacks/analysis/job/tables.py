"""Summed tables of the ranks' profiles: kernels, pairs of kernels, dimensions of parallelism, losses to held SMs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec.structs import astuple

from overlap_callbacks.analysis.exposure import add_exposures, of_rank
from overlap_callbacks.analysis.results.exposure import ExposureSums
from overlap_callbacks.analysis.results.kernel_times import OTHER_KERNELS, KernelTime, PairTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import DimensionTime, RankWindow, SmLoss
from overlap_callbacks.analysis.sums import named_sum, struct_sum, table_sum

# A part keeps the kernels with the most time, of each group of ranks or of all if there is one group. A rank sends at
# most 50, and ranks differ in few. The bytes are those of all groups.
MAX_KERNEL_ROWS = 120
MIN_KERNEL_ROWS = 64
MAX_KERNEL_BYTES = 48_000
# Families of kernels, kinds of collectives and dimensions are few.
MAX_PAIRS = 100
MAX_DIMENSIONS = 32

_ROW_BYTES = 60  # of a row, without its name


class KernelSum(KernelTime, frozen=True, array_like=True, gc=False):
    """A kernel, summed over ranks; the most thread blocks of any."""

    num_blocks: Annotated[int, max] = 0


class PairSum(PairTime, frozen=True, array_like=True, gc=False):
    """A pair, summed over ranks."""


class DimensionSum(DimensionTime, frozen=True, array_like=True, gc=False):
    """A dimension, summed over the ``num_ranks`` ranks that have it."""

    num_ranks: int = 1


class LossSum(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The modelled losses to SMs that communication holds, summed over the ranks that have a result.

    ``compute_ms`` is their sequential compute, ``held_ms`` sums ``sms_held`` times ``modelled_ms``; others as in
    ``SmLoss``.
    """

    num_ranks: int = 0
    compute_ms: float = 0.0
    from_sms_ms: float = 0.0
    from_waves_ms: float = 0.0
    concurrent_ms: float = 0.0
    modelled_ms: float = 0.0
    held_ms: float = 0.0
    num_sms: Annotated[int, max] = 0


class ProfileTables(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The summed tables of a group of ranks; ``num_ranks`` is how many have rows in a table, by its name."""

    num_ranks: Annotated[dict[str, int], named_sum(sum)] = {}
    kernels: Annotated[tuple[KernelSum, ...], _kernels] = ()
    pairs: Annotated[tuple[PairSum, ...], add_pairs] = ()
    dimension_pairs: Annotated[tuple[PairSum, ...], add_pairs] = ()
    dimensions: Annotated[tuple[DimensionSum, ...], _dimensions] = ()
    losses: Annotated[LossSum, struct_sum(LossSum)] = LossSum()
    exposure: Annotated[ExposureSums, add_exposures] = ExposureSums()


_kernels = table_sum(KernelSum, 2, order=lambda row: -(row.overlapped_ms + row.sequential_ms))


def bounded(tables: ProfileTables, num_groups: int) -> ProfileTables:
    """The tables of one of ``num_groups`` groups of ranks, with the shorter kernels merged into one row."""
    kept: list[KernelSum] = []
    others: list[KernelSum] = []
    left_bytes = MAX_KERNEL_BYTES // num_groups
    max_rows = max(MIN_KERNEL_ROWS, MAX_KERNEL_ROWS // num_groups)
    for row in tables.kernels:
        left_bytes -= len(row.name) + _ROW_BYTES
        is_kept = len(kept) < max_rows and left_bytes >= 0 and row.name != OTHER_KERNELS
        (kept if is_kept else others).append(row)
    rest = _kernels([[msgspec.structs.replace(row, name=OTHER_KERNELS, num_blocks=0) for row in others]])
    return msgspec.structs.replace(tables, kernels=(*kept, *rest))


add_pairs = table_sum(PairSum, 3, order=lambda row: -(row.time_ms + row.alone_ms), limit=MAX_PAIRS)
_dimensions = table_sum(DimensionSum, 1, order=lambda row: -row.comm_ms, limit=MAX_DIMENSIONS)
add_tables = struct_sum(ProfileTables)


def tables_of(window: RankWindow) -> ProfileTables:
    """The tables of one rank."""
    kernels = [KernelSum(*astuple(row)) for row in window.kernels]
    pairs, dimension_pairs = (
        [PairSum(*astuple(row)) for row in rows] for rows in (window.pairs, window.dimension_pairs)
    )
    dimensions = [DimensionSum(*astuple(row)) for row in window.dimensions]
    having = {"kernels": kernels, "pairs": pairs, "dimension_pairs": dimension_pairs}
    return ProfileTables(
        {name: int(bool(rows)) for name, rows in having.items()},
        _kernels([kernels]), add_pairs([pairs]), add_pairs([dimension_pairs]), _dimensions([dimensions]), _loss(window),
        of_rank(window.exposure, window.rank) if window.exposure.steps else window.exposure,
    )  # fmt: skip


def _loss(window: RankWindow) -> LossSum:
    """A rank whose compute never overlaps communication has zero loss, and so counts in the mean."""
    alone_ms = [block.compute_ms for block in window.profiled if block.mode is Mode.SEQUENTIAL]
    overlapped = [block for block in window.profiled if block.mode is Mode.OVERLAPPED]
    loses_nothing = bool(overlapped) and not any(block.covered_compute_ms for block in overlapped)
    loss = window.sm_loss or (SmLoss(window.num_sms, 0.0, 0.0, 0.0, 0.0, 0.0) if loses_nothing else None)
    if not alone_ms or loss is None:
        return LossSum()
    return LossSum(
        1, statistics.fmean(alone_ms), loss.from_sms_ms, loss.from_waves_ms, loss.concurrent_ms, loss.modelled_ms,
        loss.sms_held * loss.modelled_ms, loss.num_sms,
    )  # fmt: skip


# -- means over the ranks


def mean_kernels(tables: ProfileTables) -> tuple[KernelTime, ...]:
    """Means over the ranks that have kernels, the largest loss first."""
    kernels = []
    for row in tables.kernels:
        _, _, *sums, num_blocks = astuple(row)
        calls, calls_alone, time_ms, alone_ms = [value / tables.num_ranks["kernels"] for value in sums]
        kernels.append(KernelTime(row.name, row.communication, calls, calls_alone, time_ms, alone_ms, num_blocks))
    return tuple(sorted(kernels, key=lambda kernel: -kernel.lost_ms))


def mean_pairs(rows: Sequence[PairSum], num_ranks: int) -> tuple[PairTime, ...]:
    """Means over the ranks that have such pairs, the largest loss first."""
    pairs = [
        PairTime(family, communication, concurrent_with, *[value / num_ranks for value in sums])
        for family, communication, concurrent_with, *sums in map(astuple, rows)
    ]
    return tuple(sorted(pairs, key=lambda pair: (-pair.lost_ms, -pair.time_ms)))


def mean_dimensions(rows: Sequence[DimensionSum]) -> tuple[DimensionTime, ...]:
    """Each dimension's mean over the ranks that have it: stages of a pipeline may have different dimensions."""
    times = []
    for name, *sums, num_ranks in map(astuple, rows):
        messages, bytes_in, *times_ms = [value / num_ranks for value in sums]
        times.append(DimensionTime(name, round(messages), round(bytes_in), *times_ms))
    return tuple(sorted(times, key=lambda row: -row.comm_ms))


def mean_loss(losses: LossSum) -> tuple[list[SmLoss], float | None]:
    """The mean loss of the ranks that have one, and their mean sequential compute in milliseconds; else none."""
    if not losses.modelled_ms:
        return [], None
    number = losses.num_ranks
    loss = SmLoss(
        num_sms=losses.num_sms,
        sms_held=losses.held_ms / losses.modelled_ms,
        concurrent_ms=losses.concurrent_ms / number,
        modelled_ms=losses.modelled_ms / number,
        from_sms_ms=losses.from_sms_ms / number,
        from_waves_ms=losses.from_waves_ms / number,
    )
    return [loss], losses.compute_ms / number
