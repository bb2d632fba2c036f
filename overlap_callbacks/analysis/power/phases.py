"""When a profiled step computed and when communication was in flight, on the clock of the power readings.

While only communication runs the clock may rise, and sequential steps have more of such time. So the SM clock is taken
from readings during compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.power.readings import Readings
from overlap_callbacks.analysis.results.mode import Mode

# Minimum share of the time in which a reading may have been taken during which compute ran. The rest allows for gaps
# between kernels.
MIN_COMPUTE_SHARE = 0.9
# Added to the bounds of the step's start: the driver takes about this long to read a clock.
_READ_NS = 1_000_000


@dataclass(frozen=True)
class StepPhases:
    """When a profiled step computed and communicated, in nanoseconds of ``time.perf_counter_ns``.

    The intervals are disjoint and ascending; all may be off by up to ``uncertainty_ns``.
    """

    mode: Mode
    compute: Intervals
    communication: Intervals
    uncertainty_ns: int = 0
    counted: bool = True

    @property
    def both(self) -> Intervals:
        """When both ran at once, as disjoint intervals in ascending order."""
        return self.compute.intersection(self.communication)


class ProfilePhases:
    """Computes the phases of single steps of a profile, including kernels of other steps that run during a step."""

    def __init__(self, kernels: KernelTable) -> None:
        self._kernels = kernels
        self._compute, self._communication = (kernels.of(kind).union() for kind in (Kind.COMPUTE, Kind.COMMUNICATION))
        self._shown = (kernels.kind == Kind.COMPUTE) | (kernels.kind == Kind.COMMUNICATION)

    def of(self, step: int, mode: Mode, bounds_ns: tuple[int, int], counted: bool = True) -> StepPhases | None:
        """The phases of one step, from its first kernel to its last; None if it has no kernels.

        The device began the step between ``bounds_ns``, as of ``time.perf_counter_ns``.
        """
        own = self._kernels.intervals[self._shown & (self._kernels.step == step)]
        if not len(own):
            return None
        start, end = int(own.start_ns.min()), int(own.end_ns.max())
        compute, communication = (
            _shifted_part(union, start, end, sum(bounds_ns) // 2 - start)
            for union in (self._compute, self._communication)
        )
        return StepPhases(mode, compute, communication, (bounds_ns[1] - bounds_ns[0] + 1) // 2, counted)


def _shifted_part(union: Intervals, start_ns: int, end_ns: int, shift_ns: int) -> Intervals:
    """The part between two times, moved by ``shift_ns``."""
    low = np.searchsorted(union.end_ns, start_ns, side="right")
    high = np.searchsorted(union.start_ns, end_ns, side="left")
    starts, ends = (np.clip(side[low:high], start_ns, end_ns) + shift_ns for side in (union.start_ns, union.end_ns))
    return Intervals(starts, ends, disjoint=True)


def clocks_while_computing(readings: Readings, phases: Sequence[StepPhases]) -> dict[Mode, tuple[float, int]]:
    """The mean SM clock of the readings during compute, and their number; by mode, if there are any."""
    found: dict[Mode, list[float]] = defaultdict(list)
    known = ~np.isnan(readings.sm_clock_mhz)
    times_ns, clocks_mhz = readings.time_ns[known], readings.sm_clock_mhz[known]
    for step in phases:
        if not step.counted or not len(step.compute):
            continue
        low, high = np.searchsorted(times_ns, (step.compute.start_ns[0], step.compute.end_ns[-1]))
        margin_ns = step.uncertainty_ns + _READ_NS
        around = Intervals(times_ns[low:high] - margin_ns, times_ns[low:high] + margin_ns)
        in_compute = around.covered_ns(step.compute) >= MIN_COMPUTE_SHARE * 2 * margin_ns
        found[step.mode] += clocks_mhz[low:high][in_compute].tolist()
    return {mode: (sum(clocks) / len(clocks), len(clocks)) for mode, clocks in found.items() if clocks}
