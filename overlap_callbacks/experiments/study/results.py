"""The results of a study on disk: read back after a crash, and never written by two at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from overlap_callbacks.analysis.results.study import FILE_NAME, SCHEMA, Configuration, StudyRow, StudyStart
from overlap_callbacks.experiments.lines_file import LinesFile

_decode = msgspec.json.Decoder(StudyStart | StudyRow).decode


class ResultsError(ValueError):
    """Results that cannot be read or continued, and why."""


class _Schema(msgspec.Struct):
    schema: int = 0


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
    path = folder / FILE_NAME
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror}; give the folder of an earlier study") from None
    start, rows, broken = None, [], 0
    for line in filter(bytes.strip, lines):
        try:
            found = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            _refuse_later(path, line)
            broken += 1
            continue
        if isinstance(found, StudyStart):
            start = start or found
        else:
            rows.append(found)
    if start is None:
        raise ResultsError(f"{path} holds no study that this version can read")
    if start.schema > SCHEMA:
        _refuse(path, start.schema)
    return Results(folder, start, rows, broken)


def _refuse_later(path: Path, line: bytes) -> None:
    try:
        schema = msgspec.json.decode(line, type=_Schema).schema
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    if schema > SCHEMA:
        _refuse(path, schema)


def _refuse(path: Path, schema: int) -> None:
    raise ResultsError(f"{path} has schema version {schema}, this version reads up to {SCHEMA}: upgrade to read it")


def open_results(folder: Path) -> LinesFile:
    """The file, to append rows to.

    Raises:
        BusyError: another process writes there.
        OSError: the folder or file cannot be written.
    """
    return LinesFile(folder / FILE_NAME, "study")
