"""Runs what is left of a tuning, in balanced order, within its time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from overlap_callbacks.analysis.results.env_overrides import TIME_ONLY
from overlap_callbacks.analysis.results.window import TimedBlock
from overlap_callbacks.experiments.lines_file import LinesFile
from overlap_callbacks.experiments.supervisor import (
    Ending,
    GrowingRecord,
    Limits,
    Outcome,
    exit_in_words,
    fresh_folder,
    last_words,
    run_kept,
)
from overlap_callbacks.experiments.tune.combinations import balanced_order, command_of, environment_of
from overlap_callbacks.experiments.tune.results import Results, Run, Tuning
from overlap_callbacks.report.record import Record

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


# -- one run


def run_once(tuning: Tuning, folder: Path, combination: int, repeat: int, limits: Limits) -> Run | None:
    """Run a combination once.

    Args:
        tuning: what is tuned.
        folder: of the results.
        combination: its place in ``tuning.combinations``.
        repeat: number of the run of this combination.
        limits: of time.

    Returns:
        None where the time for all runs was over first.

    Raises:
        OSError: a file of the run cannot be written.
        KeyboardInterrupt: Ctrl-C. The command has ended.
    """
    settings = tuning.combinations[combination]
    own = fresh_folder(folder, f"{combination:03d}-{repeat}")
    growing = GrowingRecord(own)

    def blocks() -> list[TimedBlock]:
        return _timed_blocks(growing.read())[: tuning.blocks]

    outcome: Outcome | None
    try:
        outcome = run_kept(
            command_of(tuning.command, settings, str(own)),
            own,
            limits,
            environment=environment_of(settings) | {TIME_ONLY: tuning.timing.as_text()},
            is_done=lambda: len(blocks()) >= tuning.blocks,
        )
    except OSError as error:
        failure = f"the command cannot be started: {error.strerror}"
        return Run(combination=combination, repeat=repeat, seconds=0.0, failure=failure, folder=_place(own, folder))
    if outcome is None:
        return None
    # All that it has is kept: blocks that were written while it was being ended are as good.
    timed = blocks()
    failure = _failure(outcome, growing.record, len(timed), own, limits.timeout_s)
    timed = [] if failure else timed
    info = None if growing.record is None else growing.record.runs[-1]
    return Run(
        combination=combination,
        repeat=repeat,
        seconds=outcome.seconds,
        block_ms=tuple([sum(block.step_ms) / len(block.step_ms) for block in timed]),
        num_steps=sum([len(block.step_ms) for block in timed]),
        failure=failure,
        exit_code=outcome.exit_code,
        folder=_place(own, folder),
        world_size=0 if info is None else info.world_size,
        device="" if info is None else info.device,
    )


def _place(own: Path, folder: Path) -> str:
    return str(own.relative_to(folder.resolve()))


def _timed_blocks(record: Record | None) -> list[TimedBlock]:
    """The timed blocks so far: of a job that was started again, those since."""
    unfinished = None if record is None else record.unfinished
    if unfinished is None or not unfinished.samples:
        return []
    return [block for block in unfinished.samples[0].timed if block.step_ms]


def _failure(outcome: Outcome, record: Record | None, num_blocks: int, own: Path, timeout_s: float) -> str:
    """Why a run gave no step time; empty if it did."""
    if outcome.ending is Ending.DONE:
        return ""
    if outcome.ending is Ending.TIMEOUT:
        why = "too few steps were timed" if num_blocks else "no steps were timed"
        return f"{why} within {timeout_s:g} s (--timeout)" + last_words(own)
    if outcome.exit_code:
        return exit_in_words(outcome.exit_code) + last_words(own)
    if record is None:
        return (
            "the command ended and no steps were timed: is the library attached in it, and does it train long enough?"
        )
    return f"the command ended after {num_blocks} timed blocks: let it train longer, or lower --steps"
