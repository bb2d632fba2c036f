"""Reads the results of ``overlap bench`` back. Whole lines count; a line that a crash cut off does not."""

from __future__ import annotations

from pathlib import Path

import msgspec

from overlap_callbacks.analysis.results.bench import (
    FILE_NAME,
    SCHEMA,
    BenchResults,
    Failed,
    GemmRound,
    Line,
    Resumed,
    Start,
    TransferRound,
)
from overlap_callbacks.report.record_lines import lines_of


class BenchFileError(Exception):
    """There are no results, or they cannot be read; the message says why."""


def file_of(path: Path) -> Path:
    """The result file that a path means: the file itself, or that of a folder."""
    return path / FILE_NAME if path.is_dir() else path


def read(path: Path) -> BenchResults:
    """Read a result file.

    Args:
        path: of the file or its folder.

    Raises:
        BenchFileError: there are no results, or they cannot be read.
    """
    file = file_of(path)
    decoder = msgspec.json.Decoder(Line)
    start: Start | None = None
    rounds: list[GemmRound | TransferRound] = []
    failed: list[Failed] = []
    resumed: list[Resumed] = []
    broken = 0
    try:
        for _, content in lines_of(file, lambda _done, _size: None):
            try:
                line = decoder.decode(content or b"")
            except (msgspec.DecodeError, RecursionError):
                broken += 1
                continue
            if isinstance(line, Start):
                start = start or line
            elif isinstance(line, Failed):
                failed.append(line)
            elif isinstance(line, Resumed):
                resumed.append(line)
            else:
                rounds.append(line)
    except OSError as error:
        raise BenchFileError(f"{file} cannot be read: {error.strerror}") from None
    if start is None:
        raise BenchFileError(f"{file} holds no results of overlap bench: its first line is missing")
    if start.schema > SCHEMA:
        raise BenchFileError(f"{file} has schema {start.schema}; this version reads up to {SCHEMA}: update it")
    return BenchResults(
        start=start,
        rounds=tuple(rounds),
        failed=tuple(failed),
        resumed=tuple(resumed),
        broken_lines=broken,
    )
