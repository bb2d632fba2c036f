"""How long the kernels of a profile take by what the gate's log says of them: by dimension, and by collective."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.kernels.alignment import Alignment
from overlap_callbacks.analysis.kernels.issued import Issued, IssuedCollective
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.results.window import DimensionTime

# Operator and name of the group.
CollectiveKey = tuple[str, str]


def dimension_times(
    aligned: Alignment, overlapped: Sequence[int], sequential: Sequence[int], recorded: Sequence[IssuedCollective]
) -> tuple[DimensionTime, ...]:
    """The communication of each dimension of parallelism, per step, those with the most time first.

    Args:
        aligned: the whole profile and the log.
        overlapped: indices of the overlapped profiled steps.
        sequential: indices of the sequential profiled steps.
        recorded: the collectives of the recorded step.
    """
    kernels, (dimension, labels) = aligned.kernels, aligned.dimensions
    compute = kernels.of(Kind.COMPUTE).union()
    messages, bytes_in = Counter[str](), Counter[str]()
    for collective in recorded:
        messages[collective.dimension] += 1
        bytes_in[collective.dimension] += collective.bytes_in
    times = []
    for name in dict.fromkeys((*labels, *messages)):
        rows = dimension == (labels.index(name) if name in labels else -2)  # -2 is in no row
        ov, seq = (kernels.intervals[rows & np.isin(kernels.step, steps)] for steps in (overlapped, sequential))
        busy = ov.union()
        of_overlapped = (busy.sum_ns, busy.sum_ns - int(busy.covered_ns(compute).sum()), ov.sum_ns)
        comm_ms, exposed_ms, kernels_ms = (time_ns / max(len(overlapped), 1) / 1e6 for time_ns in of_overlapped)
        isolated_ms = seq.sum_ns / max(len(sequential), 1) / 1e6
        times.append(DimensionTime(name, messages[name], bytes_in[name], comm_ms, exposed_ms, kernels_ms, isolated_ms))
    return tuple(sorted(times, key=lambda time: -time.comm_ms))


def kernel_times_by_collective(kernels: KernelTable, issued: Issued) -> dict[CollectiveKey, float]:
    """Time of the kernels of each collective, per step, in milliseconds.

    A kernel tells the kind of its collective, and no group. So the result has only collectives whose kind one operator
    on one group alone has, with one kernel for each, in every step.

    Args:
        kernels: the whole profile.
        issued: what each sequential step issued, by its index.
    """
    counts = {  # a group of one rank has no kernels
        step: Counter([(call.operator, call.group.name) for call in calls if call.group_size > 1])
        for step, calls in issued.items()
    }
    of_kind: dict[str, set[CollectiveKey]] = defaultdict(set)
    for key in {key for count in counts.values() for key in count}:
        of_kind[name_rules.collective_of(key[0])].add(key)
    times = {}
    for kind, (key, *others) in of_kind.items():
        rows = kernels.runs(kind)
        in_steps = {step: rows & (kernels.step == step) for step in counts}
        if not others and all(np.count_nonzero(in_steps[step]) == count[key] for step, count in counts.items()):
            total_ns = sum(kernels.intervals[in_step].sum_ns for in_step in in_steps.values())
            times[key] = total_ns / len(counts) / 1e6
    return times
