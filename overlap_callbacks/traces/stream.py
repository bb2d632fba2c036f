"""Decodes the events of a trace piece by piece, in limited memory whatever the size of the file.

A piece is first cut where an event seems to begin, and decoded as a JSON array. If that works, the cut was between
events. If not, the array of events ends in the piece, the cut was inside an event with nested objects, or the piece is
not valid JSON (real traces have NaN, decimal commas, broken escapes). Then the events are found by their braces and
decoded one by one. Invalid events are repaired if possible, otherwise counted.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from overlap_callbacks.traces.events import Event
from overlap_callbacks.traces.files import PIECE_BYTES, Document, Progress, TraceError, foreign_kind, pieces

_Args = TypeVar("_Args", bound=msgspec.Struct)


@functools.cache
def _decoders(event: type[Event]) -> tuple[Any, Any]:
    return msgspec.json.Decoder(list[event]), msgspec.json.Decoder(event)  # type: ignore[valid-type]


@functools.cache
def _decoder_of(kind: type[msgspec.Struct]) -> Any:
    return msgspec.json.Decoder(kind | None).decode


_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_END = re.compile(rb"\}\s*(\])\s*(?=[,}]|$)")
_BETWEEN = re.compile(rb"(?<=\})\s*,?\s*(?=\{)")  # between two events; the comma may be missing
# The events must begin within this many bytes. Thousands of process groups may precede them.
_MAX_HEAD_BYTES = 64 * 2**20
# Maximum length of the text at which the array of events begins, including white space.
_MAX_START_BYTES = 256
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
# Maximum length of one event, which is buffered until it ends.
_MAX_EVENT_BYTES = 16 * 2**20
# Number of possible ends of the array tried in one piece: events may have nested arrays of objects.
_MAX_ENDS = 16
# An event that does not end within this many bytes is invalid; a shorter one may continue in the next piece.
_MAX_INCOMPLETE_BYTES = 2**19


class EventStream(Document):
    """The events of a trace file. Iterating gives one list of events per piece of the file.

    ``progress`` is called with the number of bytes read so far and of the file.

    Attributes:
        num_events: number of events so far.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        event: type[Event] = Event,
        piece_bytes: int = PIECE_BYTES,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(Path(path))
        self.num_events = 0
        self._decode_all, self._decode_one = (decoder.decode for decoder in _decoders(event))
        self._piece_bytes = piece_bytes
        self._progress = progress
        self._is_bare_array = False  # the file is only the array of events, without a document around it
        self._num_repaired = 0
        self._num_lost = 0
        self._num_strays = 0  # positions between events with something else
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._is_utf8 = True
        self._first_error = ""

    def __iter__(self) -> Iterator[list[Event]]:
        """The events; raises a TraceError if the file cannot be read, is empty, or holds no events."""
        source = map(self._checked, pieces(self.path, self.problems, self._piece_bytes, self._progress))
        rest, ended = self._skip_head(source), False
        searched = 0  # bytes at the beginning of ``rest`` in which only the first event begins
        while not ended:
            piece = next(source, b"")
            buffer = bytearray(b"[")  # decoded in place: the files are large, and a copy costs as much as decoding
            buffer += rest
            buffer += piece
            end = _last_boundary(buffer, searched) if piece else 0
            searched = 0
            if end or not piece:
                events, rest, ended = self._decode(buffer, end)
                self.num_events += len(events)
                yield events
                if not piece:
                    break
            elif len(buffer) > _MAX_EVENT_BYTES:
                raise TraceError(f"{self.path} is no trace: no event ends within {_MAX_EVENT_BYTES >> 20} MiB")
            else:
                rest = bytes(buffer[1:])
                searched = len(rest)
        self._finish(rest, source, ended)

    def args_of(
        self, events: Sequence[Event], kind: type[_Args], odd: type[msgspec.Struct] | None = None, /
    ) -> list[_Args | None]:
        """The arguments of events as structs, ``odd`` if some have other types; None if they cannot be read."""
        decode = _decoder_of(kind)
        try:
            return [decode(event.args) for event in events]
        except _DECODE_ERRORS:
            if odd is not None:
                return self.args_of(events, odd)  # type: ignore[arg-type]
            return [self._repaired_args(event.args, decode) for event in events]

    def _repaired_args(self, text: msgspec.Raw, decode: Callable[[Any], _Args | None]) -> _Args | None:
        try:
            return decode(text)
        except _DECODE_ERRORS as error:
            self._first_error = self._first_error or str(error)
        self._num_repaired += 1
        try:
            return decode(msgspec.json.encode(msgspec.json.decode(_repaired_json(bytes(text)))))
        except (*_DECODE_ERRORS, UnicodeEncodeError):
            return None

    def _checked(self, piece: bytes) -> bytes:
        """The piece. Notes bytes that are not UTF-8, which the decoder skips in unknown fields."""
        if self._is_utf8 and not (piece.isascii() and not self._utf8.getstate()[0]):  # nearly all pieces are ASCII
            try:
                self._utf8.decode(piece)
            except UnicodeDecodeError:
                self._is_utf8 = False
        return piece

    # -- the document around the events

    def _skip_head(self, source: Iterator[bytes]) -> bytes:
        """Read up to the events. Returns their text that was already read."""
        buffer = bytearray()
        searched = 0
        for piece in source:
            buffer += piece
            start = re.match(rb"\s*(.)?", buffer, re.DOTALL)
            first = start.group(1) if start else None
            if first == b"[":  # the format allows a bare array
                self._is_bare_array = True
                return bytes(buffer[start.end() :]) if start else b""
            if first not in (b"{", None):
                break
            for begin in _START.finditer(buffer, searched):
                if self._read_head(bytes(buffer[: begin.start()])):
                    return bytes(buffer[begin.end() :])
            searched = max(0, len(buffer) - _MAX_START_BYTES)
            if len(buffer) > _MAX_HEAD_BYTES:
                break
        if not buffer.strip():
            raise TraceError(f"{self.path} is empty")
        kind = foreign_kind(buffer) or " is no trace of torch.profiler: it has no traceEvents"
        raise TraceError(f"{self.path}{kind}")

    def _read_head(self, head: bytes) -> bool:
        """Read the fields before the events. Returns False if more of them follow."""
        try:
            fields = msgspec.json.decode(head + b'"traceEvents":[]}')
        except _DECODE_ERRORS:
            if not head or not _depth_one(head):
                return False
            self.problems.append("the text before the events is not valid JSON, and is left out [OC712]")
            return True
        self.head.update({key: value for key, value in fields.items() if key != "traceEvents"})
        return True

    def _finish(self, rest: bytes, source: Iterator[bytes], ended: bool) -> None:
        """Read the fields after the events, and complete ``problems``."""
        if ended:
            text = bytearray(rest)
            for piece in source:
                text += piece
                if len(text) > _MAX_HEAD_BYTES:
                    break
            rest = bytes(text)
            tail = None if self._is_bare_array else _tail(rest)
            if tail is not None:
                self.head.update(tail)
            elif rest.strip():
                self.problems.append("the text after the events is not valid JSON, and is left out [OC713]")
            elif not self._is_bare_array:
                self.problems.append("the file is cut off after its events: what would follow them is missing [OC714]")
        else:
            self.is_cut = True
            if not any("cut off" in problem for problem in self.problems):
                self.problems.append("the file is cut off: it ends before its events do [OC715]")
        if self._num_repaired:
            self.problems.append(
                f"{self._num_repaired} events were not valid JSON and were repaired ({self._first_error}) [OC716]"
            )
        if self._num_lost:
            self.problems.append(
                f"{self._num_lost} events could not be read and are left out ({self._first_error}) [OC717]"
            )
        if self._num_strays:
            self.problems.append(
                f"{self._num_strays} places between events are not valid JSON: the text there is left out [OC718]"
            )
        if not (self._is_utf8 or self._num_repaired or self._num_lost):  # otherwise those events had them
            self.problems.append("the file holds bytes that are no UTF-8: fields that have them are left out [OC719]")

    # -- events. Each method also returns the text after what it decoded, and whether the array of events ended there.

    def _decode(self, buffer: bytearray, end: int) -> tuple[list[Event], bytes, bool]:
        """The events of the buffer before ``end``, where the next one begins; 0 if these are the last of the file."""
        if end:
            comma = buffer.rindex(b",", 0, end)
            with contextlib.suppress(*_DECODE_ERRORS):
                return self._decode_before(buffer, comma), bytes(buffer[end:]), False
        last = self._decode_to_end(buffer)
        return (*last, True) if last is not None else self._one_by_one(bytes(buffer[1:]), cut_off=not end)

    def _decode_to_end(self, buffer: bytearray) -> tuple[list[Event], bytes] | None:
        """The events up to the end of the array, and the text after it; None if it does not end here."""
        if buffer[1:].lstrip()[:1] == b"]":
            return [], bytes(buffer[1:].lstrip()[1:])
        for number, end in enumerate(_END.finditer(buffer)):
            if number == _MAX_ENDS:
                break
            try:
                return self._decode_before(buffer, end.start(1)), bytes(buffer[end.end(1) :])
            except _DECODE_ERRORS:
                continue
        return None

    def _decode_before(self, buffer: bytearray, place: int) -> list[Event]:
        """The events of the buffer before ``place``, where the array is temporarily made to end."""
        byte, buffer[place] = buffer[place], ord("]")
        try:
            events: list[Event] = self._decode_all(memoryview(buffer)[: place + 1])
        finally:
            buffer[place] = byte
        return events

    def _one_by_one(self, body: bytes, cut_off: bool) -> tuple[list[Event], bytes, bool]:
        """The events of invalid text, found by their braces; ``cut_off`` if the file ends with it."""
        events: list[Event] = []
        place, all_invalid, lost = 0, False, False  # whether an event before ``place`` was lost
        while True:
            begin, end, ended = _next_object(body, place)
            gap_end = end - 1 if ended else begin if begin >= 0 else None
            self._num_strays += not lost and _is_stray(body[place:gap_end], place, begin >= 0)
            lost = False
            if ended:
                return events, body[end:], True
            event = self._read_one(body[begin:end]) if 0 <= begin < end else None
            if event is not None:
                events.append(event)
                place = end
                continue
            if begin < 0:  # no event begins in the remaining text
                return events, b"", False
            if end < 0 and not cut_off and len(body) - begin < _MAX_INCOMPLETE_BYTES:
                return events, body[begin:], False  # it may continue in the next piece
            after = -1 if all_invalid else self._next_valid(body, begin)
            if after < 0:
                all_invalid = True  # no valid event follows: searching again would be in vain
                if end < 0:  # the file ends within this event
                    return events, b"" if cut_off else body[begin:], False
                after = end
            self._num_lost += 1
            place, lost = after, True

    def _next_valid(self, body: bytes, begin: int) -> int:
        """Start of the next valid event after the invalid one at ``begin``; -1 if there is none."""
        for gap in _BETWEEN.finditer(body, begin + 1):
            start, end, _ = _next_object(body, gap.end())
            try:
                if end > 0 and self._decode_one(body[start:end]).ph is not None:
                    return gap.end()
            except _DECODE_ERRORS:
                continue
        return -1

    def _read_one(self, text: bytes) -> Event | None:
        """One event, repaired if necessary; None if that is impossible."""
        text = text.rstrip().removesuffix(b",")
        try:
            event: Event = self._decode_one(text)
        except _DECODE_ERRORS as error:
            repaired = self._repaired(text)
            self._num_repaired += repaired is not None
            self._first_error = self._first_error or str(error)
            return repaired
        return event

    def _repaired(self, text: bytes) -> Event | None:
        """An event of invalid JSON or with fields of wrong types; None if it cannot be repaired."""
        try:
            fields = msgspec.json.decode(_repaired_json(text))
            if not isinstance(fields, dict):
                return None
            if not isinstance(fields.get("args"), dict):
                fields.pop("args", None)
            for name in ("ph", "cat", "name"):
                if not isinstance(fields.get(name), str):
                    fields.pop(name, None)
            for name in ("ts", "dur"):
                if isinstance(fields.get(name), (bool, list, dict)):
                    fields.pop(name)
            event: Event = self._decode_one(msgspec.json.encode(fields))
        except (*_DECODE_ERRORS, UnicodeEncodeError):
            return None
        return event


def _tail(text: bytes) -> dict[str, Any] | None:
    """The fields after the array of events; None if the text is something else."""
    try:
        fields = msgspec.json.decode(b"{" + text.strip().removeprefix(b","))
    except _DECODE_ERRORS:
        return None
    return fields if isinstance(fields, dict) else None


_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]"]', re.DOTALL)


def _next_object(body: bytes, place: int) -> tuple[int, int, bool]:
    """Start and end of the next event, -1 each if not in ``body``; or -1, the end of the array, and True."""
    depth, begin = 0, -1
    for matched in _STRUCTURE.finditer(body, place):
        token = matched.group()
        if token in (b"{", b"["):
            if not depth:
                begin = matched.start()
            depth += 1
        elif token in (b"}", b"]"):
            if not depth:
                if token == b"]":
                    return -1, matched.end(), True
                continue
            depth -= 1
            if not depth:
                return begin, matched.end(), False
        elif token == b'"':  # begins an unterminated string
            break
    return begin, -1, False


def _is_stray(gap: bytes, place: int, is_before_event: bool) -> bool:
    """Whether a gap before an event, or after the last one, contains anything but one comma.

    At ``place`` 0, the comma may have been in the previous text.
    """
    found = gap.strip()
    return found != b"," and bool(found or (place and is_before_event))


_MAX_GAP_BYTES = 128
_BOUNDARY = re.compile(rb"\}\s{0,60},\s{0,60}\{")
# The last boundary is usually near the end: first search this many bytes, then increasingly more.
_SEARCHED_BYTES = 2**11


def _last_boundary(buffer: bytearray, since: int) -> int:
    """Where the last event of the buffer seems to begin: after ``},``; 0 if nowhere.

    The first ``since`` bytes were searched before: searching megabytes again with each piece would take minutes.
    """
    end, first = len(buffer), max(0, since - _MAX_GAP_BYTES)
    size = _SEARCHED_BYTES
    while end > first:
        begin = max(first, end - size)
        size *= 2
        gaps = list(_BOUNDARY.finditer(buffer, begin, min(len(buffer), end + _MAX_GAP_BYTES)))
        if gaps:
            return gaps[-1].end() - 1
        end = begin
    return 0


def _depth_one(head: bytes) -> bool:
    """Whether invalid JSON leaves exactly one brace open: that of the document."""
    braces = brackets = 0  # counted one by one: a damaged file may have millions, too many to keep
    for matched in _STRUCTURE.finditer(head):
        token = matched.group()
        braces += (token == b"{") - (token == b"}")
        brackets += (token == b"[") - (token == b"]")
    return braces == 1 and brackets == 0


# Strings, which are kept, and numbers that JSON does not allow or that are unusable, which become null.
_TOKENS = r'"(?:[^"\\]|\\.)*"|[-+]?\b(?:NaN|nan|Infinity|inf)\b|-?\d[\d.]*[eE][-+]?\d{4,}|-?\d{400,}'
_BAD_ESCAPE = r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})'
_DECIMAL_COMMA = r"(:\s*-?\d+),(\d+)(?=\s*[,}])"


def _repaired_json(text: bytes) -> bytes:
    """An event's text without the usual faults of real traces; it may still be invalid."""
    printable = re.sub(r"[\x00-\x1f]", " ", text.decode(errors="replace"))

    def repaired(match: re.Match[str]) -> str:
        token = match.group()
        return re.sub(_BAD_ESCAPE, r"\\\\", token) if token.startswith('"') else "null"

    return re.sub(_DECIMAL_COMMA, r"\1.\2", re.sub(_TOKENS, repaired, printable, flags=re.DOTALL)).encode()
