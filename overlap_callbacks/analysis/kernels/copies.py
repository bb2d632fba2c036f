"""Finds the copies that are the work of a collective: copy engines can run collectives without any kernel.

Copies from one device to another communicate by their name (``Memcpy PtoP``). A peer's memory that is mapped into this
device's addresses may show as a copy within the device (``Memcpy DtoD``). Then the gate's log tells: such copies
communicate if a collective that copy engines can do has no kernel, and they ran on a stream that never computes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from overlap_callbacks.analysis.kernels.accounting import PEER_COPY, accounts
from overlap_callbacks.analysis.kernels.issued import Issued
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind

# Copies from one place of a device's addresses to another, as CUPTI and roctracer name them.
WITHIN_DEVICE = ("Memcpy DtoD", "CopyDeviceToDevice")


def with_copies(kernels: KernelTable, issued: Issued) -> KernelTable:
    """The same rows, with the copies that are a collective's work as communication.

    Args:
        kernels: the whole profile.
        issued: the collectives of each step, by its index, in the order of issue. All its steps must agree: if one of
            them lacks kernels and has fewer such copies than collectives without a kernel, all copies stay copies.
    """
    within = np.array([name.startswith(WITHIN_DEVICE) for name in kernels.names], dtype=bool)
    if not within.any():
        return kernels
    computing = np.unique(kernels.lane[kernels.kind == Kind.COMPUTE])
    candidates = within[kernels.name] & (kernels.kind == Kind.COPY) & ~np.isin(kernels.lane, computing)
    lacking = {
        step: len(account.lacking_copied) - account.copies
        for step, account in accounts(kernels, issued).items()
        if len(account.lacking_copied) > account.copies
    }
    if not lacking or any((candidates & (kernels.step == step)).sum() < count for step, count in lacking.items()):
        return kernels
    rows = candidates & np.isin(kernels.step, list(lacking))
    collectives = kernels.collectives if PEER_COPY in kernels.collectives else (*kernels.collectives, PEER_COPY)
    kind, collective, name = kernels.kind.copy(), kernels.collective.copy(), kernels.name.copy()
    kind[rows], collective[rows] = Kind.COMMUNICATION, collectives.index(PEER_COPY)
    # Tables of kernels are by name, and other copies of this name do not communicate.
    distinct = [*kernels.names]
    for number in np.unique(name[rows]).tolist():
        name[rows & (kernels.name == number)] = len(distinct)
        distinct.append(f"{kernels.names[number]} of a collective")
    return dataclasses.replace(
        kernels, kind=kind, collective=collective, collectives=collectives, name=name, names=tuple(distinct)
    )
