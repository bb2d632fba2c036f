"""A running tuning: what is tuned, its runs, and how a combination is run once."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.env_overrides import TIME_ONLY, TimingPlan
from overlap_callbacks.analysis.results.window import TimedBlock
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
from overlap_callbacks.experiments.sweep import Point, Sweep
from overlap_callbacks.experiments.tune.combinations import (
    Axis,
    Combination,
    combinations,
    command_of,
    environment_of,
    in_words,
)
from overlap_callbacks.report.record import Record


class Tuning(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="tune"):
    """The first line: what is tuned.

    Attributes:
        schema: of the lines' layout.
        library_version: version that wrote them.
        started_at: wall clock, ISO 8601 with time zone.
        command: the user's.
        axes: what varies.
        timing: how steps are timed in each run.
        blocks: timed blocks of a run.
    """

    schema: int = 1
    library_version: str
    started_at: str
    command: tuple[str, ...]
    axes: tuple[Axis, ...]
    timing: TimingPlan
    blocks: int


class Run(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="run"):
    """One run of one combination.

    Attributes:
        combination: its index in ``Tune.combinations``.
        repeat: number of the run of this combination, from 0.
        seconds: its duration.
        block_ms: mean step time of each timed block; empty if it failed.
        num_steps: counted steps in those blocks.
        failure: why it failed; empty if it did not.
        exit_code: of a command that ended by itself; None if it was ended.
        folder: of its record and output, relative to that of the results.
        world_size, device: of the job; 0 and empty if not known.
    """

    combination: int
    repeat: int
    seconds: float
    block_ms: tuple[float, ...] = ()
    num_steps: int = 0
    failure: str = ""
    exit_code: int | None = None
    folder: str = ""
    world_size: int = 0
    device: str = ""

    @property
    def step_ms(self) -> float | None:
        """The geometric mean of its blocks' step times; None without any."""
        if not self.block_ms or min(self.block_ms) <= 0:
            return None
        return statistics.geometric_mean(self.block_ms)


@dataclass
class Tune(Sweep[Tuning, Run]):
    """A tuning. Its settings are the indices of its combinations, each run ``num_runs`` times."""

    COMMAND, FILE_NAME, SCHEMA, START, LINE = "tune", "tune.jsonl", 1, Tuning, Run

    num_runs: int = 1

    @property
    def combinations(self) -> list[Combination]:
        """All combinations, starting with that of the first values."""
        return combinations(self.start.axes)

    @property
    def settings(self) -> range:
        return range(len(self.combinations))

    @property
    def repeats(self) -> int:
        return self.num_runs

    def point_of(self, line: Run) -> Point:
        return Point(line.combination, line.repeat)

    def failure_of(self, line: Run) -> str:
        return line.failure

    def name(self, setting: int) -> str:
        return in_words(self.combinations[setting])

    def outcome(self, line: Run) -> str:
        if line.failure:
            return f"{self.name(line.combination)} failed: {line.failure}"
        step = "no step" if line.step_ms is None else f"{PLAIN.quantity(line.step_ms, 'ms')} a step"
        return f"{self.name(line.combination)}: {step} (the run took {line.seconds:.0f} s)"

    def expected_s(self, setting: int) -> float | None:
        # The median: the first run often takes far longer, because it reads the libraries from disk.
        known = [run.seconds for run in self.lines if not run.failure]
        return statistics.median(known) if known else None

    def run_once(self, point: Point, limits: Limits, _: ExitStack) -> Run | None:
        """Run a combination once; None if the time for all runs was over first.

        Raises an OSError if a file of the run cannot be written, and a KeyboardInterrupt once the command has ended.
        """
        number, repeat = point
        settings, wanted = self.combinations[number], self.start.blocks
        own = fresh_folder(self.folder, f"{number:03d}-{repeat}")
        folder = str(own.relative_to(self.folder.resolve()))
        growing = GrowingRecord(own)
        try:
            outcome = run_kept(
                command_of(self.start.command, settings, str(own)),
                own,
                limits,
                environment=environment_of(settings) | {TIME_ONLY: self.start.timing.as_text()},
                is_done=lambda: len(_timed_blocks(growing.read())) >= wanted,
            )
        except OSError as error:
            failure = f"the command cannot be started: {error.strerror}"
            return Run(combination=number, repeat=repeat, seconds=0.0, failure=failure, folder=folder)
        if outcome is None:
            return None
        # Blocks written while it was being ended are just as good.
        timed = _timed_blocks(growing.read())[:wanted]
        failure = _failure(outcome, growing.record, len(timed), own, limits.timeout_s)
        timed = [] if failure else timed
        info = None if growing.record is None else growing.record.runs[-1]
        return Run(
            combination=number,
            repeat=repeat,
            seconds=outcome.seconds,
            block_ms=tuple([sum(block.step_ms) / len(block.step_ms) for block in timed]),
            num_steps=sum([len(block.step_ms) for block in timed]),
            failure=failure,
            exit_code=outcome.exit_code,
            folder=folder,
            world_size=0 if info is None else info.world_size,
            device="" if info is None else info.device,
        )


def _timed_blocks(record: Record | None) -> list[TimedBlock]:
    """The timed blocks so far; after a restart of the job, only those since."""
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
