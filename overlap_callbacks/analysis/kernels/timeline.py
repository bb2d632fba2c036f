"""The timeline of one step for the page: compute and communication, the longest kernels, durations of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from overlap_callbacks.analysis.formatting import shortened
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.results.kernel_times import CallTimes, StepDetail, StepTimeline
from overlap_callbacks.analysis.results.mode import Mode

# Maximum intervals of each kind in a timeline. A chart that is a thousand pixels wide cannot show more.
MAX_INTERVALS = 400
# Maximum kernels of one step in the record, and maximum length of their names: tens of kilobytes per step.
MAX_SLICES, MAX_NAME_LENGTH = 400, 120
# Share of these reserved for communication, which is short beside long compute.
_COMMUNICATION_SHARE = 0.75
# Maximum kernels whose calls the record keeps, and maximum length of their names.
_MAX_KERNELS, _MAX_CALL_NAME_LENGTH = 40, 200


def step_timeline(kernels: KernelTable, step: int, arm: Mode) -> StepTimeline | None:
    """The timeline of one step, from its first kernel to its last; None if it has no kernels.

    Includes communication of other steps that is in flight during this one.
    """
    own = kernels.intervals[kernels.busy & (kernels.step == step)]
    if not len(own):
        return None
    start, end = int(own.start_ns.min()), int(own.end_ns.max())

    def within(kind: Kind) -> tuple[tuple[tuple[float, float], ...], float]:
        intervals = kernels.of(kind)
        union = Intervals(np.clip(intervals.start_ns, start, end), np.clip(intervals.end_ns, start, end)).union()
        thin = union.thinned(MAX_INTERVALS)
        pairs = zip((thin.start_ns - start).tolist(), (thin.end_ns - start).tolist(), strict=True)
        return tuple([(a / 1e6, b / 1e6) for a, b in pairs]), (thin.sum_ns - union.sum_ns) / 1e6

    compute, closed_compute = within(Kind.COMPUTE)
    communication, closed_communication = within(Kind.COMMUNICATION)
    return StepTimeline(arm, (end - start) / 1e6, compute, communication, closed_compute, closed_communication)


def step_detail(
    kernels: KernelTable,
    step: int,
    sizes: Mapping[int, int],
    max_slices: int = MAX_SLICES,
    start_ns: int | None = None,
    names_of: Mapping[int, str] | None = None,
) -> StepDetail:
    """The longest compute and communication kernels of one step, one by one. On CPU, a row is a piece of an operator.

    Communication comes first: up to three quarters of the kernels kept. ``sizes``: those of rows' collectives.
    ``start_ns``: when the device began the step, on the rank's clock. ``names_of``: what rows' collectives are for.
    """
    rows = np.flatnonzero(kernels.busy & (kernels.step == step))
    own, is_comm = kernels.intervals[rows], kernels.kind[rows] == Kind.COMMUNICATION
    by_length = np.argsort(-own.durations_ns, kind="stable")
    first = by_length[is_comm[by_length]][: int(max_slices * _COMMUNICATION_SHARE)]
    others = by_length[~np.isin(by_length, first)]
    kept = np.sort(np.append(first, others[: max_slices - len(first)]))
    kept = kept[np.argsort(own.start_ns[kept], kind="stable")]
    begin = int(own.start_ns.min()) if len(rows) else 0
    names: dict[tuple[str, bool], int] = {}
    lanes: dict[tuple[bool, int], int] = {}  # on CPU, threads of the two kinds share numbers
    slices = []
    for place, row in zip(kept.tolist(), rows[kept].tolist(), strict=True):
        communicates = bool(is_comm[place])
        of = names_of.get(row, "") if names_of and communicates else ""
        text = f"{shortened(of, MAX_NAME_LENGTH // 2)}: " if of else ""
        name = (shortened(f"{text}{kernels.names[kernels.name[row]]}", MAX_NAME_LENGTH), communicates)
        lane = (communicates, int(kernels.lane[row]))
        start, end = int(own.start_ns[place]), int(own.end_ns[place])
        slices.append(
            (
                names.setdefault(name, len(names)),
                lanes.setdefault(lane, len(lanes)),
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
        left_out_ms=(own.sum_ns - own[kept].sum_ns) / 1e6,
        start_ns=start_ns,
    )


def call_times(kernels: KernelTable, steps: Sequence[int]) -> tuple[CallTimes, ...]:
    """How long single calls of each kernel took in these steps, most time first. Pieces of a call are added up."""
    rows = np.flatnonzero(kernels.busy & np.isin(kernels.step, np.asarray(steps, dtype=np.int64)))
    _, first, call = np.unique(kernels.call[rows], return_index=True, return_inverse=True)
    length_ns = np.bincount(call, weights=kernels.intervals.durations_ns[rows])
    # A name that both computes and communicates has two numbers.
    key = 2 * kernels.name[rows[first]] + (kernels.kind[rows[first]] == Kind.COMMUNICATION)
    totals = np.bincount(key, weights=length_ns)
    found: list[CallTimes] = []
    for number in np.argsort(-totals, kind="stable")[:_MAX_KERNELS].tolist():
        ms = length_ns[key == number] / 1e6
        if not len(ms):
            break  # nor has any of the rest
        name, communicates = kernels.names[number // 2][:_MAX_CALL_NAME_LENGTH], bool(number % 2)
        least, middle, most = float(ms.min()), float(np.median(ms)), float(ms.max())
        found.append(CallTimes(name, communicates, len(ms), least, middle, most))
    return tuple(found)
