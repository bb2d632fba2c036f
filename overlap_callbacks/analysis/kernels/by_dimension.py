"""Which dimension of parallelism each communication kernel of a profile serves, and what each dimension costs.

A profile does not tell a kernel's process group; the gate, which saw every collective being issued, does. Kernels and
collectives of a step are matched in order; then each lane (a stream of the device, or a thread of Gloo's: both serve
one group) goes with the majority of its kernels, since two groups' collectives may start in another order than they
were issued in.
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
    """What is asked of a collective as the gate saw it."""

    @property
    def operator(self) -> str: ...

    @property
    def bytes_in(self) -> int: ...

    @property
    def dimension(self) -> str: ...


def dimensions_of_rows(
    kernels: KernelTable, issued: Mapping[int, Sequence[IssuedCollective]]
) -> tuple[Indices, tuple[str, ...]]:
    """The dimension of each row: an index into the names that come with it, -1 for what does not communicate.

    Args:
        kernels: of the whole profile.
        issued: the collectives of each step, by its index, in the order of issue.
    """
    labels: dict[str, int] = {}
    found = np.full(len(kernels), -1, dtype=np.int64)
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    point_to_point = np.zeros(len(kernels), dtype=bool)
    communicates = np.flatnonzero(kernels.kind == Kind.COMMUNICATION)
    by_start = communicates[np.argsort(kernels.intervals.start_ns[communicates], kind="stable")]
    for step, collectives in issued.items():
        rows = by_start[kernels.step[by_start] == step]
        kinds = [kernels.collectives[kernels.collective[row]] for row in rows.tolist()]
        for row, kind, dimension in zip(rows.tolist(), kinds, _in_order(kinds, collectives), strict=True):
            found[row] = labels.setdefault(dimension, len(labels))
            if kind == _SEND_RECV:
                point_to_point[row] = True  # issued on one thread, whatever the group
            else:
                votes[int(kernels.lane[row])][int(found[row])] += 1
    for row in communicates.tolist():
        ballot = votes.get(int(kernels.lane[row]))
        if ballot and not point_to_point[row]:
            found[row] = ballot.most_common(1)[0][0]
        elif found[row] < 0:
            found[row] = labels.setdefault(UNKNOWN, len(labels))
    return found, tuple(labels)


def _in_order(kinds: Sequence[str], collectives: Sequence[IssuedCollective]) -> list[str]:
    """The dimension of each kernel: of the collectives as they were issued, those of its own kind first."""
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
    """What each dimension's communication takes, per step.

    Args:
        kernels: of the whole profile.
        dimension: of each row, as ``dimensions_of_rows`` found it.
        labels: the dimensions' names.
        overlapped: indices of the overlapped profiled steps.
        sequential: indices of the sequential ones.
        recorded: the collectives of the recorded step.
    """
    compute = kernels.of(Kind.COMPUTE).union()
    steps = [np.isin(kernels.step, some) for some in (overlapped, sequential)]
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for collective in recorded:
        size = sizes[collective.dimension]
        size[0] += 1
        size[1] += collective.bytes_in

    def per_step_ms(time_ns: int, some: Sequence[int]) -> float:
        return time_ns / max(len(some), 1) / 1e6

    times = []
    for name in dict.fromkeys((*labels, *sizes)):
        rows = dimension == (labels.index(name) if name in labels else -2)
        ov, seq = (kernels.intervals[rows & inside] for inside in steps)
        busy: Intervals = ov.union()
        times.append(
            DimensionTime(
                dimension=name,
                messages=sizes[name][0],
                bytes_in=sizes[name][1],
                comm_ms=per_step_ms(busy.sum_ns, overlapped),
                exposed_ms=per_step_ms(busy.sum_ns - int(busy.covered_ns(compute).sum()), overlapped),
                kernels_ms=per_step_ms(ov.sum_ns, overlapped),
                kernels_isolated_ms=per_step_ms(seq.sum_ns, sequential),
            )
        )
    return tuple(sorted(times, key=lambda time: -time.comm_ms))
