"""The events of a trace, decoded piece by piece, so that memory stays bounded whatever the file's size.

Strict first: a piece is cut between two events and decoded as a JSON array. That it decodes proves that the cut was
between events, since a prefix of an array that parses as a list of values is one. Where a piece does not decode, the
array of events ends in it, or the cut was within an event that holds objects itself, or it is not valid JSON (real
traces hold NaN, decimal commas, broken escapes): then its events are found by their braces and decoded one by one,
repaired where that can be done, and counted where it cannot.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union

import msgspec

from overlap_callbacks.traces.files import PIECE_BYTES, Progress, TraceError, pieces


class Args(msgspec.Struct, gc=False):
    """What is needed of an event's ``args``; as it stands in the file, since the types differ between versions."""

    correlation: Any = None
    device: Any = None
    grid: msgspec.Raw = msgspec.Raw()
    block: msgspec.Raw = msgspec.Raw()
    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    group_size: Any = msgspec.field(default=None, name="Group size")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    sequence: Any = msgspec.field(default=None, name="Seq")
    input_dims: Any = msgspec.field(default=None, name="Input Dims")
    input_type: Any = msgspec.field(default=None, name="Input type")


Time = Union[int, float, str, None]


class Event(msgspec.Struct, gc=False):
    """One event, times in microseconds as JSON's numbers are read."""

    ph: Union[str, None] = None
    cat: Union[str, None] = None
    name: Union[str, None] = None
    pid: Any = None
    tid: Any = None
    ts: Time = None
    dur: Time = None
    args: Union[Args, None] = None


class ExactEvent(Event, gc=False):
    """The same with ``ts`` as it stands in the file: a number of floating point may not hold all its nanoseconds."""

    ts: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]


@functools.cache
def _decoders(event: type[Event]) -> tuple[Any, Any]:
    return msgspec.json.Decoder(list[event]), msgspec.json.Decoder(event)  # type: ignore[valid-type]


_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_END = re.compile(rb"\}\s*(\])\s*(?=[,}]|$)")
_BETWEEN = re.compile(rb"(?<=\})\s*,?\s*(?=\{)")  # two events, whose comma may be missing
# Longest beginning of a file in which its events must start: thousands of process groups may stand before them.
_LONGEST_HEAD = 64 * 2**20
# Longest that the beginning of the array may be, white space within it included.
_LONGEST_START = 256
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
# Longest single event, for which a buffer is held.
_LONGEST_EVENT = 16 * 2**20
# Ends of the array that are tried in one piece: an event may hold arrays of objects itself.
_MOST_ENDS = 16
# What cannot be read in so much text is taken not to be valid; in less it may go on in the next piece.
_ENOUGH_BYTES = 2**19


class EventStream:
    """Iterate to get the events, a list for each piece.

    Args:
        path: the file.
        event: ``Event`` or ``ExactEvent``.
        piece_bytes: how much is decoded at once.
        progress: told how far the file is read.

    Attributes:
        head: the other fields of the document, as far as they were read.
        problems: what is wrong with the file, in words; complete after iteration.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        event: type[Event] = Event,
        piece_bytes: int = PIECE_BYTES,
        progress: Progress | None = None,
    ) -> None:
        self.path = Path(path)
        self.head: dict[str, Any] = {}
        self.problems: list[str] = []
        self._decode_all, self._decode_one = (decoder.decode for decoder in _decoders(event))
        self._piece_bytes = piece_bytes
        self._progress = progress
        self._bare = False  # the array of events alone, without a document around it
        self._repairs = 0
        self._lost = 0
        self._why = ""

    def __iter__(self) -> Iterator[list[Event]]:
        """The events.

        Raises:
            TraceError: the file cannot be read, is empty, or holds no events.
        """
        source = pieces(self.path, self.problems, self._piece_bytes, self._progress)
        rest, ended = self._skip_head(source), False
        while not ended:
            piece = next(source, b"")
            buffer = bytearray(b"[")  # decoded in place: the files are large, and copies cost as much as decoding
            buffer += rest
            buffer += piece
            if not piece:
                events, rest, ended = self._decode_rest(buffer)
                yield events
                break
            end = _last_boundary(buffer)
            if end:
                events, rest, ended = self._decode(buffer, end)
                yield events
            elif len(buffer) > _LONGEST_EVENT:
                raise TraceError(f"{self.path} is no trace: no event ends within {_LONGEST_EVENT >> 20} MiB")
            else:
                rest = bytes(buffer[1:])
        self._finish(rest, source, ended)

    # -- the document around the events

    def _skip_head(self, source: Iterator[bytes]) -> bytes:
        buffer = bytearray()
        searched = 0
        for piece in source:
            buffer += piece
            start = re.match(rb"\s*(.)?", buffer, re.DOTALL)
            first = start.group(1) if start else None
            if first == b"[":  # the other form of the format: the array alone
                self._bare = True
                return bytes(buffer[start.end() :]) if start else b""
            if first not in (b"{", None):
                break
            for found in _START.finditer(buffer, searched):
                if self._read_head(bytes(buffer[: found.start()])):
                    return bytes(buffer[found.end() :])
            searched = max(0, len(buffer) - _LONGEST_START)
            if len(buffer) > _LONGEST_HEAD:
                break
        if not buffer.strip():
            raise TraceError(f"{self.path} is empty")
        raise TraceError(f"{self.path} is no trace of torch.profiler: it has no traceEvents")

    def _read_head(self, head: bytes) -> bool:
        """Take down the fields before the events; False where this is not what stands before them."""
        try:
            fields = msgspec.json.decode(head + b'"traceEvents":[]}')
        except _DECODE_ERRORS:
            if not head or not _depth_one(head):
                return False
            self.problems.append("what stands before the events is not valid JSON, and is left out")
            return True
        self.head.update({key: value for key, value in fields.items() if key != "traceEvents"})
        return True

    def _finish(self, rest: bytes, source: Iterator[bytes], ended: bool) -> None:
        if ended:
            text = bytearray(rest)
            for piece in source:
                text += piece
                if len(text) > _LONGEST_HEAD:
                    break
            rest = bytes(text)
            tail = _tail(rest)
            if tail is not None:
                self.head.update(tail)
            elif rest.strip():
                self.problems.append("what stands after the events is not valid JSON, and is left out")
            elif not self._bare:
                self.problems.append("the file is cut off after its events: what would follow them is missing")
        elif not any("cut off" in problem for problem in self.problems):
            self.problems.append("the file is cut off: it ends before its events do")
        if self._repairs:
            self.problems.append(f"{self._repairs} events were not valid JSON and were repaired ({self._why})")
        if self._lost:
            self.problems.append(f"{self._lost} events could not be read and are left out ({self._why})")

    # -- events. Each gives what follows what it decoded, and whether the array of events ended there.

    def _decode(self, buffer: bytearray, end: int) -> tuple[list[Event], bytes, bool]:
        """The events of the buffer before ``end``, where the next one begins."""
        comma = buffer.rindex(b",", 0, end)
        try:
            return self._decode_before(buffer, comma), bytes(buffer[end:]), False
        except _DECODE_ERRORS:
            found = self._decode_to_end(buffer)
            return (*found, True) if found is not None else self._one_by_one(bytes(buffer[1:]), cut_off=False)

    def _decode_rest(self, buffer: bytearray) -> tuple[list[Event], bytes, bool]:
        """The last events of the file."""
        found = self._decode_to_end(buffer)
        return (*found, True) if found is not None else self._one_by_one(bytes(buffer[1:]), cut_off=True)

    def _decode_to_end(self, buffer: bytearray) -> tuple[list[Event], bytes] | None:
        """The events up to the end of the array, and what follows it; None where it does not end here."""
        if buffer[1:].lstrip()[:1] == b"]":
            return [], bytes(buffer[1:].lstrip()[1:])
        for number, found in enumerate(_END.finditer(buffer)):
            if number == _MOST_ENDS:
                break
            try:
                return self._decode_before(buffer, found.start(1)), bytes(buffer[found.end(1) :])
            except _DECODE_ERRORS:
                continue
        return None

    def _decode_before(self, buffer: bytearray, place: int) -> list[Event]:
        """The buffer up to ``place``, as an array that ends there."""
        was, buffer[place] = buffer[place], ord("]")
        try:
            events: list[Event] = self._decode_all(memoryview(buffer)[: place + 1])
        finally:
            buffer[place] = was
        return events

    def _one_by_one(self, body: bytes, cut_off: bool) -> tuple[list[Event], bytes, bool]:
        """Events found by their braces, in pieces that are no array of whole events, or hold what is not valid."""
        events: list[Event] = []
        place, hopeless = 0, False
        while True:
            begin, end, ended = _next_object(body, place)
            if ended:
                return events, body[end:], True
            event = self._read_one(body[begin:end]) if 0 <= begin < end else None
            if event is not None:
                events.append(event)
                place = end
                continue
            if begin < 0:  # nothing more begins here
                return events, b"", False
            if end < 0 and not cut_off and len(body) - begin < _ENOUGH_BYTES:
                return events, body[begin:], False  # may go on in the next piece
            after = -1 if hopeless else self._next_whole(body, begin)
            if after < 0:
                hopeless = True  # nor will there be one further on
                if end < 0:  # the event in which the file ends
                    return events, b"" if cut_off else body[begin:], False
                after = end
            self._lost += 1
            place = after

    def _next_whole(self, body: bytes, begin: int) -> int:
        """Where, after an event that cannot be read, the next one begins that can; -1 if nowhere."""
        for found in _BETWEEN.finditer(body, begin + 1):
            start, end, _ = _next_object(body, found.end())
            try:
                if end > 0 and self._decode_one(body[start:end]).ph is not None:
                    return found.end()
            except _DECODE_ERRORS:
                continue
        return -1

    def _read_one(self, text: bytes) -> Event | None:
        text = text.rstrip().removesuffix(b",")
        try:
            event: Event = self._decode_one(text)
        except _DECODE_ERRORS as error:
            mended = self._repaired(text)
            self._repairs += mended is not None
            self._why = self._why or str(error)
            return mended
        return event

    def _repaired(self, part: bytes) -> Event | None:
        """An event that is not valid JSON, or not of the form that it should be, mended; None where it cannot be."""
        try:
            fields = msgspec.json.decode(_mended(part))
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
    """The fields that follow the array of events; None where that is not what this is."""
    try:
        fields = msgspec.json.decode(b"{" + text.strip().removeprefix(b","))
    except _DECODE_ERRORS:
        return None
    return fields if isinstance(fields, dict) else None


_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]"]', re.DOTALL)


def _next_object(body: bytes, place: int) -> tuple[int, int, bool]:
    """Begin and end of the next event, -1 for what is not in ``body``; or the end of the array, and True."""
    depth, begin = 0, -1
    for found in _STRUCTURE.finditer(body, place):
        token = found.group()
        if token in (b"{", b"["):
            if not depth:
                begin = found.start()
            depth += 1
        elif token in (b"}", b"]"):
            if not depth:
                if token == b"]":
                    return -1, found.end(), True
                continue
            depth -= 1
            if not depth:
                return begin, found.end(), False
        elif token == b'"':  # of a text that does not end
            break
    return begin, -1, False


def _last_boundary(buffer: bytearray) -> int:
    """Where the last event of the buffer begins, after a comma that follows another's end; 0 if nowhere."""
    place = len(buffer)
    while (place := buffer.rfind(b"{", 0, place)) > 0:
        gap = buffer[max(0, place - 64) : place].rstrip()
        if gap.endswith(b",") and gap[:-1].rstrip().endswith(b"}"):
            return place
    return 0


def _depth_one(head: bytes) -> bool:
    """Whether a beginning that is no valid JSON leaves open just one brace: ours, of the document."""
    bare = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", head, flags=re.DOTALL)
    return bare.count(b"{") - bare.count(b"}") == 1 and bare.count(b"[") == bare.count(b"]")


# Texts, which are kept; and what is no number that could be used.
_TOKENS = re.compile(
    r'"(?:[^"\\]|\\.)*"|[-+]?\b(?:NaN|nan|Infinity|inf)\b|-?\d[\d.]*[eE][-+]?\d{4,}|-?\d{400,}', re.DOTALL
)
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_DECIMAL_COMMA = re.compile(r"(:\s*-?\d+),(\d+)(?=\s*[,}])")
_CONTROL = re.compile(r"[\x00-\x1f]")


def _mended(part: bytes) -> bytes:
    """Text that is no JSON, as near to it as it can be read."""
    text = _CONTROL.sub(" ", part.decode(errors="replace"))

    def mend(token: re.Match[str]) -> str:
        found = token.group()
        return _BAD_ESCAPE.sub(r"\\\\", found) if found.startswith('"') else "null"

    return _DECIMAL_COMMA.sub(r"\1.\2", _TOKENS.sub(mend, text)).encode()
