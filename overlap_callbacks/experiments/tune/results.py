"""The results of a tuning on disk: one JSON object a line, flushed after each run, and readable after a crash."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from overlap_callbacks.analysis.results.env_overrides import TimingPlan
from overlap_callbacks.experiments.lines_file import LinesFile, read_lines
from overlap_callbacks.experiments.tune.combinations import Axis, Combination, combinations

FILE_NAME = "tune.jsonl"
SCHEMA = 1


class Tuning(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="tune"):
    """What is tuned: the first line.

    Attributes:
        schema: of the lines' layout.
        library_version: that wrote them.
        started_at: wall clock, ISO 8601 with time zone.
        command: the user's.
        axes: what varies.
        timing: how steps are timed in each run.
        blocks: timed blocks of a run.
    """

    schema: int = SCHEMA
    library_version: str
    started_at: str
    command: tuple[str, ...]
    axes: tuple[Axis, ...]
    timing: TimingPlan
    blocks: int

    @property
    def combinations(self) -> list[Combination]:
        """All of them; other lines name one by its place here."""
        return combinations(self.axes)


class Run(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="run"):
    """One run of one combination.

    Attributes:
        combination: its place in ``Tuning.combinations``.
        repeat: number of the run of this combination, from 0.
        seconds: that it took.
        block_ms: mean step time of each timed block; empty if it failed.
        num_steps: counted steps in those blocks.
        failure: why it failed, in words; empty if it did not.
        exit_code: of a command that ended by itself; None of one that was ended.
        folder: with its record and output, relative to that of the results.
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
        """Its one number: the mean of the logarithms of its blocks' step times, as a time; None without such times."""
        if not self.block_ms or min(self.block_ms) <= 0:
            return None
        return statistics.geometric_mean(self.block_ms)


@dataclass
class Results:
    """A tuning as read.

    Attributes:
        folder: that holds it.
        tuning: what is tuned.
        runs: in the order in which they ran.
        broken_lines: that could not be read: a crash cut them off.
        num_left: runs that were planned and did not run before the time was over, or Ctrl-C.
    """

    folder: Path
    tuning: Tuning
    runs: list[Run] = field(default_factory=list)
    broken_lines: int = 0
    num_left: int = 0

    def of(self, combination: int) -> list[Run]:
        """The runs of a combination that were measured."""
        return [run for run in self.runs if run.combination == combination and not run.failure]

    def failure_of(self, combination: int) -> Run | None:
        """The run in which a combination failed; None if it did not."""
        return next((run for run in self.runs if run.combination == combination and run.failure), None)


def read_results(folder: Path) -> Results:
    """Read the results of a tuning.

    Raises:
        ResultsError: there are none in the folder, or they are of a later version.
    """
    tuning, runs, broken = read_lines(folder / FILE_NAME, Tuning, Run, what="tuning", schema=SCHEMA)
    count = len(tuning.combinations)
    return Results(folder, tuning, [run for run in runs if 0 <= run.combination < count], broken)


def open_results(folder: Path) -> LinesFile:
    """The file, to append runs to.

    Raises:
        BusyError: another process writes there.
        OSError: the folder or file cannot be written.
    """
    return LinesFile(folder / FILE_NAME, "tune")
