"""Rank 0 decides: which arm a window measures, and which one is kept turned on between windows."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from overlap_callbacks.analysis.arm_costs import Stretch
from overlap_callbacks.analysis.deciding import Decider
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.decision import Decision
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.gate.arms import BaseArm, Keep
from overlap_callbacks.monitor.background.budget import Skip
from overlap_callbacks.sinks.jsonl import EarlierStarts, earlier_starts

# A window without a result at so many later ones: reports are stuck, and none would tell that an arm stops winning.
_UNHEARD = 4
# Maximum time that the order check waits for the record of earlier starts, which is read on the reporting thread.
_READ_S = 1.0


class ChosenArm(NamedTuple):
    """The arm of a window. ``trial``: only one step is turned."""

    name: str
    trial: bool
    sequential: bool


class Deciding:
    """The decisions of a job, on rank 0; the rules are in ``analysis/deciding.py``.

    The reporting thread calls ``open``, ``record``, ``record_trial`` and ``news``, the order check's thread ``choose``
    and ``lost``.

    Args:
        keep: its budget and certainty.
        keeps: whether the best arm is turned on between windows.
        arms: of the monitor.
        least_notice_s, steps_apart: as of ``Decider``.
        now_s: the clock.
    """

    def __init__(
        self,
        keep: Keep,
        *,
        keeps: bool,
        arms: Sequence[BaseArm],
        least_notice_s: float,
        steps_apart: int,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep, self._keeps, self._least_notice_s = keep, keeps, least_notice_s
        self._steps_apart = steps_apart
        self._arms = {arm.name: arm for arm in arms}
        self._now_s = now_s
        # Set by the training thread before ``choose``: arms that the job can have, the step that it is at, and for how
        # long it did not train.
        self.available: tuple[str, ...] = ()
        self.at = 0, 0.0
        self.stretch: Stretch | None = None  # of the arm that ``kept`` named
        self._lock = threading.Lock()
        self._is_open = threading.Event()
        self._decider: Decider | None = None
        self._said: Decision | None = None
        self._same_order: set[str] = set()  # arms with which all ranks issue the same collectives
        self._asked: tuple[int, float] | None = None  # the last window asked for, and when
        self._awaited: int | None = None  # the first window that was chosen since the last result

    def open(self, record: Path | None, run: RunInfo) -> None:
        """Begin, with what the record has of earlier starts if their job was configured as this one, ``run``."""
        earlier = EarlierStarts()
        with contextlib.suppress(OSError):  # the record's own sink has reported it
            earlier = earlier if record is None else earlier_starts(record)
        if earlier.run is None or earlier.run.job != run.job:
            earlier = EarlierStarts()
        reports: list[ArmReport | OverlapReport] = [*earlier.windows, *earlier.arms]
        decided = earlier.decision
        with self._lock:
            self._decider = Decider(
                [arm.facts for arm in self._arms.values()],
                budget=self._keep.budget,
                wrong=self._keep.wrong,
                keeps=self._keeps,
                least_notice_s=self._least_notice_s,
                steps_apart=self._steps_apart,
                lines={arm.name: arm.line for arm in self._arms.values() if arm.line},
                earlier=sorted(reports, key=lambda report: report.first_step),
                decided=decided,
            )
            for arm in self._arms.values():
                if not arm.may_be_kept:
                    self._decider.cannot_keep(arm.name)
            for report in earlier.arms:
                self._note_order(report)
            self._said = decided or self._decider.decision()
        self._is_open.set()

    def kept(self, window: int) -> str:
        """The arm to have turned on after a window, for ``stretch``; empty for the job's own setting."""
        with self._lock:
            kept = "" if self._decider is None else self._decider.kept
            heard = self._awaited is None or abs(window - self._awaited) <= _UNHEARD
            self.stretch = None
            if self._decider is not None and heard and kept in self._same_order:
                self.stretch = self._decider.turn_on(window)
            return kept if self.stretch is not None else ""

    def has_slowed(self, window: int, at: tuple[int, float] | None = None) -> bool:
        """Whether the job has slowed down by all that the best arm wins, at a window that cannot check it."""
        self.at = at or self.at
        if not self._lock.acquire(blocking=False):  # the training thread asks too
            return False
        try:
            return self._decider is not None and self._decider.has_slowed(window, *self._now())
        finally:
            self._lock.release()

    def choose(self, window: int, arm_steps: int, *, asked: bool = False) -> tuple[ChosenArm | None, Skip | None]:
        """The arm of a window, or why there is none; ``asked`` as in ``Decider.choose``."""
        if not self._is_open.wait(_READ_S):
            return None, _skip("the record of earlier starts is still being read")
        now_s, place = self._now()
        with self._lock:
            assert self._decider is not None
            for name in [name for name in self._arms if name not in self.available]:
                self._decider.leave_out(name, window, "this job cannot have it")
            self._arms = {name: arm for name, arm in self._arms.items() if name in self.available}
            choice = self._decider.choose(window, now_s, arm_steps, place=place, asked=asked)
            before, self._asked = self._asked, (window, now_s)
        if choice.arm:
            self._awaited = window if self._awaited is None else self._awaited
            return ChosenArm(choice.arm, choice.trial, self._arms[choice.arm].sequential), None
        next_window = choice.next_window
        if choice.wait_s > 0 and before is not None and window > before[0]:
            # As the budget does: half the windows until then never open, in case steps get slower.
            window_s = (now_s - before[1]) / (window - before[0])
            next_window = window + max(1, int(choice.wait_s / window_s / 2)) if window_s > 0 else 0
        return None, _skip(choice.reason, next_window)

    def _now(self) -> tuple[float, float]:
        """Time of training, and windows' distances trained: not their numbers, as what is asked for changes these."""
        step, paused_s = self.at
        return self._now_s() - paused_s, step / self._steps_apart

    def lost(self, name: str, cost_s: float = 0.0) -> None:
        """A window or trial of an arm that was chosen has no result."""
        with self._lock:
            self._awaited = None
            if self._decider is not None:
                self._decider.lost(name, cost_s)

    def record(self, report: ArmReport | OverlapReport, cost_s: float | None) -> None:
        """Note the report of a window, and what it is charged; None outside the budget."""
        with self._lock:
            self._awaited = None
            if self._decider is None:
                return
            if report.complete and isinstance(report, ArmReport):
                self._note_order(report)
            self._decider.record(report, cost_s)

    def record_trial(self, name: str, extra_s: float | None, cost_s: float) -> None:
        """Note by how much the one step of a trial was longer than usual (None: not known), and what it is charged."""
        with self._lock:
            self._awaited = None
            if self._decider is not None and extra_s is not None:
                self._decider.record_trial(name, extra_s, cost_s)
            elif self._decider is not None:
                self._decider.lost(name, cost_s)

    def _note_order(self, report: ArmReport) -> None:
        """Keep only arms with which ranks issue the same collectives: ranks that differ then do no harm."""
        assert self._decider is not None
        name = report.arm.name
        if name in self._arms and report.same_order:
            self._same_order.add(name)
        elif name in self._arms and report.same_order is False:
            self._same_order.discard(name)
            self._decider.cannot_keep(name)

    def news(self, *, job_ends: bool = False) -> tuple[Decision | None, bool]:
        """The decision, if the record does not have it, and whether it says something else than the last one.

        The record has it too if more is owed than it says: should the job be killed, its next start must pay for that.
        ``job_ends``: it has it in any case, if arms were measured.
        """
        with self._lock:
            if self._decider is None:
                return None, False
            decision, before = self._decider.decision(), self._said
            is_news = decision.is_news(before)
            owes_more = before is not None and decision.owed_s > before.owed_s
            if not (is_news or owes_more or (job_ends and decision.training_s > 0)):
                return None, False
            self._said = decision
            return decision, is_news


def _skip(reason: str, next_window: int = 0) -> Skip:
    return Skip(f"no arm is measured: {reason} [OC141]", next_window)
