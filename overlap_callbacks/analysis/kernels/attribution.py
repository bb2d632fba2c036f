"""Attributes the time that each kernel loses to the kernels that ran concurrently.

Each overlapped kernel is compared with the same kernel of a sequential step. Its loss is divided among the kinds of
kernels that ran concurrently, in proportion to their time. Losses of kernels that ran alone, and kernels that only one
mode has, get rows of their own. So the losses of compute kernels add up to T_comp,ov - T_comp,iso of equation 4, and
those of collectives to their own difference.

Copies count like kernels, by direction, in both roles. Sequential steps do not order them. So what ran beside the same
share of a call there too explains no loss, and is taken off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Union

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.calls import (
    ALONE_SHARE,
    UNORDERED,
    Calls,
    beside_ns,
    means_elsewhere,
    unordered_in,
)
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind, StringTable, directions_of
from overlap_callbacks.analysis.results.kernel_times import ALONE, UNMATCHED, PairTime

_Floats = npt.NDArray[np.float64]
_Marks = npt.NDArray[np.bool_]
# One number per call, or the same number for all.
_Amount = Union[float, _Floats]
_Before = Mapping[str, _Floats]
_NOTHING: _Before = {}

# Smaller differences of sums are rounding errors.
_ROUNDING_NS = 1.0
_BOTH = Kind.COMPUTE, Kind.COMMUNICATION
# All calls that have a match, among the partners.
_MATCHED = "(matched)"


class PairSums:
    """Time and loss of compute families by kind of collective, and the other way round, over parts of two profiles.

    Both by copies too, and copies by both.
    """

    def __init__(self, kernels: KernelTable) -> None:
        _, labels = labels_of(kernels)
        compute, communication = (
            VictimSums(kernels, victims, (partners, Kind.COPY), labels) for victims, partners in (_BOTH, _BOTH[::-1])
        )
        self._copies = VictimSums(kernels, Kind.COPY, _BOTH, UNORDERED[-2:])
        self._sums = compute, communication

    def add(
        self, calls: Calls, wanted: _Marks, alone_ns: _Floats, weight: _Amount = 1.0, before_ns: _Before = _NOTHING
    ) -> None:
        """Add calls of overlapped steps, from a part of a profile at whose bounds nothing runs.

        Args:
            calls: the calls.
            wanted: which of them count; shape (calls,).
            alone_ns: time of the same call in sequential steps, NaN without a match; shape (calls,).
            weight: of each call's step in the mean of its mode, over that of a plain mean; shape (calls,), or one
                number.
            before_ns: how long each of ``UNORDERED`` ran beside the same call in sequential steps; shape (calls,)
                each.
        """
        partner_label, _ = labels_of(calls.kernels)
        for sums in self._sums:
            sums.add(calls, wanted, alone_ns, partner_label, weight, before_ns)
        self._copies.add(calls, wanted, alone_ns, calls.kernels.kind.astype(np.int64), weight, before_ns)

    def add_alone(self, calls: Calls, wanted: _Marks, weight: _Amount = 1.0) -> None:
        """Add calls of sequential steps; the arguments are those of ``add``."""
        for sums in self._sums:
            sums.add_alone(calls, wanted, weight)

    def pairs(self, overlapped_steps: int, sequential_steps: int) -> tuple[PairTime, ...]:
        """The pairs, per step, those that lose most time first."""
        of_copies = _beside_any(self._copies.pairs(overlapped_steps, sequential_steps))
        of_kernels = [pair for sums in self._sums for pair in sums.pairs(overlapped_steps, sequential_steps)]
        return _dearest_first([*of_kernels, *of_copies])


class VictimSums:
    """Time and loss of the kernels of one kind by what ran concurrently, added up over the parts of a profile.

    ``partner_names`` are what the labels of the partners stand for.
    """

    def __init__(
        self, kernels: KernelTable, victims: Kind, partners: tuple[Kind, ...], partner_names: tuple[str, ...]
    ) -> None:
        self._victims, self._partners, self._partner_names = victims, partners, partner_names
        _, self._labels = labels_of(kernels)
        # What may run beside the victims in sequential steps too, by its label.
        unordered = UNORDERED[-2:] if victims is Kind.COPY else name_rules.COPIES
        self._unordered = {label: name for label, name in enumerate(partner_names) if name in unordered}
        # Of each partner: calls, and the times with it, overlapped and alone, in nanoseconds; shape (4, labels).
        self._sums: dict[str, _Floats] = defaultdict(lambda: np.zeros((4, len(self._labels))))
        self._sequential_ns: dict[str, float] = defaultdict(float)

    def add(
        self, calls: Calls, wanted: _Marks, alone_ns: _Floats, partner_label: Indices, weight: _Amount = 1.0,
        before_ns: _Before = _NOTHING,
    ) -> None:  # fmt: skip
        """Add calls; the arguments are those of ``PairSums.add``, and the label of each row, -1 for none."""
        label, _ = labels_of(calls.kernels)
        rows = np.flatnonzero(wanted & (calls.kind == self._victims) & (label[calls.row] >= 0))
        group = label[calls.row[rows]]
        weight = np.broadcast_to(weight, len(calls))[rows]
        own, alone = calls.duration_ns[rows].astype(float), alone_ns[rows]
        matched = np.isfinite(alone)
        alone = np.where(matched, alone, 0.0)
        is_partner = np.isin(calls.kernels.kind, self._partners) & (partner_label >= 0)
        kinds = distinct_values(partner_label[is_partner]).tolist()

        def covered_ns(of: Sequence[int]) -> _Floats:
            rows_of = is_partner & np.isin(partner_label, of)
            return calls.covered_ns(calls.kernels.intervals[rows_of])[rows].astype(float)

        concurrent = np.zeros((len(rows), len(kinds)))
        for column, kind in enumerate(kinds):
            concurrent[:, column] = covered_ns([kind])
        unordered = [column for column, kind in enumerate(kinds) if kind in self._unordered]
        there_too = concurrent[:, unordered].sum(axis=1)
        for column in unordered:
            before = before_ns.get(self._unordered[kinds[column]])
            if before is not None:
                concurrent[:, column] -= own * np.nan_to_num(before[rows]) / np.where(alone > 0, alone, np.inf)
            concurrent[concurrent[:, column] < ALONE_SHARE * own, column] = 0.0
        total = concurrent.sum(axis=1)
        share = concurrent / np.where(total > 0, total, 1.0)[:, None]
        # A moment with several kinds counts once, and is shared like the call's time and its loss.
        once = covered_ns(kinds) if len(kinds) > 1 else total
        if unordered:
            ordered = covered_ns([kind for kind in kinds if kind not in self._unordered])
            left = concurrent[:, unordered].sum(axis=1) / np.where(there_too > 0, there_too, 1.0)
            once = ordered + (covered_ns(kinds) - ordered) * left

        def put(partner: str, picked: _Marks, with_it_ns: _Amount, time_ns: _Amount, alone_ns: _Amount) -> None:
            for row, amount in enumerate((1.0, with_it_ns, time_ns, alone_ns)):
                amounts = (weight * amount)[picked]
                self._sums[partner][row] += np.bincount(group[picked], weights=amounts, minlength=len(self._labels))

        for column, kind in enumerate(kinds):
            part = share[:, column]
            ran_with = matched & (concurrent[:, column] > 0)
            put(self._partner_names[kind], ran_with, part * once, part * own, part * alone)
        put(ALONE, matched & (total == 0), 0.0, own, alone)
        put(UNMATCHED, ~matched, once, own, 0.0)
        put(_MATCHED, matched, once, own, alone)

    def add_alone(self, calls: Calls, wanted: _Marks, weight: _Amount = 1.0) -> None:
        """Add calls of sequential steps."""
        label, labels = labels_of(calls.kernels)
        rows = np.flatnonzero(wanted & (calls.kind == self._victims))
        time_ns = np.bincount(label[calls.row[rows]], weights=(weight * calls.duration_ns)[rows], minlength=len(labels))
        for number in np.flatnonzero(time_ns).tolist():
            self._sequential_ns[labels[number]] += float(time_ns[number])

    def pairs(self, num_steps: int, sequential_steps: int) -> Iterator[PairTime]:
        """The pairs, per step, in any order."""
        for partner in (*self._partner_names, ALONE):
            if partner in self._sums:
                sums = self._sums[partner]
                for number in np.flatnonzero(sums[0]).tolist():
                    yield self._pair(self._labels[number], partner, sums[:, number] / num_steps)
        # Unmatched calls get one row per label, so that all rows add up to the difference in time.
        numbers = {name: number for number, name in enumerate(self._labels)}
        for name in dict.fromkeys((*self._labels, *self._sequential_ns)):
            sums, matched = (
                self._sums[of][:, numbers[name]] / num_steps if name in numbers else np.zeros(4)
                for of in (UNMATCHED, _MATCHED)
            )
            sums[3] = self._sequential_ns.get(name, 0.0) / sequential_steps - matched[3]
            if sums[0] or abs(sums[3]) > _ROUNDING_NS:
                yield self._pair(name, UNMATCHED, sums)

    def _pair(self, victim: str, partner: str, sums: _Floats) -> PairTime:
        calls, *times_ns = sums.tolist()
        return PairTime(victim, self._victims is not Kind.COMPUTE, partner, calls, *[ns / 1e6 for ns in times_ns])


def _beside_any(pairs: Iterable[PairTime]) -> list[PairTime]:
    """Those that ran beside something, and in both modes."""
    return [pair for pair in pairs if pair.concurrent_with not in (ALONE, UNMATCHED)]


def _dearest_first(pairs: Iterable[PairTime]) -> tuple[PairTime, ...]:
    return tuple(sorted(pairs, key=lambda pair: (-pair.lost_ms, -pair.time_ms)))


def labels_of(kernels: KernelTable) -> tuple[Indices, tuple[str, ...]]:
    """The label of each row, an index into the labels that come with it.

    Its kind of collective, its family, or the direction of a copy; -1 of other copies and fills.
    """
    codes = StringTable()
    by_name = np.array([codes[name_rules.family_of(name)] for name in kernels.names], dtype=np.int64)
    by_collective = np.array([codes[name] for name in kernels.collectives], dtype=np.int64)
    label = by_name[kernels.name]
    communicates = kernels.collective >= 0
    label[communicates] = by_collective[kernels.collective[communicates]]
    copies = np.flatnonzero(kernels.kind == Kind.COPY)
    by_direction = np.array([*map(codes.__getitem__, name_rules.COPIES), -1], dtype=np.int64)
    label[copies] = by_direction[directions_of(kernels)[copies]]
    return label, codes.texts


class Pairs(NamedTuple):
    """What runs concurrently in one profile, per step, the largest loss first.

    Attributes:
        by_kind: see ``PairSums``.
        by_dimension: families of compute kernels during the communication of each dimension of parallelism; only
            kernels that overlapped and have a match.
    """

    by_kind: tuple[PairTime, ...] = ()
    by_dimension: tuple[PairTime, ...] = ()


def pair_times_of(
    kernels: KernelTable,
    overlapped: Indices,
    sequential: Indices,
    dimensions: tuple[Indices, tuple[str, ...]] | None = None,
    weights: _Floats | None = None,
) -> Pairs:
    """Time and loss of the kernels of one profile, by what ran concurrently.

    ``dimensions`` as in ``Alignment.dimensions``, None if unknown; ``weights`` as in ``kernel_times``.
    """
    if not len(overlapped) or not len(sequential):
        return Pairs()
    calls = Calls.of(kernels)
    weight = np.ones(len(calls)) if weights is None else weights[calls.step]
    ov, seq = (np.isin(calls.step, steps) for steps in (overlapped, sequential))
    unordered = unordered_in(kernels)
    values = [calls.duration_ns, *beside_ns(calls, unordered)]
    alone, *before = means_elsewhere(calls, ov, calls, seq, values, weight)
    before_ns = dict(zip(unordered, before, strict=True))
    sums = PairSums(kernels)
    sums.add(calls, ov, alone, weight, before_ns)
    sums.add_alone(calls, seq, weight)
    by_kind = sums.pairs(len(overlapped), len(sequential))
    if dimensions is None:
        return Pairs(by_kind)
    of_row, names = dimensions
    direction = directions_of(kernels)
    of_row = np.where(direction >= 0, len(names) + direction, of_row)
    by_dimension = VictimSums(kernels, _BOTH[0], (_BOTH[1], Kind.COPY), (*names, *name_rules.COPIES))
    by_dimension.add(calls, ov, alone, of_row, weight, before_ns)
    pairs = _beside_any(by_dimension.pairs(len(overlapped), len(sequential)))
    return Pairs(by_kind, _dearest_first([pair for pair in pairs if pair.concurrent_with not in name_rules.COPIES]))
