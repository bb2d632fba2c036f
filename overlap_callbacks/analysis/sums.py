"""Merging of the ranks' measurements: each struct declares it field by field, and one function does it at every level.

A *way* makes one value from those of several disjoint sets of ranks: ``sum``, ``max``, ``any``, ``RankSet.union``, or
what ``struct_sum``, ``table_sum`` and ``named_sum`` build from other ways.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, TypeVar, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Way = Callable[[Sequence[Any]], Any]

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

_COUNT, _TOTAL, _SQUARES, _LOW, _LOW_RANK, _HIGH, _HIGH_RANK = range(7)


def struct_sum(of: type[S], /, **told: Way) -> Callable[[Sequence[S]], S]:
    """The way of a struct, field by field: given by an annotation such as ``Annotated[float, max]``, otherwise ``sum``.

    ``told`` has the ways of fields without an annotation, of structs that are part of the record.
    """
    ways = _ways_of(of, told)
    return lambda parts: of(*_added(ways(), [msgspec.structs.astuple(part) for part in parts]))


def table_sum(
    of: type[S], key: int, /, *, order: Callable[[S], Any] | None = None, limit: int | None = None, **told: Way
) -> Callable[[Iterable[Iterable[S]]], tuple[S, ...]]:
    """The way of a table: rows with the same key become one row, field by field as in ``struct_sum``.

    Args:
        of: a row.
        key: number of its first fields that are the key.
        order: sort key of the rows; rows with equal ones, and by default all, are sorted by key.
        limit: maximum number of rows.
        told: as in ``struct_sum``.
    """
    ways = _ways_of(of, told)

    def add(tables: Iterable[Iterable[S]]) -> tuple[S, ...]:
        by_key: defaultdict[tuple[Any, ...], list[tuple[Any, ...]]] = defaultdict(list)
        for row in chain.from_iterable(tables):
            values = msgspec.structs.astuple(row)
            by_key[values[:key]].append(values)
        of_fields = [*[first] * key, *ways()[key:]]
        rows = [(of_key, of(*_added(of_fields, rows))) for of_key, rows in by_key.items()]
        rows.sort(key=lambda row: (order(row[1]) if order else 0, row[0]))
        return tuple([row for _, row in rows[:limit]])

    return add


def named_sum(way: Way) -> Callable[[Iterable[Mapping[Any, Any]]], dict[Any, Any]]:
    """The way for values by name, from the way for the values; sorted by name."""

    def add(parts: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
        by_name = grouped(chain.from_iterable([part.items() for part in parts]), lambda item: item[0])
        return {name: way([value for _, value in by_name[name]]) for name in sorted(by_name)}

    return add


def grouped(values: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """The values by key, both in order of first occurrence."""
    found: dict[Any, list[T]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return found


def _ways_of(of: type[msgspec.Struct], told: Mapping[str, Way]) -> Callable[[], list[Way]]:
    @cache
    def ways() -> list[Way]:  # only when all classes in the annotations are defined
        hints = get_type_hints(of, include_extras=True)
        return [told.get(name) or getattr(hints[name], "__metadata__", (sum,))[0] for name in of.__struct_fields__]

    return ways


def _added(ways: Sequence[Way], parts: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    if len(parts) == 1:
        return parts[0]
    return [way(column) for way, column in zip(ways, zip(*parts, strict=True), strict=True)]


# -- ways for values


def first(values: Sequence[T]) -> T:
    """The first value, if all are equal or in the order of their ranks."""
    return values[0]


def same_or(other: T) -> Callable[[Sequence[T]], T]:
    """The value if all are equal, otherwise ``other``."""
    return lambda values: values[0] if len(set(values)) == 1 else other


def of_lowest(values: Sequence[tuple[int, T] | None]) -> tuple[int, T] | None:
    """The value of the lowest rank, from values with their ranks; None if no rank has any."""
    return min([value for value in values if value is not None], key=lambda value: value[0], default=None)


def distinct(values: Iterable[Iterable[T]]) -> tuple[T, ...]:
    return tuple(sorted(set().union(*values)))  # type: ignore[type-var]


def in_a_row(values: Iterable[Iterable[T]]) -> tuple[T, ...]:
    return tuple([item for items in values for item in items])


def each_sum(values: Iterable[Sequence[Any]]) -> tuple[Any, ...]:
    return tuple([sum(place) for place in zip(*values, strict=True)])


def array_sum(values: Sequence[Floats]) -> Floats:
    return np.asarray(np.sum(values, axis=0))


def array_max(values: Sequence[Floats]) -> Floats:
    return np.asarray(np.max(values, axis=0))


class Aggregate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Quantities over ranks, or over devices.

    Attributes:
        rows: for each quantity its count, sum, sum of squared distances from the mean, minimum with the lowest rank
            that has it, and maximum with its rank; 7 rows of equal length.
    """

    rows: Floats

    def __post_init__(self) -> None:
        if self.rows.size % 7:
            raise ValueError("the rows of an aggregate have different lengths")

    @classmethod
    def of(cls, ranks: Sequence[int], values: Floats) -> Aggregate:
        """The quantities of some ranks; NaN if a rank lacks one. Shape (ranks, quantities)."""
        known = ~np.isnan(values)
        of_each = np.broadcast_to(np.array(ranks, dtype=np.float64)[:, None], values.shape)
        value, low, high = (np.where(known, values, absent) for absent in (0.0, np.inf, -np.inf))
        return _added_up(np.stack([known, value, np.zeros_like(values), low, of_each, high, of_each]))

    @property
    def columns(self) -> list[tuple[float, ...]]:
        return [tuple(column) for column in self.rows.reshape(7, -1).T.tolist()]


def add_aggregates(parts: Sequence[Aggregate]) -> Aggregate:
    return _added_up(np.stack([part.rows.reshape(7, -1) for part in parts], axis=1))


def _added_up(parts: Floats) -> Aggregate:
    """Sums about the common mean, of any number of parts; shape (7, parts, quantities).

    Source, for two parts: T. F. Chan, G. H. Golub, R. J. LeVeque, "Algorithms for Computing the Sample Variance" (The
    American Statistician 37, 1983), equation 2.1.
    """
    rows = parts.sum(axis=1)
    number = np.maximum(rows[_COUNT], 1)
    distances = parts[_TOTAL] / np.maximum(parts[_COUNT], 1) - rows[_TOTAL] / number
    distances -= (parts[_COUNT] * distances).sum(axis=0) / number
    rows[_LOW], rows[_HIGH] = parts[_LOW].min(axis=0), parts[_HIGH].max(axis=0)
    spreads = rows[_LOW] < rows[_HIGH]  # means of equal values differ only by rounding
    rows[_SQUARES] += np.where(spreads, (parts[_COUNT] * distances**2).sum(axis=0), 0.0)
    for extreme, rank in ((_LOW, _LOW_RANK), (_HIGH, _HIGH_RANK)):
        rows[rank] = np.where(parts[extreme] == rows[extreme], parts[rank], np.inf).min(axis=0)
    return Aggregate(rows)


# -- distinct named things, such as hosts and devices, as digests, so that they can be counted over all ranks

# Digests of 48 bits: among 10,000 names, a collision has a probability of two in ten million.
_DIGEST_BYTES = 6
# Maximum names that a part distinguishes from those of other parts. Beyond it, names common to two parts count twice;
# but parts are of neighbouring ranks, which share hosts and devices long before.
MAX_IDENTITIES = 4096


class Identities(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Distinct names, by their digests; ``num_more`` are not kept."""

    digests: tuple[bytes, ...] = ()
    num_more: int = 0

    @property
    def count(self) -> int:
        return len(self.digests) + self.num_more


def digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def add_identities(parts: Sequence[Identities]) -> Identities:
    found = distinct([part.digests for part in parts])
    num_more = sum(part.num_more for part in parts) + max(0, len(found) - MAX_IDENTITIES)
    return Identities(found[:MAX_IDENTITIES], num_more)
