"""Gives kernels whose name does not tell their collective the kind that the gate saw issued.

NCCL runs all-to-alls, gathers and scatters as ``ncclDevKernel_SendRecv``: by its name, an expert-parallel job would
spend its time in sends and receives. RCCL has one name for all: ``ncclDevKernel_Generic``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection

import numpy as np

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.kernels.accounting import PEER_COPY
from overlap_callbacks.analysis.kernels.issued import SEND_RECV, Expected, Issued, expected_kernels, is_device_profile
from overlap_callbacks.analysis.kernels.matching import matched
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind, StringTable

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
