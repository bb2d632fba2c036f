"""Impossible or missing kernels of a profile: a stream runs one kernel at a time, and each launch has one.

Profilers write kernels that end long after the next one of their stream begins, kernels without a time, and lose
kernels whose launches they have. Files and live profiles are checked by the same rules.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import Intervals, distinct_values
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable

# A kernel may begin a little before the one before it on its stream ends (programmatic dependent launch): by 13 us at
# most in 36 real files.
OVERRUN_NS = 50_000
# The clocks of host and device agree to within this.
CLOCKS_NS = 1_000_000
# No kernel starts later than this after its launch, or earlier than this before it.
_MAX_DELAY_NS, _MAX_EARLY_NS = 10 * 60 * 10**9, 10**9
# No profile begins in the first thousandth of its clock's time once that is longer than a day.
_DAY_NS, _LEAST_AGE = 24 * 60 * 60 * 10**9, 1000
# Number of kernels sampled to find the usual times.
_SAMPLE = 4096
# Rows processed at a time: columns of files may be larger than memory.
_AT_ONCE = 2**16
# The last kernel of a stream is too long if it takes more than this many times as long as any other of its name, of
# which there are at least this many.
_TOO_LONG, _MIN_ALIKE = 100, 8
_LATEST, _EVER = np.iinfo(np.int64).max, 2**61

_Marks = npt.NDArray[np.bool_]

# What a host call does with a kernel, by its name: see ``call_of``.
NO_LAUNCH, LAUNCH, DRIVER_LAUNCH, CAPTURE_BEGINS, CAPTURE_ENDS = range(5)
_LAUNCH = re.compile(r"(?:cuda|cu|hip)(?:Ext|Hcc)?(?:Module)?Launch(?:Cooperative)?Kernel(?!.*MultiDevice)")
_CAPTURE = re.compile(r"(?:cuda|cu|hip)Stream(?:(Begin)|End)(?:Re)?[cC]apture")


def call_of(name: str | None) -> int:
    """Whether a CUDA or HIP call certainly launches one kernel, or begins or ends the capture of a graph."""
    if _LAUNCH.match(name or ""):
        return DRIVER_LAUNCH if (name or "").startswith("cuL") else LAUNCH
    capture = _CAPTURE.match(name or "")
    return NO_LAUNCH if capture is None else CAPTURE_BEGINS if capture.group(1) else CAPTURE_ENDS


class Overruns(NamedTuple):
    """Kernels that seem to run impossibly long.

    Attributes:
        rows: their rows, ascending.
        until_ns: where each ends at the latest.
    """

    rows: Indices
    until_ns: Indices


def overruns(lane: Indices, ran: Intervals, correlation: npt.NDArray[np.uint64]) -> Overruns:
    """The kernels and copies that end more than ``OVERRUN_NS`` after the next one of their stream begins.

    Kernels of one graph launch share its number, and may run at the same time.

    Args:
        lane: stream of each row; shape (n,).
        ran: when each ran, in order of the starts on each device; n rows.
        correlation: number of each row's launch, 0 for none; shape (n,).
    """
    start_ns, end_ns = ran.start_ns, ran.end_ns
    # Longer than whatever starts next allows.
    long = np.concatenate([
        part.start + np.flatnonzero(end_ns[part][: len(start_ns) - part.start - 1] - OVERRUN_NS > start_ns[_next(part)])
        for part in _parts(len(ran))
    ])  # fmt: skip
    long = long[end_ns[long] > start_ns[long]].astype(np.int64)
    found, until_ns = [long[:0]], [start_ns[:0]]
    for number in distinct_values(lane[long]).tolist():
        rows = long[lane[long] == number]
        own = np.flatnonzero((lane == number) & (end_ns > start_ns))
        after = np.searchsorted(own, rows) + 1
        rows, after = rows[after < len(own)], after[after < len(own)]
        of_graph = (correlation[own[after]] == correlation[rows]) & (correlation[rows] != 0)
        if of_graph.any():
            # Those of the next launch begin where the number changes.
            changes = np.append(np.flatnonzero(np.diff(correlation[own])) + 1, len(own))
            after[of_graph] = changes[np.searchsorted(changes, after[of_graph])]
            rows, after = rows[after < len(own)], after[after < len(own)]
        next_ns = start_ns[own[after]]
        over = end_ns[rows] - OVERRUN_NS > next_ns
        found.append(rows[over])
        until_ns.append(next_ns[over])
    rows = np.concatenate(found)
    order = np.argsort(rows)
    return Overruns(rows[order], np.concatenate(until_ns)[order])


def past_the_end(
    lane: Indices, ran: Intervals, name: Indices, may_wait: _Marks, launched_ns: Indices, syncs: Intervals, end_ns: int,
    ended_ns: int = _LATEST,
) -> Overruns:  # fmt: skip
    """The last kernel of each stream if it seems to run on after everything ended.

    It ends after the profile, or after a wait of the host for the device that began after its launch. Or it is longer
    than everything else in the file, and many times as long as others of its name.

    Args:
        lane: stream of each row; shape (n,).
        ran: when each ran, in order of the starts on each device; n rows.
        name: number of each row's name; shape (n,).
        may_wait: which rows may wait for other ranks, however long; shape (n,).
        launched_ns: when each row was launched, -1 if unknown; shape (n,).
        syncs: when the host waited for all of the device, in order of the starts.
        end_ns: the last time that the host has in the file.
        ended_ns: when the profile had ended.
    """
    rows = np.full(int(lane.max(initial=-1)) + 1, -1)
    rows[lane] = np.arange(len(lane))  # of equal lanes the last counts
    rows = np.sort(rows[rows >= 0])
    if not len(rows):
        return Overruns(rows, rows)
    starts_ns, ends_ns = ran.start_ns[rows], ran.end_ns[rows]
    wait = np.where(launched_ns[rows] < 0, len(syncs), np.searchsorted(syncs.start_ns, launched_ns[rows]))
    waited_ns = np.minimum(np.append(syncs.end_ns, _LATEST)[wait], ended_ns)
    until_ns = np.where(ends_ns - CLOCKS_NS > waited_ns, np.maximum(waited_ns, starts_ns), ends_ns)
    longest = int(np.argmax(until_ns))
    row = int(rows[longest])
    rest_ns = max([int(part.max(initial=end_ns)) for part in (ran.end_ns[:row], ran.end_ns[row + 1 :])])
    length_ns, first_ns = int(until_ns[longest] - starts_ns[longest]), int(ran.start_ns.min())
    if length_ns > max(rest_ns - first_ns, 0) and not may_wait[row]:
        alike = np.flatnonzero(name == name[row])
        alike_ns = int(ran.durations_ns[alike[alike != row]].max(initial=0))
        if len(alike) > _MIN_ALIKE and length_ns > _TOO_LONG * alike_ns:
            until_ns[longest] = max(rest_ns, int(starts_ns[longest]) + alike_ns)
    over = until_ns < ends_ns
    return Overruns(rows[over], until_ns[over])


def repeated(lane: Indices, ran: Intervals, name: Indices, correlation: npt.NDArray[np.uint64]) -> Indices:
    """The rows that an earlier one repeats in all: a stream runs one kernel at a time, and a launch has one.

    Kernels of one launch of a graph may do the same at the same time.

    Args:
        lane: stream of each row; shape (n,).
        ran: when each ran, in order of the starts on each device; n rows.
        name: number of each row's name; shape (n,).
        correlation: number of each row's launch, 0 for none; shape (n,).
    """
    start_ns, end_ns = ran.start_ns, ran.end_ns
    together = np.concatenate([
        part.start + np.flatnonzero(start_ns[part][: len(start_ns) - part.start - 1] == start_ns[_next(part)])
        for part in _parts(len(ran))
    ])  # fmt: skip
    rows = distinct_values(np.concatenate((together, together + 1)).astype(np.int64))
    columns = [column[rows] for column in (lane, start_ns, end_ns, name, correlation)]
    order = np.lexsort(columns)
    same = np.all([column[order][1:] == column[order][:-1] for column in columns], axis=0)
    again = np.flatnonzero(same & (end_ns[rows[order]][1:] > start_ns[rows[order]][1:])) + 1
    if len(again):
        in_order = columns[-1][order]
        numbers, of_copies = np.unique(
            in_order[distinct_values(np.concatenate((again, again - 1)))], return_counts=True
        )
        of_all = np.unique(correlation[np.isin(correlation, numbers)], return_counts=True)[1]
        alone = (of_all == of_copies) | (numbers == 0)  # otherwise, of a graph
        again = again[alone[np.searchsorted(numbers, in_order[again])]]
    return np.sort(rows[order[again]])


def without_time(ran: Intervals, launched_ns: Indices) -> tuple[_Marks, _Marks]:
    """Whether each row has no possible time, and whether its launch has none; shape (n,) each.

    A profiler writes 0 for an unknown time; known times are far from 0.

    Args:
        ran: when each row ran, if its times are right; n rows.
        launched_ns: when each was launched, -1 if unknown; shape (n,).
    """
    start_ns, end_ns, size = ran.start_ns, ran.end_ns, len(ran)
    some = slice(None, None, max(1, size // _SAMPLE))
    real = (start_ns[some] > 0) | (end_ns[some] > start_ns[some])
    usual_ns = _median(start_ns[some][real])
    first_ns = 0 if usual_ns > _MAX_DELAY_NS else -1  # else the clock may begin with the profile
    known = real & (launched_ns[some] > first_ns)
    usual_launch_ns = _median(launched_ns[some][known])
    usual_delay_ns = _median((start_ns[some] - launched_ns[some])[known])
    earliest_ns, latest_ns = min(0, usual_delay_ns) - _MAX_EARLY_NS, usual_delay_ns + _MAX_DELAY_NS
    wrong, of_launch = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
    for part in _parts(size):
        starts_ns, begun_ns = start_ns[part], launched_ns[part]
        lost = (starts_ns <= 0) & ((end_ns[part] <= starts_ns) | (first_ns == 0))
        delay_ns, known = starts_ns - begun_ns, ~lost & (begun_ns > first_ns)
        apart = known & ((delay_ns > latest_ns) | (delay_ns < earliest_ns))
        # One of the two times is wrong: that which is further from the others of its kind.
        of_kernel = np.abs(starts_ns - usual_ns) >= np.abs(begun_ns - usual_launch_ns)
        wrong[part] = lost | (apart & of_kernel)
        of_launch[part] = (apart & ~of_kernel) | (~known & ~lost & (begun_ns >= 0))
    return wrong, of_launch


def at_no_time(starts_ns: Indices, *others_ns: Indices) -> _Marks:
    """Which of the host's events have a time of 0, or nearly, on a clock that began long before; shape (n,).

    ``others_ns`` are times of others on the same clock.
    """
    some_ns = np.concatenate([times_ns[:: max(1, len(times_ns) // _SAMPLE)] for times_ns in (starts_ns, *others_ns)])
    usual_ns = _median(some_ns[some_ns > 0])
    if usual_ns <= _MAX_DELAY_NS:
        return np.zeros(len(starts_ns), dtype=bool)
    wrong: _Marks = starts_ns <= (usual_ns // _LEAST_AGE if usual_ns > _DAY_NS else 0)
    return wrong


def _median(times_ns: Indices) -> int:
    return int(np.median(times_ns)) if len(times_ns) else 0


def _parts(size: int) -> list[slice]:
    """Slices of rows that are looked at at a time; one if there are none."""
    return [slice(first, min(first + _AT_ONCE, size)) for first in range(0, max(size, 1), _AT_ONCE)]


def _next(part: slice) -> slice:
    return slice(part.start + 1, part.stop + 1)


# -- what was launched


class Missing(NamedTuple):
    """Launches that have no kernel.

    Attributes:
        launches: their rows, ascending.
        captured: number of launches captured into a graph, which ran no kernel.
        number: number of all other launches of kernels.
    """

    launches: Indices
    captured: int
    number: int


def missing_kernels(
    launched: Intervals, call: npt.NDArray[np.uint8], thread: Indices, has_row: _Marks, captures: Intervals
) -> Missing:
    """The launches whose kernels a profile lacks.

    Args:
        launched: calls of the host; n rows.
        call: what each call does, see ``call_of``; shape (n,).
        thread: thread of each call; shape (n,).
        has_row: whether the profile has what each call launched; shape (n,).
        captures: when launches went into a graph.
    """
    launches = (call == LAUNCH) | (call == DRIVER_LAUNCH)
    lost = np.flatnonzero(launches & ~has_row)
    if not len(lost):
        return Missing(lost, 0, int(launches.sum()))
    into_graph = _covers(captures, launched.start_ns[lost])
    captured, lost = int(into_graph.sum()), lost[~into_graph]
    # A driver call within a runtime call launches the same kernel.
    same = np.zeros(len(lost), dtype=bool)
    for kind, number in itertools.product((LAUNCH, DRIVER_LAUNCH), distinct_values(thread[lost]).tolist()):
        mine = np.flatnonzero((thread[lost] == number) & (call[lost] == kind))
        other = launched[launches & has_row & (call != kind) & (thread == number)]
        if kind == DRIVER_LAUNCH:
            same[mine] = _covers(other, launched.start_ns[lost[mine]])
        else:
            same[mine] = launched[lost[mine]].covered_ns(Intervals(other.start_ns, other.start_ns + 1)) > 0
    return Missing(lost[~same], captured, int(launches.sum()) - captured)


def _covers(intervals: Intervals, times_ns: Indices) -> _Marks:
    """Whether each time lies in any of the intervals; shape (n,)."""
    return Intervals(times_ns, times_ns + 1).covered_ns(intervals) > 0


def captures_of(time_ns: Indices, begins: _Marks) -> Intervals:
    """When graphs were captured, from the calls that begin and end it; several threads may capture at a time.

    A capture without a beginning began before the profile; one without an end ends after it.
    """
    order = np.argsort(time_ns, kind="stable")
    depth = np.cumsum(np.concatenate(([0], np.where(begins[order], 1, -1))))
    bounds = np.concatenate(([-_EVER], time_ns[order], [_EVER]))
    is_open = depth > depth.min()
    return Intervals(bounds[:-1][is_open], bounds[1:][is_open])


# -- live profiles


def possible(
    kernels: KernelTable,
    device: Indices,
    correlation: npt.NDArray[np.uint64],
    wrong: _Marks,
    lost: Indices,
    num_steps: int,
    ended_ns: int | None,
) -> KernelTable:
    """A device profile without impossible rows, and the steps that have such rows or lack kernels.

    Args:
        kernels: the profile, in any order.
        device: number of each row's device; shape (n,).
        correlation: number of each row's launch, 0 for none; shape (n,).
        wrong: which rows have no time; shape (n,).
        lost: the step of each launch without a kernel, -1 outside all steps.
        num_steps: number of the steps.
        ended_ns: when the profile had ended; None if unknown.
    """
    lacking = {*lost.tolist(), *kernels.step[wrong].tolist()}
    if wrong.any():
        if kernels.launched_ns is None or (kernels.launched_ns[wrong] < 0).any():
            lacking = {*range(num_steps)}  # any step may have launched them
        kernels, device, correlation = kernels[~wrong], device[~wrong], correlation[~wrong]
        kernels = dataclasses.replace(kernels, call=np.arange(len(kernels)))
    lane, end_ns = kernels.lane * (int(device.max(initial=0)) + 1) + device, kernels.intervals.end_ns.copy()
    order = np.lexsort((kernels.intervals.start_ns, device))
    found = overruns(lane[order], kernels.intervals[order], correlation[order])
    end_ns[order[found.rows]] = found.until_ns
    if ended_ns is not None:
        end_ns = np.where(end_ns - CLOCKS_NS > ended_ns, np.maximum(ended_ns, kernels.intervals.start_ns), end_ns)
    changed = end_ns != kernels.intervals.end_ns
    return dataclasses.replace(
        kernels,
        intervals=Intervals(kernels.intervals.start_ns, end_ns) if changed.any() else kernels.intervals,
        lacking=frozenset(lacking - {-1}),
        impossible=frozenset({*kernels.step[changed].tolist()} - {-1}),
    )
