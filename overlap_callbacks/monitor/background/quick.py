"""A quick answer first: windows back to back until the answer is narrow enough, then the schedule as usual."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from overlap_callbacks.analysis.headline import run_verdict, step_change
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.run_summary import RunSummary, without_details
from overlap_callbacks.monitor.background.budget import Skip
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.sinks.base import Sink
from overlap_callbacks.sinks.jsonl import has_answer

# It ends once the interval of the difference in step time, which holds at all looks, is narrower than this fraction of
# a step and the difference no longer changes along a block; or after this time.
NARROW = 0.05
LONGEST_S = 600.0
# Ordinary steps of a window: they show the usual step, and even out the job's rhythms.
_FREE_STEPS = 64
# Reports that may wait before a window is left out for them to catch up.
_MOST_WAITING = 2


def quick_schedule(schedule: Schedule) -> Schedule:
    """The same windows, back to back."""
    return schedule.moved(every_n_steps=min(schedule.every_n_steps, schedule.window_steps + _FREE_STEPS))


def is_answered(sinks: Sequence[Sink]) -> bool:
    """Whether an earlier start of the job has given its quick answer, by the record among these sinks."""
    records = [record for sink in sinks if (record := sink.kept_record()) is not None]
    return any(map(has_answer, records))


class QuickLook:
    """On rank 0: whether windows go on back to back, and the answer. Made when the first window opens.

    The training thread calls ``submitted``, the reporting thread ``record``, ``done`` and ``answer``, the order check's
    thread ``goes_on`` and ``skip``.

    Args:
        now_s: the clock.
        sinks: if the record among them has an answer, of an earlier start of the job, the look is over as it begins.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic, sinks: Sequence[Sink] = ()) -> None:
        self._now_s = now_s
        self._sinks = sinks
        self.was_answered = False
        self._began_s: float | None = None  # when the first window was asked for
        self._windows: list[OverlapReport] = []
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._is_over = False

    def submitted(self) -> None:
        """A window has ended; its report follows."""
        with self._lock:
            self._num_waiting += 1

    def done(self) -> None:
        """There is a report of a window that was submitted, or there will be none."""
        with self._lock:
            self._num_waiting -= 1

    def record(self, report: OverlapReport) -> None:
        """Note the report of a window."""
        with self._lock:
            self._windows.append(without_details(report))

    def goes_on(self) -> bool:
        """Whether windows go on back to back; once they do not, they never do again."""
        now_s = self._now_s()
        if self._began_s is None:
            self._began_s = now_s
            self.was_answered = self._is_over = is_answered(self._sinks)
        elif now_s - self._began_s >= LONGEST_S or self._is_narrow():
            self._is_over = True
        return not self._is_over

    def _is_narrow(self) -> bool:
        """Whether the headline's interval of the difference in step time is narrow enough, and applies."""
        summary = self._summary()
        change = None if summary.not_settled else step_change(summary.pooled())
        if change is None or change.ci_low is None or change.ci_high is None:
            return False
        return change.ci_high - change.ci_low < NARROW

    @property
    def is_over(self) -> bool:
        """Whether enough was measured, or the time is up; not of a job that ended before."""
        return self._is_over

    def skip(self) -> Skip | None:
        """Whether to leave a window out, and why."""
        if self._is_over:
            return Skip("the quick answer is there [OC304]")
        with self._lock:
            is_behind = self._num_waiting > _MOST_WAITING
        return Skip("reports of earlier windows are still being made [OC305]") if is_behind else None

    def answer(self) -> str:
        """The answer so far."""
        return run_verdict(self._summary())

    def message(self, record: Path | None, write_page: Callable[[Path], Path] | None) -> str:
        """The answer so far for the user, and where the page is, which ``write_page`` writes."""
        if self.was_answered:
            return "the record has the quick answer of an earlier start; another run_dir asks anew [OC306]"
        where = ""
        if record is not None:
            where = f" `overlap report {record.parent}` makes the page."
            if write_page is not None:
                with contextlib.suppress(Exception):  # a full disk, an older record: the answer stays
                    where = f" The page is {write_page(record)}"
        return f"the quick answer: {self.answer()}{where}"

    def _summary(self) -> RunSummary:
        with self._lock:
            windows = list(self._windows)
        return RunSummary(None, windows, running=True)
