"""Times of the events of a trace file, which are microseconds in many forms, as whole nanoseconds."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.kernels.table import Indices
from overlap_callbacks.traces.events import Event

# Times outside these bounds are of no clock, nor are durations beyond the maximum; their differences would overflow.
MIN_TIME_NS, MAX_TIME_NS, MAX_DURATION_NS = -(2**61), 2**62, 2**61
# From here on, neighbouring floating-point numbers of microseconds are too far apart to tell nanoseconds.
_MAX_EXACT_US = 2**43

_Events = TypeVar("_Events", bound=Sequence[Event])


class EventTimes:
    """Starts and durations as they are in the file, converted to whole nanoseconds at the end.

    A floating-point number holds microseconds precisely enough for nanoseconds only up to 2**43 us. Of files with
    greater times, the numbers are taken as text.

    Args:
        exact: the numbers are taken as text.

    Attributes:
        unread: number of events whose times cannot be read.
        taken_impossible, taken_negative: of the events that were taken away, how many had times that no clock shows,
            and negative durations.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._start: array[Any] = array("q" if exact else "d")
        self._duration: array[Any] = array("q" if exact else "d")
        self._lost_nanoseconds = False
        self.unread = self.taken_impossible = self.taken_negative = 0

    def take(self) -> tuple[Indices, Indices, npt.NDArray[np.bool_]]:
        """All times in whole nanoseconds, which are then forgotten.

        Returns:
            Start and end of each event, and whether they are possible; shape (n,) each.
        """
        start, end, impossible, negative = self.bounds()
        self.taken_impossible += int(impossible.sum())
        self.taken_negative += negative
        self._lost_nanoseconds = self.inexact
        self._start, self._duration = array(self._start.typecode), array(self._start.typecode)
        return start, end, ~impossible

    def extend(self, events: list[Event]) -> list[Event]:
        """Keep the times of events. Returns those whose times can be read; the others are counted."""
        if self._exact:
            return [event for event in events if self.add(event)]
        try:
            start, duration = _floats([event.ts for event in events]), _floats([event.dur for event in events])
        except (TypeError, OverflowError):
            return [event for event in events if self.add(event)]
        self._start.extend(start)
        self._duration.extend(duration)
        return events

    def add(self, event: Event) -> bool:
        """Keep an event's times. If it has none that can be read, count it and return False."""
        start, duration = nanoseconds(event.ts), nanoseconds(event.dur)
        if start is None or duration is None:
            self.unread += 1
            return False
        self._start.append(start if self._exact else start / 1000)
        self._duration.append(duration if self._exact else duration / 1000)
        return True

    def add_ns(self, start_ns: Any, end_ns: Any) -> bool:
        """Keep a start and an end, for times that are exact. If they are no times, count them and return False."""
        for time in (start_ns, end_ns):
            if type(time) is not int or not MIN_TIME_NS < time < MAX_TIME_NS:
                self.unread += 1
                return False
        self._start.append(start_ns)
        self._duration.append(end_ns - start_ns)
        return True

    def __len__(self) -> int:
        return len(self._start)

    @property
    def inexact(self) -> bool:
        """Whether nanoseconds were lost, so that the file must be read again as text."""
        if self._lost_nanoseconds:
            return True
        start = np.frombuffer(self._start, dtype=np.float64) if not self._exact else np.empty(0)
        return bool(((np.abs(start) >= _MAX_EXACT_US) & (start != np.floor(start))).any())

    @property
    def num_untimed(self) -> int:
        """Number of events whose times cannot be read, or are none that a clock shows."""
        return self.unread + self.taken_impossible + int(self.bounds()[2].sum())

    def bounds(self) -> tuple[Indices, Indices, npt.NDArray[np.bool_], int]:
        """All times in whole nanoseconds.

        Returns:
            Start and end of each event, shape (n,) each; which events have impossible times, shape (n,); and how many
            durations were negative.
        """
        if self._exact:
            start, duration = (np.array(times, dtype=np.int64) for times in (self._start, self._duration))
            impossible = np.abs(duration) >= MAX_DURATION_NS
        else:
            microseconds = [np.array(times, dtype=np.float64) for times in (self._start, self._duration)]
            start_us, duration_us = microseconds
            # (NaN fails every comparison.)
            possible = (start_us > MIN_TIME_NS / 1000) & (start_us < MAX_TIME_NS / 1000)
            impossible = ~(possible & (np.abs(duration_us) < MAX_DURATION_NS / 1000))
            start, duration = (_from_microseconds(np.where(impossible, 0.0, times)) for times in microseconds)
        negative = duration < 0
        return start, start + np.where(negative, 0, duration), impossible, int(negative.sum())


def lose_nanoseconds(events: Sequence[Event]) -> bool:
    """Whether some events' starts are too great for floating-point numbers to tell their nanoseconds."""
    return any([type(time) is float and abs(time) >= _MAX_EXACT_US and time % 1 != 0 for time in _starts(events)])


def _starts(events: Sequence[Event]) -> list[Any]:
    return [event.ts for event in events]


def _floats(times: list[Any]) -> array[float]:
    return array("d", times)


def _from_microseconds(times: npt.NDArray[np.float64]) -> Indices:
    whole = np.floor(times)
    return whole.astype(np.int64) * 1000 + np.rint((times - whole) * 1000).astype(np.int64)


def nanoseconds(time: Any) -> int | None:
    """Microseconds, as a number or as text, exactly converted to whole nanoseconds; None if that is impossible."""
    if type(time) is float and abs(time) < _MAX_EXACT_US:  # as ``_from_microseconds``
        whole = math.floor(time)
        return whole * 1000 + round((time - whole) * 1000)
    if isinstance(time, bool) or time is None:
        return None
    if isinstance(time, msgspec.Raw):
        time = bytes(time).decode(errors="replace")
    try:
        value = time * 1000 if isinstance(time, int) else round(Decimal(str(time).strip('" ')) * 1000)
    except (ValueError, InvalidOperation, OverflowError):
        return None
    return value if MIN_TIME_NS < value < MAX_TIME_NS else None
