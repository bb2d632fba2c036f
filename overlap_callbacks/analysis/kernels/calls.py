"""Calls of kernels in columns, and their counterparts: the k-th call of a kernel in its step, in another step.

On a device each row of a profile is a call; on CPU several rows may be one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind, StringTable, directions_of

_Floats = npt.NDArray[np.float64]
_Marks = npt.NDArray[np.bool_]

# What may slow a kernel down in sequential steps too, which do not order copies; see ``beside_ns``.
UNORDERED = (*name_rules.COPIES, "compute", "communication")
# Rows are numbered by a table of all numbers that they could have if it is at most so many times as long.
_SPARSE = 4
# What covers at most this share of a call leaves it alone.
ALONE_SHARE = 0.1


class Calls(msgspec.Struct, frozen=True):
    """Calls in columns. On a device, a call is a row of a ``KernelTable``; on CPU, all pieces of one operator call.

    Attributes:
        kernels: the table.
        row: first row of each call; shape (n,).
        call: index of the call of each row of ``kernels``; shape (len(kernels),).
        duration_ns: own time of each call; shape (n,).
    """

    kernels: KernelTable
    row: Indices
    call: Indices
    duration_ns: Indices

    @classmethod
    def of(cls, kernels: KernelTable) -> Calls:
        """The calls of a table."""
        if kernels.one_row_a_call:
            place = np.arange(len(kernels))
            return cls(kernels, place, place, kernels.intervals.durations_ns)
        _, row, call = np.unique(kernels.call, return_index=True, return_inverse=True)
        duration = np.bincount(call, weights=kernels.intervals.durations_ns, minlength=len(row)).astype(np.int64)
        return cls(kernels, row.astype(np.int64), call.astype(np.int64), duration)

    def __len__(self) -> int:
        return len(self.row)

    @property
    def step(self) -> Indices:
        """Index of the step of each call; shape (n,)."""
        return self.kernels.step[self.row]

    @property
    def kind(self) -> npt.NDArray[np.uint8]:
        """``Kind`` of each call; shape (n,)."""
        return self.kernels.kind[self.row]

    def covered_ns(self, by: Intervals) -> Indices:
        """How much of each call's own time ``by`` covers, in nanoseconds; shape (n,)."""
        covered = self.kernels.intervals.covered_ns(by)
        if self.kernels.one_row_a_call:
            return covered
        return np.bincount(self.call, weights=covered, minlength=len(self)).astype(np.int64)


def unordered_in(kernels: KernelTable) -> tuple[str, ...]:
    """Those of ``UNORDERED`` that a profile may have, by its names: none without copies."""
    found = {name_rules.copy_of(name) for name in kernels.names}.intersection(name_rules.COPIES)
    return (*sorted(found), *UNORDERED[-2:]) if found else ()


def beside_ns(calls: Calls, of: Sequence[str]) -> list[Indices]:
    """How long each of some of ``UNORDERED`` ran beside each call: copies beside a kernel, kernels beside a copy.

    Shape (calls,) each.
    """
    kernels, direction = calls.kernels, directions_of(calls.kernels)
    rows = np.flatnonzero(direction >= 0)
    found = []
    for name in of:
        time_ns = np.zeros(len(calls), dtype=np.int64)
        if name in name_rules.COPIES:
            time_ns += calls.covered_ns(kernels.intervals[direction == name_rules.COPIES.index(name)])
            time_ns[rows] = 0  # on a device, each row is a call
        else:
            kind = (Kind.COMPUTE, Kind.COMMUNICATION)[UNORDERED[-2:].index(name)]
            time_ns[rows] = kernels.intervals[rows].covered_ns(kernels.of(kind))
        found.append(time_ns)
    return found


class _Level(NamedTuple):
    """What the same call has in common besides name and turn: its launch shape, and the number of turns."""

    launch_shape: bool
    equally_many: bool


# In order of preference: the second level because some grids vary with the data; the third pairs as many calls as both
# sides have.
_LEVELS = (_Level(True, True), _Level(False, True), _Level(True, False))


def alone_ns(calls: Calls, wanted: _Marks, partners: Calls, others: _Marks, weights: _Floats | float = 1.0) -> _Floats:
    """Mean time of a call's counterparts, NaN without any; shape (calls,).

    Args:
        calls: the calls to be matched.
        wanted: which of them to match; shape (calls,).
        partners: the calls to match with: ``calls`` itself, or those of another profile.
        others: which of the partners may match; shape (partners,).
        weights: of the partners in that mean; shape (partners,), or one number.
    """
    mean_ns: _Floats = means_elsewhere(calls, wanted, partners, others, [partners.duration_ns], weights)[0]
    return mean_ns


def means_elsewhere(
    calls: Calls, wanted: _Marks, partners: Calls, others: _Marks, values: Sequence[Indices],
    weights: _Floats | float = 1.0,
) -> _Floats:  # fmt: skip
    """As ``alone_ns``, of several values of the partners, of shape (partners,) each; shape (values, calls)."""
    labels = Labels(calls.kernels, partners.kernels)
    weight = np.broadcast_to(weights, len(partners))[others]
    mine = [np.ones(int(others.sum())), *[value[others] for value in values]]
    # A design may take a step into account with less than nothing: a weighted mean needs a sum above that.
    summed = (*[weight * value for value in mine], *mine)

    def sums(level: _Level, mine: tuple[Indices, ...]) -> CallSums:
        theirs = mine if partners is calls else labels.of(1, partners, level)
        return CallSums.nothing(4, len(summed)).with_calls([column[others] for column in theirs], summed)

    return _matched(labels, 0, calls, wanted, sums, len(values))


def _matched(
    labels: Labels, side: int, calls: Calls, wanted: _Marks,
    sums: Callable[[_Level, tuple[Indices, ...]], CallSums], num_values: int,
) -> _Floats:  # fmt: skip
    """As ``means_elsewhere``; ``sums`` has those of the partners, by the level and what identifies the calls there."""
    found = np.full((num_values, len(calls)), np.nan)
    unmatched = np.flatnonzero(wanted)
    for level in _LEVELS:
        if not len(unmatched):
            break
        mine = labels.of(side, calls, level)
        means = _means(sums(level, mine), [column[unmatched] for column in mine], num_values)
        for place, mean in enumerate(means):
            found[place, unmatched] = mean
        unmatched = unmatched[np.isnan(found[0, unmatched])]
    return found


class Labels:
    """Common numbers for the names and launch shapes of two profiles, or parts of profiles."""

    def __init__(self, first: KernelTable, second: KernelTable) -> None:
        self._names = _common(first.names, second.names)
        self._shapes = _common(first.shapes, second.shapes)
        self._collectives = _common(first.collectives, second.collectives)
        self._num_kinds = len({*first.collectives, *second.collectives}) + 1

    def of(self, side: int, calls: Calls, level: _Level) -> tuple[Indices, ...]:
        """Identifies calls by name, launch shape, turn in the step and number of turns; shape (n,) each.

        ``side`` is 0 for calls of the first profile, 1 for the second; ``calls`` hold whole steps.
        """
        # An NCCL kernel may implement several kinds of collectives; those are different calls.
        kinds = np.append(self._collectives[side], -1)[calls.kernels.collective[calls.row]]
        label = self._names[side][calls.kernels.name[calls.row]] * self._num_kinds + kinds + 1
        zeros = np.zeros_like(label)
        shape = self._shapes[side][calls.kernels.shape[calls.row]]
        if not level.launch_shape:  # copies of two sizes are not the same
            shape = np.where(calls.kind == Kind.COPY, shape, 0)
        # Turns are counted among all calls of the step, whether they were matched before or not.
        turn, of = turns_of(calls, label, shape)
        return label, shape, turn, of if level.equally_many else zeros


class SameCalls:
    """Times of the calls of one profile that others may match, added up over its parts in the memory of about one step.

    ``side`` is that of the calls, see ``Labels.of``. What of ``unordered`` ran beside them is added up too.
    """

    def __init__(self, labels: Labels, side: int, unordered: Sequence[str] = ()) -> None:
        self._labels, self._side, self._unordered = labels, side, unordered
        self._sums = {level: CallSums.nothing(4, 2 + len(unordered)) for level in _LEVELS}

    def add(self, calls: Calls, wanted: _Marks) -> None:
        """Add the wanted calls of a part that holds whole steps; shape (calls,)."""
        beside = [time_ns[wanted] for time_ns in beside_ns(calls, self._unordered)]
        values = (np.ones(int(wanted.sum())), calls.duration_ns[wanted], *beside)
        for level, sums in self._sums.items():
            columns = [column[wanted] for column in self._labels.of(self._side, calls, level)]
            self._sums[level] = sums.with_calls(columns, values)

    def means_ns(self, calls: Calls, wanted: _Marks) -> _Floats:
        """Mean time of the calls that match each wanted call of the other profile, and of what ran beside them.

        NaN where none matches; shape (1 + what is unordered, calls).
        """
        sums, number = self._sums, 1 + len(self._unordered)
        return _matched(self._labels, 1 - self._side, calls, wanted, lambda level, _: sums[level], number)


class CallSums(NamedTuple):
    """Calls added up by what identifies them, as ``Labels.of`` gives it, e.g. number and time; shape (n,) each."""

    columns: tuple[Indices, ...]
    sums: tuple[npt.NDArray[np.float64], ...]

    @classmethod
    def nothing(cls, num_columns: int, num_sums: int) -> CallSums:
        """Without calls."""
        return cls((np.empty(0, dtype=np.int64),) * num_columns, (np.empty(0),) * num_sums)

    def with_calls(self, columns: Sequence[Indices], values: Sequence[npt.NDArray[Any]]) -> CallSums:
        """With further calls, each with a value for each sum."""
        rows = [np.concatenate(parts) for parts in zip(self.columns, columns, strict=True)]
        number = numbered(rows)
        first = np.empty(int(number.max(initial=-1)) + 1, dtype=np.int64)
        first[number[::-1]] = np.arange(len(number))[::-1]  # of equal indices the last counts
        parts = zip(self.sums, values, strict=True)
        sums = [np.bincount(number, weights=np.concatenate(part)).astype(np.float64) for part in parts]
        return CallSums(tuple([row[first] for row in rows]), tuple(sums))


def _means(alone: CallSums, columns: Sequence[Indices], num_values: int) -> Iterator[_Floats]:
    """Mean of each value of the calls that equal each of some others, NaN where none does; shape (others,).

    The sums are weights and weighted values, and perhaps number and values, which count where weights add up to
    nothing.
    """
    number = numbered([np.concatenate(parts) for parts in zip(columns, alone.columns, strict=True)])
    others = len(columns[0])
    mean = np.full(int(number.max(initial=-1)) + 1, np.nan)
    weight, *values = alone.sums[: num_values + 1]
    if plain := alone.sums[num_values + 1 :]:
        is_weighted = weight > 0
        weight, *values = [np.where(is_weighted, *pair) for pair in zip((weight, *values), plain, strict=True)]
    for value in values:
        mean[number[others:]] = value / weight
        yield mean[number[:others]]


def turns_of(calls: Calls, label: Indices, shape: Indices) -> tuple[Indices, Indices]:
    """Each call's turn among the calls of its kind in its step, and how many of them there are; shape (n,) each.

    ``label`` identifies a kind apart from the launch shape; ``shape`` may be the same number for all.
    """
    group = numbered([calls.step, label, shape])
    group = group.astype(np.min_scalar_type(int(group.max(initial=0))))  # few bits are sorted faster
    order = np.argsort(calls.kernels.intervals.start_ns[calls.row], kind="stable")
    order = order[np.argsort(group[order], kind="stable")]
    group = group[order]
    first = np.flatnonzero(np.concatenate(([True], group[1:] != group[:-1]))[: len(order)])
    sizes = np.diff(np.append(first, len(order)))
    turn, of = np.empty(len(order), dtype=np.int64), np.empty(len(order), dtype=np.int64)
    turn[order] = np.arange(len(order)) - np.repeat(first, sizes)
    of[order] = np.repeat(sizes, sizes)
    return turn, of


def numbered(columns: Sequence[Indices]) -> Indices:
    """A number for each row of the columns; equal rows get the same number."""
    numbers, size, most = np.zeros(len(columns[0]), dtype=np.int64), 1, _SPARSE * len(columns[0])
    if not len(numbers):
        return numbers
    for column in columns:
        least, width = int(column.min()), int(column.max()) - int(column.min()) + 1
        if size <= most < size * width:
            numbers, size = _dense(numbers, size)
        if size * width >= 2**62:  # renumber from 0: each factor is at most the number of rows
            _, numbers = np.unique(numbers, return_inverse=True)
            _, column = np.unique(column, return_inverse=True)  # noqa: PLW2901
            size, least, width = int(numbers.max()) + 1, 0, int(column.max()) + 1
        numbers, size = numbers * width + (column - least), size * width
    return _dense(numbers, size)[0] if size <= most else np.unique(numbers, return_inverse=True)[1].astype(np.int64)


def _dense(numbers: Indices, size: int) -> tuple[Indices, int]:
    """The numbers, all below ``size``, without those that do not occur between them, and how many occur."""
    occurs = np.zeros(size, dtype=bool)
    occurs[numbers] = True
    place = np.cumsum(occurs, dtype=np.int32)
    return place[numbers].astype(np.int64) - 1, int(place[-1])


def _common(mine: Sequence[str], theirs: Sequence[str]) -> tuple[Indices, Indices]:
    """Numbers for the texts of both sides; equal texts get the same number."""
    codes = StringTable()
    first, second = (np.array([codes[text] for text in texts], dtype=np.int64) for texts in (mine, theirs))
    return first, second
