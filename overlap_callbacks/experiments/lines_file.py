"""A result file of one JSON object a line, each on the disk before the next is measured. One writes at a time.

The first line says what is measured, and each further one what came of a part of it. A crash costs the line that was
being written, and no more.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

_First = TypeVar("_First")
_Further = TypeVar("_Further")


class BusyError(ValueError):
    """Another process writes there."""


class ResultsError(ValueError):
    """Results that cannot be read or continued, and why."""


class LinesFile:
    """Appends lines to a file.

    A line that a crash cut off stays as it is, on a line of its own: readers leave it out.

    Args:
        path: of the file; its folder is made if there is none.
        command: of ``overlap`` that writes, e.g. ``tune``.

    Raises:
        BusyError: another process writes there.
        OSError: the folder or file cannot be written.
    """

    def __init__(self, path: Path, command: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise BusyError(f"another overlap {command} is at work in {path.parent}") from None
        except OSError:
            pass  # a file system without locks
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def write(self, line: Any) -> None:
        """Append a line: anything that msgspec encodes."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let others write. Closing twice is harmless."""
        self._file.close()


class _Version(msgspec.Struct):
    schema: int = 0


def read_lines(
    path: Path, first: type[_First], further: type[_Further], *, what: str, schema: int
) -> tuple[_First, list[_Further], int]:
    """Read a file of this form.

    Args:
        path: of the file.
        first: what the first line is, with its ``schema``.
        further: what the other lines are.
        what: is in it, e.g. ``tuning``.
        schema: the latest that this version reads.

    Returns:
        The first line, the further ones, and how many lines could not be read because a crash cut them off.

    Raises:
        ResultsError: the file cannot be read, holds no such results, or is of a later version.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror}; give the folder of an earlier {what}") from None
    decode = msgspec.json.Decoder(first | further).decode
    begin: _First | None = None
    rows: list[_Further] = []
    broken = 0
    for line in filter(bytes.strip, lines):
        _refuse_later(path, line, schema)
        try:
            found = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            broken += 1
            continue
        if isinstance(found, further):
            rows.append(found)
        else:
            begin = begin or found
    if begin is None:
        raise ResultsError(f"{path} holds no {what} that this version can read")
    return begin, rows, broken


def _refuse_later(path: Path, line: bytes, schema: int) -> None:
    """Also where this version does not know the line's form."""
    try:
        found = msgspec.json.decode(line, type=_Version).schema
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    if found > schema:
        raise ResultsError(f"{path} has schema version {found}, this version reads up to {schema}: upgrade to read it")
