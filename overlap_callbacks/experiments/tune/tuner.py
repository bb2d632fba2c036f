"""Runs what is left of a tuning, in balanced order, within its time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from overlap_callbacks.experiments.kept_run import Limits
from overlap_callbacks.experiments.lines_file import LinesFile
from overlap_callbacks.experiments.tune.combinations import balanced_order
from overlap_callbacks.experiments.tune.one_run import run_once
from overlap_callbacks.experiments.tune.results import Results, Run

# Of the time for all runs, what ending the last command and making the page may take.
_CLOSING_S = 15.0


@dataclass(frozen=True)
class Progress:
    """Where a tuning stands.

    Attributes:
        num_done: runs that are done, those of an earlier start included.
        num_planned: runs in all, without those of combinations that failed.
        current: number of the combination that runs now; None between two runs.
        left_s: expected time for the runs that are left; None before the first is done.
        last: the run that ended last; None before it.
    """

    num_done: int
    num_planned: int
    current: int | None
    left_s: float | None
    last: Run | None = None


@dataclass
class Tuner:
    """Runs the combinations of a tuning.

    Attributes:
        results: so far; each run is added as it ends.
        file: gets each run too.
        repeats: runs of each combination.
        timeout_s: maximum time of a run.
        total_s: maximum time of all, from ``run`` on; infinite for no limit.
        on_progress: called whenever something has changed.
    """

    results: Results
    file: LinesFile
    repeats: int
    timeout_s: float
    total_s: float = math.inf
    on_progress: Callable[[Progress], None] = lambda _: None
    _seconds: list[float] = field(default_factory=list)

    def run(self) -> bool:
        """Run what is left. Returns False if the time was over first.

        Raises:
            OSError: results cannot be written.
            KeyboardInterrupt: Ctrl-C. All runs that ended are kept.
        """
        deadline_s = time.monotonic() + self.total_s - _CLOSING_S
        for run in self.results.runs:
            self._take(run)
        last = None
        while (following := self._next()) is not None:
            number, repeat = following
            left_s = deadline_s - time.monotonic()
            # The first run says how long others take, so it is started whatever the time.
            if self._seconds and self._usual_s > left_s:
                return False
            self.on_progress(self._progress(number, last))
            limits = Limits(self.timeout_s, max(1.0, left_s))
            last = run_once(self.results.tuning, self.results.folder, number, repeat, limits)
            if last is None:
                return False
            self.file.write(last)
            self.results.runs.append(last)
            self._take(last)
            self.on_progress(self._progress(None, last))
        return True

    @property
    def num_left(self) -> int:
        """Runs that are left."""
        return len(self._pending())

    def _take(self, run: Run) -> None:
        if not run.failure:
            self._seconds.append(run.seconds)

    @property
    def _usual_s(self) -> float:
        # The median: the first run often takes far longer, because it reads the libraries from the disk.
        return statistics.median(self._seconds)

    def _pending(self) -> list[tuple[int, int]]:
        done = {(run.combination, run.repeat) for run in self.results.runs}
        order = balanced_order(len(self.results.tuning.combinations), self.repeats)
        return [item for item in order if item not in done and self.results.failure_of(item[0]) is None]

    def _next(self) -> tuple[int, int] | None:
        return next(iter(self._pending()), None)

    def _progress(self, current: int | None, last: Run | None) -> Progress:
        pending, done = self._pending(), len(self.results.runs)
        left_s = len(pending) * self._usual_s if self._seconds else None
        return Progress(done, done + len(pending), current, left_s, last)
