"""Which profiled step each kernel belongs to: the one that launched it; without a launch, the one of its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import Intervals

_Indices = npt.NDArray[np.int64]


def step_of(times_ns: _Indices, bounds: Sequence[tuple[int, int]]) -> _Indices:
    """Index of the step that each time lies in, -1 outside all steps.

    Args:
        times_ns: shape (n,).
        bounds: start and end of each step, in nanoseconds, ascending and without overlap.
    """
    if not bounds:
        return np.full(len(times_ns), -1, dtype=np.int64)
    begins, ends = np.array(bounds, dtype=np.int64).T
    index = np.searchsorted(begins, times_ns, side="right") - 1
    inside = (index >= 0) & (times_ns < ends[np.maximum(index, 0)])
    return np.where(inside, index, -1)


def step_of_kernels(
    launched_ns: _Indices, ran: Intervals, lane: _Indices, bounds: Sequence[tuple[int, int]]
) -> _Indices:
    """Index of the step of each kernel, -1 outside all steps; shape (n,).

    A kernel belongs to the step that launched it. Kineto does not record all calls that launch kernels: of CUDA's
    driver it leaves out ``cuLaunchCooperativeKernel``, ``cuGraphLaunch`` and ``cuMemcpy*Async`` (Kineto's
    CuptiCbidRegistry.cpp). A kernel without a launch belongs to the step of the kernels before and after it on its
    stream, if they are of one step: a stream runs its kernels in the order of their launches. Else it belongs to the
    step whose kernels had begun on the device, and not all ended, when it started.

    Kernels that start before the first kernel that a step launched are of an earlier step, and stay outside.

    Args:
        launched_ns: host time of each kernel's launch, -1 if unknown; shape (n,).
        ran: when each kernel ran; n rows.
        lane: stream of each kernel; shape (n,).
        bounds: host start and end of each step, in nanoseconds, ascending and without overlap.
    """
    step = step_of(launched_ns, bounds)
    if not (launched_ns < 0).any() or not (step >= 0).any():
        return step
    on_device = StepsOnDevice(bounds)
    on_device.add(step, ran)
    order = np.lexsort((ran.start_ns, lane))
    is_known = launched_ns[order] >= 0
    known, rows = order[is_known], order[~is_known]
    # The last row before and the first row after each row without a launch whose own is known; -1 for none.
    place = np.searchsorted(np.flatnonzero(is_known), np.flatnonzero(~is_known))
    before, after = np.append(known, -1)[place - 1], np.append(known, -1)[place]
    agree = (before >= 0) & (after >= 0) & (step[before] == step[after])
    agree &= (lane[before] == lane[rows]) & (lane[after] == lane[rows])
    step[rows] = np.where(agree, step[before], on_device.at(ran.start_ns[rows]))
    return step


class StepsOnDevice:
    """When the device ran the kernels of each step.

    Args:
        bounds: host start and end of each step, in nanoseconds, ascending and without overlap.
    """

    def __init__(self, bounds: Sequence[tuple[int, int]]) -> None:
        self._first = np.full(len(bounds), np.iinfo(np.int64).max)
        self._last = np.array([end for _, end in bounds], dtype=np.int64)
        self._has_rows = np.zeros(len(bounds), dtype=bool)

    def add(self, step: _Indices, ran: Intervals) -> None:
        """Add kernels by their steps, -1 for none; shape (n,), and when they ran."""
        inside = step >= 0
        np.minimum.at(self._first, step[inside], ran.start_ns[inside])
        np.maximum.at(self._last, step[inside], ran.end_ns[inside])
        self._has_rows[step[inside]] = True

    @property
    def any(self) -> bool:
        """Whether any step has kernels."""
        return bool(self._has_rows.any())

    def at(self, times_ns: _Indices) -> _Indices:
        """The step during which each time lies; -1 outside all steps; shape (n,)."""
        steps = np.flatnonzero(self._has_rows)
        # A step's first kernel may start before one of the step before has, on another stream.
        begins = np.maximum.accumulate(self._first[steps])
        index = np.searchsorted(begins, times_ns, side="right") - 1
        found = steps[np.maximum(index, 0)]
        return np.where((index >= 0) & (times_ns <= self._last[found]), found, -1)
