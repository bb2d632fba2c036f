"""The lines of a record's file, in bounded memory, and where each stands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

# A longer line is no line of a record: that of a window of 8,192 ranks is far shorter.
MAX_LINE_BYTES = 256 * 2**20
# What is read at a time. Of a line that is longer, the end is looked for before its bytes are kept.
_PIECE_BYTES = 2**20


# A line's place in the file, in bytes, and its bytes without the line break; None of one of more than MAX_LINE_BYTES.
Line = tuple[int, "bytes | None"]


def lines_of(file: Path, progress: Callable[[int, int], None]) -> Iterator[Line]:
    """The lines that are not blank.

    Args:
        file: the record.
        progress: called with the number of bytes read so far, and the size of the file in bytes.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb", buffering=0) as source:
        size, start, rest = os.fstat(source.fileno()).st_size, 0, b""
        while piece := source.read(_PIECE_BYTES):
            *whole, rest = (rest + piece).split(b"\n")
            for content in whole:
                if content and not content.isspace():
                    yield start, content
                start += len(content) + 1
            if len(rest) >= _PIECE_BYTES:
                _, long = _long_line(source, start, len(rest))
                rest = b""
                if long is None or not long.isspace():
                    yield start, long
                start = source.tell()
            done = source.tell()
            progress(done, max(size, done))  # the job may still be writing
        if rest and not rest.isspace():
            yield start, rest


def line_at(file: Path, start: int) -> bytes:
    """The line that begins at a place of the file, without the line break.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as source:
        source.seek(start)
        return source.readline(MAX_LINE_BYTES).rstrip(b"\n")


def _long_line(source: IO[bytes], start: int, known: int) -> Line:
    """The line that begins at ``start`` and has no end in its first ``known`` bytes; the file is left after its end."""
    length = known
    while piece := source.read(_PIECE_BYTES):
        end = piece.find(b"\n")
        length += len(piece) if end < 0 else end
        if end >= 0:
            break
    content = None
    if length <= MAX_LINE_BYTES:
        source.seek(start)
        content = source.read(length)  # once: it may be most of the memory that there is
    source.seek(start + length + 1)
    return start, content
