"""Time marks on the device or the host, set without blocking and read later. Nothing here waits for the device.

A mark on a stream is an event, read once the device has passed it; a mark on the host is ``time.perf_counter_ns``.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import Union

import torch

from overlap_callbacks.instruments import device

Mark = Union[int, device.Event]


def now() -> int:
    return time.perf_counter_ns()


def is_ready(mark: Mark) -> bool:
    """Whether the device has passed the mark, so that its time is known. Does not block."""
    return isinstance(mark, int) or bool(mark.query())


_this_thread = threading.local()
_OWN_THREADS = "overlap-callbacks"  # name prefix of the library's threads


def device_of(mark: Mark) -> torch.device | None:
    """The device of a mark; None for a host mark, or if torch does not know it."""
    return None if isinstance(mark, int) else getattr(mark, "device", None)


def prepare_own_thread(of: torch.device | None) -> None:
    """Prepare one of the library's threads for querying events of a device; does nothing on other threads."""
    if of is None or not threading.current_thread().name.startswith(_OWN_THREADS):
        return
    if getattr(_this_thread, "device", None) != of:
        _this_thread.device = of
        device.prepare_thread(of)


def elapsed_ms(start: Mark, end: Mark) -> float:
    """Milliseconds between two marks that are ready. Raises TypeError for a host mark and a stream mark."""
    if isinstance(start, int) and isinstance(end, int):
        return (end - start) / 1e6
    if isinstance(start, int) or isinstance(end, int):
        raise TypeError("a mark of the host and a mark of a stream have no common clock")
    milliseconds: float = start.elapsed_time(end)
    return milliseconds


class HostTimes:
    """Bounds in host time for when the device passed the marks of its stream. Thread-safe.

    An event has no host time, only a time relative to another event. But the device passes it after the host recorded
    it, after each poll that found it pending, and before the poll that finds it passed. All marks of a window share one
    offset between the two clocks, so the narrowest bounds hold for all. Polls that are independent of the steps, such
    as those of the power sampler's thread, narrow the bounds to a few milliseconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Marks that the device had not passed at the last poll, each with that host time.
        self._pending: deque[tuple[device.Event, int]] = deque()
        self._reference: device.Event | None = None
        self._earliest_ns = -math.inf  # bounds of the reference event's host time
        self._latest_ns = math.inf

    def recorded(self, mark: device.Event, not_before_ns: int) -> None:
        """Note a mark on the stream, and a host time before it was recorded: it may pass before recording returns."""
        with self._lock:
            self._pending.append((mark, not_before_ns))

    def poll(self) -> None:
        """Check which pending marks the device has passed. Does not block."""
        with self._lock:
            while self._pending:
                mark, not_passed_ns = self._pending[0]
                asked_ns = now()
                if not is_ready(mark):
                    self._pending[0] = mark, asked_ns
                    return
                seen_ns = now()
                self._pending.popleft()
                if self._reference is None:
                    self._reference = mark
                since_ns = 1e6 * elapsed_ms(self._reference, mark)
                self._earliest_ns = max(self._earliest_ns, not_passed_ns - since_ns)
                self._latest_ns = min(self._latest_ns, seen_ns - since_ns)

    def bounds(self, mark: device.Event) -> tuple[int, int]:
        """Host times in ns, on the clock of ``now()``, between which the device passed a mark that is ready.

        Raises ValueError if no mark of the stream was seen to pass yet.
        """
        if self._reference is None:
            raise ValueError("no mark of this stream was seen to be passed yet")
        since_ns = 1e6 * elapsed_ms(self._reference, mark)
        return round(self._earliest_ns + since_ns), round(self._latest_ns + since_ns)


class StepClock:
    """Marks the start and end of steps: on the compute stream of an accelerator, else on the host.

    ``compute_stream``: the current stream of the thread that created the clock; None on CPU.
    """

    def __init__(self) -> None:
        # Only a process that already uses a device is timed on it. In a CPU job, asking for the current stream would
        # create a context, which takes hundreds of MiB.
        used = device.in_use()
        self.compute_stream = None if used is None else device.accelerator().current_stream(used)
        self._host_times = HostTimes()

    @property
    def device(self) -> str:
        if self.compute_stream is None:
            return "cpu"
        return device.name(self.compute_stream.device)

    def mark(self) -> Mark:
        """Set a mark at this point of the compute stream; on CPU, the host time."""
        if self.compute_stream is None:
            return now()
        before_ns = now()
        mark = device.accelerator().mark(self.compute_stream)
        self._host_times.recorded(mark, before_ns)
        self._host_times.poll()
        return mark

    def poll(self) -> None:
        """Poll pending marks to narrow their host-time bounds. Thread-safe, never blocks."""
        if self.compute_stream is not None:
            prepare_own_thread(self.compute_stream.device)
            self._host_times.poll()

    def host_bounds_ns(self, mark: Mark) -> tuple[int, int]:
        """Host times in ns, on the clock of ``now()``, between which a mark that is ready was passed."""
        if isinstance(mark, int):
            return mark, mark
        self.poll()
        return self._host_times.bounds(mark)
