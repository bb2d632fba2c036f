"""Ranges of the host that name a part of the program, and in which of them each kernel was launched.

They are the modules of a model (``with_modules=True`` or ``with_stack=True`` of torch's profiler), what a user has
named by ``record_function`` or NVTX, and torch's own, such as ``Optimizer.step#AdamW.step``.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.kernels.table import Indices

if TYPE_CHECKING:
    from overlap_callbacks.traces.events import Event
    from overlap_callbacks.traces.times import EventTimes

# Torch's name of a call of a module begins so, and then has the class and its number.
MODULE = "nn.Module: "
# A trace of a long run may have any number of them, and each takes 32 bytes.
_MOST_RANGES = 1_000_000


class HostRanges:
    """Ranges as they are read from a file.

    Args:
        times: takes their times.

    Attributes:
        times: their times.
        names: the distinct names; those of modules without the words before their class.
        left_out: number of ranges beyond those that are kept.
    """

    def __init__(self, times: EventTimes) -> None:
        self.names: list[str] = []
        self.left_out = 0
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

    def forget(self) -> None:
        """Forget all ranges."""
        self.times.take()
        self._name, self._thread = array("q"), array("q")

    def thread_number(self, thread: int | str | None) -> int:
        """The number of a thread that has ranges; -1 of another one."""
        return self._threads.get(thread, -1)

    def innermost(self, thread: Indices, time_ns: Indices) -> Indices:
        """The name of the innermost range that was open at a time on a thread, as an index into ``names``; -1 for none.

        Args:
            thread: as numbered by ``thread_number``; shape (n,).
            time_ns: shape (n,).
        """
        start_ns, end_ns, impossible, _ = self.times.bounds()
        of_range, name = np.array(self._thread, dtype=np.int64), np.array(self._name, dtype=np.int64)
        found = np.full(len(time_ns), -1, dtype=np.int64)
        for number in range(len(self._threads)):
            rows = np.flatnonzero(thread == number)
            own = np.flatnonzero((of_range == number) & ~impossible & (end_ns > start_ns))
            if len(rows) and len(own):
                place = _innermost(start_ns[own], end_ns[own], time_ns[rows])
                found[rows] = np.where(place >= 0, name[own[place]], -1)
        return found

    def _has_room(self) -> bool:
        self.left_out += len(self) >= _MOST_RANGES
        return len(self) < _MOST_RANGES

    def _label(self, name: str, thread: int | str) -> None:
        number = self._number_of.setdefault(name, len(self._number_of))
        if number == len(self.names):
            self.names.append(safe_text.clean(name.removeprefix(MODULE)))
        self._name.append(number)
        self._thread.append(self._threads.setdefault(thread, len(self._threads)))


def _innermost(start_ns: Indices, end_ns: Indices, time_ns: Indices) -> Indices:
    """Which of some nested ranges is the innermost that holds each time; -1 for none. One thread's ranges nest.

    Ranges of one depth follow one another. So the one that holds a time is found by search, one depth after another.
    """
    depth = _depths(start_ns, end_ns)
    found = np.full(len(time_ns), -1, dtype=np.int64)
    for level in range(int(depth.max()) + 1):
        rows = np.flatnonzero(depth == level)
        rows = rows[np.argsort(start_ns[rows], kind="stable")]
        last = np.searchsorted(start_ns[rows], time_ns, side="right") - 1
        holds: npt.NDArray[np.bool_] = (last >= 0) & (time_ns < end_ns[rows[last]])
        found[holds] = rows[last[holds]]
    return found


def _depths(start_ns: Indices, end_ns: Indices) -> Indices:
    """How many ranges each one lies within."""
    count = len(start_ns)
    ends = np.zeros(2 * count, dtype=bool)
    ends[count:] = True
    times = np.concatenate((start_ns, end_ns))
    # At one time, ends come before starts, and the longest of those that start comes first.
    longest = np.concatenate((-(end_ns - start_ns), np.zeros(count, dtype=np.int64)))
    order = np.lexsort((longest, ~ends, times))
    open_now = np.cumsum(np.where(ends[order], -1, 1))
    depth = np.empty(2 * count, dtype=np.int64)
    depth[order] = open_now
    return depth[:count] - 1
