"""Rows of numbers in a file: written once, read a part at a time, sorted by parts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_callbacks.traces.files import TraceError

# Rows of a file, with a field for each column; shape (n,).
Rows = npt.NDArray[np.void]

# Rows that are in memory at a time. A test takes fewer.
AT_ONCE = 2**15
PREFIX = "overlap-trace-"
# The folder for temporary folders; None for the system's. Who starts other processes removes theirs.
PARENT: str | None = None
# Odd, and with bits all over: products with it spread numbers over the upper half of 64 bits.
FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)
# Of each part that is sorted, how many rows show where the values lie.
_SAMPLES = 64


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Write a temporary file in this context, or read it.

    Raises:
        TraceError: that is not possible.
    """
    try:
        yield
    except OSError as error:
        raise TraceError(
            f"the trace is too long for memory, and a temporary file cannot be written: {error}; TMPDIR names another "
            "folder for it"
        ) from None


class Folder:
    """A temporary folder for files of rows. It is made once something is written, and removed at the end."""

    def __init__(self) -> None:
        self._made: tempfile.TemporaryDirectory[str] | None = None
        self._number = 0

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._made is not None:
            self._made.cleanup()

    def file(self, dtype: np.dtype[Any]) -> RowsFile:
        """A new file of rows.

        Raises:
            TraceError: the folder cannot be made.
        """
        if self._made is None:
            with _writing():
                self._made = tempfile.TemporaryDirectory(prefix=PREFIX, dir=PARENT, ignore_cleanup_errors=True)
        self._number += 1
        return RowsFile(Path(self._made.name) / str(self._number), dtype, self)


class RowsFile:
    """Rows in a file.

    Args:
        path: of the file, which does not exist yet.
        dtype: of a row.
        folder: makes other files.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], folder: Folder) -> None:
        self.dtype = dtype
        self._path, self._folder, self._length = path, folder, 0

    def __len__(self) -> int:
        return self._length

    def append(self, rows: Rows) -> None:
        """Write rows behind the others.

        Raises:
            TraceError: there is no room for them.
        """
        if len(rows):
            # (``tofile`` does not tell of bytes that find no room when the file is closed.)
            with _writing(), self._path.open("ab") as file:
                file.write(rows.tobytes())
            self._length += len(rows)

    def read(self, first: int, last: int) -> Rows:
        """The rows from one place to another.

        Raises:
            TraceError: they are not all there.
        """
        with _writing(), self._path.open("rb") as file:
            rows: Rows = np.fromfile(file, self.dtype, last - first, offset=first * self.dtype.itemsize)
            if len(rows) < last - first:
                raise OSError("a temporary file has lost its end")
        return rows

    def overwrite(self, first: int, rows: Rows) -> None:
        """Write rows over those from one place on."""
        with _writing(), self._path.open("r+b") as file:
            file.seek(first * self.dtype.itemsize)
            file.write(rows.tobytes())

    def bounds(self) -> list[tuple[int, int]]:
        """Where the parts begin and end that are in memory at a time."""
        return [(first, min(first + AT_ONCE, self._length)) for first in range(0, self._length, AT_ONCE)]

    def __iter__(self) -> Iterator[Rows]:
        """The rows, a part at a time."""
        for first, last in self.bounds():
            yield self.read(first, last)

    def delete(self) -> None:
        """Delete the file: its rows are needed no more."""
        self._path.unlink(missing_ok=True)
        self._length = 0

    def divided(self, by: str, number: int) -> list[RowsFile]:
        """Files with the rows whose value of an unsigned column is the same modulo ``number``; this one is deleted."""
        shift, count = np.uint64(32), np.uint64(number)
        return self._distributed(number, lambda rows: (((rows[by] * FACTOR) >> shift) % count).astype(np.int64))

    def in_order(self, by: str, then: str | None = None) -> Iterator[Rows]:
        """The rows in the order of a column, a part at a time; the file is deleted meanwhile.

        Args:
            by: the column.
            then: the column that decides among rows that are equal; None for their order in the file.
        """

        def in_order(rows: Rows) -> Rows:
            order = np.argsort(rows[by], kind="stable") if then is None else np.lexsort((rows[then], rows[by]))
            return rows[order]

        if len(self) <= AT_ONCE:
            rows = self.read(0, len(self)) if len(self) else np.empty(0, self.dtype)
            self.delete()
            if len(rows):
                yield in_order(rows)
            return
        # Values that lie among all as evenly as those of each part do among its own: each file gets about as many.
        stride = max(AT_ONCE // _SAMPLES, 1)
        samples = np.sort(np.concatenate([np.sort(rows[by])[::stride] for rows in self]))
        limits = samples[_SAMPLES::_SAMPLES]
        files = self._distributed(len(limits) + 1, lambda rows: np.searchsorted(limits, rows[by], side="right"))
        for file in files:
            if len(file):
                rows = file.read(0, len(file))
                file.delete()
                yield in_order(rows)

    def _distributed(self, number: int, file_of: Callable[[Rows], npt.NDArray[np.int64]]) -> list[RowsFile]:
        files = [self._folder.file(self.dtype) for _ in range(number)]
        for rows in self:
            place = file_of(rows)
            order = np.argsort(place, kind="stable")
            ends = np.searchsorted(place[order], np.arange(number), side="right")
            begins = np.concatenate(([0], ends[:-1]))
            for i in np.flatnonzero(ends > begins).tolist():
                files[i].append(rows[order[begins[i] : ends[i]]])
        self.delete()
        return files
