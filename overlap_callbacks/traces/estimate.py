"""Estimates the compute slowdown from one trace: an association, not an experiment."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.calls import Calls, CallSums, numbered, turns_of
from overlap_callbacks.analysis.kernels.table import Kind, StringTable
from overlap_callbacks.traces.figures import SlowdownEstimate
from overlap_callbacks.traces.trace import Trace

# A kernel counts as beside communication if at least the first share of its time is, as alone if at most the second is.
_MIN_BESIDE, _MAX_ALONE = 0.9, 0.1
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
        matched: whether those during communication match any alone.
        means_ns: mean time of these.
        used: whether those alone are matched.
    """

    matched: _Marks
    means_ns: npt.NDArray[np.float64]
    used: _Marks


class EstimateSums:
    """Compute calls during communication and alone, added up over the pieces of a device's time."""

    def __init__(self, trace: Trace) -> None:
        self._names = trace.kernels.names
        # Launches that differ in registers or shared memory alone count as the same.
        number_of: dict[str, int] = {}
        self._shape = np.array(
            [number_of.setdefault(text, len(number_of)) for text in trace.kernels.shapes], dtype=np.int64
        )
        # Turns need several steps to compare; and without launch shapes, a name alone does not identify a kernel.
        self._methods = [_BY_TURN] if len(trace.steps) > 1 and not trace.is_cut else []
        self._methods += [_BY_LAUNCH] if any(trace.kernels.shapes) else []
        # Number and time of the calls beside communication, and of those alone.
        self._calls = CallSums.nothing(6, 4)

    def add(self, trace: Trace) -> None:
        """Add the rows of a piece, which has all calls of its steps."""
        kernels, calls = trace.kernels, Calls.of(trace.kernels)
        counts = (calls.kind == Kind.COMPUTE) & (calls.duration_ns > 0)
        if trace.steps:
            counts &= calls.step >= 0  # outside the steps, the turn of a call is unknown
            counts &= trace.whole[calls.step] | trace.is_cut  # and so it is in steps that lack others
        covered = calls.covered_ns(kernels.of(Kind.COMMUNICATION)) / np.maximum(calls.duration_ns, 1)
        beside, alone = counts & (covered >= _MIN_BESIDE), counts & (covered <= _MAX_ALONE)
        name, shape = kernels.name[calls.row], self._shape[kernels.shape[calls.row]]
        # What communicates is no call of a kernel that computes, though it may have its name.
        label = name * 2 + (kernels.collective[calls.row] >= 0)
        columns = (name, shape, *turns_of(calls, label, shape), *turns_of(calls, label, np.zeros_like(shape)))
        values = beside, calls.duration_ns * beside, alone, calls.duration_ns * alone
        mine = beside | alone
        self._calls = self._calls.with_calls([part[mine] for part in columns], [part[mine] for part in values])

    def figures(self) -> SlowdownEstimate | None:
        """The estimate; None if no call during communication matches one alone."""
        for levels, method in self._methods:
            found = self._match(levels)
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

    def _match(self, levels: tuple[tuple[int, ...], ...]) -> _Matches:
        """Match calls by columns that must be equal, in order of preference."""
        columns, (beside, _, alone, alone_ns) = self._calls
        matched, used = np.zeros(len(beside), dtype=bool), np.zeros(len(beside), dtype=bool)
        means_ns = np.full(len(beside), np.nan)
        for level in levels:
            number = numbered([columns[i] for i in level])
            count, total_ns = (np.bincount(number, weights=values) for values in (alone, alone_ns))
            now = (beside > 0) & ~matched & (count[number] > 0)
            means_ns[now] = total_ns[number[now]] / count[number[now]]
            matched |= now
            used |= (alone > 0) & np.isin(number, number[now])
        return _Matches(matched, means_ns, used)

    def _figures(
        self, method: str, found: _Matches, mine: _Marks, families: dict[str, SlowdownEstimate] | None = None
    ) -> SlowdownEstimate:
        """The estimate of some rows of the calls."""
        columns, (beside, beside_ns, alone, _) = self._calls
        rows = mine & found.matched
        time_ns = float(beside_ns[rows].sum())
        return SlowdownEstimate(
            slowdown=time_ns / float((beside * found.means_ns)[rows].sum()) - 1,
            method=method,
            kernels=len(distinct_values(columns[0][rows])),
            calls_beside=int(beside[rows].sum()),
            calls_alone=int(alone[mine & found.used].sum()),
            calls_left_out=int(beside[mine & ~found.matched].sum()),
            time_beside_ms=time_ns / 1e6,
            families=families or {},
        )
