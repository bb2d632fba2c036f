"""Which kernels lose time beside which: a loss in kernel time, shared out over what ran beside each kernel.

Each overlapped kernel is compared with the same kernel of a sequential step, which ran alone. What it took longer is
shared among the kinds of kernels that ran beside it, in proportion to how long each did. What no company explains, and
what only one of the modes has, stand in rows of their own. So the losses of the compute kernels add up to
T_comp,ov - T_comp,iso of equation 4, and those of the collectives to their own difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.analysis.results.window import UNMATCHED, PairTime

# Beside nothing, and nothing to compare with.
ALONE = "(nothing)"


@dataclass(frozen=True)
class Calls:
    """Calls in columns: on a device a row of ``KernelTable`` each, on CPU the pieces of one operator together.

    Attributes:
        kernels: of which these are calls.
        row: first row of each; shape (n,).
        call: index into these calls of each row of ``kernels``; shape (len(kernels),).
        duration_ns: its own time; shape (n,).
    """

    kernels: KernelTable
    row: Indices
    call: Indices
    duration_ns: Indices

    @classmethod
    def of(cls, kernels: KernelTable) -> Calls:
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


class Level(NamedTuple):
    """What counts as the same call: always the name, and what else is true here."""

    launch_shape: bool
    in_turn: bool  # the k-th of its kind in its step
    equally_many: bool  # in both steps


# The second, since some grids vary with the data; the third pairs what there is of both, and leaves the rest alone.
IN_TURN = (Level(True, True, True), Level(False, True, True))
IN_ORDER = (*IN_TURN, Level(True, True, False))
SAME_LAUNCH = (Level(True, False, False),)


def match(
    calls: Calls,
    wanted: npt.NDArray[np.bool_],
    partners: Calls,
    others: npt.NDArray[np.bool_],
    levels: tuple[Level, ...] = IN_ORDER,
) -> Match:
    """Find for each call the same call elsewhere; where several steps have it, their mean.

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
    for level in levels:
        if not len(todo) or not len(there):
            break
        mine, theirs = both.keys(todo, there, level)
        size = int(max(mine.max(), theirs.max())) + 1
        count = np.bincount(theirs, minlength=size)
        total = np.bincount(theirs, weights=partners.duration_ns[there], minlength=size)
        found = count[mine] > 0
        alone[todo[found]] = (total / np.maximum(count, 1))[mine[found]]
        hit = np.zeros(size, dtype=bool)
        hit[mine[found]] = True
        used[there[hit[theirs]]] = True
        todo = todo[~found]
    return Match(alone, used)


class _Labels:
    """Common numbers for the names and launch shapes of two profiles, which may be one."""

    def __init__(self, calls: Calls, partners: Calls) -> None:
        self.sides = (calls, partners)
        self._names = _common(calls.kernels.names, partners.kernels.names)
        self._shapes = _common(calls.kernels.shapes, partners.kernels.shapes)
        self._collectives = _common(calls.kernels.collectives, partners.kernels.collectives)
        self._num_kinds = len({*calls.kernels.collectives, *partners.kernels.collectives}) + 1

    def keys(self, todo: Indices, there: Indices, level: Level) -> tuple[Indices, Indices]:
        """A number for each call of both sides, equal for what is the same."""
        sides = []
        for side, rows in enumerate((todo, there)):
            label, shape = self._kinds(side, level)
            nothing = np.zeros(len(rows), dtype=np.int64)
            # Turns are counted among all calls of the step, matched before or not.
            turn, of = self._turns(side, label, shape) if level.in_turn else (nothing, nothing)
            if level.in_turn:
                turn, of = turn[rows], of[rows] if level.equally_many else nothing
            sides.append((label[rows], shape[rows], turn, of))
        keys = _numbered([np.concatenate(parts) for parts in zip(*sides, strict=True)])
        return keys[: len(todo)], keys[len(todo) :]

    def _kinds(self, side: int, level: Level) -> tuple[Indices, Indices]:
        calls = self.sides[side]
        # One kernel of NCCL may serve several kinds of collectives: they are not the same call.
        kinds = np.append(self._collectives[side], -1)[calls.kernels.collective[calls.row]]
        label = self._names[side][calls.kernels.name[calls.row]] * self._num_kinds + kinds + 1
        if not level.launch_shape:
            return label, np.zeros_like(label)
        return label, self._shapes[side][calls.kernels.shape[calls.row]]

    def _turns(self, side: int, label: Indices, shape: Indices) -> tuple[Indices, Indices]:
        """Of each call, which of its kind it is in its step, and of how many."""
        calls = self.sides[side]
        group = _numbered([calls.step, label, shape])
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


@dataclass(frozen=True)
class Side:
    """The calls of one mode that count.

    Attributes:
        calls: of a profile.
        wanted: which of them count; shape (calls,).
        num_steps: steps that those are from.
    """

    calls: Calls
    wanted: npt.NDArray[np.bool_]
    num_steps: int


def pair_times(overlapped: Side, sequential: Side, alone_ns: npt.NDArray[np.float64]) -> tuple[PairTime, ...]:
    """Time and loss of each family beside each kind of collective, and of each collective beside each family.

    Args:
        overlapped: the calls that share the device.
        sequential: the calls that they were matched with.
        alone_ns: what ``match`` found: the time of the same call alone, NaN where it has none; shape (calls,).

    Returns:
        The pairs, per step, those that lose most time first.
    """
    pairs = [
        pair
        for victims, partners in ((Kind.COMPUTE, Kind.COMMUNICATION), (Kind.COMMUNICATION, Kind.COMPUTE))
        for pair in _pairs(overlapped, sequential, alone_ns, victims, partners)
    ]
    return tuple(sorted(pairs, key=lambda pair: (-pair.lost_ms, -pair.time_ms)))


def _pairs(
    overlapped: Side, sequential: Side, alone_ns: npt.NDArray[np.float64], victims: Kind, partners: Kind
) -> Iterator[PairTime]:
    calls, num_steps = overlapped.calls, overlapped.num_steps
    label, labels = labels_of(calls.kernels)
    rows = np.flatnonzero(overlapped.wanted & (calls.kind == victims))
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

    def per_step(picked: npt.NDArray[np.bool_], amount: Any) -> npt.NDArray[np.float64]:
        weights = np.broadcast_to(amount, len(rows))[picked]
        return np.bincount(group[picked], weights=weights, minlength=len(labels)) / num_steps

    def of(partner: str, picked: npt.NDArray[np.bool_], weight: Any, beside_ns: Any) -> Iterator[PairTime]:
        counts = per_step(picked, 1.0)
        for number in np.flatnonzero(counts).tolist():
            yield PairTime(
                victim=labels[number],
                communication=victims is Kind.COMMUNICATION,
                beside=partner,
                calls=float(counts[number]),
                beside_ms=float(per_step(picked, beside_ns)[number]) / 1e6,
                time_ms=float(per_step(picked, weight * own)[number]) / 1e6,
                alone_ms=float(per_step(picked, weight * np.where(matched, alone, 0.0))[number]) / 1e6,
            )

    for column, kind in enumerate(kinds):
        yield from of(labels[kind], matched & (beside[:, column] > 0), share[:, column], beside[:, column])
    yield from of(ALONE, matched & (total == 0), 1.0, 0.0)

    # What has no partner on either side stands beside each other, so that all rows add up to the difference in time.
    time = dict(zip(labels, (per_step(~matched, own) / 1e6).tolist(), strict=True))
    count = dict(zip(labels, per_step(~matched, 1.0).tolist(), strict=True))
    cover = dict(zip(labels, (per_step(~matched, total) / 1e6).tolist(), strict=True))
    paired = dict(zip(labels, (per_step(matched, np.where(matched, alone, 0.0)) / 1e6).tolist(), strict=True))
    in_all = _time_by_label(sequential, victims)
    for name in dict.fromkeys((*labels, *in_all)):
        rest = in_all.get(name, 0.0) - paired.get(name, 0.0)
        if count.get(name) or abs(rest) > _NOTHING_MS:
            yield PairTime(
                victim=name,
                communication=victims is Kind.COMMUNICATION,
                beside=UNMATCHED,
                calls=count.get(name, 0.0),
                beside_ms=cover.get(name, 0.0),
                time_ms=time.get(name, 0.0),
                alone_ms=rest,
            )


# Less than a nanosecond: what is left of sums of floating point.
_NOTHING_MS = 1e-6


def _time_by_label(side: Side, kind: Kind) -> dict[str, float]:
    """Time per step of each family, or kind of collective, ms."""
    label, labels = labels_of(side.calls.kernels)
    rows = np.flatnonzero(side.wanted & (side.calls.kind == kind))
    time_ns = np.bincount(label[side.calls.row[rows]], weights=side.calls.duration_ns[rows], minlength=len(labels))
    return {labels[i]: float(time_ns[i]) / side.num_steps / 1e6 for i in np.flatnonzero(time_ns)}


def labels_of(kernels: KernelTable) -> tuple[Indices, tuple[str, ...]]:
    """The kind of collective, or the family, of each row."""
    codes: dict[str, int] = {}
    by_name = np.array(
        [codes.setdefault(name_rules.family_of(name), len(codes)) for name in kernels.names], dtype=np.int64
    )
    by_collective = np.array([codes.setdefault(name, len(codes)) for name in kernels.collectives], dtype=np.int64)
    found = by_name[kernels.name] if len(by_name) else np.empty(0, dtype=np.int64)
    communicates = kernels.collective >= 0
    found[communicates] = by_collective[kernels.collective[communicates]]
    return found, tuple(codes)


def pair_times_of(kernels: KernelTable, overlapped: Indices, sequential: Indices) -> tuple[PairTime, ...]:
    """What kernels lose beside each other in the overlapped steps, against the same in the sequential ones."""
    if not len(overlapped) or not len(sequential):
        return ()
    calls = Calls.of(kernels)
    ov, seq = (Side(calls, np.isin(calls.step, steps), len(steps)) for steps in (overlapped, sequential))
    return pair_times(ov, seq, match(calls, ov.wanted, calls, seq.wanted).alone_ns)
