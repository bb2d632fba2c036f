"""Assigns each communication kernel of a profile to a dimension of parallelism, and computes what each dimension costs.

A profile does not tell the process group of a kernel. The gate does: it saw every collective when it was issued. The
kernels and the collectives of a step are matched in order. Then each lane is assigned to the dimension of most of its
kernels, since collectives of two groups may start in another order than they were issued in. A lane is a stream of the
device or a thread of Gloo; each serves one group.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.dimension_rules import UNKNOWN
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.analysis.results.window import DimensionTime

_SEND_RECV = "send_recv"


class IssuedCollective(Protocol):
    """What this module needs of a collective as the gate saw it."""

    @property
    def operator(self) -> str:
        """The ``c10d`` operator."""
        ...

    @property
    def bytes_in(self) -> int:
        """Bytes of the tensors that it reads."""
        ...

    @property
    def dimension(self) -> str:
        """Dimension of parallelism that its group serves."""
        ...


def dimensions_of_rows(
    kernels: KernelTable, issued: Mapping[int, Sequence[IssuedCollective]]
) -> tuple[Indices, tuple[str, ...]]:
    """The dimension of each row: an index into the names that come with it, -1 for rows that do not communicate.

    Args:
        kernels: the whole profile.
        issued: the collectives of each step, by its index, in the order in which they were issued.
    """
    labels: dict[str, int] = {}
    dimension = np.full(len(kernels), -1, dtype=np.int64)
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    point_to_point = np.zeros(len(kernels), dtype=bool)
    communicates = np.flatnonzero(kernels.kind == Kind.COMMUNICATION)
    by_start = communicates[np.argsort(kernels.intervals.start_ns[communicates], kind="stable")]
    for step, collectives in issued.items():
        rows = by_start[kernels.step[by_start] == step]
        kinds = [kernels.collectives[kernels.collective[row]] for row in rows.tolist()]
        for row, kind, name in zip(rows.tolist(), kinds, _in_order(kinds, collectives), strict=True):
            dimension[row] = labels.setdefault(name, len(labels))
            if kind == _SEND_RECV:
                point_to_point[row] = True  # all groups share one thread for these, so lanes tell nothing
            else:
                votes[int(kernels.lane[row])][int(dimension[row])] += 1
    for row in communicates.tolist():
        votes_of_lane = votes.get(int(kernels.lane[row]))
        if votes_of_lane and not point_to_point[row]:
            dimension[row] = votes_of_lane.most_common(1)[0][0]
        elif dimension[row] < 0:
            dimension[row] = labels.setdefault(UNKNOWN, len(labels))
    return dimension, tuple(labels)


def _in_order(kinds: Sequence[str], collectives: Sequence[IssuedCollective]) -> list[str]:
    """The dimension of each kernel of a step, in order of their starts.

    If there are as many kernels as collectives, the k-th kernel is the k-th collective. Else it is the next collective
    of its own kind.
    """
    real = [c for c in collectives if "barrier" not in c.operator]
    if len(real) == len(kinds):
        return [c.dimension for c in real]
    waiting: dict[str, deque[str]] = defaultdict(deque)
    for collective in real:
        waiting[name_rules.collective_of(collective.operator)].append(collective.dimension)
    return [waiting[kind].popleft() if waiting[kind] else UNKNOWN for kind in kinds]


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
