"""Decides which arm a job measures next, which it drops, and which is best: successive elimination within a budget.

Every window compares one arm with the job as configured, so windows of all arms are compared through that. An arm is
dropped once its interval says that it is slower, or slower than another, with certainty. Intervals hold at all looks
(``statistics.pool``) and for all arms together (Bonferroni), so looking after each window costs no certainty.

An arm that is known to be faster is the best until another is known to be faster than it. It is checked again at
growing distances. An effect may change, which intervals over the whole run would notice late: ``Watch`` does at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.arm_costs import ArmCosts, Stretch
from overlap_callbacks.analysis.arm_evidence import MOST_APART, ArmEvidence, BestArm, Watch
from overlap_callbacks.analysis.arms import SEQUENTIAL
from overlap_callbacks.analysis.results.arm import ArmReport, ComparedArm
from overlap_callbacks.analysis.results.decision import Decision, LeftOut, Why, Winner
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.statistics import Pooling, inverted_change, pool_changes

# Maximum distance between two looks at the pace of the job.
_LOOKS_APART = 4
# Fewer windows do not show how much an effect varies from window to window; only an arm that is slower is dropped by
# fewer. By ``benchmarks/deciding.py``, where it varies by 2 %.
_LEAST_WINDOWS, _LEAST_PAIRS = 6, 4
# An arm that wins less than this share is not worth finding: it is what windows may cost by default.
_WORTH = 0.005
# One step may be long for a reason of its own, such as a compilation: so many are tried before an arm waits for the
# time that its window would cost.
_TRIALS = 3
# So many windows in a row that do not count are no accident.
_IN_VAIN = 4


class Choice(NamedTuple):
    """What a window measures.

    Attributes:
        arm: its arm; empty if no window is due.
        trial: whether only one step is turned: nothing is known of the arm's cost, or its window is too dear so far.
        next_window: if none is due, the first that may be, by the distance of checks; 0 for the next one.
        wait_s: if none is due, the time until training has paid for the next one, about; 0 if it is not that.
        reason: if none is due, why.
    """

    arm: str = ""
    trial: bool = False
    next_window: int = 0
    wait_s: float = 0.0
    reason: str = ""


class Decider:
    """Rank 0: decides about arms. Its methods are called one at a time, from any thread.

    At every moment what it begins and keeps costs at most ``budget`` of the time since, plus the dearest window begun.

    Args:
        arms: in the user's order; names are unique.
        budget: share of training time that windows of arms, and the one that is kept, may cost.
        wrong: share of jobs in which an arm is chosen that is slower than the job as configured, at most.
        keeps: whether the best arm is turned on; otherwise it is recommended.
        least_notice_s: least time in which all ranks can go back from it.
        steps_apart: steps of a window's distance, if known.
        lines: by arm, what to put into the job to have it for good.
        earlier: reports of windows from earlier starts of the job that are comparable with this one, in order.
        decided: the last decision of these starts. What was left out stays so, except arms that stopped winning: they
            start anew.
    """

    def __init__(
        self,
        arms: Sequence[ComparedArm],
        *,
        budget: float,
        wrong: float,
        keeps: bool,
        least_notice_s: float,
        steps_apart: float = math.inf,
        lines: Mapping[str, str] | None = None,
        earlier: Sequence[ArmReport | OverlapReport] = (),
        decided: Decision | None = None,
    ) -> None:
        self._arms = {arm.name: ArmEvidence(arm) for arm in arms}
        self._budget, self._wrong, self._keeps = budget, wrong, keeps
        self._pooling = Pooling(all_looks=True, confidence=1 - wrong / len(arms))
        self._lines = lines or {}
        self._costs = ArmCosts(budget, least_notice_s, steps_apart)
        self._best: BestArm | None = None
        self._advised: BestArm | None = None
        self._last = 0, 0  # the last window that led to something, and its first step
        self._resume(earlier, decided)

    def choose(
        self, window: int, now_s: float, arm_steps: int, *, place: float | None = None, asked: bool = False
    ) -> Choice:
        """What a window that could begin now measures. If that is an arm, its window or trial counts as begun.

        Args:
            window: its number.
            now_s: time on a clock that does not go back.
            arm_steps: steps with the arm in a whole window.
            place: how many windows' distances the job has trained; the window's number by default.
            asked: whether it is measured whatever the budget says and whether an arm is due, if one is left.
        """
        self.has_slowed(window, now_s, place)
        self._costs.window_opens(self._shown)
        if asked and (left := self._due(window)[0] or [held.arm for held in self._all_held]):
            left[0].num_begun += 1
            return Choice(left[0].arm.name)
        if self._costs.awaited():
            return Choice(reason="the window before it has no result yet")
        due, next_window = self._due(window)
        if not due:
            if next_window:
                next_window = min(next_window, window + _LOOKS_APART)
                return Choice(next_window=next_window, reason="the best arm is checked again later")
            return Choice(next_window=window + MOST_APART, reason="no arm is left to measure")
        waits = []
        for arm in due:
            cost_s = arm.window_cost_s(arm_steps, self._costs.base_s)
            trial, wait_s = cost_s is None, self._wait_s(arm, cost_s or 0.0)
            if wait_s > 0 and not arm.windows and arm.num_trials < _TRIALS:
                trial, wait_s = True, self._wait_s(arm, arm.trial_s)
            if wait_s <= 0:
                arm.num_begun += 1
                self._costs.begin(arm.arm.name, arm.trial_s if trial or cost_s is None else cost_s)
                return Choice(arm.arm.name, trial=trial)
            waits.append(wait_s)
        return Choice(wait_s=min(waits), reason="training pays for the next window first")

    def _wait_s(self, arm: ArmEvidence, cost_s: float) -> float:
        """Time until a window or trial of an arm may begin. What the best arm may lose comes before those of others."""
        best, short_s = self._best, 0.0
        if best is not None and not self._is_held(arm):
            short_s = self._costs.short_s(best.rate, in_doubt=best.watch.doubts, cost_s=cost_s)
        return max(self._costs.unpaid_s(cost_s), short_s / self._budget)

    def has_slowed(self, window: int, now_s: float, place: float | None = None) -> bool:
        """Whether the job has slowed down since the last look by all that the kept arm wins: check it at once."""
        pace_s = self._costs.look(window if place is None else place, now_s)
        return pace_s is not None and self._best is not None and self._best.look(window, pace_s)

    def turn_on(self, window: int) -> Stretch | None:
        """Begin a stretch with the kept arm after a window; None if it may not be turned on now."""
        self._costs.window_opens(self._shown)
        if (best := self._best) is not None and self._costs.is_refuted(best.arm.center):
            self._leave_out(best.arm, Why.NOT_KEPT, window)
            self._bring_back(best.arm)
            self._settle(best.arm, window)
        best = self._best
        return None if best is None else self._costs.turn_on(best.rate, in_doubt=best.watch.doubts)

    def record(self, report: ArmReport | OverlapReport, cost_s: float | None) -> None:
        """Note the report of an arm's window, of sequential steps an ``OverlapReport``.

        ``cost_s``: training time that it cost, as charged: rather too much than too little. None outside the budget.
        """
        name = _arm_of(report, self._arms)
        arm = self._arms.get(name)
        self._costs.end(name, cost_s or 0.0)
        if arm is None:
            return
        if cost_s is None and report.lost_ms is not None:
            cost_s = report.lost_ms / 1e3  # what the next one will cost
            self._costs.window_took(cost_s)
        if cost_s is not None:
            arm.costs_s.append(max(0.0, cost_s))
            self._costs.window_costs(cost_s)
        self._last = report.window, report.first_step
        # Where training was interrupted, that says nothing of the arm; but the best one must be checked.
        if report.complete or self._is_held(arm):
            self._add(arm, report)

    def record_trial(self, name: str, extra_s: float, cost_s: float) -> None:
        """Note a trial: how much longer than usual its one step took, and what the whole trial cost."""
        self._costs.end(name, cost_s)
        arm = self._arms[name]
        arm.num_trials += 1
        arm.extra_s = max(0.0, extra_s) if arm.extra_s is None else min(arm.extra_s, max(0.0, extra_s))
        arm.trial_s = max(0.0, cost_s)

    def lost(self, name: str, cost_s: float) -> None:
        """Note a window or trial that was begun and gives no report, and what it cost."""
        self._costs.end(name, cost_s)

    def leave_out(self, name: str, window: int, reason: str) -> None:
        """Measure an arm no longer, because the job cannot have it."""
        self._leave_out(self._arms[name], Why.UNMEASURED, window, reason=reason)
        self._settle(self._arms[name], window)

    def cannot_keep(self, name: str) -> None:
        """From now on an arm may only be recommended."""
        arm = self._arms[name]
        arm.is_fixed = True
        if self._best is not None and self._best.arm is arm:
            self._best, self._advised = None, self._best
            self._costs.keep(None)

    @property
    def _shown(self) -> float:
        """The speed-up of the best arm by its windows."""
        return 0.0 if self._best is None else math.expm1(self._best.arm.center)

    @property
    def kept(self) -> str:
        """As ``Decision.kept``."""
        return self._best.arm.arm.name if self._keeps and self._best is not None else ""

    def decision(self) -> Decision:
        """What is decided so far."""
        left = self._left
        out = [arm.left_out for arm in self._arms.values() if arm.left_out is not None]
        return Decision(
            window=self._last[0],
            first_step=self._last[1],
            keeps=self._keeps,
            wrong=self._wrong,
            budget=self._budget,
            cost_s=self._costs.cost_s,
            training_s=self._costs.training_s,
            best=self._winner(self._best),
            advised=self._winner(self._advised),
            left=tuple([arm.arm.name for arm in left]),
            left_out=tuple(sorted(out, key=lambda one: one.window)),
            would_show={arm.arm.name: shows for arm in left if (shows := arm.would_show()) is not None},
        )

    # -- which arm is next

    def _due(self, window: int) -> tuple[list[ArmEvidence], int]:
        """The arms that may be measured now, the first one first; without any, the window from which one may be."""
        others = sorted([arm for arm in self._left if not self._is_held(arm)], key=lambda arm: arm.num_begun)
        due = [held.arm for held in self._all_held if held.is_due(window)]
        return [*due, *others], min([held.next_window for held in self._all_held], default=0)

    @property
    def _all_held(self) -> list[BestArm]:
        return [held for held in (self._best, self._advised) if held is not None]

    def _is_held(self, arm: ArmEvidence) -> bool:
        return any(held.arm is arm for held in self._all_held)

    # -- what is known

    def _add(self, arm: ArmEvidence, report: ArmReport | OverlapReport) -> None:
        speedup = _speedup_of(report)
        if arm.add(speedup, self._pooling):
            self._watch(arm, report.window)
        elif arm.in_vain >= _IN_VAIN:
            problem = next(iter(report.problems), "its windows have no speed-up")
            self._leave_out(arm, Why.UNMEASURED, report.window, reason=problem)
        self._settle(arm, report.window)

    def _watch(self, arm: ArmEvidence, window: int) -> None:
        for held in [held for held in self._all_held if held.arm is arm]:
            has_stopped = held.watch.has_stopped(arm.logs[-1])
            held.checked(window)
            if has_stopped:
                self._leave_out(arm, Why.STOPPED, window)
                self._bring_back(arm)

    def _settle(self, arm: ArmEvidence, window: int) -> None:
        """Leave out arms by what is known now that ``arm`` has another window, and choose the best."""
        if arm.left_out is None and not self._is_held(arm):
            if arm.high < 0:
                self._leave_out(arm, Why.SLOWER, window)
            elif arm.high < _WORTH and len(arm.logs) >= _LEAST_WINDOWS:
                self._leave_out(arm, Why.NO_GAIN, window)
        for other in self._left:
            if arm.left_out is None and other is not arm and len(arm.logs) <= len(other.logs):  # a new pair of windows
                one, ahead = (arm, other) if arm.center < other.center else (other, arm)
                may_replace = ahead.may_be_kept or not one.may_be_kept
                if may_replace and len(arm.logs) >= _LEAST_PAIRS and one.is_behind(ahead, self._pooling):
                    self._leave_out(one, Why.BEHIND, window, than=ahead.arm.name)
        self._best = self._held(self._best, window, may_be_kept=True)
        self._costs.keep(self._best.account if self._keeps and self._best is not None else None)
        self._advised = self._held(self._advised, window, may_be_kept=False)
        self._end_search(window)

    @property
    def _left(self) -> list[ArmEvidence]:
        return [arm for arm in self._arms.values() if arm.left_out is None]

    def _held(self, before: BestArm | None, window: int, *, may_be_kept: bool) -> BestArm | None:
        if before is not None and before.arm.left_out is None:
            return before
        left = [arm for arm in self._left if arm.may_be_kept is may_be_kept]
        known = [arm for arm in left if arm.low > 0 and len(arm.logs) >= _LEAST_WINDOWS]
        if not known:
            return None
        best = max(known, key=lambda arm: arm.center)
        watch = Watch.of(best)
        if any([watch.has_stopped(log) for log in best.logs][-1:]):  # it won at first, and no longer does
            return None
        num_windows = sum([len(arm.windows) for arm in self._arms.values()])
        return BestArm(best, window, num_windows, watch)

    def _end_search(self, window: int) -> None:
        """Leave out the arms that are not told apart from the best after as many windows as it took to find that."""
        if self._best is None:
            return
        num_windows = sum([len(arm.windows) for arm in self._arms.values() if not self._is_held(arm)])
        self._best.others_before = min(self._best.others_before, num_windows)
        if num_windows - self._best.others_before < self._best.num_windows:
            return
        for arm in [arm for arm in self._left if not self._is_held(arm)]:
            self._leave_out(arm, Why.NOT_AHEAD, window, than=self._best.arm.arm.name)

    def _leave_out(self, arm: ArmEvidence, why: Why, window: int, *, than: str = "", reason: str = "") -> None:
        arm.left_out = LeftOut(arm.arm.name, window, why, len(arm.windows), self._pooled(arm), than, reason)

    def _bring_back(self, stopped: ArmEvidence) -> None:
        """Measure again the arms that were left out only because of one that stopped winning."""
        for arm in self._arms.values():
            if arm.left_out is not None and arm.left_out.than == stopped.arm.name:
                arm.left_out = None

    def _winner(self, held: BestArm | None) -> Winner | None:
        if held is None or (speedup := self._pooled(held.arm)) is None:
            return None
        arm, name = held.arm, held.arm.arm.name
        return Winner(name, held.since, len(arm.windows), speedup, self._lines.get(name, ""), arm.why_not_kept)

    def _pooled(self, arm: ArmEvidence) -> Estimate | None:
        return pool_changes(arm.windows, self._pooling)

    def _resume(self, earlier: Sequence[ArmReport | OverlapReport], decided: Decision | None) -> None:
        before = {} if decided is None else {one.arm: one for one in decided.left_out}
        anew = {name for name, one in before.items() if one.why is Why.STOPPED}
        for report in earlier:
            arm = self._arms.get(_arm_of(report, self._arms))
            if arm is not None and report.lost_ms is not None:
                arm.costs_s.append(max(0.0, report.lost_ms / 1e3))
                self._costs.window_costs(arm.costs_s[-1])
            if arm is not None and arm.arm.name not in anew:
                arm.add(_speedup_of(report), self._pooling)
        self._costs.owed_s = 0.0 if decided is None else decided.owed_s
        for name, one in before.items():
            if name in self._arms and name not in anew and one.why is not Why.UNMEASURED and one.than not in anew:
                self._arms[name].left_out = one
        winners = () if decided is None else (decided.best, decided.advised)
        for winner in winners:
            arm = None if winner is None else self._arms.get(winner.arm)
            if winner is None or arm is None or not arm.windows:
                continue
            held = BestArm(arm, winner.window, winner.num_windows, Watch.of(arm))
            if arm.may_be_kept:
                self._best = held
                self._costs.keep(held.account if self._keeps else None)
            else:
                self._advised = held


# -- speed-ups


def _arm_of(report: ArmReport | OverlapReport, arms: Mapping[str, ArmEvidence]) -> str:
    """The name of a report's arm; a report of overlap is of sequential steps."""
    if isinstance(report, ArmReport):
        return report.arm.name
    return SEQUENTIAL.name if SEQUENTIAL.name in arms else ""


def _speedup_of(report: ArmReport | OverlapReport) -> Estimate | None:
    """How much faster the arm was in a window; None if that does not count."""
    if not report.counts or report.control:
        return None
    if isinstance(report, ArmReport):
        return report.speedup
    found = report.speedup_vs_sequential
    return None if found is None else inverted_change(found)
