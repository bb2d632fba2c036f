"""Assigns each communication kernel of a profile to a dimension of parallelism, and computes what each dimension costs.

A profile does not tell the process group of a kernel. The gate does: it saw every collective when it was issued. See
``matching`` for how the kernels of a step are matched with its collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from overlap_callbacks.analysis.dimension_rules import UNKNOWN
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.issued import Issued, IssuedCollective
from overlap_callbacks.analysis.kernels.matching import matched
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.analysis.results.window import DimensionTime


def dimensions_of_rows(
    kernels: KernelTable, issued: Issued, serialised: Collection[int] = ()
) -> tuple[Indices, tuple[str, ...]]:
    """The dimension of each row: an index into the names that come with it, -1 for rows that do not communicate.

    Args:
        kernels: the whole profile.
        issued: the collectives of each step, by its index, in the order in which they were issued.
        serialised: indices of the sequential steps, whose kernels start in the order of issue.
    """
    labels: dict[str, int] = {}
    dimension = np.full(len(kernels), -1, dtype=np.int64)
    matches = matched(kernels, issued, serialised)
    for row in np.flatnonzero(kernels.kind == Kind.COMMUNICATION).tolist():
        name = matches[row].dimension if row in matches else None
        dimension[row] = labels.setdefault(name or UNKNOWN, len(labels))
    return dimension, tuple(labels)


def dimension_times(
    kernels: KernelTable,
    dimension: Indices,
    labels: Sequence[str],
    overlapped: Sequence[int],
    sequential: Sequence[int],
    recorded: Sequence[IssuedCollective],
) -> tuple[DimensionTime, ...]:
    """The communication of each dimension, per step, those with the most time first.

    Args:
        kernels: the whole profile.
        dimension: dimension of each row, from ``dimensions_of_rows``; shape (n,).
        labels: names of the dimensions, from ``dimensions_of_rows``.
        overlapped: indices of the overlapped profiled steps.
        sequential: indices of the sequential profiled steps.
        recorded: the collectives of the recorded step.
    """
    compute = kernels.of(Kind.COMPUTE).union()
    in_overlapped, in_sequential = np.isin(kernels.step, overlapped), np.isin(kernels.step, sequential)
    messages = Counter(collective.dimension for collective in recorded)
    bytes_in: Counter[str] = Counter()
    for collective in recorded:
        bytes_in[collective.dimension] += collective.bytes_in

    def per_step_ms(time_ns: int, steps: Sequence[int]) -> float:
        return time_ns / max(len(steps), 1) / 1e6

    times = []
    for name in dict.fromkeys((*labels, *messages)):
        rows = dimension == (labels.index(name) if name in labels else -2)  # -2 is in no row
        ov, seq = kernels.intervals[rows & in_overlapped], kernels.intervals[rows & in_sequential]
        busy: Intervals = ov.union()
        times.append(
            DimensionTime(
                dimension=name,
                messages=messages[name],
                bytes_in=bytes_in[name],
                comm_ms=per_step_ms(busy.sum_ns, overlapped),
                exposed_ms=per_step_ms(busy.sum_ns - int(busy.covered_ns(compute).sum()), overlapped),
                kernels_ms=per_step_ms(ov.sum_ns, overlapped),
                kernels_isolated_ms=per_step_ms(seq.sum_ns, sequential),
            )
        )
    return tuple(sorted(times, key=lambda time: -time.comm_ms))
