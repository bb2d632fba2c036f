"""Kernels of a CPU job: the training thread's operators compute, communication libraries' ranges communicate.

An operator is whatever torch's profiler calls one (``cpu_op``), whatever its name. User-named ranges are not operators.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.intervals import Intervals, self_segments
from overlap_callbacks.analysis.kernels.table import (
    Indices,
    KernelTable,
    KernelTableBuilder,
    Kind,
    collectives_of,
    communicates,
    rows_named,
    step_of,
)

# Share of a step that must count as nothing for a note about it.
MAX_UNCOUNTED = 0.2

# Patterns, compiled on use: device traces need none.
# Functional collectives, whose waits have their own ranges.
_FUNCTIONAL = r"^_?c10d_functional|^_dtensor::shard_dim|wait_tensor"
# Other operators that issue a collective, or wait for one.
_ISSUES = r"^c10d::|^symm_mem::|^record_param_comms"
# Not operators, although old versions of torch list them as such: torch's own named ranges.
_ANNOTATIONS = r"^(Optimizer\.(step|zero_grad)#|enumerate\(DataLoader\)#|DistributedDataParallel\.forward$)"
# Does not compute by itself. Hooks run in the time of the engine and of AccumulateGrad, and many hooks wait.
_NO_COMPUTE = r"^autograd::engine::|^torch::autograd::AccumulateGrad|^aten::(record_stream|is_pinned)|" + _ANNOTATIONS


def host_kernels(
    host: KernelTableBuilder,
    ranges: KernelTableBuilder,
    bounds: Sequence[tuple[int, int]],
    quiet_ns: Sequence[int] = (),
) -> KernelTable:
    """The table of a CPU job.

    Args:
        host: the operators of the training thread.
        ranges: asynchronous ranges, of communication or of anything else.
        bounds: start and end of each step, in nanoseconds.
        quiet_ns: ascending times at which no collective was in flight; ranges that extend beyond one are cut there.
    """
    calls = host.intervals
    called, call_names = np.array(host.name, dtype=np.int64), host.names.texts
    pieces, owner, waiting = own_time(calls, called, call_names)
    # A call belongs to the step of its start, so that all its pieces are in one step.
    step = step_of(calls.start_ns, bounds)[owner]

    is_comm = communicates(ranges)
    comm, comm_name = _cut(ranges.intervals[is_comm], quiet_ns), np.array(ranges.name, dtype=np.int64)[is_comm]

    name = np.concatenate((called[owner], comm_name + len(call_names)))
    kind = np.repeat(np.array((Kind.COMPUTE, Kind.COMMUNICATION), dtype=np.uint8), (len(owner), len(comm)))
    distinct = (*call_names, *ranges.names.texts)
    collective, collectives = collectives_of(name, distinct, kind == Kind.COMMUNICATION)
    intervals = pieces.with_others(comm)
    return KernelTable(
        intervals=intervals,
        kind=kind,
        name=name,
        step=np.concatenate((step, step_of(comm.start_ns, bounds))),
        call=np.concatenate((owner, len(calls) + np.arange(len(comm)))),
        names=distinct,
        shape=np.zeros(len(name), dtype=np.int64),
        shapes=("",),
        collective=collective,
        collectives=collectives,
        lane=np.concatenate((np.zeros(len(owner), dtype=np.int64), np.array(ranges.lane, dtype=np.int64)[is_comm])),
        launches=(None,),
        without_launch=np.zeros(len(name), dtype=bool),
        from_graph=np.zeros(len(name), dtype=bool),
        uncounted=_uncounted(intervals.with_others(waiting), calls, bounds),
    )


def own_time(
    calls: Intervals, called: Indices, names: Sequence[str]
) -> tuple[Intervals, npt.NDArray[np.intp], Intervals]:
    """The own time of calls of one thread.

    ``called``: index into ``names`` of each call; shape (n,). Returns the pieces of time in which a call computes,
    ascending, with each piece's call; and pieces in which a call issues a collective or waits.
    """
    pieces, owner = self_segments(calls)
    waits, computes = _kinds(calls, called, names)
    wanted = computes[owner]
    return pieces[wanted], owner[wanted], pieces[waits[owner]]


def uncounted_note(shares: Sequence[float]) -> str:
    """A note on steps with large ``KernelTable.uncounted`` shares; empty if they are small."""
    share = float(np.mean(shares)) if len(shares) else 0.0
    if share <= MAX_UNCOUNTED:
        return ""
    return f"{share:.0%} of a step runs in no torch operator: it counts neither as compute nor as communication [OC379]"


def _kinds(
    calls: Intervals, called: Indices, names: Sequence[str]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which calls issue collectives or wait for them, and which compute; in their own time; shape (n,) each.

    Waiting for a ``Work`` has no range: it is in the own time of the operator that issued it, which counts as neither.
    """
    functional, issues, idle = (
        rows_named(re.compile(pattern).search, names, called) for pattern in (_FUNCTIONAL, _ISSUES, _NO_COMPUTE)
    )
    issues = (issues | rows_named(name_rules.is_communication, names, called)) & ~functional
    # Collectives issued by a functional collective have a range for the wait.
    alone = issues & (calls.covered_ns(calls[functional]) < calls.durations_ns)
    starts = np.sort(calls.start_ns[alone])
    within = np.searchsorted(starts, calls.end_ns) > np.searchsorted(starts, calls.start_ns)
    return issues | functional, ~(issues | functional | idle | within)


def _uncounted(counted: Intervals, calls: Intervals, bounds: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """The share of each step that nothing covers; of the whole profile if it has no steps."""
    if not len(calls):
        return ()
    steps = np.array(bounds or [(calls.start_ns.min(), calls.end_ns.max())], dtype=np.int64)
    whole = Intervals(steps[:, 0], steps[:, 1])
    lengths = np.maximum(whole.durations_ns, 1)
    return tuple((1 - whole.covered_ns(counted) / lengths).tolist())


def _cut(ranges: Intervals, quiet_ns: Sequence[int]) -> Intervals:
    """The ranges, each cut at the first quiet time after its start."""
    never = np.iinfo(np.int64).max
    quiet = np.append(np.asarray(quiet_ns, dtype=np.int64), never)
    next_quiet = quiet[np.searchsorted(quiet, ranges.start_ns, side="left")]
    return Intervals(ranges.start_ns, np.minimum(ranges.end_ns, next_quiet))
