"""Finds the copies of a trace file that are the work of a collective, by the rule of a live window.

Live, the gate's log tells which collectives have no kernel (``analysis/kernels/copies.py``). A file has no such log.
But torch's operator of each collective (``record_param_comms``) lies around its launches, and tells kind and group.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

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
    copies = Copies(Collectives.none(), Counter())
    within = within_device(kernels)
    if not within.any() or not len(ranges):
        return copies
    communicates = kernels.kind == Kind.COMMUNICATION
    in_steps = (kernels.step >= 0) | ~(kernels.step >= 0).any()  # those launched before the file began are in no step
    all_launched = not (communicates & kernels.without_launch & in_steps).any()
    rows = np.flatnonzero(within | communicates)
    around = ranges.around(launched_ns[rows], thread[rows])
    has_kernel = around[communicates[rows]]
    mine = within[rows] & (around >= 0) & ~np.isin(around, has_kernel)
    rows, around = rows[mine], around[mine]
    alone = may_communicate(kernels)
    order = np.argsort(around, kind="stable")
    rows, around = rows[order], around[order]
    found, first = np.unique(around, return_index=True)
    all_alone = np.logical_and.reduceat(alone[rows], first).tolist() if len(first) else []
    infos: dict[CollectiveInfo, int] = {}
    number = np.full(len(rows), -1, dtype=np.int64)
    bounds = [*first.tolist(), len(rows)]
    details, detail_of = ranges.details, ranges.detail
    for i, place in enumerate(found.tolist()):
        detail = details[detail_of[place]]
        info = _info(detail)
        if info.size == 1:
            continue
        if all_launched and info.kind in COPIED and info.size is not None and all_alone[i]:
            number[bounds[i] : bounds[i + 1]] = infos.setdefault(info, len(infos))
        else:
            copies.untold[info.kind if detail.info is not None else detail.name] += 1
    kept = np.flatnonzero(number >= 0)
    kept = kept[np.argsort(rows[kept])]
    # Several copies may be one collective, so each of them has neither its size nor its number.
    return copies._replace(communicating=Collectives.alike(rows[kept], number[kept], tuple(infos)))


def _info(detail: RangeDetail) -> CollectiveInfo:
    return detail.info or CollectiveInfo(name_rules.collective_of(detail.name))
