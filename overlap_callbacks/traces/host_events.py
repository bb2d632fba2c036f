"""Collects the operators of the host, and the ranges of communication libraries that run there."""

from __future__ import annotations

import re
from array import array
from typing import Any

import numpy as np

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.kernels.table import KernelTableBuilder, Kind
from overlap_callbacks.traces.collect import (
    ENQUEUED,
    FOREIGN,
    LAUNCH,
    NOTE,
    OLD_RANGE,
    OPERATOR,
    UNKNOWN_CATEGORY,
    ArgsReader,
    EventCollector,
    Numbers,
    NumbersBy,
    all_hashable,
    launches_kernel,
    short_name,
)
from overlap_callbacks.traces.events import Args, Event
from overlap_callbacks.traces.times import EventTimes

_MAX_OTHER_RANGES = 4096


class HostEvents(EventCollector):
    """The operators of all host threads, and the ranges of communication libraries that run on the host.

    Attributes:
        row_threads: thread of each row, as a number of ``threads``.
        threads: numbers of the threads, which are as they are in the file.
        ranges: ranges of communication libraries.
        range_times: start and duration of each range.
        enqueued: number of collectives of NCCL and its like. Of those the host sees only that it enqueued them.
        launches: number of launches of kernels.
        num_taken: number of operators and ranges that were taken away.
        other_ranges: names of the host's other ranges, some thousands at most.
    """

    def __init__(self, steps: re.Pattern[str] | None = None, *, exact: bool = False) -> None:
        super().__init__(steps, exact=exact)
        self.row_threads = array("i")
        self.threads: Numbers[int | str] = Numbers()
        self.ranges = KernelTableBuilder()
        self.range_times = EventTimes(exact)
        self._all_times.append(self.range_times)
        self.enqueued = self.launches = self.num_taken = 0
        self.other_ranges: set[str] = set()
        self._of_kernel: NumbersBy[str | None] = NumbersBy(launches_kernel)

    @property
    def num_held(self) -> int:
        """Number of operators and ranges that are in memory."""
        return len(self.rows) + len(self.ranges)

    def take(self) -> tuple[Any, Any, Any]:
        """Name and thread of each operator, and the name of each range, shape (n,) each, which are then forgotten."""
        self.num_taken += self.num_held
        taken = self.rows.take()["name"], np.array(self.row_threads), self.ranges.take()["name"]
        self.row_threads = array("i")
        return taken

    def _collect(self, args_of: ArgsReader) -> None:
        notes, operators = self._durations(NOTE), [*self._durations(OPERATOR), *self._durations(OLD_RANGE)]
        is_step = self._is_step
        steps = [event for event in (*notes, *operators) if is_step[event.name]]
        if steps:
            self._note(steps)
            operators = [event for event in operators if not is_step[event.name]]
        self._add_operators([event for event in operators if event.name is not None])
        for event in notes:
            if event.name is not None and not is_step[event.name]:
                self._add_range(event, event.name)
        self.launches += sum([self._of_kernel[event.name] for event in self._durations(LAUNCH)])
        # An event of an unknown category that names a device is of one.
        unknown = self._durations(UNKNOWN_CATEGORY)
        for event, args in zip(unknown, args_of(unknown, Args), strict=True):
            if args is not None and type(args.device) is int:
                self.foreign[event.cat or ""] += 1
        for event in self._durations(FOREIGN):
            self.foreign[event.cat or ""] += 1

    def _add_operators(self, events: list[Event]) -> None:
        events = self.times.extend(events)
        rows, nothing = self.rows, array("q", bytes(8 * len(events)))
        rows.extend(
            kind=[int(Kind.COMPUTE)] * len(events),
            name=map(self._name_of.__getitem__, [event.name for event in events]),
            correlation=array("Q", nothing.tobytes()),
            shape=array("q", [rows.shapes.setdefault("", len(rows.shapes))]) * len(events),
            collective=array("q", [rows.collectives[""]]) * len(events),
            lane=nothing,
        )
        self.row_threads.extend(map(self.threads.__getitem__, all_hashable([event.tid for event in events])))

    def _add_range(self, event: Event, name: str) -> None:
        if name.startswith(ENQUEUED):
            self.enqueued += 1
        elif name_rules.is_communication(name):
            if self.range_times.add(event):
                self.ranges.label(Kind.COMMUNICATION, short_name(name))
        elif len(self.other_ranges) < _MAX_OTHER_RANGES:
            self.other_ranges.add(short_name(name))
