"""Finds the same call elsewhere: the k-th call of a kernel in its step, in another step or in another profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.kernels.call_table import Calls
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable

# Name, launch shape, turn in the step, and how many turns there are.
_Columns = tuple[Indices, Indices, Indices, Indices]


class Match(msgspec.Struct, frozen=True):
    """Which calls match the same calls elsewhere.

    Attributes:
        alone_ns: mean time of the matching calls, NaN for a call without a match; shape (calls,).
        used: whether each partner matches a call; shape (partners,).
    """

    alone_ns: npt.NDArray[np.float64]
    used: npt.NDArray[np.bool_]


class Level(NamedTuple):
    """What counts as the same call: always the name, and everything that is true here.

    Attributes:
        launch_shape: the same grid and block.
        in_turn: the same turn, i.e. both are the k-th of their kind in their steps.
        equally_many: both steps have the same number of calls of the kind.
    """

    launch_shape: bool
    in_turn: bool
    equally_many: bool


# The second level is there since some grids vary with the data. The third pairs as many calls as both sides have.
IN_TURN = (Level(True, True, True), Level(False, True, True))
IN_ORDER = (*IN_TURN, Level(True, True, False))
SAME_LAUNCH = (Level(True, False, False),)


def match(
    calls: Calls,
    wanted: npt.NDArray[np.bool_],
    partners: Calls,
    others: npt.NDArray[np.bool_],
    levels: tuple[Level, ...] = IN_ORDER,
    weights: npt.NDArray[np.float64] | float = 1.0,
) -> Match:
    """Find the same call elsewhere for each call; if several steps have it, their mean counts.

    Args:
        calls: the calls to be matched.
        wanted: which of them are matched; shape (calls,).
        partners: the calls to match with: ``calls`` itself, or those of another profile.
        others: which of the partners may match; shape (partners,).
        levels: what counts as the same call, in order of preference.
        weights: of the partners in that mean; shape (partners,), or one number.
    """
    weights = np.broadcast_to(weights, len(partners))
    alone_ns = np.full(len(calls), np.nan)
    used = np.zeros(len(partners), dtype=bool)
    unmatched, candidates = np.flatnonzero(wanted), np.flatnonzero(others)
    labels = Labels(calls.kernels, partners.kernels)
    for level in levels:
        if not len(unmatched) or not len(candidates):
            break
        of_calls = labels.of(0, calls, level)
        of_partners = of_calls if partners is calls else labels.of(1, partners, level)
        columns = zip(of_calls, of_partners, strict=True)
        keys = numbered([np.concatenate((own[unmatched], other[candidates])) for own, other in columns])
        mine, theirs = keys[: len(unmatched)], keys[len(unmatched) :]
        size = int(max(mine.max(), theirs.max())) + 1
        count = np.bincount(theirs, minlength=size)
        # A design may take a step into account with less than nothing: a mean needs a sum above that.
        own = weights[candidates]
        own = np.where(np.bincount(theirs, weights=own, minlength=size)[theirs] > 0, own, 1.0)
        total = np.bincount(theirs, weights=own, minlength=size)
        total_ns = np.bincount(theirs, weights=own * partners.duration_ns[candidates], minlength=size)
        matched = count[mine] > 0
        alone_ns[unmatched[matched]] = total_ns[mine[matched]] / total[mine[matched]]
        is_key_matched = np.zeros(size, dtype=bool)
        is_key_matched[mine[matched]] = True
        used[candidates[is_key_matched[theirs]]] = True
        unmatched = unmatched[~matched]
    return Match(alone_ns, used)


class Labels:
    """Common numbers for the names and launch shapes of two profiles, which may be the same one.

    Args:
        first: one profile, or a part of it: its names and shapes are those of all.
        second: the other one.
    """

    def __init__(self, first: KernelTable, second: KernelTable) -> None:
        self._names = _common(first.names, second.names)
        self._shapes = _common(first.shapes, second.shapes)
        self._collectives = _common(first.collectives, second.collectives)
        self._num_kinds = len({*first.collectives, *second.collectives}) + 1

    def of(self, side: int, calls: Calls, level: Level) -> _Columns:
        """What tells calls apart: name, launch shape, turn in the step, and how many turns there are; shape (n,) each.

        Args:
            side: 0 for calls of the first profile, 1 for the second.
            calls: calls of a profile, or of a part of it that holds whole steps.
            level: what counts as the same call.
        """
        # One NCCL kernel may implement several kinds of collectives; those are not the same call.
        kinds = np.append(self._collectives[side], -1)[calls.kernels.collective[calls.row]]
        label = self._names[side][calls.kernels.name[calls.row]] * self._num_kinds + kinds + 1
        zeros = np.zeros_like(label)
        shape = self._shapes[side][calls.kernels.shape[calls.row]] if level.launch_shape else zeros
        # Turns are counted among all calls of the step, whether they were matched before or not.
        turn, of = turns_of(calls, label, shape) if level.in_turn else (zeros, zeros)
        return label, shape, turn, of if level.equally_many else zeros


class SameCalls:
    """Numbers and times of the calls of one profile, which come a part at a time, and that others may match.

    What tells calls apart takes as much memory as the calls of one step, as a rule.

    Args:
        labels: of the two profiles.
        side: which of them the calls are of, see ``Labels.of``.
        levels: what counts as the same call, in order of preference.
    """

    def __init__(self, labels: Labels, side: int, levels: tuple[Level, ...] = IN_ORDER) -> None:
        self._labels, self._side, self._levels = labels, side, levels
        self._sums = [CallSums.nothing(4, 2) for _ in levels]

    def add(self, calls: Calls, wanted: npt.NDArray[np.bool_]) -> None:
        """Add calls of a part that holds whole steps.

        Args:
            calls: the calls.
            wanted: which of them may match; shape (calls,).
        """
        for place, level in enumerate(self._levels):
            columns = [column[wanted] for column in self._labels.of(self._side, calls, level)]
            times_ns = calls.duration_ns[wanted]
            self._sums[place] = self._sums[place].with_calls(columns, (np.ones(len(times_ns)), times_ns))

    def alone_ns(self, calls: Calls, wanted: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """Mean time of the calls that match each call of the other profile, NaN without a match; shape (calls,).

        Args:
            calls: calls of a part of the other profile that holds whole steps.
            wanted: which of them are matched; shape (calls,).
        """
        found = np.full(len(calls), np.nan)
        unmatched = np.flatnonzero(wanted)
        for sums, level in zip(self._sums, self._levels, strict=True):
            if not len(unmatched):
                break
            columns = self._labels.of(1 - self._side, calls, level)
            found[unmatched] = _means_ns(sums, [column[unmatched] for column in columns])
            unmatched = unmatched[np.isnan(found[unmatched])]
        return found


class CallSums(NamedTuple):
    """Calls added up by what tells them apart.

    Attributes:
        columns: that, e.g. as ``Labels.of`` gives it; shape (n,) each.
        sums: sums over the calls, e.g. their number and their time; shape (n,) each.
    """

    columns: tuple[Indices, ...]
    sums: tuple[npt.NDArray[np.float64], ...]

    @classmethod
    def nothing(cls, num_columns: int, num_sums: int) -> CallSums:
        """Of no calls."""
        return cls((np.empty(0, dtype=np.int64),) * num_columns, (np.empty(0),) * num_sums)

    def with_calls(self, columns: Sequence[Indices], values: Sequence[npt.NDArray[Any]]) -> CallSums:
        """These calls and some more, each with a value for each sum."""
        rows = [np.concatenate(parts) for parts in zip(self.columns, columns, strict=True)]
        number = numbered(rows)
        first = np.unique(number, return_index=True)[1]
        return CallSums(
            tuple([row[first] for row in rows]),
            tuple(
                [
                    np.bincount(number, weights=np.concatenate(parts)).astype(np.float64)
                    for parts in zip(self.sums, values, strict=True)
                ]
            ),
        )


def _means_ns(alone: CallSums, columns: Sequence[Indices]) -> npt.NDArray[np.float64]:
    """Mean time of the calls that are like each of some others, NaN where none is; shape (others,)."""
    number = numbered([np.concatenate(parts) for parts in zip(columns, alone.columns, strict=True)])
    others = len(columns[0])
    means_ns = np.full(int(number.max(initial=-1)) + 1, np.nan)
    calls, total_ns = alone.sums
    means_ns[number[others:]] = total_ns / calls
    return means_ns[number[:others]]


def turns_of(calls: Calls, label: Indices, shape: Indices) -> tuple[Indices, Indices]:
    """Each call's turn among the calls of its kind in its step, and how many of them there are; shape (n,) each.

    Args:
        calls: the calls.
        label: what is of one kind, beside the launch shape; shape (n,).
        shape: the launch shape, or the same number for all; shape (n,).
    """
    group = numbered([calls.step, label, shape])
    order = np.lexsort((calls.kernels.intervals.start_ns[calls.row], group))
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = group[order][1:] != group[order][:-1]
    first = np.flatnonzero(begins)
    number = np.cumsum(begins) - 1
    sizes = np.diff(np.append(first, len(order)))
    turn, of = np.empty(len(order), dtype=np.int64), np.empty(len(order), dtype=np.int64)
    turn[order] = np.arange(len(order)) - first[number]
    of[order] = sizes[number]
    return turn, of


def numbered(columns: list[Indices]) -> Indices:
    """A number for each row of the columns; equal rows get the same number."""
    numbers, size = np.zeros(len(columns[0]), dtype=np.int64), 1
    if not len(numbers):
        return numbers
    for column in columns:
        least, width = int(column.min()), int(column.max()) - int(column.min()) + 1
        if size * width >= 2**62:  # then they are numbered anew, from 0 on: each factor is at most the number of rows
            _, numbers = np.unique(numbers, return_inverse=True)
            _, column = np.unique(column, return_inverse=True)  # noqa: PLW2901
            size, least, width = int(numbers.max()) + 1, 0, int(column.max()) + 1
        numbers, size = numbers * width + (column - least), size * width
    _, numbers = np.unique(numbers, return_inverse=True)
    return numbers.astype(np.int64)


def _common(mine: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[Indices, Indices]:
    """Numbers for the texts of both sides; equal texts get the same number."""
    codes: dict[str, int] = {}
    return tuple(
        [  # type: ignore[return-value]
            np.array([codes.setdefault(text, len(codes)) for text in texts], dtype=np.int64) for texts in (mine, theirs)
        ]
    )
