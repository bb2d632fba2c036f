"""Writes the result file: a line is on disk before the next point is measured."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from overlap_callbacks.analysis.results.bench import FILE_NAME, Line


class ResultsFile:
    """A result file that is appended to.

    A line that a crash cut off stays as it is, on a line of its own: readers leave it out.

    Args:
        folder: of the results; is made where it is missing.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME
        self._file = self.path.open("ab")
        if self._file.tell() and not self._ends_with_a_line():
            self._file.write(b"\n")

    def append(self, line: Line) -> None:
        """Write a line, and see that it is on disk."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def _ends_with_a_line(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
