"""Finds the copies of a trace file that are the work of a collective, by the rule of a live window.

Live, the gate's log tells which collectives have no kernel (``analysis/kernels/copies.py``). A file has no such log.
But torch's operator of each collective (``record_param_comms``) lies around its launches, and tells kind and group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.kernels.copies import may_communicate, within_device
from overlap_callbacks.analysis.kernels.issued import COPIED
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.traces.events import Args
from overlap_callbacks.traces.metadata import CollectiveInfo, KernelMetadata, Range, Ranges


class Copies(NamedTuple):
    """The copies within the device that collectives without a kernel launched.

    Attributes:
        communicating: what is known of the collective of each copy that communicates, by row.
        untold: how many collectives of each name launched such copies where the file does not tell whether they
            communicate.
    """

    communicating: dict[int, CollectiveInfo]
    untold: Counter[str]


def copies_of_collectives(
    kernels: KernelTable,
    launched_ns: Indices,
    thread_of: Callable[[int], Any],
    operators: Sequence[tuple[str, int | str, int, int, Args | None]],
    annotations: Sequence[tuple[str, int | str, int, int, Args | None]],
) -> Copies:
    """Which copies within the device are the work of a collective.

    A collective's copies communicate if it launched no kernel, copy engines can do it, its group has more than one
    rank, and the copies ran on streams that never compute. A collective on a group of one rank copies, but communicates
    nothing. Copies whose launch is not in the file stay copies. If the launch of a communication kernel is missing, it
    may be that collective's, so the file does not tell.

    Args:
        kernels: the whole file.
        launched_ns: when each row was launched, -1 if unknown; shape (n,).
        thread_of: gives the thread that launched a row.
        operators: torch's operators of collectives, those that describe theirs: name, thread, start and end in
            nanoseconds, arguments.
        annotations: torch's ranges of collectives, in the same form. They do not tell the group.
    """
    within = within_device(kernels)
    if not within.any():
        return Copies({}, Counter())
    ranges = Ranges(operators or annotations)
    communicates = kernels.kind == Kind.COMMUNICATION
    in_steps = (kernels.step >= 0) | ~(kernels.step >= 0).any()  # those launched before the file began are in no step
    all_launched = not (communicates & kernels.without_launch & in_steps).any()
    has_kernel, launched = set[Range](), dict[Range, list[int]]()
    for row in np.flatnonzero(within | communicates).tolist():
        found = ranges.around(int(launched_ns[row]), thread_of(row))
        if found is not None:
            if within[row]:
                launched.setdefault(found, []).append(row)
            else:
                has_kernel.add(found)
    alone = may_communicate(kernels)
    metadata, copies = KernelMetadata(), Copies({}, Counter())
    for found, rows in launched.items():
        if found in has_kernel:
            continue
        info = _info(found, metadata)
        if info.size == 1:
            continue
        if all_launched and info.kind in COPIED and info.size is not None and all(alone[row] for row in rows):
            # Several copies may be one collective, so each of them has neither its size nor its number.
            copies.communicating.update(dict.fromkeys(rows, info._replace(num_bytes=None, sequence=None)))
        else:
            copies.untold[info.kind if operators else found.name] += 1
    return copies


def _info(found: Range, metadata: KernelMetadata) -> CollectiveInfo:
    if found.args is not None and found.args.collective is not None:
        return metadata.read(found.args)
    return CollectiveInfo(name_rules.collective_of(found.name))
