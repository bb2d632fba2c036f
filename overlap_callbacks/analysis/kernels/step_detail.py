"""The longest kernels of one step, one by one, for a timeline that can be looked into."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from overlap_callbacks.analysis.formatting import shortened
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.results.kernel_times import StepDetail

# Kernels of one step that the record keeps, and the length of their names. So a step takes some tens of kilobytes.
MAX_SLICES, MAX_NAME_LENGTH = 400, 120
# Of them, this share is for communication first: so that a collective can be told by its place among its like.
_COMMUNICATION_SHARE = 0.75


def step_detail(
    kernels: KernelTable,
    step: int,
    sizes: Mapping[int, int],
    max_slices: int = MAX_SLICES,
    start_ns: int | None = None,
) -> StepDetail:
    """The longest compute and communication kernels of one step. On CPU, a row is a piece of an operator.

    Communication comes first: up to three quarters of the kernels that are kept.

    Args:
        kernels: the whole profile.
        step: index of the step.
        sizes: size of the collective of each row that has one, by row.
        max_slices: number of kernels that are kept.
        start_ns: when the device began the step, on the clock of the rank; None where not known.
    """
    shown = (kernels.kind == Kind.COMPUTE) | (kernels.kind == Kind.COMMUNICATION)
    rows = np.flatnonzero(shown & (kernels.step == step))
    intervals = kernels.intervals[rows]
    begin = int(intervals.start_ns.min()) if len(rows) else 0
    communicating = kernels.kind[rows] == Kind.COMMUNICATION
    by_length = np.argsort(-intervals.durations_ns, kind="stable")
    first = by_length[communicating[by_length]][: int(max_slices * _COMMUNICATION_SHARE)]
    others = by_length[~np.isin(by_length, first)]
    longest = np.sort(np.append(first, others[: max_slices - len(first)]))
    kept = rows[longest[np.argsort(intervals.start_ns[longest], kind="stable")]]
    names: dict[tuple[str, bool], int] = {}
    lanes: dict[tuple[bool, int], int] = {}  # on CPU, threads of the two kinds have the same numbers
    slices = []
    for row in kept.tolist():
        communicates = bool(kernels.kind[row] == Kind.COMMUNICATION)
        name = shortened(kernels.names[kernels.name[row]], MAX_NAME_LENGTH)
        start, end = int(kernels.intervals.start_ns[row]), int(kernels.intervals.end_ns[row])
        slices.append(
            (
                names.setdefault((name, communicates), len(names)),
                lanes.setdefault((communicates, int(kernels.lane[row])), len(lanes)),
                (start - begin) / 1e6,
                (end - start) / 1e6,
                sizes.get(row, 0) if communicates else 0,
            )
        )
    return StepDetail(
        names=tuple([name for name, _ in names]),
        communication=tuple([communicates for _, communicates in names]),
        slices=tuple(slices),
        left_out=len(rows) - len(kept),
        left_out_ms=(intervals.sum_ns - kernels.intervals[kept].sum_ns) / 1e6,
        start_ns=start_ns,
        communication_left_out=int(communicating.sum()) - int(communicating[longest].sum()),
    )
