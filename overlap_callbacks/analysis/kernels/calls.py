"""How long single calls of each kernel take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.results.kernel_times import CallTimes

# Kernels that the record keeps, and the length of their names.
MAX_KERNELS, MAX_NAME_LENGTH = 40, 200


def call_times(kernels: KernelTable, steps: Sequence[int]) -> tuple[CallTimes, ...]:
    """How long calls of each kernel took in these steps, those with the most time first.

    A call that has several pieces, as operators on CPU have, takes as long as they do together.
    """
    shown = (kernels.kind == Kind.COMPUTE) | (kernels.kind == Kind.COMMUNICATION)
    rows = np.flatnonzero(shown & np.isin(kernels.step, np.asarray(steps, dtype=np.int64)))
    _, first, call = np.unique(kernels.call[rows], return_index=True, return_inverse=True)
    length_ns = np.bincount(call, weights=kernels.intervals.durations_ns[rows])
    name, communicates = kernels.name[rows[first]], kernels.kind[rows[first]] == Kind.COMMUNICATION
    key = 2 * name + communicates
    found: list[CallTimes] = []
    totals = np.bincount(key, weights=length_ns)
    for number in np.argsort(-totals, kind="stable")[:MAX_KERNELS].tolist():
        lengths = length_ns[key == number] / 1e6
        if not len(lengths):
            break  # the rest have no calls either
        text = kernels.names[number // 2][:MAX_NAME_LENGTH]
        found.append(
            CallTimes(
                text, bool(number % 2), len(lengths), float(lengths.min()), float(np.median(lengths)),
                float(lengths.max()),
            )
        )  # fmt: skip
    return tuple(found)
