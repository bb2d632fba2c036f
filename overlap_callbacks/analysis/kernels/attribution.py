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
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.call_table import Calls
from overlap_callbacks.analysis.kernels.same_calls import match
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.analysis.results.kernel_times import ALONE, UNMATCHED, PairTime

# One number per call, or the same number for all.
_Amount = Union[float, npt.NDArray[np.float64]]


class Side(msgspec.Struct, frozen=True):
    """The calls of one mode.

    Attributes:
        calls: all calls of a profile.
        wanted: which of them are of the mode; shape (calls,).
        num_steps: number of the mode's steps.
        weight: of each call's step in the mean of its mode, over that of a plain mean; shape (calls,), or one number.
    """

    calls: Calls
    wanted: npt.NDArray[np.bool_]
    num_steps: int
    weight: _Amount = 1.0


def pair_times(overlapped: Side, sequential: Side, alone_ns: npt.NDArray[np.float64]) -> tuple[PairTime, ...]:
    """Time and loss of each family beside each kind of collective, and of each kind of collective beside each family.

    Args:
        overlapped: the calls of overlapped steps.
        sequential: the calls of sequential steps.
        alone_ns: time of the same call in sequential steps, NaN if it has no match, see ``match``; shape (calls,).

    Returns:
        The pairs, per step, those that lose most time first.
    """
    sums = PairSums(overlapped.calls.kernels, sequential.calls.kernels)
    sums.add(overlapped.calls, overlapped.wanted, alone_ns, overlapped.weight)
    sums.add_alone(sequential.calls, sequential.wanted, sequential.weight)
    return sums.pairs(overlapped.num_steps, sequential.num_steps)


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
    of_row, names = dimensions
    sums = _VictimSums(overlapped.calls.kernels, Kind.COMPUTE, Kind.COMMUNICATION, names)
    sums.add(overlapped.calls, overlapped.wanted, alone_ns, of_row, overlapped.weight)
    alone = _LabelSums(sequential.calls.kernels, Kind.COMPUTE)
    alone.add(sequential.calls, sequential.wanted, sequential.weight)
    found = sums.pairs(overlapped.num_steps, alone.ms(sequential.num_steps))
    pairs = [pair for pair in found if pair.concurrent_with not in (ALONE, UNMATCHED)]
    return tuple(sorted(pairs, key=lambda pair: (-pair.lost_ms, -pair.time_ms)))


class PairSums:
    """What ``pair_times`` gives, added up over the parts of two profiles.

    Args:
        overlapped: the profile with the overlapped steps, or a part of it: its names are those of all.
        sequential: the same with the sequential steps.
    """

    def __init__(self, overlapped: KernelTable, sequential: KernelTable) -> None:
        _, labels = labels_of(overlapped)
        both = (Kind.COMPUTE, Kind.COMMUNICATION), (Kind.COMMUNICATION, Kind.COMPUTE)
        self._sums = [_VictimSums(overlapped, victims, partners, labels) for victims, partners in both]
        self._alone = [_LabelSums(sequential, victims) for victims, _ in both]

    def add(
        self,
        calls: Calls,
        wanted: npt.NDArray[np.bool_],
        alone_ns: npt.NDArray[np.float64],
        weight: _Amount = 1.0,
    ) -> None:
        """Add calls of overlapped steps.

        Args:
            calls: the calls of a part at whose bounds nothing runs.
            wanted: which of them count; shape (calls,).
            alone_ns: as in ``pair_times``.
            weight: as in ``Side``.
        """
        beside, _ = labels_of(calls.kernels)
        for sums in self._sums:
            sums.add(calls, wanted, alone_ns, beside, weight)

    def add_alone(self, calls: Calls, wanted: npt.NDArray[np.bool_], weight: _Amount = 1.0) -> None:
        """Add calls of sequential steps.

        Args:
            calls: the calls of a part.
            wanted: which of them count; shape (calls,).
            weight: as in ``Side``.
        """
        for sums in self._alone:
            sums.add(calls, wanted, weight)

    def pairs(self, overlapped_steps: int, sequential_steps: int) -> tuple[PairTime, ...]:
        """The pairs, per step, those that lose most time first."""
        found = [
            pair
            for sums, alone in zip(self._sums, self._alone, strict=True)
            for pair in sums.pairs(overlapped_steps, alone.ms(sequential_steps))
        ]
        return tuple(sorted(found, key=lambda pair: (-pair.lost_ms, -pair.time_ms)))


class _Amounts:
    """Calls and times of each of some labels; shape (labels,) each, times in nanoseconds."""

    def __init__(self, num_labels: int) -> None:
        self.calls, self.beside_ns, self.time_ns, self.alone_ns = (np.zeros(num_labels) for _ in range(4))

    def add(
        self,
        group: Indices,
        picked: npt.NDArray[np.bool_],
        weight: _Amount,
        beside_ns: _Amount,
        time_ns: _Amount,
        alone_ns: _Amount,
    ) -> None:
        """Add calls.

        Args:
            group: the label of each; shape (n,).
            picked: which of them count; shape (n,).
            weight: of each, see ``Side``.
            beside_ns: how long each ran beside others.
            time_ns: how long each took.
            alone_ns: how long the same call took alone.
        """
        group = group[picked]
        for total, amount in (
            (self.calls, 1.0),
            (self.beside_ns, beside_ns),
            (self.time_ns, time_ns),
            (self.alone_ns, alone_ns),
        ):
            weights = np.broadcast_to(weight * amount, len(picked))[picked]
            np.add(total, np.bincount(group, weights=weights, minlength=len(total)), out=total)


class _VictimSums:
    """Time and loss of the kernels of one kind by what ran beside them, added up over the parts of a profile.

    Args:
        kernels: the profile, or a part of it.
        victims: the kind of the kernels.
        partners: the kind of what runs beside them.
        partner_names: what the labels of the partners stand for.
    """

    def __init__(self, kernels: KernelTable, victims: Kind, partners: Kind, partner_names: tuple[str, ...]) -> None:
        self._victims, self._partners, self._partner_names = victims, partners, partner_names
        _, self._labels = labels_of(kernels)
        self._beside: dict[int, _Amounts] = {}
        # Those that ran beside none, those without a match, and all that have one.
        self._alone, self._unmatched, self._matched = (_Amounts(len(self._labels)) for _ in range(3))

    def add(
        self,
        calls: Calls,
        wanted: npt.NDArray[np.bool_],
        alone_ns: npt.NDArray[np.float64],
        partner_label: Indices,
        weight: _Amount = 1.0,
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
        beside = np.zeros((len(rows), len(kinds)))
        for column, kind in enumerate(kinds):
            beside[:, column] = calls.covered_ns(calls.kernels.intervals[is_partner & (partner_label == kind)])[rows]
        total = beside.sum(axis=1)
        share = beside / np.where(total > 0, total, 1.0)[:, None]
        # A moment beside several kinds counts once, and is shared like the call's time and its loss.
        once = total
        if len(kinds) > 1:
            once = calls.covered_ns(calls.kernels.intervals[is_partner & (partner_label >= 0)])[rows]
        for column, kind in enumerate(kinds):
            amounts = self._beside.setdefault(kind, _Amounts(len(self._labels)))
            part = share[:, column]
            beside_it = matched & (beside[:, column] > 0)
            amounts.add(group, beside_it, weight, part * once, part * own, part * alone)
        self._alone.add(group, matched & (total == 0), weight, 0.0, own, alone)
        self._unmatched.add(group, ~matched, weight, once, own, 0.0)
        self._matched.add(group, matched, weight, once, own, alone)

    def pairs(self, num_steps: int, all_alone_ms: dict[str, float]) -> Iterator[PairTime]:
        """The pairs, per step, in any order.

        Args:
            num_steps: number of steps of the calls.
            all_alone_ms: time per step of all calls of sequential steps, by label.
        """
        of_partners = [(self._partner_names[kind], self._beside[kind]) for kind in sorted(self._beside)]
        for partner, amounts in (*of_partners, (ALONE, self._alone)):
            for number in np.flatnonzero(amounts.calls).tolist():
                alone_ms = float(amounts.alone_ns[number] / num_steps) / 1e6
                yield self._pair(self._labels[number], partner, amounts, number, num_steps, alone_ms)
        # Calls without a match get one row per label, so that all rows add up to the difference in time.
        matched_ms = dict(zip(self._labels, (self._matched.alone_ns / num_steps / 1e6).tolist(), strict=True))
        nothing, numbers = _Amounts(1), {name: number for number, name in enumerate(self._labels)}
        for name in dict.fromkeys((*self._labels, *all_alone_ms)):
            alone_ms = all_alone_ms.get(name, 0.0) - matched_ms.get(name, 0.0)
            amounts, number = (self._unmatched, numbers[name]) if name in numbers else (nothing, 0)
            if amounts.calls[number] or abs(alone_ms) > _ROUNDING_MS:
                yield self._pair(name, UNMATCHED, amounts, number, num_steps, alone_ms)

    def _pair(
        self, victim: str, beside: str, amounts: _Amounts, number: int, num_steps: int, alone_ms: float
    ) -> PairTime:
        return PairTime(
            kernel_family=victim,
            communication=self._victims is Kind.COMMUNICATION,
            concurrent_with=beside,
            calls=float(amounts.calls[number] / num_steps),
            concurrent_ms=float(amounts.beside_ns[number] / num_steps) / 1e6,
            time_ms=float(amounts.time_ns[number] / num_steps) / 1e6,
            alone_ms=alone_ms,
        )


# One nanosecond; smaller differences of sums are rounding errors.
_ROUNDING_MS = 1e-6


class _LabelSums:
    """Time of each family, or of each kind of collective, added up over the parts of a profile.

    Args:
        kernels: the profile, or a part of it.
        kind: of the kernels that count.
    """

    def __init__(self, kernels: KernelTable, kind: Kind) -> None:
        self._kind, (_, self._labels) = kind, labels_of(kernels)
        self._time_ns = np.zeros(len(self._labels))

    def add(self, calls: Calls, wanted: npt.NDArray[np.bool_], weight: _Amount = 1.0) -> None:
        """Add calls; ``wanted`` tells which of them count, ``weight`` is as in ``Side``."""
        label, _ = labels_of(calls.kernels)
        rows = np.flatnonzero(wanted & (calls.kind == self._kind))
        group, weights = label[calls.row[rows]], (weight * calls.duration_ns)[rows]
        self._time_ns += np.bincount(group, weights=weights, minlength=len(self._labels))

    def ms(self, num_steps: int) -> dict[str, float]:
        """Time per step, in milliseconds, of those that took any."""
        return {
            self._labels[i]: float(self._time_ns[i]) / num_steps / 1e6 for i in np.flatnonzero(self._time_ns).tolist()
        }


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
    weights: npt.NDArray[np.float64] | None = None,
) -> Pairs:
    """Time and loss of the kernels of one profile by what ran beside them.

    Args:
        kernels: the whole profile.
        overlapped: indices of the overlapped profiled steps.
        sequential: indices of the sequential profiled steps.
        dimensions: of each row, from ``by_dimension.dimensions_of_rows``; None if they are not known.
        weights: of the profiled steps, as in ``kernel_times``.
    """
    if not len(overlapped) or not len(sequential):
        return Pairs()
    calls = Calls.of(kernels)
    weight = 1.0 if weights is None else weights[calls.step]
    ov, seq = (Side(calls, np.isin(calls.step, steps), len(steps), weight) for steps in (overlapped, sequential))
    alone_ns = match(calls, ov.wanted, calls, seq.wanted, weights=weight).alone_ns
    by_dimension = () if dimensions is None else dimension_pair_times(ov, seq, alone_ns, dimensions)
    return Pairs(pair_times(ov, seq, alone_ns), by_dimension)
