"""Calls of kernels in columns: on a device each row of a profile is a call, on CPU several rows may be one."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable


class Calls(msgspec.Struct, frozen=True):
    """Calls in columns. On a device, a call is a row of a ``KernelTable``; on CPU, all pieces of one operator call.

    Attributes:
        kernels: the table.
        row: first row of each call; shape (n,).
        call: index of the call that each row of ``kernels`` belongs to; shape (len(kernels),).
        duration_ns: own time of each call; shape (n,).
    """

    kernels: KernelTable
    row: Indices
    call: Indices
    duration_ns: Indices

    @classmethod
    def of(cls, kernels: KernelTable) -> Calls:
        """The calls of a table."""
        if kernels.one_row_a_call:
            place = np.arange(len(kernels))
            return cls(kernels, place, place, kernels.intervals.durations_ns)
        _, row, call = np.unique(kernels.call, return_index=True, return_inverse=True)
        duration = np.bincount(call, weights=kernels.intervals.durations_ns, minlength=len(row)).astype(np.int64)
        return cls(kernels, row.astype(np.int64), call.astype(np.int64), duration)

    def __len__(self) -> int:
        return len(self.row)

    @property
    def step(self) -> Indices:
        """Index of the step of each call; shape (n,)."""
        return self.kernels.step[self.row]

    @property
    def kind(self) -> npt.NDArray[np.uint8]:
        """``Kind`` of each call; shape (n,)."""
        return self.kernels.kind[self.row]

    def covered_ns(self, by: Intervals) -> Indices:
        """How much of each call's own time ``by`` covers, in nanoseconds; shape (n,)."""
        covered = self.kernels.intervals.covered_ns(by)
        if self.kernels.one_row_a_call:
            return covered
        return np.bincount(self.call, weights=covered, minlength=len(self)).astype(np.int64)
