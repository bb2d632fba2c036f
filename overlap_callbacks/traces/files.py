"""Reads the bytes of a trace file, decompressed, in pieces of bounded size."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

try:
    from isal import igzip, isal_zlib

    # igzip decompresses about three times faster than zlib, but has no wheels for some machines.
    _open_gzip: Any = igzip.open
    _GZIP_ERRORS: tuple[Any, ...] = (EOFError, OSError, zlib.error, isal_zlib.error)
except ImportError:  # pragma: no cover
    _open_gzip = gzip.open
    _GZIP_ERRORS = (EOFError, OSError, zlib.error)

# A piece and the events decoded from it fit into a core's cache. Larger pieces cost memory and time.
PIECE_BYTES = 2**18

_GZIP_MAGIC = b"\x1f\x8b"


# Called with the number of bytes read so far and the number of bytes of the file.
Progress = Callable[[int, int], None]


class TraceError(ValueError):
    """A file cannot be read as a trace; the message says why."""


def pieces(
    path: str | os.PathLike[str], problems: list[str], size: int = PIECE_BYTES, progress: Progress | None = None
) -> Iterator[bytes]:
    """Read a file in pieces, decompressed if it is gzipped, whatever its name.

    If a compressed file is cut off or damaged, reading ends there, and ``problems`` tells it.

    Args:
        path: the file.
        problems: gets what is wrong with the file, in words.
        size: maximum size of a piece, in bytes.
        progress: called with the number of bytes read so far and the number of bytes of the file.

    Raises:
        TraceError: there is no such file, it cannot be opened, or it is empty.
    """
    file = Path(path)
    if file.is_dir():
        raise TraceError(f"{file} is a folder: give the trace files in it")
    try:
        with file.open("rb") as raw:
            magic = raw.read(2)
            raw.seek(0)
            if not magic:
                raise TraceError(f"{file} is empty")
            total = os.fstat(raw.fileno()).st_size
            packed = magic == _GZIP_MAGIC
            for piece in _gunzipped(raw, file, problems, size) if packed else iter(lambda: raw.read(size), b""):
                if progress is not None:
                    progress(raw.tell(), total)
                yield piece
    except OSError as error:
        raise TraceError(f"{file} cannot be read: {error.strerror or error}") from None


def _gunzipped(raw: BinaryIO, file: Path, problems: list[str], size: int) -> Iterator[bytes]:
    read = 0
    with _open_gzip(raw, "rb") as stream:
        while True:
            try:
                piece = stream.read(size)
            except _GZIP_ERRORS as error:
                if not read:
                    raise TraceError(f"{file} cannot be gunzipped: {error}") from None
                problems.append(f"the compressed file is cut off or damaged after {read} bytes ({error})")
                return
            if not piece:
                return
            read += len(piece)
            yield piece
