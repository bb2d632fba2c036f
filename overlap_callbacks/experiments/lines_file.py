"""A result file of one JSON object a line, each on the disk before the next is measured. One writes at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO, Any

import msgspec


class BusyError(ValueError):
    """Another process writes there."""


class LinesFile:
    """Appends lines to a file.

    Args:
        path: of the file; its folder is made if there is none.
        command: of ``overlap`` that writes, e.g. ``tune``.

    Raises:
        BusyError: another process writes there.
        OSError: the folder or file cannot be written.
    """

    def __init__(self, path: Path, command: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise BusyError(f"another overlap {command} is at work in {path.parent}") from None
        except OSError:
            pass  # a file system without locks
        if self._file.seek(0, os.SEEK_END):
            self._file.write(b"\n")  # a crash may have left half a line

    def write(self, line: Any) -> None:
        """Append a line: anything that msgspec encodes."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let others write."""
        self._file.close()
