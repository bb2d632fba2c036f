"""Estimates slowdowns from one trace: compute during communication, and what copies and kernels do to each other.

They are associations, no experiment: calls that ran beside something are compared with the same calls that ran alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.attribution import labels_of
from overlap_callbacks.analysis.kernels.calls import ALONE_SHARE, UNORDERED, Calls, CallSums, numbered, turns_of
from overlap_callbacks.analysis.kernels.table import Indices, Kind, StringTable, directions_of, is_size
from overlap_callbacks.analysis.results.kernel_times import PairTime
from overlap_callbacks.traces.collect import Numbers
from overlap_callbacks.traces.figures import SlowdownEstimate
from overlap_callbacks.traces.trace import Trace

# A kernel counts as beside communication if at least the first share of its time is. What copies slow down, and copies
# beside communication, count from the second share on. What is covered for at most ``ALONE_SHARE`` is alone.
_MIN_BESIDE, _MIN_COPIED = 0.9, 0.5
# What a call is: alone, beside communication, or (from the third on) beside copies of each direction; or none of these.
_NEITHER, _ALONE, _DURING = -1, 0, 1
_COPYING = 2
# A slowdown is told if it rests on this many calls of either side, and is beyond this share and this many standard
# errors.
_MIN_CALLS, _MIN_CHANGE, _ERRORS = 3, 0.05, 3
# What tells calls apart: name, launch shape, and turn and number of turns among the calls of the step of this name and
# shape, or of this name alone. Calls are the same if these columns are equal; the first that match count. Some grids
# vary with the data, so the shape counts first and then not.
_Method = tuple[tuple[tuple[int, ...], ...], str]
_BY_TURN: _Method = ((0, 1, 2, 3), (0, 4, 5)), "calls of one kernel in the same turn of different steps"
_BY_LAUNCH: _Method = ((0, 1),), "calls of one kernel with the same grid and block"

_Marks = npt.NDArray[np.bool_]


class _Matches(NamedTuple):
    """The matches of each row of calls; shape (rows,) each.

    Attributes:
        matched: whether those that did not run alone match any that did.
        used: whether those alone are matched.
        means_ns: mean time of those alone, of both.
        alike: number of those alone, of both.
    """

    matched: _Marks
    used: _Marks
    means_ns: npt.NDArray[np.float64]
    alike: npt.NDArray[np.float64]


class EstimateSums:
    """Calls during communication, during copies and alone, added up over the pieces of a device's time."""

    def __init__(self, trace: Trace) -> None:
        self._names = trace.kernels.names
        # Launches that differ in registers or shared memory alone count as the same.
        number_of: dict[str, int] = {}
        self._shape = np.array(
            [number_of.setdefault(text, len(number_of)) for text in trace.kernels.shapes], dtype=np.int64
        )
        # Turns need several steps to compare; and without launch shapes, a name alone does not identify a kernel.
        self._methods = [_BY_TURN] if len(trace.steps) > 1 and not trace.is_cut else []
        self._methods += [_BY_LAUNCH] if any([shape and not is_size(shape) for shape in trace.kernels.shapes]) else []
        directions = {name_rules.copy_of(name) for name in self._names}
        self._copies = not directions.isdisjoint(name_rules.COPIES)
        # Collectives and copies by their labels, groups and sizes.
        self._what: Numbers[tuple[str, int, int]] = Numbers()
        # Number and time of the calls, by what they are and what ran beside them; with copies squared and covered time.
        self._calls = CallSums.nothing(9, 4 if self._copies else 2)

    def add(self, trace: Trace) -> None:
        """Add the rows of a piece, which has all calls of its steps."""
        self._calls = self._calls.with_calls(*self._columns(trace))

    def _columns(self, trace: Trace) -> tuple[list[Indices], list[npt.NDArray[Any]]]:
        """The columns of the calls that count, and their values."""
        kernels, calls = trace.kernels, Calls.of(trace.kernels)
        is_compute = calls.kind == Kind.COMPUTE
        counts = (is_compute | self._copies) & (calls.duration_ns > 0)
        if trace.steps:
            counts &= calls.step >= 0  # outside the steps, the turn of a call is unknown
            counts &= trace.whole[calls.step] | trace.is_cut  # and so it is in steps that lack others
        state, covered_ns = self._beside(trace, calls)
        # Collectives are compared with those of one size on one group, beside compute as they are; copies likewise.
        what, computing = np.zeros_like(calls.row), np.zeros_like(calls.row)
        others = np.flatnonzero(~is_compute)
        what[others] = self._number(trace, calls.row[others])
        if self._copies:
            covered = kernels.intervals[calls.row[others]].covered_ns(kernels.union_of(Kind.COMPUTE))
            computing[others] = covered > ALONE_SHARE * calls.duration_ns[others]
        counts &= (state != _NEITHER) & (is_compute | (what > 0))
        name, shape = kernels.name[calls.row], self._shape[kernels.shape[calls.row]]
        label = name * (len(self._what) + 2) + what
        turns = (*turns_of(calls, label, shape), *turns_of(calls, label, np.zeros_like(shape)))
        columns = (name, shape, *turns, what, computing, state)
        time_ns = calls.duration_ns[counts].astype(float)
        values: list[npt.NDArray[Any]] = [np.ones(len(time_ns)), time_ns]
        values += [time_ns**2, covered_ns[counts]] if self._copies else []
        return [part[counts] for part in columns], values

    def _beside(self, trace: Trace, calls: Calls) -> tuple[Indices, Indices]:
        """What each call is, and how long what it is compared for ran beside it; shape (calls,) each.

        What is beside both communication and copies is not compared: neither is its cause alone.
        """
        kernels, kind = trace.kernels, calls.kind
        length_ns = np.maximum(calls.duration_ns, 1)

        def state(covered_ns: Indices, least: float, during: Indices | int) -> Indices:
            share = covered_ns / length_ns
            return np.where(share >= least, during, np.where(share <= ALONE_SHARE, _ALONE, _NEITHER))

        comm_ns = calls.covered_ns(kernels.union_of(Kind.COMMUNICATION))
        direction = directions_of(kernels)
        found = state(comm_ns, _MIN_BESIDE, _DURING)
        if not (direction >= 0).any():
            return np.where(kind == Kind.COMPUTE, found, _ALONE), comm_ns
        copied_ns = calls.covered_ns(kernels.intervals[direction >= 0])
        copying, beside = np.full(len(calls), _COPYING), np.flatnonzero(copied_ns > 0)
        ran = kernels.intervals[calls.row[beside]]  # on a device, each row is a call
        each = [ran.covered_ns(kernels.intervals[direction == number]) for number in range(len(name_rules.COPIES))]
        copying[beside] += np.argmax(each, axis=0)
        copying = state(copied_ns, _MIN_COPIED, copying)
        found = np.where(found == _ALONE, copying, np.where(copying == _ALONE, found, _NEITHER))
        found = np.where(kind == Kind.COMMUNICATION, copying, found)
        found = np.where(kind == Kind.COPY, state(comm_ns, _MIN_COPIED, _DURING), found)
        return found, np.where(found >= _COPYING, copied_ns, comm_ns)

    def _number(self, trace: Trace, rows: Indices) -> Indices:
        """Numbers of collectives and copies that can be compared, from 1 on; 0 of others; shape (rows,)."""
        kernels, told = trace.kernels, trace.collectives
        if not self._copies:
            return (kernels.collective[rows] >= 0).astype(np.int64)
        label, texts = labels_of(kernels)
        # The size of a copy is its launch shape.
        size = np.where(kernels.kind[rows] == Kind.COPY, self._shape[kernels.shape[rows]], told.num_bytes[rows])
        columns = [label[rows], told.info[rows], size]
        number = numbered(columns)
        first = np.unique(number, return_index=True)[1]
        found = [
            self._what[texts[of], info, size] + 1 if of >= 0 else 0
            for of, info, size in zip(*[column[first].tolist() for column in columns], strict=True)
        ]
        return np.array(found, dtype=np.int64)[number]

    def figures(self) -> SlowdownEstimate | None:
        """The estimate; None if no call of compute during communication matches one alone."""
        computes = self._calls.columns[6] == 0
        for levels, method in self._methods:
            found = self._match(levels, computes & (self._calls.columns[8] == _DURING))
            if not found.matched.any():
                continue
            families = StringTable()
            of_names = np.array([families[name_rules.family_of(name)] for name in self._names])
            family = of_names[self._calls.columns[0]]
            of_families = {
                families.texts[i]: self._figures(method, found, family == i)
                for i in distinct_values(family[found.matched]).tolist()
            }
            by_time = dict(sorted(of_families.items(), key=lambda item: -item[1].time_beside_ms))
            return self._figures(method, found, np.ones(len(family), dtype=bool), by_time)
        return None

    @property
    def beside_copies(self) -> tuple[PairTime, ...]:
        """What kernels lose beside copies, and copies beside communication, in all; the largest loss first.

        Only slowdowns and gains that rest on several calls and are beyond their noise.
        """
        if not self._copies:
            return ()
        name, *_, what, _, state = self._calls.columns
        texts = StringTable()
        of_what = np.array([-1, *[texts[text] for text, _, _ in self._what]], dtype=np.int64)
        of_name = np.array([texts[name_rules.family_of(text)] for text in self._names], dtype=np.int64)
        label = np.where(what > 0, of_what[what], of_name[name])
        levels = tuple([level for of_method, _ in self._methods for level in of_method])
        found: list[PairTime] = []
        for number in distinct_values(state[(state >= _COPYING) | ((state == _DURING) & (what > 0))]).tolist():
            beside = UNORDERED[-1] if number == _DURING else name_rules.COPIES[number - _COPYING]
            matches = self._match(levels, (state == number) & ((what > 0) | (number != _DURING)))
            for moves in (False, True):
                of_kind = (what > 0) == moves
                for of in distinct_values(label[matches.matched & of_kind]).tolist():
                    found += self._pair(texts.texts[of], moves, beside, matches, of_kind & (label == of))
        return tuple(sorted(found, key=lambda pair: -pair.lost_ms))

    def _pair(self, victim: str, moves: bool, beside: str, found: _Matches, mine: _Marks) -> Iterator[PairTime]:
        """The loss of some rows, if it is beyond noise."""
        number, time_ns, square, covered_ns = self._calls.sums
        rows, alone = mine & found.matched, mine & found.used
        calls, calls_alone = float(number[rows].sum()), float(number[alone].sum())
        if min(calls, calls_alone) < _MIN_CALLS:
            return
        # As shares of the mean time alone: the mean, and the squared deviations of both sides.
        mean = float((time_ns / found.means_ns)[rows].sum()) / calls
        variance = float((square / found.means_ns**2)[rows].sum() - calls * mean**2) / (calls - 1)
        spread = float((square / found.means_ns**2 - number)[alone].sum())
        free = calls_alone - float((number / found.alike)[alone].sum())
        alone_variance = spread / free if free > 0.5 else variance
        error = max(0.0, variance / calls + alone_variance / calls_alone) ** 0.5
        if abs(mean - 1) > max(_MIN_CHANGE, _ERRORS * error):
            alone_ns = float((number * found.means_ns)[rows].sum())
            times_ns = float(covered_ns[rows].sum()), float(time_ns[rows].sum()), alone_ns
            yield PairTime(victim, moves, beside, calls, *[ns / 1e6 for ns in times_ns])

    def _match(self, levels: tuple[tuple[int, ...], ...], wanted: _Marks) -> _Matches:
        """Match rows with those alone by columns that must be equal, in order of preference."""
        columns, (number, time_ns, *_) = self._calls
        is_alone = columns[8] == _ALONE
        alone, alone_ns = number * is_alone, time_ns * is_alone
        matched, used = np.zeros(len(number), dtype=bool), np.zeros(len(number), dtype=bool)
        means_ns, alike = np.full(len(number), np.nan), np.full(len(number), np.nan)
        for level in levels:
            group = numbered([columns[i] for i in (*level, 6, 7)])
            count, total_ns = (np.bincount(group, weights=values) for values in (alone, alone_ns))
            now = wanted & ~matched & (count[group] > 0)
            matched |= now
            mine = is_alone & np.isin(group, group[now])
            used |= mine
            now |= mine
            means_ns[now], alike[now] = total_ns[group[now]] / count[group[now]], count[group[now]]
        return _Matches(matched, used, means_ns, alike)

    def _figures(
        self, method: str, found: _Matches, mine: _Marks, families: dict[str, SlowdownEstimate] | None = None
    ) -> SlowdownEstimate:
        """The estimate of some rows of the calls of compute."""
        columns, (number, times_ns, *_) = self._calls
        rows = mine & found.matched
        during = mine & (columns[6] == 0) & (columns[8] == _DURING)
        time_ns = float(times_ns[rows].sum())
        return SlowdownEstimate(
            slowdown=time_ns / float((number * found.means_ns)[rows].sum()) - 1,
            method=method,
            kernels=len(distinct_values(columns[0][rows])),
            calls_beside=int(number[rows].sum()),
            calls_alone=int(number[mine & found.used].sum()),
            calls_left_out=int(number[during & ~found.matched].sum()),
            time_beside_ms=time_ns / 1e6,
            families=families or {},
        )
