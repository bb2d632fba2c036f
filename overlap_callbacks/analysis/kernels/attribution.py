"""Attributes the time that each kernel loses to the kernels that ran beside it.

Each overlapped kernel is compared with the same kernel of a sequential step, which ran alone. Its loss is divided among
the kinds of kernels that ran beside it, in proportion to the time that each did. Losses of kernels that ran beside
nothing, and kernels that only one of the modes has, get rows of their own. So the losses of the compute kernels add up
to T_comp,ov - T_comp,iso of equation 4, and the losses of the collectives to their own difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Union

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.distinct import distinct_values
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.analysis.results.kernel_times import ALONE, UNMATCHED, PairTime

# One number per call, or the same number for all.
_Amount = Union[float, npt.NDArray[np.float64]]


class Calls(msgspec.Struct, frozen=True):
    """Calls in columns. On a device, a call is a row of a ``KernelTable``; on CPU, all pieces of one operator call.

    Attributes:
        kernels: the table.
        row: first row of each call; shape (n,).
        call: index of the call that each row of ``kernels`` belongs to; shape (len(kernels),).
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
) -> Match:
    """Find the same call elsewhere for each call; if several steps have it, their mean counts.

    Args:
        calls: the calls to be matched.
        wanted: which of them are matched; shape (calls,).
        partners: the calls to match with: ``calls`` itself, or those of another profile.
        others: which of the partners may match; shape (partners,).
        levels: what counts as the same call, in order of preference.
    """
    alone_ns = np.full(len(calls), np.nan)
    used = np.zeros(len(partners), dtype=bool)
    unmatched, candidates = np.flatnonzero(wanted), np.flatnonzero(others)
    labels = _Labels(calls, partners)
    for level in levels:
        if not len(unmatched) or not len(candidates):
            break
        mine, theirs = labels.keys(unmatched, candidates, level)
        size = int(max(mine.max(), theirs.max())) + 1
        count = np.bincount(theirs, minlength=size)
        total_ns = np.bincount(theirs, weights=partners.duration_ns[candidates], minlength=size)
        matched = count[mine] > 0
        alone_ns[unmatched[matched]] = (total_ns / np.maximum(count, 1))[mine[matched]]
        is_key_matched = np.zeros(size, dtype=bool)
        is_key_matched[mine[matched]] = True
        used[candidates[is_key_matched[theirs]]] = True
        unmatched = unmatched[~matched]
    return Match(alone_ns, used)


class _Labels:
    """Common numbers for the names and launch shapes of two profiles, which may be the same one."""

    def __init__(self, calls: Calls, partners: Calls) -> None:
        self.sides = (calls, partners)
        self._names = _common(calls.kernels.names, partners.kernels.names)
        self._shapes = _common(calls.kernels.shapes, partners.kernels.shapes)
        self._collectives = _common(calls.kernels.collectives, partners.kernels.collectives)
        self._num_kinds = len({*calls.kernels.collectives, *partners.kernels.collectives}) + 1

    def keys(self, calls: Indices, partners: Indices, level: Level) -> tuple[Indices, Indices]:
        """A number for each of the given calls and partners, equal for those that are the same call."""
        sides = []
        of_all = self._of_all(0, level)
        for side, rows in enumerate((calls, partners)):
            if side and self.sides[1] is not self.sides[0]:
                of_all = self._of_all(1, level)
            label, shape, turn, of = (column[rows] for column in of_all)
            sides.append((label, shape, turn, of if level.equally_many else np.zeros_like(of)))
        keys = numbered([np.concatenate(parts) for parts in zip(*sides, strict=True)])
        return keys[: len(calls)], keys[len(calls) :]

    def _of_all(self, side: int, level: Level) -> tuple[Indices, Indices, Indices, Indices]:
        """What tells all calls of a side apart: name, launch shape, turn in the step, and how many turns there are."""
        label, shape = self._kinds(side, level)
        # Turns are counted among all calls of the step, whether they were matched before or not.
        zeros = np.zeros_like(label)
        return label, shape, *(turns_of(self.sides[side], label, shape) if level.in_turn else (zeros, zeros))

    def _kinds(self, side: int, level: Level) -> tuple[Indices, Indices]:
        calls = self.sides[side]
        # One NCCL kernel may implement several kinds of collectives; those are not the same call.
        kinds = np.append(self._collectives[side], -1)[calls.kernels.collective[calls.row]]
        label = self._names[side][calls.kernels.name[calls.row]] * self._num_kinds + kinds + 1
        if not level.launch_shape:
            return label, np.zeros_like(label)
        return label, self._shapes[side][calls.kernels.shape[calls.row]]


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


class Side(msgspec.Struct, frozen=True):
    """The calls of one mode.

    Attributes:
        calls: all calls of a profile.
        wanted: which of them are of the mode; shape (calls,).
        num_steps: number of the mode's steps.
    """

    calls: Calls
    wanted: npt.NDArray[np.bool_]
    num_steps: int


def pair_times(overlapped: Side, sequential: Side, alone_ns: npt.NDArray[np.float64]) -> tuple[PairTime, ...]:
    """Time and loss of each family beside each kind of collective, and of each kind of collective beside each family.

    Args:
        overlapped: the calls of overlapped steps.
        sequential: the calls of sequential steps.
        alone_ns: time of the same call in sequential steps, NaN if it has no match, see ``match``; shape (calls,).

    Returns:
        The pairs, per step, those that lose most time first.
    """
    beside = labels_of(overlapped.calls.kernels)
    pairs = [
        pair
        for victims, partners in ((Kind.COMPUTE, Kind.COMMUNICATION), (Kind.COMMUNICATION, Kind.COMPUTE))
        for pair in _pairs(overlapped, sequential, alone_ns, victims, partners, beside)
    ]
    return tuple(sorted(pairs, key=lambda pair: (-pair.lost_ms, -pair.time_ms)))


def dimension_pair_times(
    overlapped: Side,
    sequential: Side,
    alone_ns: npt.NDArray[np.float64],
    dimensions: tuple[Indices, tuple[str, ...]],
) -> tuple[PairTime, ...]:
    """Time and loss of each family of compute kernels beside the communication of each dimension of parallelism.

    Args:
        overlapped: the calls of overlapped steps.
        sequential: the calls of sequential steps.
        alone_ns: as in ``pair_times``.
        dimensions: of each row of the table, from ``by_dimension.dimensions_of_rows``.

    Returns:
        The pairs, per step, those that lose most time first; without kernels that ran beside no communication, and
        without those that have no match.
    """
    found = _pairs(overlapped, sequential, alone_ns, Kind.COMPUTE, Kind.COMMUNICATION, dimensions)
    pairs = [pair for pair in found if pair.beside not in (ALONE, UNMATCHED)]
    return tuple(sorted(pairs, key=lambda pair: (-pair.lost_ms, -pair.time_ms)))


def _pairs(
    overlapped: Side,
    sequential: Side,
    alone_ns: npt.NDArray[np.float64],
    victims: Kind,
    partners: Kind,
    beside_labels: tuple[Indices, tuple[str, ...]],
) -> Iterator[PairTime]:
    calls, num_steps = overlapped.calls, overlapped.num_steps
    partner_label, partner_names = beside_labels
    label, labels = labels_of(calls.kernels)
    rows = np.flatnonzero(overlapped.wanted & (calls.kind == victims))
    group = label[calls.row[rows]]
    own, alone = calls.duration_ns[rows].astype(float), alone_ns[rows]  # ns
    matched = np.isfinite(alone)
    kinds = [kind for kind in distinct_values(partner_label[calls.kernels.kind == partners]).tolist() if kind >= 0]
    beside = np.zeros((len(rows), len(kinds)))
    for column, kind in enumerate(kinds):
        partner_rows = (calls.kernels.kind == partners) & (partner_label == kind)
        beside[:, column] = calls.covered_ns(calls.kernels.intervals[partner_rows])[rows]
    total = beside.sum(axis=1)
    share = beside / np.where(total > 0, total, 1.0)[:, None]

    def per_step(picked: npt.NDArray[np.bool_], amount: _Amount) -> npt.NDArray[np.float64]:
        weights = np.broadcast_to(amount, len(rows))[picked]
        return np.bincount(group[picked], weights=weights, minlength=len(labels)) / num_steps

    def of(partner: str, picked: npt.NDArray[np.bool_], weight: _Amount, beside_ns: _Amount) -> Iterator[PairTime]:
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
        yield from of(partner_names[kind], matched & (beside[:, column] > 0), share[:, column], beside[:, column])
    yield from of(ALONE, matched & (total == 0), 1.0, 0.0)

    # Calls without a match get one row per label, so that all rows add up to the difference in time.
    def by_label(picked: npt.NDArray[np.bool_], amount: _Amount, unit: float = 1e6) -> dict[str, float]:
        return dict(zip(labels, (per_step(picked, amount) / unit).tolist(), strict=True))

    time_ms, beside_ms = by_label(~matched, own), by_label(~matched, total)
    count = by_label(~matched, 1.0, unit=1.0)
    matched_alone_ms = by_label(matched, np.where(matched, alone, 0.0))
    all_alone_ms = _time_by_label(sequential, victims)
    for name in dict.fromkeys((*labels, *all_alone_ms)):
        unmatched_alone_ms = all_alone_ms.get(name, 0.0) - matched_alone_ms.get(name, 0.0)
        if count.get(name) or abs(unmatched_alone_ms) > _ROUNDING_MS:
            yield PairTime(
                victim=name,
                communication=victims is Kind.COMMUNICATION,
                beside=UNMATCHED,
                calls=count.get(name, 0.0),
                beside_ms=beside_ms.get(name, 0.0),
                time_ms=time_ms.get(name, 0.0),
                alone_ms=unmatched_alone_ms,
            )


# One nanosecond; smaller differences of sums are rounding errors.
_ROUNDING_MS = 1e-6


def _time_by_label(side: Side, kind: Kind) -> dict[str, float]:
    """Time per step of each family, or of each kind of collective, in milliseconds."""
    label, labels = labels_of(side.calls.kernels)
    rows = np.flatnonzero(side.wanted & (side.calls.kind == kind))
    time_ns = np.bincount(label[side.calls.row[rows]], weights=side.calls.duration_ns[rows], minlength=len(labels))
    return {labels[i]: float(time_ns[i]) / side.num_steps / 1e6 for i in np.flatnonzero(time_ns)}


def labels_of(kernels: KernelTable) -> tuple[Indices, tuple[str, ...]]:
    """The label of each row, an index into the labels that come with it: its kind of collective, or its family."""
    codes: dict[str, int] = {}
    by_name = np.array(
        [codes.setdefault(name_rules.family_of(name), len(codes)) for name in kernels.names], dtype=np.int64
    )
    by_collective = np.array([codes.setdefault(name, len(codes)) for name in kernels.collectives], dtype=np.int64)
    label = by_name[kernels.name] if len(by_name) else np.empty(0, dtype=np.int64)
    communicates = kernels.collective >= 0
    label[communicates] = by_collective[kernels.collective[communicates]]
    return label, tuple(codes)


class Pairs(NamedTuple):
    """What runs beside what in one profile.

    Attributes:
        by_kind: see ``pair_times``.
        by_dimension: see ``dimension_pair_times``; empty where dimensions are not known.
    """

    by_kind: tuple[PairTime, ...] = ()
    by_dimension: tuple[PairTime, ...] = ()


def pair_times_of(
    kernels: KernelTable,
    overlapped: Indices,
    sequential: Indices,
    dimensions: tuple[Indices, tuple[str, ...]] | None = None,
) -> Pairs:
    """Time and loss of the kernels of one profile by what ran beside them.

    Args:
        kernels: the whole profile.
        overlapped: indices of the overlapped profiled steps.
        sequential: indices of the sequential profiled steps.
        dimensions: of each row, from ``by_dimension.dimensions_of_rows``; None if they are not known.
    """
    if not len(overlapped) or not len(sequential):
        return Pairs()
    calls = Calls.of(kernels)
    ov, seq = (Side(calls, np.isin(calls.step, steps), len(steps)) for steps in (overlapped, sequential))
    alone_ns = match(calls, ov.wanted, calls, seq.wanted).alone_ns
    by_dimension = () if dimensions is None else dimension_pair_times(ov, seq, alone_ns, dimensions)
    return Pairs(pair_times(ov, seq, alone_ns), by_dimension)
