"""A sweep measures settings in balanced order, and writes each result to disk before it measures the next.

The results file has one JSON object per line: first what is measured, then the outcome of each point. A crash loses
only the line being written.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import msgspec

from overlap_callbacks.experiments.supervisor import Limits

# Reserved from the time for all points: ending the last one and making the page.
_CLOSING_S = 20.0
# Maximum reasons, and settings named per reason; the table has all.
_MAX_REASONS, _MAX_NAMED = 5, 3

_Start = TypeVar("_Start")
_Line = TypeVar("_Line")


class BusyError(ValueError):
    """Another process is writing there."""


class ResultsError(ValueError):
    """Results cannot be read or continued; the message says why."""


class CannotGoOnError(Exception):
    """An experiment cannot start or continue; the message says why, and what to do."""


class Point(NamedTuple):
    """The unit of measurement: a setting, hashable and of the sweep's own type, and its repeat, from 0."""

    setting: Any
    repeat: int = 0


@dataclass(frozen=True)
class Progress:
    """The progress of a sweep.

    Attributes:
        num_done: finished points, including those of an earlier start.
        num_planned: points in total, without those of settings that failed.
        current: name of the current setting; empty between two.
        left_s: expected time for the remaining points; None if not known.
        ended: outcome of the point that has just ended; empty if none has.
    """

    num_done: int
    num_planned: int
    current: str = ""
    left_s: float | None = None
    ended: str = ""


@dataclass
class Sweep(ABC, Generic[_Start, _Line]):
    """The settings of a sweep, and the results so far.

    Attributes:
        folder: of the results.
        start: the first line: what is measured, and where.
        lines: the other lines, in the order written.
        broken_lines: lines that could not be read: a crash cuts the last one off.
        retried: failures in this many first lines are ignored.
    """

    # Set by subclasses: the ``overlap`` command that measures, its file, and the file's line types.
    COMMAND: ClassVar[str]
    FILE_NAME: ClassVar[str]
    SCHEMA: ClassVar[int]
    START: ClassVar[Any]
    LINE: ClassVar[Any]

    folder: Path
    start: _Start
    lines: list[_Line] = field(default_factory=list)
    broken_lines: int = 0
    retried: int = 0

    @property
    @abstractmethod
    def settings(self) -> Sequence[Any]:
        """The settings, in the order of the first round."""

    @property
    def repeats(self) -> int:
        """How often each setting is measured."""
        return 1

    @abstractmethod
    def point_of(self, line: _Line) -> Point | None:
        """The point of a line; None for other lines."""

    @abstractmethod
    def failure_of(self, line: _Line) -> str:
        """Why a point failed; empty if it did not."""

    @abstractmethod
    def name(self, setting: Any) -> str:
        """Readable name of a setting."""

    def outcome(self, line: _Line) -> str:
        """Readable outcome of a point; empty if not worth a line."""
        return ""

    def expected_s(self, setting: Any) -> float | None:
        """Expected time of a point; None if not known."""
        return None

    @property
    def left(self) -> list[Point]:
        """The remaining points, in balanced order: A B C, C B A, and so on.

        Drift that is linear in time then cancels over each pair of rounds. Failed settings are skipped.
        """
        done, failed = set(), set()
        for place, line in enumerate(self.lines):
            point = self.point_of(line)
            if point is not None and not self.failure_of(line):
                done.add(point)
            elif point is not None and place >= self.retried:
                failed.add(point.setting)
        forth = self.settings
        return [
            point
            for repeat in range(self.repeats)
            for setting in (forth[::-1] if repeat % 2 else forth)
            if (point := Point(setting, repeat)) not in done and setting not in failed
        ]

    @classmethod
    def read(cls, path: Path, **options: Any) -> Self:
        """Read results from their folder, or from the file in it; ``options`` are further arguments of the class.

        Raises:
            ResultsError: the file cannot be read, has no such results, or is of a later version.
        """
        file = path / cls.FILE_NAME if path.is_dir() else path
        try:
            content = file.read_bytes()
        except OSError as error:
            why, command = error.strerror, cls.COMMAND
            raise ResultsError(
                f"{file} cannot be read: {why}; give the folder of an earlier overlap {command}"
            ) from None
        decode = msgspec.json.Decoder(cls.START | cls.LINE).decode
        start: Any = None
        lines: list[Any] = []
        broken = 0
        for line in filter(bytes.strip, content.split(b"\n")):
            try:
                _refuse_later(file, line, cls.SCHEMA)
                found = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                broken += 1
                continue
            if not isinstance(found, cls.START):
                lines.append(found)
            elif start is None:
                start = found
        if start is None:
            raise ResultsError(f"{file} holds no results of overlap {cls.COMMAND}: its first line is missing")
        return cls(file.parent, start, lines, broken, **options)

    def open(self) -> LinesFile:
        """The file to append lines to; writes the first line if it is new. Raises like ``LinesFile``."""
        file = LinesFile(self.folder / self.FILE_NAME, self.COMMAND)
        if file.is_new:
            file.write(self.start)
        return file


def chosen(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the user chose, without None and empty values; lists without duplicates."""
    lists = (tuple, list, range)
    found = {name: tuple(dict.fromkeys(one)) if isinstance(one, lists) else one for name, one in asked.items()}
    return {name: one for name, one in found.items() if one is not None and one != ()}


def failures_in_words(failed: Sequence[tuple[str, str]]) -> list[str]:
    """Failed settings, given as name and reason; one sentence per reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in failed:
        by_reason.setdefault(reason, []).append(name)
    listed = [
        f"Failed: {'; '.join(names[:_MAX_NAMED])}"
        + (f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else "")
        + f": {reason}"
        for reason, names in list(by_reason.items())[:_MAX_REASONS]
    ]
    if len(by_reason) > _MAX_REASONS:
        listed.append("More failed, for other reasons; the table has all.")
    return listed


class LinesFile:
    """Appends lines to a file of ``overlap COMMAND``. Only one process can write at a time.

    A line that a crash cut off stays on a line of its own: readers skip it.

    Attributes:
        is_new: whether the file was empty.

    Raises:
        BusyError: another process is writing there.
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
        self.is_new = not self._file.seek(0, os.SEEK_END)
        if not self.is_new:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def write(self, line: Any) -> None:
        """Append a line: anything that msgspec encodes. It is on disk when this returns."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Allow other processes to write. Safe to call twice."""
        self._file.close()


class _Version(msgspec.Struct):
    schema: int = 0


def _refuse_later(file: Path, line: bytes, schema: int) -> None:
    """Raise for a later version, even if this version does not know the form of its lines."""
    found = msgspec.json.decode(line, type=_Version).schema
    if found > schema:
        raise ResultsError(f"{file} has schema version {found}, this version reads up to {schema}: upgrade to read it")


def run(
    sweep: Sweep[Any, _Line],
    measure: Callable[[Point, Limits, ExitStack], _Line | None],
    file: LinesFile | None,
    *,
    timeout_s: float = math.inf,
    total_s: float = math.inf,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> bool:
    """Measure what is left.

    Args:
        sweep: gets each line.
        measure: measures a point; None if the time for all ran out first, or a stop was requested. What it puts on the
            stack is undone once the line is on disk.
        file: gets each line too; None on ranks that do not write.
        timeout_s: maximum time of a point.
        total_s: maximum time of all; infinite for no limit.
        on_progress: called on every change.

    Returns:
        Whether everything was measured.

    Raises:
        OSError: results cannot be written.
        CannotGoOnError: the experiment cannot continue.
        KeyboardInterrupt: Ctrl-C. Results so far are kept.
    """
    deadline_s = time.monotonic() + total_s - _CLOSING_S
    while left := sweep.left:
        point, left_s = left[0], deadline_s - time.monotonic()
        expected_s = sweep.expected_s(point.setting)
        # The first point shows how long others take, so measure it whatever the time.
        if expected_s is not None and expected_s > left_s:
            return False
        on_progress(_progress(sweep, left, current=sweep.name(point.setting)))
        try:
            with ExitStack() as stack:
                line = measure(point, Limits(timeout_s, max(1.0, left_s)), stack)
                if line is None:
                    return False
                if file is not None:
                    file.write(line)
                sweep.lines.append(line)
        except CannotGoOnError as error:
            raise CannotGoOnError(f"{error}. What was measured is in {sweep.folder}") from None
        on_progress(_progress(sweep, sweep.left, ended=sweep.outcome(line)))
    return True


def _progress(sweep: Sweep[Any, _Line], left: Sequence[Point], *, current: str = "", ended: str = "") -> Progress:
    done = {point for line in sweep.lines if (point := sweep.point_of(line)) is not None} - set(left)
    expected = [sweep.expected_s(point.setting) for point in left]
    known = [seconds for seconds in expected if seconds is not None]
    left_s = sum(known) if len(known) == len(expected) else None
    return Progress(len(done), len(done) + len(left), current, left_s, ended)
