"""Columns of numbers: in memory or, once they are long, memory-mapped from temporary files.

A mapped column is a read-only array, whose memory the system can reclaim. Its file has no name: it disappears with the
column, however the process ends.
"""

from __future__ import annotations

import contextlib
import mmap
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from overlap_callbacks.traces.files import TraceError

Array = npt.NDArray[Any]

# Maximum numbers of a column held in memory, and numbers processed at a time.
MAX_IN_MEMORY = 2**18
AT_ONCE = 2**16

_mapped: WeakSet[mmap.mmap] = WeakSet()


class Column:
    """A growing column; raises a TraceError if there is no room for it."""

    def __init__(self, dtype: npt.DTypeLike = np.int64) -> None:
        self._dtype = np.dtype(dtype)
        self._held: list[Array] = []
        self._number_held = 0
        self._file: IO[bytes] | None = None

    def append(self, values: Array) -> None:
        """Append numbers."""
        if not len(values):
            return
        self._held.append(np.ascontiguousarray(values, self._dtype))
        self._number_held += len(values)
        if self._file is None and self._number_held <= MAX_IN_MEMORY:
            return
        with _writing():
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0, prefix="overlap-trace-")  # noqa: SIM115
            for part in self._held:
                rest = part.data.cast("B")
                while len(rest):  # if there is no room, some bytes are written before the error is raised
                    rest = rest[self._file.write(rest) :]
        self._held.clear()

    def finished(self) -> Array:
        """All numbers; nothing can be appended afterwards."""
        if self._file is None:
            return np.concatenate([np.empty(0, self._dtype), *self._held])
        with _writing(), self._file as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        _mapped.add(memory)
        return np.frombuffer(memory, self._dtype)

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Turn errors of writing a temporary file into a TraceError."""
    try:
        yield
    except OSError as error:
        raise TraceError(
            f"the trace is too long for memory, and a temporary file cannot be written: {error}; TMPDIR names another "
            "folder for it"
        ) from None


def parts(length: int) -> Iterator[slice]:
    """Slices of ``AT_ONCE`` rows of a column."""
    for first in range(0, length, AT_ONCE):
        yield slice(first, min(first + AT_ONCE, length))


def cuts(length: int, at_least: int, last_cut: Callable[[int, int], int]) -> Iterator[slice]:
    """Slices of at least ``at_least`` rows each, except the last, extended until they can end.

    ``last_cut`` returns the last row between two others before which a slice may end, 0 for none.
    """
    first = 0
    while first < length:
        size, last = max(at_least, 1), 0
        while not last and first + size < length:
            last = last_cut(first, first + size)
            size *= 2
        last = last or length
        yield slice(first, last)
        first = last


def derived(function: Callable[..., Array], *columns: Array, dtype: npt.DTypeLike = np.int64) -> Array:
    """A column computed by a function from the rows of others, a part at a time; shape (n,) each."""
    column = Column(dtype)
    for part in parts(len(columns[0])):
        column.append(function(*[of_column[part] for of_column in columns]))
        release()
    return column.finished()


def taken(column: Array, rows: Array, dtype: npt.DTypeLike | None = None) -> Array:
    """Some rows of a column in any order, as a column of the same or another type."""
    found = Column(dtype or column.dtype)
    for part in parts(len(rows)):
        found.append(column[rows[part]])
    release()
    return found.finished()


def release() -> None:
    """Free the memory of mapped columns; they are read again when needed."""
    for memory in _mapped:
        memory.madvise(mmap.MADV_DONTNEED)
