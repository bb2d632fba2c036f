"""Finds the copies of a trace file that are the work of a collective, by the rule of a live window.

Live, the gate's log tells which collectives have no kernel (``analysis/kernels/copies.py``). A file has no such log.
But torch's operator of each collective (``record_param_comms``) lies around its launches, and tells kind and group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.kernels.copies import may_communicate, within_device
from overlap_callbacks.analysis.kernels.issued import COPIED
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.traces.collective_ranges import CollectiveRanges, RangeDetail
from overlap_callbacks.traces.collectives import CollectiveInfo, Collectives


class Copies(NamedTuple):
    """The copies within the device that collectives without a kernel launched.

    Attributes:
        communicating: what is known of the collective of each copy that communicates.
        untold: how many collectives of each name launched such copies where the file does not tell whether they
            communicate.
    """

    communicating: Collectives
    untold: Counter[str]


def copies_of_collectives(
    kernels: KernelTable, launched_ns: Indices, thread: Indices, ranges: CollectiveRanges
) -> Copies:
    """Which copies within the device are the work of a collective.

    A collective's copies communicate if it launched no kernel, copy engines can do it, its group has more than one
    rank, and the copies ran on streams that never compute. A collective on a group of one rank copies, but communicates
    nothing. Copies whose launch is not in the file stay copies. If the launch of a communication kernel is missing, it
    may be that collective's, so the file does not tell.

    Args:
        kernels: the whole file.
        launched_ns: when each row was launched, -1 if unknown; shape (n,).
        thread: the thread that launched it, as ``ranges`` numbers them; shape (n,).
        ranges: torch's operators of collectives, those that describe theirs; or its ranges of collectives, which do not
            tell the group.
    """
    within = within_device(kernels)
    if not within.any() or not len(ranges):
        return Copies(Collectives.none(), Counter())
    communicates = kernels.kind == Kind.COMMUNICATION
    in_steps = (kernels.step >= 0) | ~(kernels.step >= 0).any()  # those launched before the file began are in no step
    all_launched = not (communicates & kernels.without_launch & in_steps).any()
    rows = np.flatnonzero(within | communicates)
    around = ranges.around(launched_ns[rows], thread[rows])
    found = CopiesInRanges()
    number = found.add(within[rows], may_communicate(kernels)[rows], around, ranges.detail, ranges.details)
    if not all_launched:
        return Copies(Collectives.none(), found.untold + found.told)
    kept = np.flatnonzero(number >= 0)
    # Several copies may be one collective, so each of them has neither its size nor its number.
    return Copies(Collectives.alike(rows[kept], number[kept], found.infos), found.untold)


class CopiesInRanges:
    """Finds the copies that are the work of a collective, range by range.

    Attributes:
        told: how many collectives of each kind launched copies that communicate, if no launch is missing.
        untold: how many of each name launched copies of which the file does not tell in any case.
    """

    def __init__(self) -> None:
        self.told: Counter[str] = Counter()
        self.untold: Counter[str] = Counter()
        self._infos: dict[CollectiveInfo, int] = {}

    @property
    def infos(self) -> tuple[CollectiveInfo, ...]:
        """What is known of the collectives."""
        return tuple(self._infos)

    def add(
        self,
        within: npt.NDArray[np.bool_],
        alone: npt.NDArray[np.bool_],
        around: Indices,
        detail: Indices,
        details: Sequence[RangeDetail],
    ) -> Indices:
        """Add some ranges, with all that was launched in each.

        Args:
            within: which rows are copies within the device. The others are kernels that communicate. Shape (n,).
            alone: which of the copies ran on a stream that never computes; shape (n,).
            around: in which range each row was launched, -1 for none; shape (n,).
            detail: index into ``details`` of each range; shape (ranges,).
            details: what ranges have in common.

        Returns:
            Of each row that communicates if no launch is missing, the number of its collective in ``infos``; -1 of
            others. Shape (n,).
        """
        mine = np.flatnonzero(within & (around >= 0) & ~np.isin(around, around[~within]))
        mine = mine[np.argsort(around[mine], kind="stable")]
        found, first = np.unique(around[mine], return_index=True)
        all_alone = np.logical_and.reduceat(alone[mine], first).tolist() if len(first) else []
        number = np.full(len(within), -1, dtype=np.int64)
        bounds = [*first.tolist(), len(mine)]
        for i, place in enumerate(found.tolist()):
            about = details[detail[place]]
            info = _info(about)
            if info.size == 1:
                continue
            if info.kind in COPIED and info.size is not None and all_alone[i]:
                number[mine[bounds[i] : bounds[i + 1]]] = self._infos.setdefault(info, len(self._infos))
                self.told[info.kind] += 1
            else:
                self.untold[info.kind if about.info is not None else about.name] += 1
        return number


def _info(detail: RangeDetail) -> CollectiveInfo:
    return detail.info or CollectiveInfo(name_rules.collective_of(detail.name))
