"""Tables of a window as means over its ranks: kernels, pairs of kernels, dimensions of parallelism."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from overlap_callbacks.analysis.results.window import (
    CollectiveTime,
    DimensionTime,
    KernelTime,
    PairTime,
    RankWindow,
)

_Row = TypeVar("_Row")
_Key = TypeVar("_Key", bound=Hashable)


def mean_kernels(windows: Sequence[RankWindow]) -> tuple[KernelTime, ...]:
    """Means over the ranks that have kernels; those that lose most time first."""
    means = mean_by(
        (kernel for window in windows for kernel in window.kernels),
        key=lambda kernel: (kernel.name, kernel.communication),
        fields=("overlapped_calls", "sequential_calls", "overlapped_ms", "sequential_ms"),
        count=sum(bool(window.kernels) for window in windows),
    )
    num_blocks: dict[tuple[str, bool], int] = {}
    for kernel in (kernel for window in windows for kernel in window.kernels):
        key = kernel.name, kernel.communication
        num_blocks[key] = max(num_blocks.get(key, 0), kernel.num_blocks)
    kernels = (KernelTime(*key, **values, num_blocks=num_blocks[key]) for key, values in means.items())
    return tuple(sorted(kernels, key=lambda kernel: -kernel.lost_ms))


def mean_pairs(
    windows: Sequence[RankWindow], pairs_of: Callable[[RankWindow], Sequence[PairTime]]
) -> tuple[PairTime, ...]:
    """Means over the ranks that have such pairs; those that lose most time first."""
    means = mean_by(
        (pair for window in windows for pair in pairs_of(window)),
        key=lambda pair: (pair.victim, pair.communication, pair.beside),
        fields=("calls", "beside_ms", "time_ms", "alone_ms"),
        count=sum(bool(pairs_of(window)) for window in windows),
    )
    pairs = (PairTime(*key, **values) for key, values in means.items())
    return tuple(sorted(pairs, key=lambda pair: (-pair.lost_ms, -pair.time_ms)))


def mean_dimensions(windows: Sequence[RankWindow]) -> tuple[DimensionTime, ...]:
    """Each dimension's mean over the ranks that have it: in a pipeline of data-parallel stages, not all have all."""
    means = mean_by(
        (row for window in windows for row in window.dimensions),
        key=lambda row: row.dimension,
        fields=("messages", "bytes_in", "comm_ms", "exposed_ms", "kernels_ms", "kernels_isolated_ms"),
    )
    times = (
        DimensionTime(
            dimension=dimension,
            **{**values, "messages": round(values["messages"]), "bytes_in": round(values["bytes_in"])},
        )
        for dimension, values in means.items()
    )
    return tuple(sorted(times, key=lambda row: -row.comm_ms))


# Ranks that timed the same part of a collective differ by less.
_SAME_BYTES = 0.01


def with_transfers(collectives: Sequence[CollectiveTime], windows: Sequence[RankWindow]) -> tuple[CollectiveTime, ...]:
    """The collectives of one rank, each with the time of its transfer: the least over the ranks of its group.

    A rank that comes early waits for the last one within the collective; the last one does not wait. Over the
    collectives of a step another rank may be the last each time, so the result is an upper bound.

    Args:
        collectives: of one rank.
        windows: of all ranks.
    """
    by_key: dict[tuple[str, str], list[CollectiveTime]] = {}
    for window in windows:
        for row in window.collectives:
            by_key.setdefault((row.operator, row.group), []).append(row)
    return tuple(
        [
            msgspec.structs.replace(row, transfer_ms=_transfer_ms(row, by_key.get((row.operator, row.group), [])))
            for row in collectives
        ]
    )


def _transfer_ms(row: CollectiveTime, ranks: Sequence[CollectiveTime]) -> float | None:
    if row.kernels_ms is not None:
        return min(
            (other.kernels_ms for other in ranks if other.kernels_ms and _alike(other.size_bytes, row.size_bytes)),
            default=None,
        )
    if row.isolated_ms is None or row.timed_bytes is None:
        return None
    size = row.timed_bytes
    times = [
        other.isolated_ms
        for other in ranks
        if other.isolated_ms is not None and other.timed_bytes is not None and _alike(other.timed_bytes, size)
    ]
    return min(times, default=None)


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME_BYTES * max(one, other)


def mean_by(
    rows: Iterable[_Row], key: Callable[[_Row], _Key], fields: Sequence[str], count: int | None = None
) -> dict[_Key, dict[str, Any]]:
    """Means of some fields over all rows that have the same key.

    Args:
        rows: the rows of all ranks.
        key: tells which rows belong together.
        fields: names of the fields, all of them numbers.
        count: what each sum is divided by: ranks, also those that lack the row. None for the number of rows of the key.

    Returns:
        The means by key and field, in the order in which the keys first appear.
    """
    by_key: dict[_Key, list[_Row]] = {}
    for row in rows:
        by_key.setdefault(key(row), []).append(row)
    return {
        value: {
            field: sum(float(getattr(row, field)) for row in of_key) / (len(of_key) if count is None else count)
            for field in fields
        }
        for value, of_key in by_key.items()
    }
