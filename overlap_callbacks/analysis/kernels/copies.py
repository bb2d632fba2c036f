"""Copies by copy engines, and those of them that are the work of a collective, which may run without any kernel.

Copies from one device to another communicate by their name (``Memcpy PtoP``). A peer's memory that is mapped into this
device's addresses may show as a copy within the device (``Memcpy DtoD``). Such copies communicate if they ran on a
stream that never computes, and do the work of a collective that copy engines can do and that has no kernel. In a live
window the gate's log has those collectives (``alignment.py``); in a file, torch's ranges around the launches do
(``traces/copies.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind, StringTable

# Copies from one place of a device's addresses to another, as CUPTI and roctracer name them.
WITHIN_DEVICE = ("Memcpy DtoD", "CopyDeviceToDevice")


def is_copy(name: str) -> bool:
    """Whether a row is a copy by a copy engine, by its name. A collective has one such copy for each peer, or more."""
    return name.startswith(("Memcpy", "Memset", "Copy"))


def copies_of(kernels: KernelTable) -> npt.NDArray[np.bool_]:
    """Which rows are copies and fills, whether they communicate or not; shape (n,)."""
    return kernels.named(is_copy)


def within_device(kernels: KernelTable) -> npt.NDArray[np.bool_]:
    """Which rows are copies within the device, by their name; shape (n,)."""
    within: npt.NDArray[np.bool_] = kernels.named(lambda name: name.startswith(WITHIN_DEVICE))
    within &= kernels.kind == Kind.COPY
    return within


def may_communicate(kernels: KernelTable) -> npt.NDArray[np.bool_]:
    """Which rows are copies within the device on a lane that never computes; shape (n,)."""
    computing = distinct_values(kernels.lane[kernels.kind == Kind.COMPUTE])
    return within_device(kernels) & ~np.isin(kernels.lane, computing)


def as_communication(kernels: KernelTable, kind_of: Mapping[int, str]) -> KernelTable:
    """The same rows, with some copies as communication.

    Args:
        kernels: the whole profile.
        kind_of: the kind of collective of each of these copies, by row.
    """
    if not kind_of:
        return kernels
    rows = np.fromiter(kind_of, dtype=np.int64, count=len(kind_of))
    kinds, names = StringTable(kernels.collectives), StringTable(kernels.names)
    kind, collective, name = kernels.kind.copy(), kernels.collective.copy(), kernels.name.copy()
    kind[rows] = Kind.COMMUNICATION
    collective[rows] = [kinds[text] for text in kind_of.values()]
    for number in distinct_values(name[rows]).tolist():
        mine = rows[name[rows] == number]
        name[mine] = names[copy_of_collective(kernels.names[number])]
    return dataclasses.replace(
        kernels, kind=kind, collective=collective, collectives=kinds.texts, name=name, names=names.texts
    )


def copy_of_collective(name: str) -> str:
    """The name of a copy that is a collective's work. Tables of kernels are by name, and other copies may have it."""
    return f"{name} of a collective"
