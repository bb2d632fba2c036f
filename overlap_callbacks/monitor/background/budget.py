"""Decides which windows to skip so that measuring stays within ``max_overhead``, and which get long blocks.

Rank 0 skips windows until training has paid for earlier ones. Every rank backs off after a window that waited in vain
for another rank.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.settled import Verdict
from overlap_callbacks.instruments import clocks
from overlap_callbacks.monitor.schedule import Schedule

# With fewer windows before it, a change would not show.
_QUIET_WINDOWS = 40
_SAVED = "nothing has changed lately, so windows come half as often and are saved for a change [OC383]"
_NOT_KNOWN = "what a window costs is not known, and max_overhead is kept"


def _no_late_cost() -> float:
    return 0.0


def _charged(cost: float, upper: float | None) -> float:
    """The part of an estimate that is charged; see ``WindowBudget``."""
    return max(0.0, cost if upper is None else (cost + upper) / 2)


class Skip(NamedTuple):
    """Why windows are skipped, and the first one that may be measured again; 0 for the next one."""

    reason: str
    next_window: int = 0


class WindowBudget:
    """Decides which windows to skip because of their cost; also keeps the step time.

    A window that costs ``c`` seconds is paid for by ``c / max_overhead`` seconds of training, in host time. The next is
    measured once all before it are paid for. So at any time the cost of all windows is at most ``max_overhead`` of the
    training time since the first one opened, plus the cost of the last one. None: no limit.

    The cost is an estimate, which noise may push below zero. A window is charged the estimate plus half the distance to
    the upper end of its interval (about one standard error), and at least 0: in total more than windows cost.

    A skipped window costs too: its first steps are recorded, and all ranks wait for rank 0's ruling. So when many must
    be skipped, rank 0 announces half of them in advance, and they never open. Not all: steps may get slower.

    Only rank 0 has reports. The reporting thread calls ``record``, the order check's thread ``skip``, the training
    thread the rest.
    """

    def __init__(self, max_overhead: float | None, now_ns: Callable[[], int] = clocks.now) -> None:
        self.long_blocks = LongBlocks()
        self._max_overhead = max_overhead
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._paid_at_s = -math.inf
        self._reason = ""
        self._last = 0.0, 0.0  # when the last window opened, and its cost
        # If the latest window was left out because of the cost of others: the training time until they are paid for,
        # and the ``max_overhead`` that would have sufficed, 0 if none would.
        self._postponed: tuple[float, float] | None = None
        self._step_s = 0.0
        self._began = 0, -math.inf  # the last window that came, and when
        # windows of unknown cost: when they opened, how long they took
        self._unknown: dict[int, tuple[float, float]] = {}
        self._late_ms: Callable[[], float] = _no_late_cost
        self._num_quiet = 0
        self.charged_s = 0.0  # of all windows
        self._saves = False  # the latest window is saved
        self._exempt: set[int] = set()  # windows outside the budget

    def exempt(self, window: int) -> None:
        """Take a window out of the budget: it is measured at any time, and charged nothing."""
        self._exempt.add(window)

    def is_exempt(self, window: int | None) -> bool:
        """Whether a window is outside the budget."""
        return window in self._exempt

    def unpaid_s(self) -> float | None:
        """Time until a window is within the budget, at least 0; None if the cost of one is not known yet."""
        with self._lock:
            if self._unknown:
                return None if self._max_overhead is not None else 0.0
            return max(0.0, self._paid_at_s + self._paid_after_s(self._late_ms() / 1e3) - self._now_ns() / 1e9)

    def await_cost(self, window: int, opened_ns: int, wall_ms: float) -> None:
        """Note a window that has ended: when it opened, how long it took. None is measured until its cost is known."""
        if window in self._exempt:
            return
        with self._lock:
            self._unknown[window] = opened_ns / 1e9, wall_ms / 1e3
            self._began = window, opened_ns / 1e9

    def give_up(self, window: int, late_ms: Callable[[], float] = _no_late_cost) -> None:
        """Charge a window whose cost is still unknown its whole duration, and ``late_ms`` with the next report."""
        with self._lock:
            lost = self._unknown.pop(window, None)
            if lost is not None:
                self._charge_late(late_ms)
                self._owe(*lost)
                self._reason = _NOT_KNOWN

    def record(
        self, report: OverlapReport, opened_ns: int, late_ms: Callable[[], float] = _no_late_cost
    ) -> float | None:
        """Note what a window cost, and the time of an overlapped step in it. Returns what it is charged, in s.
        None if it is outside the budget.

        ``late_ms`` returns the later cost of it and the skipped windows after it, to be charged with the next report.
        """
        self.note(report)
        if report.window in self._exempt:
            return None
        with self._lock:
            self._unknown.pop(report.window, None)
            known_s = self._charge_late(late_ms)
            # If the cost is unknown, charge the window's duration: it cost no more than that.
            charged_ms = report.wall_ms if report.lost_ms is None else _charged(report.lost_ms, report.lost_high_ms)
            self._owe(opened_ns / 1e9, max(0.0, charged_ms / 1e3 - known_s))
            overhead = report.measurement_overhead
            if self._max_overhead is None or overhead is None:
                self._reason = _NOT_KNOWN
                return charged_ms / 1e3
            overhead = _charged(overhead, report.measurement_overhead_ci_high)
            self._reason = (
                f"a window is charged {PLAIN.share_of_training(overhead)} of training time and max_overhead allows "
                f"{PLAIN.share_of_training(self._max_overhead)}, "
                f"so one window in {max(1, math.ceil(overhead / self._max_overhead))} is measured"
            )
            return charged_ms / 1e3

    def charge(self, window: int, opened_ns: int, cost_s: float, late_ms: Callable[[], float] = _no_late_cost) -> None:
        """Charge a window without a report what it cost; ``late_ms`` as in ``record``."""
        with self._lock:
            self._unknown.pop(window, None)
            if window in self._exempt:
                return
            self._charge_late(late_ms)
            self._owe(opened_ns / 1e9, cost_s)
            self._reason = "an arm was tried in one step, or collectives were delayed, which training pays for first"

    def note_quiet(self, num_windows: int) -> None:
        """Note for how many windows nothing has changed: if for many, every second one is saved for a change."""
        with self._lock:
            self._num_quiet = num_windows

    @property
    def _is_quiet(self) -> bool:
        return self._num_quiet >= _QUIET_WINDOWS

    def note(self, report: OverlapReport) -> None:
        """Note what a report says of the job, without its cost."""
        self.long_blocks.record(report)
        if report.e2e_overlapped_ms is not None:
            with self._lock:
                self._step_s = report.e2e_overlapped_ms.value / 1e3

    def skip(self, window: int | None) -> Skip | None:
        """Whether to skip a window, and some after it. None if not, and for a pinned mode, which has no window."""
        if window is None or window in self._exempt or self._max_overhead is None:
            return None
        with self._lock:
            self._postponed = None
            if self._unknown:
                return Skip("what the window before it cost is not known yet [OC301]", window + 1)
            now_s, (before, before_s) = self._now_ns() / 1e9, self._began
            self._began = window, now_s
            unpaid_s = self._paid_at_s + self._paid_after_s(self._late_ms() / 1e3) - now_s
            opened_s, cost_s = self._last
            if unpaid_s <= 0 and self._is_quiet:
                # Half as often: at least every second window is left out.
                saves_s, self._saves = opened_s + 2 * self._paid_after_s(cost_s) - now_s, not self._saves
                left = saves_s / (now_s - before_s) * (window - before) if now_s > before_s and window > before else 0.0
                if saves_s > 0 or self._saves:
                    return Skip(_SAVED, window + max(1, math.ceil(left / 2)))
            if unpaid_s <= 0:
                return None
            sooner = (now_s - opened_s) / cost_s - 1 if cost_s > 0 else 0.0
            self._postponed = unpaid_s, 1 / sooner if sooner > 1 else 0.0
            passed, taken_s = window - before, now_s - before_s
            # If numbers went back, the time between windows is unknown.
            left = unpaid_s / taken_s * passed if passed > 0 and taken_s > 0 else 0.0
            return Skip(f"{self._reason} [OC302]", window + max(1, math.ceil(left / 2)))

    def postponed(self, schedule: Schedule, step: int) -> str:
        """When the next window comes after one at ``step`` that was left out, and which budget would bring it sooner.

        Empty if it was not left out because of the cost of others.
        """
        with self._lock:
            postponed, step_s, reason = self._postponed, self._step_s, self._reason
        if postponed is None:
            return ""
        unpaid_s, enough = postponed
        steps = math.ceil(unpaid_s / step_s) if step_s > 0 else 1
        soon, comes = (schedule.next_window_step(step + after) for after in (1, steps))
        digits = 1 - math.floor(math.log10(enough)) if enough else 0
        budget = f"{math.ceil(enough * 10**digits - 1e-9) / 10**digits:g}" if enough else "None"
        return (
            f"the budget postpones the next window to about step {comes:,}: {reason}; max_overhead={budget} would "
            f"bring it at step {soon:,} [OC116]"
        )

    def _charge_late(self, late_ms: Callable[[], float]) -> float:
        """Charge and return what the last window has cost since its report; from now on ``late_ms`` reports that."""
        late_s = self._late_ms() / 1e3
        self._paid_at_s += self._paid_after_s(late_s)
        self._late_ms = late_ms
        return late_s

    def _owe(self, opened_s: float, cost_s: float) -> None:
        self._last = opened_s, cost_s
        self.charged_s += cost_s
        paid_after_s = self._paid_after_s(cost_s)
        # What a quiet stretch has saved pays for the next window, at a change.
        saved_s = paid_after_s if self._is_quiet else 0.0
        self._paid_at_s = max(self._paid_at_s, opened_s - saved_s) + paid_after_s

    def _paid_after_s(self, cost_s: float) -> float:
        """Time until a cost is paid for: the cost itself plus the training that pays for it."""
        return 0.0 if self._max_overhead is None else cost_s + cost_s / self._max_overhead

    @property
    def step_s(self) -> float:
        """Time of an overlapped step in the last measured window; 0 before the first report."""
        with self._lock:
            return self._step_s


# -- silent ranks


class SilenceBackoff:
    """Skips windows after one that waited in vain for a rank, until such waits are within ``max_overhead``.

    Each wait in vain at least doubles the distance to the next window. Windows open at multiples of a power of two:
    ranks whose powers differ still meet at the multiples of the largest.
    """

    def __init__(self, max_overhead: float | None) -> None:
        self.next_window = 0  # the first that may be opened
        # Without a budget, windows come less often while the rank is silent, without a limit to how often.
        self._max_overhead = max_overhead or math.inf
        self._power = 0  # windows are opened at multiples of two to this power

    def not_heard(self, window: int, waited_s: float, interval_s: float) -> None:
        """Record that a window waited ``waited_s`` in vain; without the wait, windows are ``interval_s`` apart."""
        paid_by = math.ceil(waited_s / (self._max_overhead * interval_s)) if interval_s > 0 else 1
        self._power = max(self._power + 1, math.ceil(math.log2(max(1, paid_by))))
        distance = 2**self._power
        self.next_window = math.ceil((window + max(1, paid_by)) / distance) * distance

    def all_heard(self) -> None:
        """Record that all ranks came to a window: the next one may open."""
        self._power = 0

    def rewind(self) -> None:
        """Start over: window numbers have gone back."""
        self.next_window = 0


# -- long blocks


# ``benchmarks/settled.py``: with this many steps the error of the settled difference is halved. Fewer than the minimum
# add little to the timed blocks and the steps around them.
_WANTED_STEPS, _LEAST_STEPS = 40, 24
# Where the timed blocks give no watts. ``benchmarks/power_truth.py``: NVML's counter, updated every 100 ms, measures a
# block this long to 2 %. Below the minimum no sensor gives more than in the timed blocks.
_WANTED_S, _LEAST_S = 6.0, 2.0
# Every n-th window of an arm, from the second one on: the first shows what a block would cost. If the second one's
# block shows no memory and watts are known, further blocks would only cost: the steps around the timed blocks show
# memory that appears later.
_EVERY = 4
# Above this ratio of sequential to overlapped step time a long block is too expensive: 20 % longer, plus the error of a
# single window (``benchmarks/power_hours.py``).
_MOST_LONGER = 1.25
# After this many in a row without watts, long blocks are no longer made longer for power.
_MOST_IN_VAIN = 6


class LongBlocks:
    """Rank 0: decides which windows have a long block of each mode, for slow effects and slow power sensors.

    Decides from the reports so far. Two threads use it: one calls ``record``, the other ``steps``.
    """

    def __init__(self) -> None:
        self._step_s = 0.0
        self._lacks_watts = False
        self._too_expensive = True
        self._in_vain = 0
        self._memory_is_open = True
        self._long: set[int] = set()
        self._windows: Counter[str] = Counter()

    def record(self, report: OverlapReport) -> None:
        """Note a report's step times, whether the difference keeps changing along a block, and whether its blocks gave
        the watts of both modes.
        """
        overlapped, sequential, power = report.e2e_overlapped_ms, report.e2e_sequential_ms, report.power
        if overlapped is None or sequential is None:
            return
        self._step_s = overlapped.value / 1e3
        self._too_expensive = sequential.value > _MOST_LONGER * overlapped.value
        was_long = report.window in self._long
        if report.settled is not None and (was_long or not self._memory_is_open):
            self._memory_is_open = report.settled.verdict is not Verdict.SHORT
        lacks = power is not None and (len(power.modes) < 2 or any(mode.mean_avg_w is None for mode in power.modes))
        if was_long:
            self._long.discard(report.window)
            self._in_vain = self._in_vain + 1 if lacks else 0
        else:
            self._lacks_watts = lacks

    def steps(self, window: int, arm: str, schedule: Schedule, steps_per_block: int) -> int:
        """Counted steps of each mode's long block in a window of an arm that will be measured; 0 for none."""
        self._windows[arm] += 1
        for_power = self._lacks_watts and self._in_vain < _MOST_IN_VAIN
        if not (self._memory_is_open or for_power or self._windows[arm] == 2):
            return 0
        if self._windows[arm] % _EVERY != 2 or self._too_expensive or self._step_s <= 0:
            return 0
        wanted = max(_WANTED_STEPS, math.ceil(_WANTED_S / self._step_s) if for_power else 0)
        steps = min(wanted, schedule.most_long_steps(steps_per_block))
        gives_watts = for_power and steps > steps_per_block and steps * self._step_s >= _LEAST_S
        if steps < _LEAST_STEPS and not gives_watts:
            return 0
        self._long.add(window)
        return steps
