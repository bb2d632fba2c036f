"""Names what ran beside communication in sequential steps, where nothing should.

The gate orders a collective with the streams on which the step computes and communicates. Work on another stream is not
ordered: a stream of the user's own, shared experts. Interval algebra on the profile finds it.

Which stream is the model's own cannot be told from a profile. Nor need it be: what was ordered ran beside nothing. So
each stream is judged by its own compute that ran beside communication, not by how much it computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from overlap_callbacks.analysis.formatting import one_digit
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind

# Below this share of the compute, overlap is the uncertainty of the kernels' times.
_MIN_SHARE = 0.002
# A stream with less than this share of what ran beside communication is not worth its place in the text.
_MIN_PART = 0.05
_MAX_NAMED = 3
_MAX_NAME_LENGTH = 80


def beside_communication(kernels: KernelTable, sequential: Sequence[int], unseen: Mapping[str, float]) -> str:
    """What ran beside communication in sequential steps, in words; empty if it is too little to matter.

    Args:
        kernels: the whole profile, of a device. Communication of all steps counts.
        sequential: indices of the sequential profiled steps.
        unseen: communication of no collective that the gate saw: how many kernels or copies of each name a step has.
    """
    communication = kernels.of(Kind.COMMUNICATION).union()
    rows = np.flatnonzero((kernels.kind == Kind.COMPUTE) & np.isin(kernels.step, sequential))
    compute = kernels.intervals[rows]
    beside_ns = compute.covered_ns(communication)
    total_ns = int(beside_ns.sum())
    if not total_ns or total_ns < _MIN_SHARE * compute.sum_ns:
        return ""
    num_steps = len(sequential)
    lanes = kernels.lane[rows]
    compute_ns = _summed(lanes, compute.durations_ns)
    largest = [(lane, time) for lane, time in _summed(lanes, beside_ns).most_common() if time >= _MIN_PART * total_ns]
    streams = []
    for lane, time_ns in largest[:_MAX_NAMED]:
        on_lane = lanes == lane
        names = _named(kernels, rows[on_lane], beside_ns[on_lane], num_steps)
        share = one_digit(100 * time_ns / compute_ns[lane])
        streams.append(f"{_ms(time_ns, num_steps)} on stream {lane} ({share} % of its compute): {names}")
    if len(largest) > _MAX_NAMED:
        streams.append(f"and on {len(largest) - _MAX_NAMED} more streams")
    text = f"in sequential steps compute ran beside communication, {'; '.join(streams)}"
    escaped = _escaped(kernels, sequential, unseen)
    return f"{text}; the gate did not see this communication: {escaped}" if escaped else text


def _escaped(kernels: KernelTable, sequential: Sequence[int], unseen: Mapping[str, float]) -> str:
    """The communication beside compute that belongs to no collective, in words; empty if there is none.

    A name may be that of collectives too. Then it is named only if what belongs to no collective can be all of it that
    ran beside compute.
    """
    numbers = [number for number, name in enumerate(kernels.names) if name in unseen]
    candidates = (kernels.kind == Kind.COMMUNICATION) & np.isin(kernels.name, numbers)
    rows = np.flatnonzero(candidates & np.isin(kernels.step, sequential))
    hidden_ns = kernels.intervals[rows].covered_ns(kernels.of(Kind.COMPUTE).union())
    rows, hidden_ns = rows[hidden_ns > 0], hidden_ns[hidden_ns > 0]
    per_step = Counter(kernels.name[rows].tolist())
    explained = [n for n, count in per_step.items() if count <= round(unseen[kernels.names[n]] * len(sequential))]
    chosen = np.isin(kernels.name[rows], explained)
    return _named(kernels, rows[chosen], hidden_ns[chosen], len(sequential))


def _summed(keys: Indices, times_ns: Indices) -> Counter[int]:
    sums: Counter[int] = Counter()
    for key in distinct_values(keys).tolist():
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


def _ms(time_ns: int, num_steps: int) -> str:
    """Time of a step, rounded so that the ranks of a job say the same."""
    return f"{one_digit(time_ns / num_steps / 1e6)} ms"
