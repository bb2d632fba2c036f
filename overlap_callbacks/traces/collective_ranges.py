"""Torch's ranges around the launches of collectives: what is known of them, and in which of them a call was made."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from overlap_callbacks.analysis.kernels.table import Indices
from overlap_callbacks.traces.collectives import CollectiveInfo
from overlap_callbacks.traces.times import EventTimes


class RangeDetail(NamedTuple):
    """What some ranges have in common.

    Attributes:
        name: of the range, e.g. ``nccl:all_reduce``.
        info: what its arguments tell about the collective; None if they do not describe it.
    """

    name: str
    info: CollectiveInfo | None = None


class CollectiveRanges:
    """Ranges as they are read from a file.

    Args:
        times: takes their times.

    Attributes:
        times: their times.
        num_taken: number of ranges that were taken away.
    """

    def __init__(self, times: EventTimes) -> None:
        self.times = times
        self._thread, self._detail, self._num_bytes = array("q"), array("q"), array("q")
        self._threads: dict[str, int] = {}
        self._details: dict[RangeDetail, int] = {}
        self.num_taken = 0

    def __len__(self) -> int:
        return len(self._thread)

    def add(self, threads: Iterable[Any], details: Iterable[RangeDetail], num_bytes: Iterable[int]) -> None:
        """Keep ranges whose times were kept.

        Args:
            threads: of each.
            details: what each has in common with others.
            num_bytes: size of the collective of each; ``UNKNOWN`` if unknown.
        """
        of_thread, of_detail = self._threads, self._details
        # A thread's number and its text are one thread.
        self._thread.extend([of_thread.setdefault(str(thread), len(of_thread)) for thread in threads])
        self._detail.extend([of_detail.setdefault(detail, len(of_detail)) for detail in details])
        self._num_bytes.extend(num_bytes)

    def thread_number(self, thread: Any) -> int:
        """The number of a thread that has ranges; -1 of another one."""
        return self._threads.get(str(thread), -1)

    @property
    def details(self) -> tuple[RangeDetail, ...]:
        """What some ranges have in common."""
        return tuple(self._details)

    @cached_property
    def detail(self) -> Indices:
        """Index into ``details`` of each range; shape (n,)."""
        return np.array(self._detail, dtype=np.int64)

    @cached_property
    def num_bytes(self) -> Indices:
        """Size of the collective of each range; ``UNKNOWN`` if unknown; shape (n,)."""
        return np.array(self._num_bytes, dtype=np.int64)

    def around(self, launched_ns: Indices, thread: Indices) -> Indices:
        """In which range each launch was made: the last one to begin before it, if it had not ended; -1 for none.

        Args:
            launched_ns: when each launch was made, -1 if unknown; shape (n,).
            thread: by which thread, as numbered by ``thread_number``; shape (n,).
        """
        start_ns, end_ns, impossible, _ = self.times.bounds()
        of_thread = np.where(impossible, -1, np.array(self._thread, dtype=np.int64))
        return last_begun(start_ns, end_ns, of_thread, launched_ns, thread)

    def take(self) -> dict[str, Indices]:
        """Start, end, thread, detail and size of each range by the columns of a file; they are then forgotten."""
        start_ns, end_ns, possible = self.times.take()
        numbers = {"thread": self._thread, "detail": self._detail, "num_bytes": self._num_bytes}
        columns = {name: np.array(column, dtype=np.int64)[possible] for name, column in numbers.items()}
        self.num_taken += len(self)
        self._thread, self._detail, self._num_bytes = array("q"), array("q"), array("q")
        return {"start": start_ns[possible], "end": end_ns[possible], **columns}


def last_begun(
    start_ns: Indices, end_ns: Indices, of_thread: Indices, launched_ns: Indices, thread: Indices
) -> Indices:
    """In which range each launch was made: the last one of its thread to begin before it, if it had not ended.

    Args:
        start_ns: when each range began; shape (ranges,).
        end_ns: when it ended; shape (ranges,).
        of_thread: the thread of each range, -1 for a range that does not count; shape (ranges,).
        launched_ns: when each launch was made, -1 if unknown; shape (n,).
        thread: by which thread; shape (n,).

    Returns:
        The place of the range, -1 for none; shape (n,).
    """
    order = np.lexsort((end_ns, start_ns, of_thread))
    calls = np.argsort(thread, kind="stable")
    numbers = np.arange(int(of_thread.max(initial=-1)) + 2)
    first_range, first_call = np.searchsorted(of_thread[order], numbers), np.searchsorted(thread[calls], numbers)
    found = np.full(len(launched_ns), -1, dtype=np.int64)
    for number in np.flatnonzero((np.diff(first_range) > 0) & (np.diff(first_call) > 0)).tolist():
        own = order[first_range[number] : first_range[number + 1]]
        mine = calls[first_call[number] : first_call[number + 1]]
        times_ns = launched_ns[mine]
        place = np.searchsorted(start_ns[own], times_ns, side="right") - 1
        last = own[np.maximum(place, 0)]
        found[mine] = np.where((place >= 0) & (times_ns >= 0) & (times_ns < end_ns[last]), last, -1)
    return found
