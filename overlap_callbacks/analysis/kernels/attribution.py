"""Attributes the time that each kernel loses to the kernels that ran concurrently.

Each overlapped kernel is compared with the same kernel of a sequential step. Its loss is divided among the kinds of
kernels that ran concurrently, in proportion to their time. Losses of kernels that ran alone, and kernels that only one
mode has, get rows of their own. So the losses of compute kernels add up to T_comp,ov - T_comp,iso of equation 4, and
those of collectives to their own difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Union

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.calls import Calls, alone_ns
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind, StringTable
from overlap_callbacks.analysis.results.kernel_times import ALONE, UNMATCHED, PairTime

_Floats = npt.NDArray[np.float64]
_Marks = npt.NDArray[np.bool_]
# One number per call, or the same number for all.
_Amount = Union[float, _Floats]

# Smaller differences of sums are rounding errors.
_ROUNDING_NS = 1.0
# All calls that have a match, among the partners.
_MATCHED = "(matched)"


class PairSums:
    """Time and loss of compute families by kind of collective, and the other way round, over parts of two profiles."""

    def __init__(self, kernels: KernelTable) -> None:
        _, labels = labels_of(kernels)
        both = (Kind.COMPUTE, Kind.COMMUNICATION), (Kind.COMMUNICATION, Kind.COMPUTE)
        self._sums = [VictimSums(kernels, victims, partners, labels) for victims, partners in both]

    def add(self, calls: Calls, wanted: _Marks, alone_ns: _Floats, weight: _Amount = 1.0) -> None:
        """Add calls of overlapped steps, from a part of a profile at whose bounds nothing runs.

        Args:
            calls: the calls.
            wanted: which of them count; shape (calls,).
            alone_ns: time of the same call in sequential steps, NaN without a match; shape (calls,).
            weight: of each call's step in the mean of its mode, over that of a plain mean; shape (calls,), or one
                number.
        """
        partner_label, _ = labels_of(calls.kernels)
        for sums in self._sums:
            sums.add(calls, wanted, alone_ns, partner_label, weight)

    def add_alone(self, calls: Calls, wanted: _Marks, weight: _Amount = 1.0) -> None:
        """Add calls of sequential steps; the arguments are those of ``add``."""
        for sums in self._sums:
            sums.add_alone(calls, wanted, weight)

    def pairs(self, overlapped_steps: int, sequential_steps: int) -> tuple[PairTime, ...]:
        """The pairs, per step, those that lose most time first."""
        return _dearest_first([pair for sums in self._sums for pair in sums.pairs(overlapped_steps, sequential_steps)])


class VictimSums:
    """Time and loss of the kernels of one kind by what ran concurrently, added up over the parts of a profile.

    ``partner_names`` are what the labels of the partners stand for.
    """

    def __init__(self, kernels: KernelTable, victims: Kind, partners: Kind, partner_names: tuple[str, ...]) -> None:
        self._victims, self._partners, self._partner_names = victims, partners, partner_names
        _, self._labels = labels_of(kernels)
        # Of each partner: calls, and the times with it, overlapped and alone, in nanoseconds; shape (4, labels).
        self._sums: dict[str, _Floats] = defaultdict(lambda: np.zeros((4, len(self._labels))))
        self._sequential_ns: dict[str, float] = defaultdict(float)

    def add(
        self, calls: Calls, wanted: _Marks, alone_ns: _Floats, partner_label: Indices, weight: _Amount = 1.0
    ) -> None:
        """Add calls; the arguments are those of ``PairSums.add``, and the label of each row, -1 for none."""
        label, _ = labels_of(calls.kernels)
        rows = np.flatnonzero(wanted & (calls.kind == self._victims))
        group = label[calls.row[rows]]
        weight = np.broadcast_to(weight, len(calls))[rows]
        own, alone = calls.duration_ns[rows].astype(float), alone_ns[rows]
        matched = np.isfinite(alone)
        alone = np.where(matched, alone, 0.0)
        is_partner = calls.kernels.kind == self._partners
        kinds = [kind for kind in distinct_values(partner_label[is_partner]).tolist() if kind >= 0]
        concurrent = np.zeros((len(rows), len(kinds)))
        for column, kind in enumerate(kinds):
            of_kind = calls.kernels.intervals[is_partner & (partner_label == kind)]
            concurrent[:, column] = calls.covered_ns(of_kind)[rows]
        total = concurrent.sum(axis=1)
        share = concurrent / np.where(total > 0, total, 1.0)[:, None]
        # A moment with several kinds counts once, and is shared like the call's time and its loss.
        once = total
        if len(kinds) > 1:
            once = calls.covered_ns(calls.kernels.intervals[is_partner & (partner_label >= 0)])[rows]

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
        return PairTime(victim, self._victims is Kind.COMMUNICATION, partner, calls, *[ns / 1e6 for ns in times_ns])


def _dearest_first(pairs: Iterable[PairTime]) -> tuple[PairTime, ...]:
    return tuple(sorted(pairs, key=lambda pair: (-pair.lost_ms, -pair.time_ms)))


def labels_of(kernels: KernelTable) -> tuple[Indices, tuple[str, ...]]:
    """The label of each row, an index into the labels that come with it: its kind of collective, or its family."""
    codes = StringTable()
    by_name = np.array([codes[name_rules.family_of(name)] for name in kernels.names], dtype=np.int64)
    by_collective = np.array([codes[name] for name in kernels.collectives], dtype=np.int64)
    label = by_name[kernels.name]
    communicates = kernels.collective >= 0
    label[communicates] = by_collective[kernels.collective[communicates]]
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
    alone = alone_ns(calls, ov, calls, seq, weight)
    sums = PairSums(kernels)
    sums.add(calls, ov, alone, weight)
    sums.add_alone(calls, seq, weight)
    by_kind = sums.pairs(len(overlapped), len(sequential))
    if dimensions is None:
        return Pairs(by_kind)
    of_row, names = dimensions
    by_dimension = VictimSums(kernels, Kind.COMPUTE, Kind.COMMUNICATION, names)
    by_dimension.add(calls, ov, alone, of_row, weight)
    pairs = by_dimension.pairs(len(overlapped), len(sequential))
    return Pairs(by_kind, _dearest_first([pair for pair in pairs if pair.concurrent_with not in (ALONE, UNMATCHED)]))
