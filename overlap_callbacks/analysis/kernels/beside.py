"""Names what ran beside communication in sequential steps, where nothing should.

The gate orders a collective with the streams on which the step computes and communicates. Work on another stream is not
ordered: a stream of the user's own, shared experts, copies of a data loader. Interval algebra on the profile finds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind

# Below this share of the compute, overlap is the uncertainty of the kernels' times.
_MIN_SHARE = 0.002
_MAX_NAMED = 3
_MAX_NAME_LENGTH = 80


def beside_communication(kernels: KernelTable, sequential: Sequence[int]) -> str:
    """What ran beside communication in sequential steps, in words; empty if it is too little to matter.

    Args:
        kernels: the whole profile, of a device. Communication of all steps counts.
        sequential: indices of the sequential profiled steps.
    """
    communication = kernels.of(Kind.COMMUNICATION).union()
    rows = np.flatnonzero((kernels.kind == Kind.COMPUTE) & np.isin(kernels.step, sequential))
    compute = kernels.intervals[rows]
    beside_ns = compute.covered_ns(communication)
    total_ns = int(beside_ns.sum())
    if not total_ns or total_ns < _MIN_SHARE * compute.sum_ns:
        return ""
    num_steps = max(len(sequential), 1)
    lanes = kernels.lane[rows]
    by_lane, compute_by_lane = _summed(lanes, beside_ns), _summed(lanes, compute.durations_ns)
    main = compute_by_lane.most_common(1)[0][0]
    elsewhere_ns = total_ns - by_lane[main]
    if elsewhere_ns >= total_ns / 2:
        aside = lanes != main
        streams = sorted(lane for lane, time_ns in by_lane.items() if lane != main and time_ns)
        names = _named(kernels, rows[aside], beside_ns[aside], num_steps)
        return (
            f"in sequential steps {_ms(elsewhere_ns, num_steps)} of compute ran beside communication on "
            f"{_streams(streams)}, which the gate does not order: {names}"
        )
    # The step's own compute was not kept apart from some communication: then that is what escaped.
    rows = np.flatnonzero((kernels.kind == Kind.COMMUNICATION) & np.isin(kernels.step, sequential))
    hidden_ns = kernels.intervals[rows].covered_ns(kernels.of(Kind.COMPUTE).union())
    names = _named(kernels, rows, hidden_ns, num_steps)
    return (
        f"in sequential steps {_ms(total_ns, num_steps)} of compute ran beside communication that the gate did not "
        f"order: {names}"
    )


def _summed(keys: Indices, times_ns: Indices) -> Counter[int]:
    sums: Counter[int] = Counter()
    for key in np.unique(keys).tolist():
        sums[key] = int(times_ns[keys == key].sum())
    return sums


def _named(kernels: KernelTable, rows: Indices, times_ns: Indices, num_steps: int) -> str:
    """The kernels with the most time, as text of bounded length."""
    by_name = _summed(kernels.name[rows], times_ns)
    largest = [(number, time_ns) for number, time_ns in by_name.most_common() if time_ns]
    shown = [
        f"{kernels.names[number][:_MAX_NAME_LENGTH]} ({_ms(time_ns, num_steps)})"
        for number, time_ns in largest[:_MAX_NAMED]
    ]
    more = len(largest) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _streams(streams: Sequence[int]) -> str:
    shown = ", ".join(str(stream) for stream in streams[:_MAX_NAMED])
    more = len(streams) - _MAX_NAMED
    return f"stream{'s' if len(streams) > 1 else ''} {shown}" + (f" and {more} more" if more > 0 else "")


def _ms(time_ns: int, num_steps: int) -> str:
    return f"{time_ns / num_steps / 1e6:.3g} ms"
