"""Places the parts of a window so that no periodic event of the job hits one mode more often than the other.

A job does something at every k-th step: it waits for one of k loader workers, logs, saves. Windows that always open at
the same phase would give these steps to one mode, and more windows would only narrow the interval around a wrong
number. So rank 0 chooses when each part starts, and with which mode, to even out the imbalance of earlier windows for
all k at once. (A fixed table by window number cannot: the budget skips windows.)
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.monitor.schedule import Part, Placement, Schedule

# Periods that are balanced, in steps.
PERIODS = range(2, 65)
# Maximum ordinary steps inserted before either part, in addition to the fixed ones.
_MAX_SHIFT = 120
# Relative cost of the profiled part. It has a quarter of the counted steps, so its imbalance is larger anyway.
_WEIGHT_OF_PROFILED = 4e-6

# The higher the power, the more the worst period dominates the sum.
_POWER = 16

Floats = npt.NDArray[np.float64]


class PhaseBalance:
    """Places the windows of a run.

    For each arm, part, period and phase it accumulates over windows the share of sequential steps hit minus that of
    overlapped ones, and minimises the sum of their sixteenth powers, which the worst period dominates.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[str, Part], list[Floats]] = defaultdict(
            lambda: [np.zeros(period) for period in PERIODS]
        )

    def place(
        self, schedule: Schedule, first_step: int, arm: str, steps_per_block: int, long_steps: int = 0
    ) -> Placement:
        """Place the parts of a window that will be measured; it counts from now on.

        ``steps_per_block``: counted steps of a timed block. ``long_steps``: those of each mode's long block, at most
        ``schedule.most_long_steps``; 0 for none.
        """
        if not schedule.spread:
            timed_steps = len(schedule.part(Part.TIMED, steps_per_block))
            return Placement(schedule.decided_at, schedule.decided_at + timed_steps, steps_per_block=steps_per_block)
        around = schedule.steps_around(steps_per_block)
        long_part = len(schedule.long_part(long_steps))
        room = schedule.spare_steps(steps_per_block) - 2 * around - long_part
        timed = _Candidates(schedule, Part.TIMED, steps_per_block, self._totals[arm, Part.TIMED])
        profiled = _Candidates(schedule, Part.PROFILED, steps_per_block, self._totals[arm, Part.PROFILED])
        timed_start = schedule.decided_at + around
        profiled_start = timed_start + timed.num_steps + long_part + around
        timed.look(first_step + timed_start, min(room, _MAX_SHIFT))
        profiled.look(first_step + profiled_start, min(room, 2 * _MAX_SHIFT) if profiled.num_steps else 0)
        cost = timed.cost.min(axis=0)[:, None] + _WEIGHT_OF_PROFILED * profiled.cost.min(axis=0)
        if profiled.num_steps:
            gap = np.arange(cost.shape[1]) - np.arange(cost.shape[0])[:, None]
            cost[(gap < 0) | (gap > _MAX_SHIFT)] = np.inf
        # Treat costs that differ only by rounding as equal, and take the first.
        best = int(np.flatnonzero(cost.ravel() <= cost.min() * (1 + 1e-9) + 1e-24)[0])
        shift, later = divmod(best, cost.shape[1])
        return Placement(
            timed_start + shift, profiled_start + later, timed.take(shift), profiled.take(later), steps_per_block,
            long_steps,
        )  # fmt: skip


class _Candidates:
    def __init__(self, schedule: Schedule, part: Part, steps_per_block: int, totals: list[Floats]) -> None:
        marks = _marks(schedule, part, steps_per_block)
        self.num_steps = len(marks)
        self._hits = [_by_phase(marks, period) for period in PERIODS]
        self._totals = totals
        self._earliest = 0
        self.cost = np.zeros((2, 1))  # of each start; shape (2, starts), second row: modes swapped

    def look(self, earliest: int, room: int) -> None:
        """Compute the cost of starts from step ``earliest`` to ``room`` steps later."""
        self._earliest = earliest
        starts = earliest + np.arange(room + 1)
        self.cost = np.zeros((2, len(starts)))
        for total, hits, period in zip(self._totals, self._hits, PERIODS, strict=True):
            for row, sign in enumerate((1, -1)):
                self.cost[row] += ((total + sign * hits) ** _POWER).sum(axis=1)[starts % period]

    def take(self, shift: int) -> bool:
        """Account for the start that is ``shift`` steps later. Returns whether its modes are swapped."""
        swapped = bool(self.cost[1, shift] < self.cost[0, shift] * (1 - 1e-9) - 1e-24)
        sign = -1 if swapped else 1
        for number, period in enumerate(PERIODS):
            self._totals[number] += sign * self._hits[number][(self._earliest + shift) % period]
        return swapped


def _marks(schedule: Schedule, part: Part, steps_per_block: int) -> Floats:
    """For each step of a part, its share of its mode's counted steps; negative for overlapped ones."""
    steps = schedule.part(part, steps_per_block)
    marks = np.array([(1.0 if step.arm is Mode.SEQUENTIAL else -1.0) if step.counted else 0.0 for step in steps])
    return marks / max(1.0, float((marks > 0).sum()))


def _by_phase(marks: Floats, period: int) -> Floats:
    """The marks summed by phase; shape (period, period). In row r the part starts at step r modulo the period."""
    folded = np.bincount(np.arange(len(marks)) % period, weights=marks, minlength=period)
    phase = np.arange(period)
    by_start: Floats = folded[(phase[None, :] - phase[:, None]) % period]
    return by_start
