"""Sets the communication kernels of a step against its collectives: what has no kernel, and what has no collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from overlap_callbacks.analysis.kernels.issued import (
    COPIED,
    Expected,
    Issued,
    expected_kernels,
    is_device_profile,
    runs_as,
)
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind

PEER_COPY = "peer_copy"


class Account(msgspec.Struct, frozen=True):
    """One step.

    Attributes:
        expected: its collectives, blocks and batches, without barriers.
        lacking: those without a kernel. Copies count as the kernels of what copy engines can do, if there is a copy for
            each.
        surplus: number of kernels of each kind (as their names tell it) that belong to no collective.
        copies: number of copies that communicate.
    """

    expected: tuple[Expected, ...]
    lacking: tuple[Expected, ...]
    surplus: Mapping[str, int]
    copies: int

    @property
    def lacking_copied(self) -> tuple[Expected, ...]:
        """Those without a kernel that copy engines can do."""
        return tuple([part for part in self.lacking if part.kind in COPIED])

    @property
    def copies_explain(self) -> bool:
        """Whether the copies are those of collectives that lack a kernel."""
        return 0 < len(self.lacking_copied) <= self.copies


def is_copy(name: str) -> bool:
    """Whether a row is a copy by a copy engine, by its name. A collective has one such copy for each peer, or more."""
    return name.startswith(("Memcpy", "Memset", "Copy"))


def copies_of(kernels: KernelTable) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which rows are copies and fills, whether they communicate or not; shape (n,)."""
    names = np.array([is_copy(name) for name in kernels.names], dtype=bool)
    return names[kernels.name] if len(kernels) else np.zeros(0, dtype=bool)


def accounts(kernels: KernelTable, issued: Issued) -> dict[int, Account]:
    """The account of each step whose collectives are known, by its index."""
    on_device = is_device_profile(kernels, issued)
    communicates, copy = kernels.kind == Kind.COMMUNICATION, copies_of(kernels)
    kinds = [runs_as(kind, on_device=on_device) for kind in kernels.collectives]
    found: dict[int, Counter[str]] = {step: Counter() for step in issued}
    copies: Counter[int] = Counter()
    rows = np.flatnonzero(communicates & np.isin(kernels.step, list(issued)))
    columns = (kernels.step[rows], kernels.collective[rows], copy[rows])
    for step, kind, copied in zip(*[column.tolist() for column in columns], strict=True):
        if copied:
            copies[step] += 1
        else:
            found[step][kinds[kind]] += 1
    return {
        step: _account(found[step], expected_kernels(collectives, on_device=on_device), copies[step])
        for step, collectives in issued.items()
    }


def _account(found: Counter[str], expected: Sequence[Expected], copies: int) -> Account:
    """Give each collective a kernel of its own name, then what is left one of another name that it may run as."""
    left = Counter(found)
    real = [part for part in expected if part.kind != "barrier"]
    lacking = [part for part in real if not _take(left, (part.runs_as, part.kind))]
    lacking = [part for part in lacking if not _take(left, [kind for kind in left if part.may_run_as(kind)])]
    # A barrier is a kernel or none, and a block is one kernel or several.
    for part in expected:
        for _ in range(1 if part.kind == "barrier" else part.members - 1):
            _take(left, (part.runs_as, *(kind for kind in left if part.may_run_as(kind))))
    return Account(tuple(real), tuple(lacking), {kind: count for kind, count in left.items() if count}, copies)


def _take(left: Counter[str], kinds: Sequence[str]) -> bool:
    for kind in kinds:
        if left[kind] > 0:
            left[kind] -= 1
            return True
    return False
