"""Puts a live profile together with the gate's log: what its kernels are, and whether the two agree."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.kernels.accounting import PEER_COPY
from overlap_callbacks.analysis.kernels.beside import beside_communication
from overlap_callbacks.analysis.kernels.copies import with_copies, within_device
from overlap_callbacks.analysis.kernels.cross_check import cross_check
from overlap_callbacks.analysis.kernels.issued import SEND_RECV, Expected, Issued, expected_kernels, is_device_profile
from overlap_callbacks.analysis.kernels.matching import matched
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind, StringTable


@dataclass(frozen=True)
class ProfileWithLog:
    """A profile, seen together with the gate's log.

    Attributes:
        kernels: with the kinds of collectives that the log tells, and with copies that are a collective's work as
            communication.
        doubts: why the profile must not be used, in words.
        problems: what is doubtful but does not forbid its use, in words.
        lower_bound: whether there may be more communication than it shows.
    """

    kernels: KernelTable
    doubts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    lower_bound: bool = False


def with_log(
    kernels: KernelTable,
    issued: Issued,
    compared: Collection[int],
    sequential: Sequence[int],
    symmetric_groups: Collection[str] = (),
) -> ProfileWithLog:
    """Put a profile together with the gate's log.

    Args:
        kernels: the whole profile.
        issued: the collectives of each profiled step, by its index, in the order of issue.
        compared: indices of the steps whose log is whole. Of these, the log is held against the profile.
        sequential: indices of the sequential steps that count.
        symmetric_groups: names of the groups for which torch's symmetric memory is enabled.
    """
    whole = {step: collectives for step, collectives in issued.items() if step in compared}
    on_device = is_device_profile(kernels, issued)
    if on_device:
        kernels = relabelled(with_copies(kernels, whole), issued, sequential)
    found = cross_check(kernels, whole)
    if found.missing:
        doubt = f"the profile does not show the job's communication: {found.missing}; its kernel times are left out"
        return ProfileWithLog(kernels, doubts=(doubt,))
    beside = beside_communication(kernels, sequential, found.unseen) if on_device else ""
    bound = lower_bound_note(kernels, found.unseen, issued, symmetric_groups) if on_device else ""
    notes = [note for note in (beside, bound) if note]
    return ProfileWithLog(kernels, problems=(*found.notes, *notes), lower_bound=bool(bound))


# -- labels
# Gives kernels whose name does not tell their collective the kind that the gate saw issued.
#
# NCCL runs all-to-alls, gathers and scatters as ``ncclDevKernel_SendRecv``: by its name, an expert-parallel job would
# spend its time in sends and receives. RCCL has one name for all: ``ncclDevKernel_Generic``.


# Kinds of which a kernel's name does not tell the collective.
_UNTOLD = (SEND_RECV, PEER_COPY, name_rules.OTHER)


def relabelled(kernels: KernelTable, issued: Issued, serialised: Collection[int] = ()) -> KernelTable:
    """The same kernels, with the kind of collective that the gate's log tells.

    Args:
        kernels: the whole profile. A profile of the host stays as it is: Gloo names its ranges.
        issued: the collectives of each step, by its index, in the order of issue.
        serialised: indices of the sequential steps, whose kernels start in the order of issue.
    """
    untold = [kernels.collectives.index(kind) for kind in _UNTOLD if kind in kernels.collectives]
    rows = np.flatnonzero((kernels.kind == Kind.COMMUNICATION) & np.isin(kernels.collective, untold))
    if not len(rows) or not is_device_profile(kernels, issued):
        return kernels
    expected = [part for step in issued.values() for part in expected_kernels(step, on_device=True)]
    matches = matched(kernels, issued, serialised)
    instead = _instead_of_send_recv(expected)
    labels = StringTable()
    for kind in kernels.collectives:
        labels[kind]
    collective = kernels.collective.copy()
    for row in rows.tolist():
        found = matches[row].kind if row in matches else None
        if kernels.collectives[collective[row]] == SEND_RECV:
            found = found or instead
        if found is not None and found != name_rules.OTHER:
            collective[row] = labels[found]
    return dataclasses.replace(kernels, collective=collective, collectives=labels.texts)


def _instead_of_send_recv(expected: list[Expected]) -> str | None:
    """What a kernel of that name must be if no step issued a send or a receive: the most frequent kind that runs so."""
    kinds = Counter(part.kind for part in expected if part.runs_as == SEND_RECV)
    return kinds.most_common(1)[0][0] if kinds and SEND_RECV not in kinds else None


# -- kernels of NCCL's device API


_MAX_NAMED, _MAX_NAME_LENGTH = 3, 60


def lower_bound_note(
    kernels: KernelTable, unseen: Collection[str], steps: Collection[int], symmetric_groups: Collection[str]
) -> str:
    """Why communication, and overlap in sequential steps, may be more than the profile shows; empty where it may not.

    Data that a rank reads from or writes to another one's mapped memory may show as a copy within the device. Such a
    copy is known for communication only if a collective explains it.

    Args:
        kernels: the whole profile, with copies that are a collective's work as communication.
        unseen: names of kernels and copies that communicate and are no collective's.
        steps: indices of the profiled steps.
        symmetric_groups: names of the groups for which torch's symmetric memory is enabled.
    """
    direct = [name for name in unseen if any(re.search(pattern, name) for pattern in name_rules.direct_communication)]
    used = ", ".join([name[:_MAX_NAME_LENGTH] for name in sorted(direct)[:_MAX_NAMED]])
    if not direct and symmetric_groups and (within_device(kernels) & np.isin(kernels.step, list(steps))).any():
        used = f"symmetric memory of {len(symmetric_groups)} groups, and copies within the device"
    if not used:
        return ""
    return (
        f"communication that no collective explains ({used}) may be copies that no figure has: communication and "
        f"residual overlap are lower bounds"
    )
