"""The results of a tuning on disk: one JSON object a line, flushed after each run, and readable after a crash."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from overlap_callbacks.analysis.results.timing_plan import TimingPlan
from overlap_callbacks.experiments.lines_file import LinesFile
from overlap_callbacks.experiments.tune.combinations import Axis, Combination, combinations

FILE_NAME = "tune.jsonl"
SCHEMA_VERSION = 1


class ResultsError(ValueError):
    """Results that cannot be read or continued, and why."""


class Tuning(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="tune"):
    """What is tuned: the first line.

    Attributes:
        schema_version: of the lines' layout.
        library_version: that wrote them.
        started_at: wall clock, ISO 8601 with time zone.
        command: the user's.
        axes: what varies.
        timing: how steps are timed in each run.
        blocks: timed blocks of a run.
    """

    schema_version: int = SCHEMA_VERSION
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


_Line = Tuning | Run
_decode = msgspec.json.Decoder(_Line).decode


@dataclass
class Results:
    """A tuning as read.

    Attributes:
        folder: that holds it.
        tuning: what is tuned.
        runs: in the order in which they ran.
        broken_lines: that could not be read: a crash cut them off.
    """

    folder: Path
    tuning: Tuning
    runs: list[Run] = field(default_factory=list)
    broken_lines: int = 0

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
    path = folder / FILE_NAME
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror}; give the folder of an earlier tuning") from None
    tuning, runs, broken = None, [], 0
    for line in filter(bytes.strip, lines):
        try:
            found = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            broken += 1
            continue
        if isinstance(found, Tuning):
            tuning = tuning or found
        else:
            runs.append(found)
    if tuning is None:
        raise ResultsError(f"{path} holds no tuning that this version can read")
    if tuning.schema_version > SCHEMA_VERSION:
        raise ResultsError(f"{path} was written by overlap-callbacks {tuning.library_version}: upgrade to read it")
    count = len(tuning.combinations)
    return Results(folder, tuning, [run for run in runs if 0 <= run.combination < count], broken)


class ResultsWriter(LinesFile):
    """Appends lines to the results, each on the disk before the next run begins.

    Args:
        folder: made if there is none.

    Raises:
        BusyError: another process writes there.
        OSError: the folder or file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FILE_NAME, "tune")
