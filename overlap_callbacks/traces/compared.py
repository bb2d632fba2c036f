"""One of two compared trace files: its mean step, and its calls by whether the other file has them too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import distinct_values, sum_of, sums_by
from overlap_callbacks.analysis.kernels.calls import Calls, SameCalls
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.kernels.times import KernelFigures, KernelSums
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.traces.analysis import device_figures, step_figures
from overlap_callbacks.traces.collectives import UNKNOWN, Collectives
from overlap_callbacks.traces.figures import StepFigures, TraceFigures
from overlap_callbacks.traces.pieces import Device
from overlap_callbacks.traces.ranks import CollectiveSums
from overlap_callbacks.traces.trace import Trace

# Stands for the range of what was launched in none.
NO_RANGE = "(no range)"

_Marks = npt.NDArray[np.bool_]


class Side:
    """One file: its mean step, and sums of its calls by their matches in the other one.

    Attributes:
        trace: the whole trace.
        kernels: a table without rows, with the names of all kernels.
        num_steps: number of whole steps, which count; 1 for a file without any.
        has_steps: whether the file has any.
        computes: whether any kernel that counts computes, once the calls were added up.
        num_collectives: kernels that count and communicate, once the calls were added up.
        unmatched: the calls that match none, by the number of their name, once all were matched.
    """

    def __init__(self, device: Device) -> None:
        self.trace = trace = device.trace
        self.kernels = kernels = trace.kernels[:0]
        self._device = device
        self.keep({step.number for step in trace.steps})
        self.computes, self.num_collectives = False, 0
        # Bytes of each step, or of a file without steps; None if any size is unknown.
        self._bytes: list[int] | None = [0] * max(1, len(trace.steps))
        self._infos: set[int] = set()
        self._total = KernelFigures()
        self._compute_ns = self._matched_ns = 0
        self._matched, self.unmatched = _Times(len(kernels.names)), _Times(len(kernels.names))
        self._kind = np.full(len(kernels.names), Kind.OTHER)
        self._ranges = (NO_RANGE, *(trace.launches.ranges if trace.launches is not None else ()))
        self._by_range = _Times(len(self._ranges))

    def keep(self, numbers: set[int]) -> None:
        """Count only whole steps with these numbers; call before anything is added up."""
        steps = self.trace.steps
        self._steps = [i for i in self._device.steps if not steps[i].cut and steps[i].number in numbers]
        if not self._steps:
            # A file without whole steps is one step, with the turns of all its calls.
            self._device.at_least = len(self.trace.kernels)
        self.has_steps, self.num_steps = bool(self._steps), max(len(self._steps), 1)

    def only(self, numbers: Iterable[int]) -> Side:
        """The same file, to be added up anew; of it only whole steps with these numbers count."""
        side = Side(self._device)
        side.keep({*numbers})
        return side

    def add_up(self, mode: Mode, same_calls: SameCalls) -> TraceFigures:
        """The figures of the file; ``same_calls`` collects the calls that the other file's may match."""

        def add(trace: Trace) -> None:
            calls, wanted, _rows = self._calls(trace)
            same_calls.add(calls, wanted)
            rows = np.flatnonzero(self._counts(trace.kernels))
            kind = trace.kernels.kind[rows]
            self.computes |= bool((kind == Kind.COMPUTE).any())
            self._total += KernelSums(trace.kernels).of_rows(rows)
            rows = rows[kind == Kind.COMMUNICATION]
            self._add_collectives(trace.collectives[rows], trace.kernels.step[rows])

        return device_figures(self._device, CollectiveSums(self.trace, with_turns=False), mode, add)

    def calls(self) -> Iterator[tuple[Calls, _Marks, Trace]]:
        """The calls of each piece, which of them count, and the piece."""
        return (self._calls(piece.trace) for piece in self._device.pieces())

    def match(self, calls: Calls, wanted: _Marks, alone_ns: npt.NDArray[np.float64], trace: Trace) -> None:
        """Add the wanted calls of a piece; ``alone_ns`` are the times of their matches, NaN without any."""
        is_matched, kind = np.isfinite(alone_ns), calls.kind
        name, time_ns = calls.kernels.name[calls.row], calls.duration_ns
        compute = wanted & (kind == Kind.COMPUTE)
        self._compute_ns += sum_of(time_ns[compute])
        self._matched_ns += sum_of(time_ns[compute & is_matched])
        rows = np.flatnonzero(wanted & ~is_matched & (kind != Kind.COPY))
        self.unmatched.add(name[rows], time_ns[rows], alone_ns[rows])
        rows = np.flatnonzero(is_matched)
        self._matched.add(name[rows], time_ns[rows], alone_ns[rows])
        self._kind[name[rows]] = kind[rows]  # the last kind counts for names with several
        if trace.launches is not None and trace.launches.range_of is not None:
            rows = rows[kind[rows] == Kind.COMPUTE]
            self._by_range.add(trace.launches.range_of[calls.row[rows]] + 1, time_ns[rows], alone_ns[rows])

    @property
    def wall_ms(self) -> float:
        """Mean length of a step on the host, or the length of a file without steps."""
        if self.has_steps:
            return float(np.mean([self.trace.steps[i].wall_ms for i in self._steps]))
        span = self._device.span
        return 0.0 if span is None else (span.end_ns - span.start_ns) / 1e6

    @property
    def mean_step(self) -> StepFigures:
        """The kernels of the mean step, once the calls were added up."""
        ms_per_step = 1e-6 / self.num_steps
        return step_figures(self._total, None, None, communicates=True, to_ms=lambda ns: ns * ms_per_step)

    @property
    def device_name(self) -> str:
        """Empty if unknown, and of a CPU job."""
        return "" if self.trace.on_host else self.trace.device_names.get(self._device.number, "")

    @property
    def communicates(self) -> bool:
        """Whether the steps that count do, or the host, once the calls were added up."""
        launches = self.trace.launches
        return bool(self.num_collectives) or (launches is not None and launches.on_host is not None)

    @property
    def group_sizes(self) -> set[int]:
        """Those of the collectives' groups, as far as the file tells, once the calls were added up."""
        infos = self.trace.collectives.infos
        return {size for i in self._infos if (size := infos[i].size) is not None}

    @property
    def comm_bytes(self) -> float | None:
        """What a mean step communicates, once the calls were added up; None if any size is unknown."""
        return None if self._bytes is None else sum(self._bytes) / self.num_steps

    @property
    def step_bytes(self) -> dict[int, int]:
        """What each step that counts communicates, by its number; empty if any size is unknown."""
        return {self.trace.steps[i].number: self._bytes[i] for i in self._steps} if self._bytes is not None else {}

    @property
    def times(self) -> tuple[object, ...]:
        """When the kernels ran, once the calls were added up: no two files have the same, unless one is a copy."""
        return self._device.span, self._total, len(self.trace.kernels), self.trace.steps

    @property
    def matched_fraction(self) -> float:
        """The share of the compute time whose calls the other file has too."""
        return self._matched_ns / self._compute_ns if self._compute_ns else 0.0

    @property
    def matched_kernels(self) -> tuple[KernelTime, ...]:
        """The matched kernels per step, the largest loss first."""
        return tuple(self._matched.of_each(self.kernels.names, self._kind, self.num_steps))

    @property
    def matched_ranges(self) -> tuple[KernelTime, ...]:
        """Matched compute per step by the host's range around its launch, the largest loss first."""
        if not self._by_range.calls[1:].any():
            return ()
        compute = np.full(len(self._ranges), Kind.COMPUTE)
        return tuple(self._by_range.of_each(self._ranges, compute, self.num_steps))

    def _add_collectives(self, found: Collectives, step: npt.NDArray[np.int64]) -> None:
        self.num_collectives += len(found.info)
        self._infos.update(distinct_values(found.info[found.info >= 0]).tolist())
        begins, _ = found.transfers_ns(step)  # several kernels may run one all-to-all
        num_bytes = found.num_bytes[begins]
        if (num_bytes == UNKNOWN).any():
            self._bytes = None
        if self._bytes is not None:
            added = sums_by(np.maximum(step[begins], 0), num_bytes, len(self._bytes))
            self._bytes = list(map(int.__add__, self._bytes, added))

    def _calls(self, trace: Trace) -> tuple[Calls, _Marks, Trace]:
        calls = Calls.of(trace.kernels)
        return calls, self._counts(trace.kernels)[calls.row], trace

    def _counts(self, kernels: KernelTable) -> _Marks:
        """Which rows count."""
        return np.isin(kernels.step, self._steps) if self.has_steps else np.ones(len(kernels), dtype=bool)


class _Times:
    """Per key, such as a kernel's name: number of calls, their time, and that of their matches."""

    def __init__(self, size: int) -> None:
        self.calls, self._time_ns, self._alone_ns = (np.zeros(size) for _ in range(3))

    def add(
        self, of: npt.NDArray[np.int64], duration_ns: npt.NDArray[np.int64], alone_ns: npt.NDArray[np.float64]
    ) -> None:
        """Add calls by key, with their times and their matches' times; shape (n,) each."""
        size = len(self.calls)
        self.calls += np.bincount(of, minlength=size)
        self._time_ns += np.bincount(of, weights=duration_ns, minlength=size)
        self._alone_ns += np.bincount(of, weights=alone_ns, minlength=size)

    def by_name(self, names: tuple[str, ...]) -> dict[str, tuple[int, float]]:
        """Number and time in milliseconds of calls, by key."""
        return {names[i]: (int(self.calls[i]), float(self._time_ns[i]) / 1e6) for i in np.flatnonzero(self.calls)}

    def of_each(self, names: tuple[str, ...], kind: npt.NDArray[Any], num_steps: int) -> Iterator[KernelTime]:
        """The calls of each key per step, except copies, the largest loss first."""
        calls, overlapped_ms = self.calls / num_steps, self._time_ns / num_steps / 1e6
        alone_ms = self._alone_ns / num_steps / 1e6
        for i in np.argsort(alone_ms - overlapped_ms, kind="stable").tolist():
            if self.calls[i] and kind[i] != Kind.COPY:
                yield KernelTime(
                    name=names[i],
                    communication=bool(kind[i] == Kind.COMMUNICATION),
                    overlapped_calls=float(calls[i]),
                    sequential_calls=float(calls[i]),
                    overlapped_ms=float(overlapped_ms[i]),
                    sequential_ms=float(alone_ms[i]),
                )
