"""Which windows have a long block of each mode: for what follows a mode slowly, and for slow sensors of power.

Rank 0 decides.
"""

from __future__ import annotations

import math
from collections import Counter

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.monitor.schedule import Schedule

# ``benchmarks/settled.py``: with so many steps the settled difference is known twice as well, and a response that rises
# in a straight line is held. Fewer than the least add little to the timed blocks and the steps beside them.
_WANTED_STEPS, _LEAST_STEPS = 40, 24
# Where the timed blocks tell no watts. ``benchmarks/power_truth.py``: NVML's counter, renewed every 100 ms, tells those
# of so long a block to 2 %. In a shorter one than the least no sensor tells more than in the timed blocks.
_WANTED_S, _LEAST_S = 6.0, 2.0
# Every so-manieth window of an arm, from the second one on: the first tells what a block would cost.
_EVERY = 4
# Where sequential steps take longer than this, of overlapped ones, a long block would be too dear: 20 % longer, and
# what one window is off by (``benchmarks/power_hours.py``).
_MOST_LONGER = 1.25
# After so many in a row that told no watts, they are no longer made longer for power.
_MOST_IN_VAIN = 6


class LongBlocks:
    """Decides by the reports so far. Two threads use it: one calls ``record``, the other ``steps``."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._lacks_watts = False
        self._too_dear = True
        self._in_vain = 0
        self._long: set[int] = set()
        self._windows: Counter[str] = Counter()

    def record(self, report: OverlapReport) -> None:
        """Take note of a report: what its steps took, and whether its blocks told the watts of both modes."""
        overlapped, sequential, power = report.e2e_overlapped_ms, report.e2e_sequential_ms, report.power
        if overlapped is None or sequential is None:
            return
        self._step_s = overlapped.value / 1e3
        self._too_dear = sequential.value > _MOST_LONGER * overlapped.value
        lacks = power is not None and (len(power.modes) < 2 or any(mode.mean_avg_w is None for mode in power.modes))
        if report.window in self._long:
            self._long.discard(report.window)
            self._in_vain = self._in_vain + 1 if lacks else 0
        else:
            self._lacks_watts = lacks

    def steps(self, window: int, arm: str, schedule: Schedule, steps_per_block: int) -> int:
        """Counted steps of the long block of each mode in a window that will be measured; 0 for none.

        Args:
            window: its number.
            arm: name of what the job as configured is compared with.
            schedule: of the job.
            steps_per_block: counted steps of the window's timed blocks.
        """
        self._windows[arm] += 1
        if self._windows[arm] % _EVERY != 2 or self._too_dear or self._step_s <= 0:
            return 0
        for_power = self._lacks_watts and self._in_vain < _MOST_IN_VAIN
        wanted = max(_WANTED_STEPS, math.ceil(_WANTED_S / self._step_s) if for_power else 0)
        steps = min(wanted, schedule.most_long_steps(steps_per_block))
        tells_power = for_power and steps > steps_per_block and steps * self._step_s >= _LEAST_S
        if steps < _LEAST_STEPS and not tells_power:
            return 0
        self._long.add(window)
        return steps
