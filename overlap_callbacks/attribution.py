"""Which kernels lose time beside which: a loss in kernel time, shared out over what ran beside each kernel.

Each overlapped kernel is compared with the same kernel of a sequential step, which ran alone. What it took longer is
shared among the kinds of kernels that ran beside it, in proportion to how long each did. So the losses of the compute
kernels add up to T_comp,ov - T_comp,iso of equation 4, whatever the table is sorted or grouped by; what no partner
explains stands in rows of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_callbacks import names
from overlap_callbacks.kernels import Indices, Kernels, Kind
from overlap_callbacks.samples import PairTime
from overlap_callbacks.timeline import Intervals

# Beside nothing, and nothing to compare with.
ALONE = "(nothing)"
UNMATCHED = "(not matched)"


@dataclass(frozen=True)
class Calls:
    """Calls in columns: on a device a row of ``Kernels`` each, on CPU the pieces of one operator together.

    Attributes:
        kernels: of which these are calls.
        row: first row of each; shape (n,).
        call: index into these calls of each row of ``kernels``; shape (len(kernels),).
        duration_ns: its own time; shape (n,).
    """

    kernels: Kernels
    row: Indices
    call: Indices
    duration_ns: Indices

    @classmethod
    def of(cls, kernels: Kernels) -> Calls:
        _, row, call = np.unique(kernels.call, return_index=True, return_inverse=True)
        duration = np.bincount(call, weights=kernels.intervals.durations_ns, minlength=len(row)).astype(np.int64)
        return cls(kernels, row.astype(np.int64), call.astype(np.int64), duration)

    def __len__(self) -> int:
        return len(self.row)

    @property
    def step(self) -> Indices:
        return self.kernels.step[self.row]

    @property
    def kind(self) -> npt.NDArray[np.uint8]:
        return self.kernels.kind[self.row]

    def covered_ns(self, by: Intervals) -> Indices:
        """How much of each call's own time ``by`` covers; shape (n,)."""
        covered = self.kernels.intervals.covered_ns(by)
        return np.bincount(self.call, weights=covered, minlength=len(self)).astype(np.int64)


@dataclass(frozen=True)
class Match:
    """Overlapped calls and the same calls of sequential steps.

    Attributes:
        alone_ns: mean time of the same call in the sequential steps, NaN for a call that matches none; shape (calls,).
        used: whether a sequential call served as a partner; shape (calls of the sequential profile,).
    """

    alone_ns: npt.NDArray[np.float64]
    used: npt.NDArray[np.bool_]


# What counts as the same call, as (of the same launch shape, in the same turn). In turn: the k-th of its name and
# launch shape in its step, where the steps have equally many; failing that the k-th of its name, since some grids vary
# with the data. Same launch: any of its name and launch shape.
IN_TURN = ((True, True), (False, True))
SAME_LAUNCH = ((True, False),)


def match(
    calls: Calls,
    wanted: npt.NDArray[np.bool_],
    partners: Calls,
    others: npt.NDArray[np.bool_],
    levels: tuple[tuple[bool, bool], ...] = IN_TURN + SAME_LAUNCH,
) -> Match:
    """Find for each call the same call elsewhere.

    Args:
        calls: the calls to be matched.
        wanted: which of them count; shape (calls,).
        partners: the calls to look among: ``calls`` itself, or those of another profile.
        others: which of them count; shape (partners,).
        levels: what counts as the same, in order of preference.
    """
    alone = np.full(len(calls), np.nan)
    used = np.zeros(len(partners), dtype=bool)
    todo, there = np.flatnonzero(wanted), np.flatnonzero(others)
    both = _Labels(calls, partners)
    for with_shape, in_turn in levels:
        if not len(todo) or not len(there):
            break
        mine, theirs = both.keys(todo, there, with_shape=with_shape, in_turn=in_turn)
        size = int(max(mine.max(initial=-1), theirs.max(initial=-1))) + 1
        fit = theirs >= 0
        count = np.bincount(theirs[fit], minlength=size)
        total = np.bincount(theirs[fit], weights=partners.duration_ns[there[fit]], minlength=size)
        found = (mine >= 0) & (count[np.maximum(mine, 0)] > 0)
        alone[todo[found]] = (total / np.maximum(count, 1))[mine[found]]
        hit = np.zeros(size, dtype=bool)
        hit[mine[found]] = True
        used[there[fit & hit[np.maximum(theirs, 0)]]] = True
        todo = todo[~found]
    return Match(alone, used)


class _Labels:
    """Common numbers for the names and launch shapes of two profiles, which may be one."""

    def __init__(self, calls: Calls, partners: Calls) -> None:
        self.sides = (calls, partners)
        self._names = _common(calls.kernels.names, partners.kernels.names)
        self._shapes = _common(calls.kernels.shapes, partners.kernels.shapes)

    def keys(self, todo: Indices, there: Indices, *, with_shape: bool, in_turn: bool) -> tuple[Indices, Indices]:
        """A number for each call of both sides, equal for what is the same; -1 where that cannot be told."""
        sides = []
        for side, (calls, rows) in enumerate(zip(self.sides, (todo, there), strict=True)):
            kernels = calls.kernels
            label = self._names[side][kernels.name[calls.row[rows]]]
            shape = self._shapes[side][kernels.shape[calls.row[rows]]] if with_shape else np.zeros_like(label)
            turn, of = np.zeros_like(label), np.zeros_like(label)
            if in_turn:
                # Turns are counted among all calls of the step, matched before or not.
                turn, of = self._turns(side, with_shape)
                turn, of = turn[rows], of[rows]
            sides.append((label, shape, turn, of))
        keys = _numbered([np.concatenate(parts) for parts in zip(*sides, strict=True)])
        return keys[: len(todo)], keys[len(todo) :]

    def _turns(self, side: int, with_shape: bool) -> tuple[Indices, Indices]:
        """Of each call, which of its name (and launch shape) it is in its step, and of how many."""
        calls = self.sides[side]
        kernels = calls.kernels
        label = self._names[side][kernels.name[calls.row]]
        shape = self._shapes[side][kernels.shape[calls.row]] if with_shape else np.zeros_like(label)
        start = kernels.intervals.start_ns[calls.row]
        group = _numbered([calls.step, label, shape])
        order = np.lexsort((start, group))
        begins = np.ones(len(order), dtype=bool)
        begins[1:] = group[order][1:] != group[order][:-1]
        first = np.flatnonzero(begins)
        number = np.cumsum(begins) - 1
        sizes = np.diff(np.append(first, len(order)))
        turn, of = np.empty(len(order), dtype=np.int64), np.empty(len(order), dtype=np.int64)
        turn[order] = np.arange(len(order)) - first[number]
        of[order] = sizes[number]
        return turn, of


def _numbered(columns: list[Indices]) -> Indices:
    """A number for each row of the columns, the same for equal rows."""
    numbers = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        _, codes = np.unique(column, return_inverse=True)
        # The product stays far below the largest integer: both factors are at most the number of rows.
        _, numbers = np.unique(numbers * (int(codes.max(initial=0)) + 1) + codes, return_inverse=True)
    return numbers.astype(np.int64)


def _common(mine: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[Indices, Indices]:
    codes: dict[str, int] = {}
    return tuple(  # type: ignore[return-value]
        np.array([codes.setdefault(text, len(codes)) for text in texts], dtype=np.int64) for texts in (mine, theirs)
    )


def pair_times(
    calls: Calls, wanted: npt.NDArray[np.bool_], alone_ns: npt.NDArray[np.float64], num_steps: int
) -> tuple[PairTime, ...]:
    """Time and loss of each family beside each kind of collective, and of each collective beside each family.

    Args:
        calls: of a profile.
        wanted: whether a call counts; shape (n,).
        alone_ns: time of the same call alone, NaN where that is not known; shape (n,).
        num_steps: steps that the wanted calls are from; figures are per step.

    Returns:
        The pairs, those that lose most time first.
    """
    pairs = [
        pair
        for victims, partners in ((Kind.COMPUTE, Kind.COMMUNICATION), (Kind.COMMUNICATION, Kind.COMPUTE))
        for pair in _pairs(calls, wanted, alone_ns, num_steps, victims, partners)
    ]
    return tuple(sorted(pairs, key=lambda pair: (-(pair.lost_ms or 0.0), -pair.time_ms)))


def _pairs(
    calls: Calls,
    wanted: npt.NDArray[np.bool_],
    alone_ns: npt.NDArray[np.float64],
    num_steps: int,
    victims: Kind,
    partners: Kind,
) -> Iterator[PairTime]:
    label, labels = labels_of(calls.kernels)
    rows = np.flatnonzero(wanted & (calls.kind == victims))
    group = label[calls.row[rows]]
    own, alone = calls.duration_ns[rows].astype(float), alone_ns[rows]
    matched = np.isfinite(alone)
    kinds = np.unique(label[calls.kernels.kind == partners]).tolist()
    beside = np.zeros((len(rows), len(kinds)))
    for column, kind in enumerate(kinds):
        partner_rows = (calls.kernels.kind == partners) & (label == kind)
        beside[:, column] = calls.covered_ns(calls.kernels.intervals[partner_rows])[rows]
    total = beside.sum(axis=1)
    share = beside / np.where(total > 0, total, 1.0)[:, None]

    def of(partner: str, picked: npt.NDArray[np.bool_], weight: Any, beside_ns: Any, known: bool) -> Iterator[PairTime]:
        def per_step(amount: Any) -> npt.NDArray[np.float64]:
            return np.bincount(group[picked], weights=(amount * picked)[picked], minlength=len(labels)) / num_steps

        counts, times, besides = per_step(1.0), per_step(weight * own) / 1e6, per_step(beside_ns) / 1e6
        alones = per_step(weight * np.where(matched, alone, 0.0)) / 1e6
        for number in np.flatnonzero(counts).tolist():
            yield PairTime(
                victim=labels[number],
                communication=victims is Kind.COMMUNICATION,
                beside=partner,
                calls=float(counts[number]),
                beside_ms=float(besides[number]),
                time_ms=float(times[number]),
                alone_ms=float(alones[number]) if known else None,
            )

    for column, kind in enumerate(kinds):
        yield from of(labels[kind], matched & (beside[:, column] > 0), share[:, column], beside[:, column], True)
    yield from of(ALONE, matched & (total == 0), 1.0, 0.0, True)
    yield from of(UNMATCHED, ~matched, 1.0, total, False)


def labels_of(kernels: Kernels) -> tuple[Indices, tuple[str, ...]]:
    """The kind of collective, or the family, of each row."""
    codes: dict[str, int] = {}
    by_name = np.array([codes.setdefault(names.family_of(name), len(codes)) for name in kernels.names], dtype=np.int64)
    by_collective = np.array([codes.setdefault(name, len(codes)) for name in kernels.collectives], dtype=np.int64)
    found = by_name[kernels.name] if len(by_name) else np.empty(0, dtype=np.int64)
    communicates = kernels.collective >= 0
    found[communicates] = by_collective[kernels.collective[communicates]]
    return found, tuple(codes)
