"""What is known of an arm from its windows, and whether the best one goes on winning."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from overlap_callbacks.analysis.arm_costs import KeptAccount
from overlap_callbacks.analysis.results.arm import ComparedArm
from overlap_callbacks.analysis.results.decision import LeftOut
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import Pooling, half_width_factor, pooled_error

# Maximum distance between two checks of the best arm, in windows.
MOST_APART = 32
# A pace counts as slower from this ratio on, to the median of so many before it.
_SLOWED, _PACES = 1.03, 8
# ``Watch``: logarithms of the likelihood ratio from which an arm is given up, and from which it is checked again at
# once. Winning nothing is compared with winning this part of what it won at first: it may win less later, and chance
# has favoured the first of several. By ``benchmarks/deciding.py``: an arm of 5 % that turns 5 % slower is given up
# after some 6 windows, one that goes on winning in some 2 % of jobs.
_EVIDENCE, _DOUBT, _PART = math.log(50), 0.7, 0.6
# Wider intervals, as logarithms, show nothing, and a window with such an error is none; a record may hold any number.
_MOST_SHOWN, _MOST_ERROR = 1.0, 100.0


@dataclass(eq=False)
class ArmEvidence:
    """What is known of an arm. ``center``, ``low`` and ``high``: its speed-up and interval, as logarithms."""

    arm: ComparedArm
    windows: list[Estimate] = field(default_factory=list)  # the speed-ups of those that count
    logs: list[float] = field(default_factory=list)  # their logarithms
    variances: list[float] = field(default_factory=list)
    degrees: list[float] = field(default_factory=list)
    center: float = 0.0
    error: float = math.inf
    half: float = math.inf
    left_out: LeftOut | None = None
    extra_s: float | None = None  # by which a step with it takes longer, by its trials
    trial_s: float = 0.0  # cost of its last trial
    costs_s: list[float] = field(default_factory=list)  # of its windows
    num_trials: int = 0
    num_begun: int = 0
    in_vain: int = 0
    is_fixed: bool = False  # it may not be kept, whatever it is

    @property
    def may_be_kept(self) -> bool:
        return not self.why_not_kept

    @property
    def why_not_kept(self) -> str:
        if self.arm.sequential:
            return "its steps are sequential"
        if not self.arm.equal_results:
            return "it changes results"
        return "ranks issue other collectives with it" if self.is_fixed else ""

    @property
    def low(self) -> float:
        return self.center - self.half

    @property
    def high(self) -> float:
        return self.center + self.half

    def add(self, speedup: Estimate | None, pooling: Pooling) -> bool:
        """Add a window; False if it says nothing of the arm."""
        error = math.inf if speedup is None or speedup.standard_error is None else speedup.standard_error
        if speedup is None or not (0 <= error < _MOST_ERROR and speedup.value > -1):
            self.in_vain += 1
            return False
        self.in_vain = 0
        self.windows.append(speedup)
        self.logs.append(math.log1p(speedup.value))
        self.variances.append(error**2)
        degrees = speedup.degrees_of_freedom
        self.degrees.append(degrees if degrees and degrees > 0 else 1.0)
        self.center, self.error, self.half = _interval(self.logs, self.variances, self.degrees, pooling)
        return True

    def is_behind(self, other: ArmEvidence, pooling: Pooling) -> bool:
        """Whether it is slower than another with certainty, by their windows in pairs, one after the other."""
        number = min(len(self.logs), len(other.logs))
        if not number:
            return False
        logs, own, others = (np.array(part[:number]) for part in (self.logs, self.variances, other.variances))
        with np.errstate(all="ignore"):
            parts = own**2 / self.degrees[:number] + others**2 / other.degrees[:number]
            degrees = np.where(parts > 0, (own + others) ** 2 / parts, self.degrees[:number])
        center, _, half = _interval(logs - other.logs[:number], own + others, degrees, pooling)
        return center + half < 0

    def would_show(self) -> float | None:
        """The least speed-up that its interval would tell from none."""
        return math.expm1(self.half) if self.half < _MOST_SHOWN else None

    def window_cost_s(self, arm_steps: int, base_s: float) -> float | None:
        """What a window costs, at the upper end; None if nothing is known of it. ``base_s``: what any window costs."""
        if self.costs_s:
            return max(self.costs_s[-3:])
        if self.windows:  # of an earlier start
            return base_s
        return None if self.extra_s is None else self.extra_s * arm_steps + base_s


@dataclass(eq=False)
class BestArm:
    """The best arm, and when it is checked again: each distance is twice the one before, while nothing is in doubt."""

    arm: ArmEvidence
    since: int  # window
    num_windows: int  # of all arms until then
    watch: Watch
    account: KeptAccount = field(default_factory=KeptAccount)
    others_before: float = math.inf
    distance: int = 1
    next_window: int = 0
    paces_s: list[float] = field(default_factory=list)  # time from window to window while it is on, the last ones

    @property
    def rate(self) -> float:
        """Share of time that it loses should it turn as much slower as it was faster."""
        return math.expm1(self.watch.effect)

    def is_due(self, window: int) -> bool:
        # A step number that goes back takes window numbers with it.
        is_past = window >= self.next_window or window < self.next_window - self.distance
        return is_past or self.account.was_used_up

    def look(self, window: int, pace_s: float) -> bool:
        """Whether the job has slowed down since the last looks by all that the arm wins; then it is checked at once."""
        usual_s = median(self.paces_s) if self.paces_s else math.inf
        self.paces_s = [*self.paces_s[1 - _PACES :], pace_s]
        if pace_s <= max(math.exp(self.watch.effect), _SLOWED) * usual_s:
            return False
        self.next_window = window
        return True

    def checked(self, window: int) -> None:
        self.account.was_used_up = False
        self.distance = 1 if self.watch.doubts else min(2 * self.distance, MOST_APART)
        self.next_window = window + self.distance


@dataclass(eq=False)
class Watch:
    """Notices that an arm stops winning, by Page's cumulative sum of the evidence of its windows.

    ``effect`` and ``error``: of one window while it wins, on the scale of logarithms.
    """

    effect: float
    error: float
    total: float = 0.0

    @classmethod
    def of(cls, arm: ArmEvidence) -> Watch:
        return cls(_PART * arm.center, max(arm.error * math.sqrt(len(arm.logs)), 1e-6))

    @property
    def doubts(self) -> bool:
        return self.total > _DOUBT

    def has_stopped(self, log: float) -> bool:
        """Add a window's logarithm; whether it is now more likely by far that the arm wins nothing."""
        self.total = max(0.0, self.total + self.effect * (self.effect / 2 - log) / self.error**2)
        return self.total > _EVIDENCE


def _interval(logs: Any, variances: Any, degrees: Any, pooling: Pooling) -> tuple[float, float, float]:
    """Mean, standard error and half the width, as ``statistics.pool`` on the scale of logarithms."""
    values = np.asarray(logs)
    error, freedom = pooled_error(values, np.asarray(variances), np.asarray(degrees))
    half = float(error * half_width_factor(freedom, len(values), pooling))
    return float(values.mean()), float(error), half if half >= 0 else math.inf  # NaN without an interval
