"""Ranges of the host that name a part of the program, and in which of them each kernel was launched.

They are the modules of a model (``with_modules=True`` or ``with_stack=True`` of torch's profiler), what a user has
named by ``record_function`` or NVTX, and torch's own, such as ``Optimizer.step#AdamW.step``.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.table import Indices

if TYPE_CHECKING:
    from overlap_callbacks.traces.events import Event
    from overlap_callbacks.traces.times import EventTimes

# Torch's name of a call of a module begins so, and then has the class and its number.
MODULE = "nn.Module: "
# A trace of a long run may have any number of them, and each takes 32 bytes.
_MOST_RANGES = 1_000_000


class RangeColumns(NamedTuple):
    """Ranges in columns; shape (n,) each.

    Attributes:
        start_ns: when each began.
        end_ns: when it ended.
        thread: the number of its thread.
        name: the number of its name.
    """

    start_ns: Indices
    end_ns: Indices
    thread: Indices
    name: Indices


class HostRanges:
    """Ranges as they are read from a file.

    Args:
        times: takes their times.

    Attributes:
        times: their times.
        names: the distinct names; those of modules without the words before their class.
        left_out: number of ranges beyond those that are kept.
        num_taken: number of ranges that were taken away.
    """

    def __init__(self, times: EventTimes) -> None:
        self.names: list[str] = []
        self.left_out = self.num_taken = 0
        self.times = times
        self._name = array("q")
        self._thread = array("q")
        self._number_of: dict[str, int] = {}
        self._threads: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self._name)

    def add(self, name: str, thread: int | str, event: Event) -> None:
        """Keep a range, if its times can be read."""
        if self._has_room() and self.times.add(event):
            self._label(name, thread)

    def add_ns(self, name: str, thread: int | str, start_ns: int, end_ns: int) -> None:
        """Keep a range whose times are exact."""
        if self._has_room() and self.times.add_ns(start_ns, end_ns):
            self._label(name, thread)

    def columns(self) -> RangeColumns:
        """Those that took time."""
        start_ns, end_ns, impossible, _ = self.times.bounds()
        return self._those(start_ns, end_ns, ~impossible)

    def take(self) -> RangeColumns:
        """Those that took time. All are then forgotten."""
        self.num_taken += len(self)
        taken = self._those(*self.times.take())
        self._name, self._thread = array("q"), array("q")
        return taken

    def thread_number(self, thread: int | str | None) -> int:
        """The number of a thread that has ranges; -1 of another one."""
        return self._threads.get(thread, -1)

    def _those(self, start_ns: Indices, end_ns: Indices, possible: npt.NDArray[np.bool_]) -> RangeColumns:
        own = possible & (end_ns > start_ns)
        thread, name = (np.array(numbers, dtype=np.int64) for numbers in (self._thread, self._name))
        return RangeColumns(start_ns[own], end_ns[own], thread[own], name[own])

    def _has_room(self) -> bool:
        self.left_out += len(self) >= _MOST_RANGES
        return len(self) < _MOST_RANGES

    def _label(self, name: str, thread: int | str) -> None:
        number = self._number_of.setdefault(name, len(self._number_of))
        if number == len(self.names):
            self.names.append(safe_text.clean(name.removeprefix(MODULE)))
        self._name.append(number)
        self._thread.append(self._threads.setdefault(thread, len(self._threads)))


def launched_in(ranges: RangeColumns, thread: Indices, launched_ns: Indices, training: int) -> Indices:
    """The name of the range in which each launch was made, -1 for none; shape (n,).

    A thread without a range, such as autograd's, works for the training thread: its launches count for the range that
    this one was in.

    Args:
        ranges: the ranges, those that were open at the launches among them.
        thread: the thread of each launch, as the ranges number them, -1 for another one; shape (n,).
        launched_ns: when each was made, -1 if unknown; shape (n,).
        training: number of the training thread; -1 if it has no ranges.
    """
    found = innermost(ranges, thread, launched_ns)
    if training >= 0:
        without = np.flatnonzero((launched_ns >= 0) & (found < 0) & (thread != training))
        found[without] = innermost(ranges, np.full(len(without), training), launched_ns[without])
    return found


def innermost(ranges: RangeColumns, thread: Indices, time_ns: Indices) -> Indices:
    """The name of the innermost range that was open at a time on a thread, -1 for none; shape (n,).

    Args:
        ranges: the ranges.
        thread: as the ranges number them; shape (n,).
        time_ns: shape (n,).
    """
    found = np.full(len(time_ns), -1, dtype=np.int64)
    for number in distinct_values(ranges.thread).tolist():
        rows = np.flatnonzero(thread == number)
        own = np.flatnonzero(ranges.thread == number)
        if len(rows):
            place = _innermost(ranges.start_ns[own], ranges.end_ns[own], time_ns[rows])
            found[rows] = np.where(place >= 0, ranges.name[own[place]], -1)
    return found


def _innermost(start_ns: Indices, end_ns: Indices, time_ns: Indices) -> Indices:
    """Which of some ranges is the innermost that holds each time: of the open ones the last to begin; -1 for none.

    One thread's ranges nest, but for damaged files. The answer does not depend on ranges that have ended before.
    """
    order = np.lexsort((-end_ns, start_ns))
    start_ns, end_ns = start_ns[order], end_ns[order]
    # The last range before each one that ends later. What lies between ends no later than it.
    before = np.arange(len(order)) - 1
    while True:
        ended = (before >= 0) & (end_ns[before] <= end_ns)
        if not ended.any():
            break
        before[ended] = before[before[ended]]
    found = np.searchsorted(start_ns, time_ns, side="right") - 1
    while True:
        ended = (found >= 0) & (end_ns[found] <= time_ns)
        if not ended.any():
            break
        found[ended] = before[found[ended]]
    return np.where(found >= 0, order[found], -1)
