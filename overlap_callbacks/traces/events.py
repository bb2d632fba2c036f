"""Events of a trace file as decoded, and their times in columns of whole nanoseconds.

Most events are not needed, nor the arguments of most others. So arguments stay text, decoded on demand
(``stream.EventStream.args_of``).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Union

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.kernels.table import Indices
from overlap_callbacks.traces import columns
from overlap_callbacks.traces.columns import Array, Column

NO_ARGS = msgspec.Raw(b"null")

Time = Union[int, float, str, None]


class Event(msgspec.Struct, gc=False):
    """One event, its times in microseconds."""

    ph: Union[str, None] = None
    cat: Union[str, None] = None
    name: Union[str, None] = None
    pid: Any = None
    tid: Any = None
    ts: Time = None
    dur: Time = None
    args: msgspec.Raw = NO_ARGS


class ExactEvent(Event, gc=False):
    """One event with ``ts`` as text, for times where floats would lose nanoseconds."""

    ts: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]


class LaunchArgs(msgspec.Struct, gc=False):
    """``args`` of a call that launches a kernel."""

    correlation: Any = None


class RangeArgs(msgspec.Struct, gc=False):
    """``args`` of torch's range of a collective, as text, of which few differ."""

    input_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    input_type: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")


class Args(msgspec.Struct, gc=False):
    """``args`` of other events, of any type that the file's version has."""

    device: Any = None
    correlation: Any = None
    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    group_size: Any = msgspec.field(default=None, name="Group size")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    sequence: Any = msgspec.field(default=None, name="Seq")
    in_splits: Any = msgspec.field(default=None, name="In split size")
    out_splits: Any = msgspec.field(default=None, name="Out split size")
    module: Any = msgspec.field(default=None, name="module_fqn")
    rank: Any = None


_Triple = Union[tuple[int, int, int], None]


class KernelArgs(Args, gc=False):
    """``args`` of a kernel or copy with current types; the launch's can be a key of a dict."""

    grid: _Triple = None
    block: _Triple = None
    registers: Union[int, None] = msgspec.field(default=None, name="registers per thread")
    shared_memory: Union[int, None] = msgspec.field(default=None, name="shared memory")
    blocks_per_sm: Union[int, float, None] = msgspec.field(default=None, name="blocks per SM")
    bytes: Any = None


class OddKernelArgs(Args, gc=False):
    """The same with other types: as text."""

    grid: msgspec.Raw = msgspec.Raw()
    block: msgspec.Raw = msgspec.Raw()
    registers: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="registers per thread")
    shared_memory: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="shared memory")
    blocks_per_sm: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="blocks per SM")
    bytes: Any = None


# -- columns


# No clock exceeds these times, and no event this duration; differences of larger ones would overflow.
MIN_TIME_NS, MAX_TIME_NS, MAX_DURATION_NS = -(2**61), 2**62, 2**61
# From here on, floating-point microseconds are too coarse for nanoseconds.
_MAX_EXACT_US = 2**43


class EventColumns:
    """Events of one kind: start and end in whole nanoseconds, and other whole numbers.

    Events without valid times are left out by default. Floating-point microseconds are exact to the nanosecond only up
    to 2**43 us, so files with later times are reread with times as text (``exact``).

    Args:
        exact: times come as text.
        keep_untimed: keep events with impossible times, with -1 as start and end.
        numbers: type codes of the other columns, by name.

    Attributes:
        number: number of events whose times can be read.
        keeps_untimed: whether those without a valid time are kept.
        untimed: number of events without a valid time or with a negative duration; complete once the columns are
            finished.
    """

    def __init__(self, exact: bool, *, keep_untimed: bool = False, **numbers: str) -> None:
        self.number = self.untimed = 0
        self._exact, self.keeps_untimed = exact, keep_untimed
        self._start: array[Any] = array("q" if exact else "d")
        self._duration: array[Any] = array("q" if exact else "d")
        self._numbers: dict[str, array[Any]] = {name: array(code) for name, code in numbers.items()}
        self._columns = {"start": Column(), "end": Column(), **{name: Column(code) for name, code in numbers.items()}}
        self._lost_nanoseconds = False

    def __len__(self) -> int:
        return self.number

    def keep(self, events: list[Event]) -> list[Event]:
        """Add events by their times. Returns those kept, whose other numbers ``label`` takes next."""
        self._make_room()
        if self._exact:
            return self._one_by_one(events)
        try:
            times: list[list[Any]] = [[event.ts for event in events], [event.dur for event in events]]
            start, duration = (array("d", of_events) for of_events in times)
        except (TypeError, OverflowError):
            return self._one_by_one(events)
        self._start.extend(start)
        self._duration.extend(duration)
        self.number += len(events)
        return events

    def keep_ns(self, *spans: tuple[Any, Any]) -> list[bool]:
        """Add events by exact start and end. Returns whether each is kept; ``label`` takes their other numbers."""
        self._make_room()  # once: events kept in one call are labelled before any is written
        timed = []
        for span in spans:
            timed.append(all([type(time) is int and MIN_TIME_NS < time < MAX_TIME_NS for time in span]))
            if timed[-1]:
                self._add(span[0], span[1] - span[0])
            elif self.keeps_untimed:
                self._add_untimed()
        if self.keeps_untimed:
            return [True] * len(timed)
        self.untimed += timed.count(False)
        return timed

    def add(self, start: Any, end: Any, **numbers: int) -> None:
        """Add one event by exact start and end, if valid, and its other numbers."""
        if all(self.keep_ns((start, end))):
            self.label(**{name: (number,) for name, number in numbers.items()})

    def label(self, **numbers: Iterable[int]) -> None:
        """Add the other numbers of the last added events."""
        for name, values in numbers.items():
            self._numbers[name].extend(values)

    @property
    def inexact(self) -> bool:
        """Whether nanoseconds were lost, so the file must be reread with times as text."""
        self._write()
        return self._lost_nanoseconds

    def finished(self) -> dict[str, Array]:
        """The columns by name; call last."""
        self._write()
        return {name: column.finished() for name, column in self._columns.items()}

    def _one_by_one(self, events: list[Event]) -> list[Event]:
        kept = []
        for event in events:
            start, duration = nanoseconds(event.ts), nanoseconds(event.dur)
            if start is not None and duration is not None:
                self._add(start if self._exact else start / 1000, duration if self._exact else duration / 1000)
            elif self.keeps_untimed:
                self._add_untimed()
            else:
                self.untimed += 1
                continue
            kept.append(event)
        return kept

    def _add(self, start: float, duration: float) -> None:
        self._start.append(start)
        self._duration.append(duration)
        self.number += 1

    def _add_untimed(self) -> None:
        """Add an event that keeps its place in the columns, but does not count as content of the file."""
        self._start.append(0)
        self._duration.append(MAX_DURATION_NS)

    def _make_room(self) -> None:
        if len(self._start) >= columns.AT_ONCE:
            self._write()

    def _write(self) -> None:
        """Move the events held in memory to the columns."""
        start, end, untimed = self._bounds()
        self.untimed += int(untimed.sum())
        values = {"start": start, "end": end}
        if self.keeps_untimed:
            start[untimed] = end[untimed] = -1
            untimed = np.zeros(len(start), dtype=bool)
        for name, held in self._numbers.items():
            values[name] = np.array(held)
            self._numbers[name] = array(held.typecode)
        for name, column in values.items():
            self._columns[name].append(column[~untimed] if untimed.any() else column)
        self._start, self._duration = array(self._start.typecode), array(self._start.typecode)

    def _bounds(self) -> tuple[Indices, Indices, npt.NDArray[np.bool_]]:
        """Start and end in nanoseconds of the events in memory, and whether they are impossible."""
        if self._exact:
            start, duration = (np.array(times, dtype=np.int64) for times in (self._start, self._duration))
            untimed = np.abs(duration) >= MAX_DURATION_NS
        else:
            microseconds = [np.array(times, dtype=np.float64) for times in (self._start, self._duration)]
            start_us, duration_us = microseconds
            lost = (np.abs(start_us) >= _MAX_EXACT_US) & (start_us != np.floor(start_us))
            self._lost_nanoseconds |= bool(lost.any())
            # (NaN fails every comparison.)
            possible = (start_us > MIN_TIME_NS / 1000) & (start_us < MAX_TIME_NS / 1000)
            untimed = ~(possible & (np.abs(duration_us) < MAX_DURATION_NS / 1000))
            start, duration = (_from_microseconds(np.where(untimed, 0.0, times)) for times in microseconds)
        return start, start + duration, untimed | (duration < 0)


def lose_nanoseconds(events: Sequence[Event]) -> bool:
    """Whether the start of any event is too late for nanoseconds in a floating-point number of microseconds."""
    starts: list[Any] = [event.ts for event in events]
    return any([type(time) is float and abs(time) >= _MAX_EXACT_US and time % 1 != 0 for time in starts])


def _from_microseconds(times: npt.NDArray[np.float64]) -> Indices:
    whole = np.floor(times)
    return whole.astype(np.int64) * 1000 + np.rint((times - whole) * 1000).astype(np.int64)


def nanoseconds(time: Any) -> int | None:
    """Microseconds, as a number or text, in whole nanoseconds; None if invalid."""
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
