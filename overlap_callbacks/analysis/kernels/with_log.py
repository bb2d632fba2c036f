"""Puts a live profile together with the gate's log: what its kernels are, and whether the two agree."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from overlap_callbacks.analysis.kernels.beside import beside_communication
from overlap_callbacks.analysis.kernels.copies import with_copies
from overlap_callbacks.analysis.kernels.cross_check import cross_check
from overlap_callbacks.analysis.kernels.direct import lower_bound_note
from overlap_callbacks.analysis.kernels.issued import Issued, is_device_profile
from overlap_callbacks.analysis.kernels.relabelling import relabelled
from overlap_callbacks.analysis.kernels.table import KernelTable


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
