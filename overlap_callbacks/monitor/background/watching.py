"""Watches the run: adds up the parts of steps over the ranks; rank 0 tells what changes, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from overlap_callbacks._threads import Worker
from overlap_callbacks.analysis.goodput import Spent, input_bound
from overlap_callbacks.analysis.results.change import Change
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.request import JobAnswer
from overlap_callbacks.analysis.watch import RunWatch, change_in_words
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.parts import PartsOfRanks
from overlap_callbacks.monitor.faults import Notices
from overlap_callbacks.sinks.fan_out import FanOut

Sinks = Callable[[], FanOut]
# Asks for a window, and calls with the answer.
AskForWindow = Callable[[Callable[[JobAnswer], None]], None]


class Watching:
    """The reporting thread calls it with what it gets; the training thread, ``submit``.

    Args:
        parts: adds up the ranks' parts of steps.
        budget: of windows; learns how long nothing has changed.
        ask: for a window where something has changed; the budget decides when it comes.
    """

    def __init__(self, parts: PartsOfRanks, budget: WindowBudget, ask: AskForWindow) -> None:
        self.exchange = parts.exchange
        self._parts = parts
        self._budget = budget
        self._watch = RunWatch()
        self._spent = Spent()
        self._said_input = False
        self._ask = ask
        self._has_asked = False

    def submit(self, worker: Worker, number: int, key: str, stop: Callable[[], bool], sinks: Sinks) -> None:
        """On the training thread: have a stretch added up; -1: have the job's first steps looked at."""
        if number < 0:
            worker.submit(self.look)
        elif self._parts.may_wait():
            worker.submit(lambda: self.stretch(number, key, stop, sinks))

    def stretch(self, number: int, key: str, stop: Callable[[], bool], sinks: Sinks) -> None:
        """A stretch of steps has ended. ``sinks`` returns the open sinks."""
        found = self._parts.gather(number, key, stop)
        if not self._parts.is_rank_0:
            return
        self.look()
        row = None if found is None else self._parts.run.append(found)
        if row is not None:
            sinks().frontier(row)
            self._log_goodput(sinks())
        if found is not None:
            self._tell(self._watch.stretch(found), sinks)
        self._ask_for_window()

    def window(self, report: OverlapReport, sinks: Sinks) -> None:
        """Rank 0 has reported a window."""
        self._tell(self._watch.window(report), sinks)

    def look(self) -> None:
        """Add up the latest steps, and say once if the job waits for input."""
        if not self._parts.is_rank_0:
            return
        vectors = self._parts.vectors()
        self._spent.add(vectors)
        sentence = "" if self._said_input else input_bound(vectors)
        if sentence:
            self._said_input = True
            Notices.announce(f"{sentence} [OC382]")

    def close(self, sinks: FanOut) -> None:
        """The job has ended."""
        if self._parts.is_rank_0:
            self.look()
            row = self._parts.run.incomplete
            if row is not None:
                sinks.frontier(row)
            self._log_goodput(sinks)

    def _tell(self, found: Sequence[Change], sinks: Sinks) -> None:
        for change in found:
            Notices.announce(f"{change_in_words(change)} [OC381]")
            sinks().change(change)
        self._budget.note_quiet(self._watch.num_quiet)

    def _ask_for_window(self) -> None:
        """Ask once for each change, and again as long as that cannot be decided yet."""
        if not self._watch.awaits_window:
            self._has_asked = False
        elif not self._has_asked:
            self._has_asked = True
            self._ask(self._note_answer)

    def _note_answer(self, answer: JobAnswer) -> None:
        self._has_asked = answer.outcome != "busy"

    def _log_goodput(self, sinks: FanOut) -> None:
        goodput = self._spent.goodput(time.time(), self._budget.charged_s)
        if goodput.total_s > 0:
            sinks.goodput(goodput)
