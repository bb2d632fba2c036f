"""The results of a study on disk: read back after a crash, and never written by two at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from overlap_callbacks.analysis.results.study import FILE_NAME, SCHEMA, Configuration, StudyRow, StudyStart
from overlap_callbacks.experiments.lines_file import LinesFile, read_lines


@dataclass
class Results:
    """A study as read.

    Attributes:
        folder: that holds it.
        start: what is measured, and where.
        rows: in the order in which they were trained.
        broken_lines: that could not be read: a crash cut them off.
    """

    folder: Path
    start: StudyStart
    rows: list[StudyRow] = field(default_factory=list)
    broken_lines: int = 0

    @property
    def left(self) -> list[Configuration]:
        """Configurations without a row, in the order in which they were asked for."""
        done = {row.configuration for row in self.rows}
        return [configuration for configuration in self.start.configurations if configuration not in done]

    @property
    def failed(self) -> list[Configuration]:
        """Configurations that were tried and never measured, in the order in which they were asked for."""
        measured = {row.configuration for row in self.rows if row.failure is None}
        tried = {row.configuration for row in self.rows} - measured
        return [configuration for configuration in self.start.configurations if configuration in tried]


def read_results(folder: Path) -> Results:
    """Read the results of a study.

    Raises:
        ResultsError: there are none in the folder, or they are of a later version.
    """
    start, rows, broken = read_lines(folder / FILE_NAME, StudyStart, StudyRow, what="study", schema=SCHEMA)
    return Results(folder, start, rows, broken)


def open_results(folder: Path) -> LinesFile:
    """The file, to append rows to.

    Raises:
        BusyError: another process writes there.
        OSError: the folder or file cannot be written.
    """
    return LinesFile(folder / FILE_NAME, "study")
