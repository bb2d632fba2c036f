"""The lines of a record file and their positions, in bounded memory; and windows without their details."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.run_summary import without_details

# A longer line is not from a record: the line of a window of 8,192 ranks is far shorter.
MAX_LINE_BYTES = 256 * 2**20
# For a longer line, find the end before keeping its bytes.
_PIECE_BYTES = 2**20
_BUFFER_BYTES = 2**20


# A line's position in the file, in bytes, and its content without the line break; None if over MAX_LINE_BYTES.
Line = tuple[int, "bytes | None"]


def lines_of(file: Path, progress: Callable[[int, int], None]) -> Iterator[Line]:
    """The lines that are not blank. ``progress`` gets the bytes read so far, and the size of the file in bytes.

    Raises:
        OSError: the file cannot be read.
    """
    # Reading lines from a buffered file is four times as fast as splitting what was read.
    with file.open("rb", buffering=_BUFFER_BYTES) as source:
        size, start, told = os.fstat(source.fileno()).st_size, 0, 0
        while line := source.readline(_PIECE_BYTES):
            content: bytes | None = line
            ended, end = line.endswith(b"\n"), start + len(line)
            if ended:
                content = line[:-1]
            elif len(line) >= _PIECE_BYTES:
                _, content = _long_line(source, start, len(line))
                ended, end = True, source.tell()
            if content is None or (content and not content.isspace()):
                yield start, content
            start = end
            if not ended:  # the job is still writing the rest of this line
                break
            if start - told >= _PIECE_BYTES:
                told = start
                progress(start, max(size, start))  # the job may still be writing
        if start > told:
            progress(start, max(size, start))


def line_at(file: Path, start: int) -> bytes:
    """The line at a position of the file, without the line break.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as source:
        source.seek(start)
        return source.readline(MAX_LINE_BYTES).rstrip(b"\n")


def _long_line(source: IO[bytes], start: int, known: int) -> Line:
    """The line at ``start``, whose end is not in its first ``known`` bytes; moves the file position past the line."""
    length = known
    while piece := source.read(_PIECE_BYTES):
        end = piece.find(b"\n")
        length += len(piece) if end < 0 else end
        if end >= 0:
            break
    content = None
    if length <= MAX_LINE_BYTES:
        source.seek(start)
        content = source.read(length)  # once: it may take most of the available memory
    source.seek(start + length + 1)
    return start, content


# -- windows without their details: enough to judge a run of thousands of windows, small enough to keep


# Exceptions of decoding a line.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

# The parts of a report that ``without_details`` omits.
_DETAILS = (
    "kernels", "pairs", "dimensions", "dimension_pairs", "pictures", "collectives", "samples", "power_trace",
    "messages", "expert_details", "transfers", "exposure", "sized_transfers",
)  # fmt: skip
# The parts that often do not change between windows; equal ones are stored once.
_SHARED = ("ranks", "problems", "findings", "backend", "device")
_NOTHING = (msgspec.Raw(), msgspec.Raw(b"[]"), msgspec.Raw(b"null"))


class Details(NamedTuple):
    """Position of a window's line, in bytes, and the names of its non-empty details."""

    start: int
    parts: frozenset[str]


def _outline() -> Any:
    """A struct like ``OverlapReport`` that leaves details undecoded, which takes a third of the time."""
    fields: list[Any] = []
    for known in msgspec.structs.fields(OverlapReport):
        if known.name in _DETAILS:
            fields.append((known.name, msgspec.Raw, msgspec.Raw()))
        elif known.required:
            fields.append((known.name, known.type))
        elif known.default is not msgspec.NODEFAULT:
            fields.append((known.name, known.type, known.default))
        else:
            fields.append((known.name, known.type, msgspec.field(default_factory=known.default_factory)))
    return msgspec.defstruct("Outline", fields, kw_only=True)


decode_window = msgspec.json.Decoder(OverlapReport).decode
_decode_outline = msgspec.json.Decoder(_outline()).decode
_details_of = attrgetter(*_DETAILS)
_FIGURES = tuple([known.name for known in msgspec.structs.fields(OverlapReport) if known.name not in _DETAILS])
_figures_of = attrgetter(*_FIGURES)


class Outlines:
    """Decodes the lines of windows like ``without_details``."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def __call__(self, start: int, line: bytes) -> tuple[OverlapReport, Details]:
        """The window of the line at ``start``, without its details, and the details omitted.

        Raises:
            msgspec.MsgspecError, UnicodeDecodeError, RecursionError: a field that is not a detail cannot be decoded.
        """
        outline = _decode_outline(line)
        # Not the fields themselves: they would keep the whole line in memory.
        details = zip(_DETAILS, _details_of(outline), strict=True)
        parts = frozenset([name for name, raw in details if raw not in _NOTHING])
        left = Details(start, self._shared(parts))
        if not outline.complete:  # its blocks are needed too
            return without_details(decode_window(line)), left
        fields = dict(zip(_FIGURES, _figures_of(outline), strict=True))
        for name in _SHARED:
            fields[name] = self._shared(fields[name])
        return OverlapReport(**fields), left

    def _shared(self, value: Any) -> Any:
        return self._known.setdefault(value, value)
