"""Marks of every step, windows included: when it begins, and when each of its parts does.

The training thread leaves marks and reads none. On a host a mark is a time; on a device it is an event of the compute
stream, at most six in a step, which is read once the device has passed it.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.step_vectors import (
    AFTER_BACKWARD,
    AS_AT_FIRST,
    BACKWARD,
    FIRST_STEP,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PAUSED,
    TOGETHER,
    WAITING,
    StepVectors,
    parts_of,
)
from overlap_callbacks.gate.interruptions import is_from_handler
from overlap_callbacks.instruments import clocks, device

# Steps kept.
SIZE = 4096
# Marks kept until they are read, twice: a mark is two items.
_MAX_ITEMS = 2 * 65_536
# Steps that were read at different times are kept together up to this many.
_STEPS_TOGETHER = 256
# Events of a step on a device: its beginning, the optimizer's, and four others.
MAX_EVENTS = 6


# Called with what begins, and its host time; True if it cannot be marked, because a graph is being captured.
Leave = Callable[[tuple[int, int]], bool | None]


class Marker(Protocol):
    """What leaves marks itself, without a call of the ring: in a job whose own work fills the caches each costs."""

    leave: Leave


class StepRing:
    """The parts of the last 4,096 steps. The training thread marks, in well below a microsecond; any thread reads.

    ``failed`` gets the error of a mark that a device refuses: it does not reach the job.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._items: deque[Any] = deque(maxlen=_MAX_ITEMS)  # in turn what begins, and when
        self._spoilt: deque[int] = deque(maxlen=SIZE)
        self._device: _DeviceMarks | None = None
        self._paused_in = OTHER
        self._markers: weakref.WeakSet[Marker] = weakref.WeakSet()
        self.leave: Leave = self._leave_first
        # Of the thread that reads:
        self._lock = threading.Lock()
        self._unread: list[Any] = []  # from the beginning of a step that is not complete
        self._read: deque[StepVectors] = deque()
        self._num_read = 0

    # -- on the training thread

    def begin(self, step: int) -> None:
        """A step begins, and the one before it ends."""
        self.leave((FIRST_STEP + step, time.perf_counter_ns()))

    def enter(self, part: int) -> None:
        """A part of the open step begins, and the one before it ends; see ``analysis.step_vectors``."""
        self.leave((part, time.perf_counter_ns()))

    def lend(self, marker: Marker) -> None:
        """Keep its ``leave`` the ring's own."""
        self._markers.add(marker)
        marker.leave = self.leave

    def _leave_by(self, leave: Leave) -> None:
        self.leave = leave
        for marker in self._markers:
            marker.leave = leave

    def pause(self) -> None:
        """Something that is not training begins."""
        try:
            part = self._items[-2]
        except IndexError:  # they were read just now
            part = self._unread[-2] if self._unread else OTHER
        if part != PAUSED:
            self._paused_in = AS_AT_FIRST if part >= FIRST_STEP else part
        self.enter(PAUSED)

    def resume(self) -> None:
        """Training goes on, in the part in which it was paused."""
        self.enter(self._paused_in)

    def spoil(self, step: int) -> None:
        """Exclude a step that is not ordinary: it has instruments, a mode of its own, or a pause."""
        self._spoilt.append(step)

    def close(self) -> None:
        """Leave no more marks."""
        self._leave_by(_nothing)

    def _leave_first(self, mark: tuple[int, int]) -> None:
        """Once a step begins, marks are events if the process uses a device; then nothing is known of those before."""
        items = self._items
        items.extend(mark)
        if mark[0] < FIRST_STEP:
            return
        used = device.in_use()
        if used is None:
            self._leave_by(items.extend)  # one call: a thread sees both items or none
        else:
            items.clear()
            self._device = _DeviceMarks(device.accelerator().current_stream(used), items.extend, self._failed)
            self._leave_by(self._device.leave)

    # -- on any thread

    @property
    def last_mark(self) -> clocks.Mark | None:
        """The latest mark; None if there is none that was not read yet."""
        items = self._items
        return items[-1] if items else None

    def vectors(self) -> StepVectors:
        """The parts of the last steps that are complete, in order; of those after the step number last went back."""
        with self._lock:
            self._read_marks()
            return StepVectors.joined(self._read)

    def durations(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Numbers and durations (from one beginning to the next, in ms) of the ordinary steps."""
        vectors = self.vectors()
        step_ns = vectors.step_ns
        known = vectors.ordinary & (step_ns > 0)
        return vectors.steps[known], step_ns[known] / 1e6

    def _read_marks(self) -> None:
        items = self._items
        new = [items.popleft() for _ in range(len(items) // 2 * 2)]
        unread = self._unread + new
        marks, times = unread[::2], unread[1::2]
        begins = begun = [place for place, mark in enumerate(marks) if mark >= FIRST_STEP]
        if self._device is not None:
            begins = _ready(begun, times)
        if len(begins) < 2:
            self._unread = unread[2 * begun[0] :] if begun else []
            return
        first, last = begins[0], begins[-1]
        self._unread = unread[2 * last :]
        steps = np.array(marks, dtype=np.int64)[begins] - FIRST_STEP
        if self._device is None:
            times_ns = np.array(times[first : last + 1], dtype=np.int64)
            begun_ns = times_ns[np.array(begins[:-1]) - first]
        else:
            times_ns = self._device.times_ns(times, begins)
            begun_ns = np.array([self._device.begun_ns.popleft() for _ in begins[:-1]], dtype=np.int64)
        parts_ns = parts_of(np.array(marks[first : last + 1], dtype=np.int64), times_ns)
        follows = np.diff(steps) == 1
        ordinary = follows & ~np.isin(steps[:-1], np.array(self._spoilt, dtype=np.int64))
        self._keep(StepVectors(steps[:-1], begun_ns, parts_ns, ordinary))

    def _keep(self, read: StepVectors) -> None:
        back = np.flatnonzero(np.diff(read.steps) <= 0)
        if len(back):
            read = read.where(slice(int(back[-1]) + 1, None))
        if len(back) or (self._read and read.steps[0] <= self._read[-1].steps[-1]):
            self._read.clear()
            self._num_read = 0
        self._num_read += len(read)
        if self._read and len(self._read[-1]) < _STEPS_TOGETHER:
            read = StepVectors.joined([self._read.pop(), read])
        self._read.append(read)
        while self._num_read > SIZE:
            over = self._num_read - SIZE
            oldest = self._read.popleft()
            self._num_read -= min(over, len(oldest))
            if over < len(oldest):
                self._read.appendleft(oldest.where(slice(over, None)))


def _nothing(_: tuple[int, int]) -> None:
    pass


def _ready(begins: list[int], times: list[clocks.Mark]) -> list[int]:
    """The beginnings that the device has passed: the first ones."""
    passed = 0
    for place in reversed(begins):
        clocks.prepare_own_thread(clocks.device_of(times[place]))
        if clocks.is_ready(times[place]):
            passed = place
            break
    else:
        return []
    return [place for place in begins if place <= passed]


class _DeviceMarks:
    """Events of steps on a compute stream, at most six in a step.

    Of several micro-batches one is marked, another in each step: the others are one part.
    """

    def __init__(self, stream: device.Stream, extend: Any, failed: Callable[[Exception], None]) -> None:
        self._stream = stream
        self._extend = extend
        self._failed = failed
        self._accelerator = device.accelerator()
        self.begun_ns: deque[int] = deque(maxlen=_MAX_ITEMS)  # host time of the beginnings
        self._free: deque[device.Event] = deque()  # read before
        self._num_events = 0  # of the open step, without the optimizer's
        self._num_forward = 0  # micro-batches of the open step
        self._num_batches = 1  # of the step before
        self._chosen = 0

    def leave(self, mark: tuple[int, int]) -> bool | None:
        what, now_ns = mark
        try:
            return self._enter(what) if what < FIRST_STEP else self._begin(what, now_ns)
        except Exception as error:
            if is_from_handler(error):
                raise  # the user's own
            self._failed(error)
            return None

    def _begin(self, what: int, now_ns: int) -> bool | None:
        if self._accelerator.is_capturing():
            return True
        event = self._mark()
        self.begun_ns.append(now_ns)
        self._extend((what, event))
        self._num_batches, self._num_forward, self._num_events = max(1, self._num_forward), 0, 1
        self._chosen = (what - FIRST_STEP) % self._num_batches
        if self._chosen:
            self._extend((TOGETHER, event))
        return None

    def _enter(self, part: int) -> bool | None:
        wanted = self._wanted(part)
        is_optimizer = part == OPTIMIZER
        if wanted is None or (self._num_events >= MAX_EVENTS - 1 and not is_optimizer):
            return None
        if self._accelerator.is_capturing():
            return True
        self._num_events += not is_optimizer
        self._extend((wanted, self._mark()))
        return None

    def _wanted(self, part: int) -> int | None:
        """What to mark for a part; None for nothing."""
        if part == FORWARD:
            self._num_forward += 1
        if self._num_batches == 1 or part not in (FORWARD, BACKWARD, WAITING, AFTER_BACKWARD):
            return part
        batch = self._num_forward - 1
        if part in (FORWARD, BACKWARD):
            return part if batch == self._chosen else None
        if batch == self._num_batches - 1:
            return part
        return TOGETHER if batch == self._chosen and part == WAITING else None

    def _mark(self) -> device.Event:
        event = self._free.popleft() if self._free else self._accelerator.event(enable_timing=True)
        event.record(self._stream)
        return event

    def times_ns(self, times: list[Any], begins: list[int]) -> npt.NDArray[np.int64]:
        """Times of the marks from the first to the last of some beginnings, all passed, on one clock.

        Within a step they are distances from its first event, rounded once.
        """
        found, start_ns = [0], 0
        for first, last in itertools.pairwise(begins):
            origin = times[first]
            found += [start_ns + round(1e6 * origin.elapsed_time(event)) for event in times[first + 1 : last + 1]]
            start_ns = found[-1]
            self._free.extend({id(event): event for event in times[first:last]}.values())
        return np.array(found, dtype=np.int64)
