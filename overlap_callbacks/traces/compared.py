"""One side of a comparison of two traces: its mean step, and its calls added up by what they match."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.exact_sums import sum_of
from overlap_callbacks.analysis.kernels.call_table import Calls
from overlap_callbacks.analysis.kernels.same_calls import SameCalls
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.kernels.times import KernelFigures, KernelSums
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.traces.analysis import device_figures
from overlap_callbacks.traces.figures import TraceFigures
from overlap_callbacks.traces.launches import Launches
from overlap_callbacks.traces.pieces import Device
from overlap_callbacks.traces.trace import Trace

# Stands for the range of what was launched in none.
NO_RANGE = "(no range)"

_Marks = npt.NDArray[np.bool_]


class MeanStep(NamedTuple):
    """Means over the steps of one file, in milliseconds."""

    wall_ms: float
    compute_ms: float
    compute_busy_ms: float
    comm_ms: float
    comm_kernels_ms: float
    hidden_comm_ms: float
    covered_compute_ms: float


class Side:
    """One file.

    Args:
        device: its only device.

    Attributes:
        head: the trace, with any rows or none.
        num_steps: number of the steps that count, those that are whole; 1 for a file without any.
        has_steps: whether the file has any.
        computes: whether any kernel computes, once the calls were added up.
    """

    def __init__(self, device: Device) -> None:
        self.head = device.head
        self._steps = [step for step in device.outline.steps if not self.head.steps[step].cut]
        # A file without whole steps is one step, whose turns are those of all its calls.
        self._device = device if self._steps else device.in_one_piece()
        self.has_steps, self.num_steps = bool(self._steps), max(len(self._steps), 1)
        self.computes = False
        self._total = KernelFigures.nothing()

    @property
    def kernels(self) -> KernelTable:
        """The kernels, with any rows or none: their names are those of all."""
        return self.head.kernels

    def add_up(self, mode: Mode, same_calls: SameCalls) -> TraceFigures:
        """The figures of the file.

        Args:
            mode: in which it was taken.
            same_calls: takes the calls that the other file's may match.
        """

        def add(_: int, trace: Trace) -> None:
            calls, wanted, _rows = self._calls(trace)
            same_calls.add(calls, wanted)
            self.computes |= bool((trace.kernels.kind == Kind.COMPUTE).any())
            self._total += KernelSums(trace.kernels).of_rows(np.flatnonzero(self._counts(trace.kernels)))

        return device_figures(self._device, mode, add)

    def calls(self) -> Iterator[tuple[Calls, _Marks, Trace]]:
        """The calls of each piece, which of them count, and the piece."""
        return (self._calls(piece.trace) for piece in self._device.pieces())

    @property
    def mean_step(self) -> MeanStep:
        """The mean step, once the calls were added up."""
        total, ms_per_step, span = self._total, 1e-6 / self.num_steps, self._device.outline.span
        if self.has_steps:
            wall_ms = float(np.mean([self.head.steps[i].wall_ms for i in self._steps]))
        else:
            wall_ms = 0.0 if span is None else (span.end_ns - span.start_ns) / 1e6
        return MeanStep(
            wall_ms=wall_ms,
            compute_ms=total.compute_ns * ms_per_step,
            compute_busy_ms=total.compute_busy_ns * ms_per_step,
            comm_ms=total.comm_busy_ns * ms_per_step,
            comm_kernels_ms=total.comm_ns * ms_per_step,
            hidden_comm_ms=total.hidden_comm_ns * ms_per_step,
            covered_compute_ms=total.covered_compute_ns * ms_per_step,
        )

    def _calls(self, trace: Trace) -> tuple[Calls, _Marks, Trace]:
        calls = Calls.of(trace.kernels)
        return calls, self._counts(trace.kernels)[calls.row], trace

    def _counts(self, kernels: KernelTable) -> _Marks:
        """Which rows count."""
        return np.isin(kernels.step, self._steps) if self.has_steps else np.ones(len(kernels), dtype=bool)


class Unmatched(NamedTuple):
    """Calls of one kernel of one file that the other file lacks, and their time."""

    calls: int
    time_ms: float


class UnmatchedSums:
    """The calls of one file that the other file lacks, added up over pieces.

    Args:
        side: the file.
    """

    def __init__(self, side: Side) -> None:
        self._names = side.kernels.names
        self._calls, self._time_ns = (np.zeros(len(self._names)) for _ in range(2))
        self._order: dict[int, None] = {}  # as the names come first
        self._compute_ns = self._matched_ns = 0

    def add(self, calls: Calls, wanted: _Marks, alone_ns: npt.NDArray[np.float64]) -> None:
        """Add the calls of a piece.

        Args:
            calls: the calls.
            wanted: which of them count; shape (calls,).
            alone_ns: time of the same call of the other file, NaN without one; shape (calls,).
        """
        matched, size = np.isfinite(alone_ns), len(self._names)
        compute = wanted & (calls.kind == Kind.COMPUTE)
        self._compute_ns += sum_of(calls.duration_ns[compute])
        self._matched_ns += sum_of(calls.duration_ns[compute & matched])
        rows = np.flatnonzero(wanted & ~matched & (calls.kind != Kind.COPY))
        name = calls.kernels.name[calls.row[rows]]
        self._order.update(dict.fromkeys(name.tolist()))
        self._calls += np.bincount(name, minlength=size)
        self._time_ns += np.bincount(name, weights=calls.duration_ns[rows], minlength=size)

    @property
    def matched_fraction(self) -> float:
        """The share of the compute time whose calls the other file has too."""
        return self._matched_ns / self._compute_ns if self._compute_ns else 0.0

    @property
    def by_name(self) -> dict[str, Unmatched]:
        """The calls by the names of their kernels."""
        return {self._names[i]: Unmatched(int(self._calls[i]), float(self._time_ns[i]) / 1e6) for i in self._order}


class MatchedSums:
    """The calls of the overlapped file and what they match, added up over pieces.

    Args:
        side: the file.

    Attributes:
        unmatched: the calls that match nothing.
    """

    def __init__(self, side: Side) -> None:
        self.unmatched = UnmatchedSums(side)
        self._num_steps = side.num_steps
        self._names = side.kernels.names
        self._by_name = _Times(len(self._names))
        self._communicates, self._copies = (np.zeros(len(self._names), dtype=bool) for _ in range(2))
        ranges = () if side.head.launches is None else side.head.launches.ranges
        self._ranges = (NO_RANGE, *ranges)
        self._by_range = _Times(len(self._ranges))

    def add(self, calls: Calls, wanted: _Marks, alone_ns: npt.NDArray[np.float64], launches: Launches | None) -> None:
        """Add the calls of a piece.

        Args:
            calls: the calls.
            wanted: which of them count; shape (calls,).
            alone_ns: time of the same call of the other file, NaN without one; shape (calls,).
            launches: the host's side of the rows; None of a CPU job.
        """
        self.unmatched.add(calls, wanted, alone_ns)
        rows = np.flatnonzero(np.isfinite(alone_ns))
        name, kind = calls.kernels.name[calls.row[rows]], calls.kind[rows]
        self._by_name.add(name, calls.duration_ns[rows], alone_ns[rows])
        # (Of a name that stands for several kinds, the last one counts.)
        self._communicates[name], self._copies[name] = kind == Kind.COMMUNICATION, kind == Kind.COPY
        if launches is not None and launches.range_of is not None:
            rows = rows[kind == Kind.COMPUTE]
            of_range = launches.range_of[calls.row[rows]] + 1
            self._by_range.add(of_range, calls.duration_ns[rows], alone_ns[rows])

    @property
    def kernels(self) -> tuple[KernelTime, ...]:
        """The matched kernels per step, those that lose most time first."""
        return tuple(
            [
                times
                for i, times in self._by_name.of_each(self._names, self._communicates, self._num_steps)
                if not self._copies[i]
            ]
        )

    @property
    def ranges(self) -> tuple[KernelTime, ...]:
        """The matched compute per step by the range of the host in which it was launched, the largest loss first."""
        if not self._by_range.calls[1:].any():
            return ()
        none = np.zeros(len(self._ranges), dtype=bool)
        return tuple([times for _, times in self._by_range.of_each(self._ranges, none, self._num_steps)])


class _Times:
    """Calls of each of some things, their time, and that of what they match.

    Attributes:
        calls: their numbers; shape (things,).
    """

    def __init__(self, size: int) -> None:
        self.calls, self._overlapped_ns, self._alone_ns = (np.zeros(size) for _ in range(3))

    def add(
        self, of: npt.NDArray[np.int64], duration_ns: npt.NDArray[np.int64], alone_ns: npt.NDArray[np.float64]
    ) -> None:
        """Add calls.

        Args:
            of: the thing of each; shape (n,).
            duration_ns: how long each took; shape (n,).
            alone_ns: how long what it matches took; shape (n,).
        """
        size = len(self.calls)
        self.calls += np.bincount(of, minlength=size)
        self._overlapped_ns += np.bincount(of, weights=duration_ns, minlength=size)
        self._alone_ns += np.bincount(of, weights=alone_ns, minlength=size)

    def of_each(self, names: tuple[str, ...], communicates: _Marks, num_steps: int) -> Iterator[tuple[int, KernelTime]]:
        """The number of each thing that has calls, and these per step, the largest loss first."""
        calls, overlapped_ms = self.calls / num_steps, self._overlapped_ns / num_steps / 1e6
        alone_ms = self._alone_ns / num_steps / 1e6
        for i in np.argsort(alone_ms - overlapped_ms, kind="stable").tolist():
            if self.calls[i]:
                yield (
                    i,
                    KernelTime(
                        name=names[i],
                        communication=bool(communicates[i]),
                        overlapped_calls=float(calls[i]),
                        sequential_calls=float(calls[i]),
                        overlapped_ms=float(overlapped_ms[i]),
                        sequential_ms=float(alone_ms[i]),
                    ),
                )
