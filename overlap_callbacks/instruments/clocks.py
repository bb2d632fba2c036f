"""Points in time on the device or the host, and the time between them.

A mark on a CUDA (or ROCm) stream is an event: recording it does not block, and it is read later, once the device has
passed it. A mark on the host is ``time.perf_counter_ns``. Nothing here ever waits for the device.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections import deque
from typing import Any, Union

import torch

Mark = Union[int, torch.cuda.Event]


def now() -> int:
    """A mark on the host, in nanoseconds."""
    return time.perf_counter_ns()


def stream_mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """A mark on a stream: it lies where the device stands once all work enqueued so far is done."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def is_ready(mark: Mark) -> bool:
    """Whether the mark's time is known; asks the device, never waits for it."""
    return isinstance(mark, int) or bool(mark.query())


_of_thread = threading.local()
_THREAD_LOCAL_CAPTURE = 1  # cudaStreamCaptureModeThreadLocal, and hipStreamCaptureModeThreadLocal


def leave_captures_alone() -> None:
    """Let this thread ask for events while another captures a CUDA graph; for threads of our own, not for the job's.

    Unless a thread says so, a question of its to the device invalidates a graph that any other thread is capturing in
    torch's default mode. NCCL's watchdog in torch does the same.
    """
    if getattr(_of_thread, "told", False) or threading.current_thread() is threading.main_thread():
        return
    _of_thread.told = True
    try:
        if torch.version.hip is not None:
            exchange = ctypes.CDLL("libamdhip64.so").hipThreadExchangeStreamCaptureMode
        else:
            major = str(torch.version.cuda).split(".")[0]
            # Loaded by torch already: this finds it by its name.
            exchange = ctypes.CDLL(f"libcudart.so.{major}").cudaThreadExchangeStreamCaptureMode
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL_CAPTURE)))
    except (OSError, AttributeError):
        return  # another build of torch: as before


def elapsed_ms(start: Mark, end: Mark) -> float:
    """Time from ``start`` to ``end`` in milliseconds. Both must be ready, and of one kind."""
    if isinstance(start, int) and isinstance(end, int):
        return (end - start) / 1e6
    if isinstance(start, int) or isinstance(end, int):
        raise TypeError("a mark of the host and a mark of a stream have no common clock")
    milliseconds: float = start.elapsed_time(end)
    return milliseconds


class HostTimes:
    """When the device passed marks of its stream, on the host's clock: bounds from both sides.

    An event knows no time of the host's, only the time since another event. But the device passes it after the host
    recorded it, and after each look that found it not yet passed, and before the look that finds it passed. All marks
    of a window share the one offset between the two clocks, so the narrowest bounds hold for all. Looks at times that
    do not go in step with training (those of the power sampler's thread) narrow them to a few milliseconds.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[list[Any]] = deque()  # marks, and the latest time before which each was not passed
        self._reference: Any = None
        self._earliest_ns = -math.inf  # bounds of the reference's time
        self._latest_ns = math.inf

    def recorded(self, mark: Any) -> None:
        """A mark was left on the stream just now."""
        with self._lock:
            self._waiting.append([mark, now()])

    def look(self) -> None:
        """See which marks the device has passed; asks, never waits."""
        with self._lock:
            while self._waiting:
                waiting, asked_ns = self._waiting[0], now()
                if not is_ready(waiting[0]):
                    waiting[1] = asked_ns
                    return
                seen_ns = now()
                mark, not_before_ns = self._waiting.popleft()
                if self._reference is None:
                    self._reference = mark
                since_ns = 1e6 * elapsed_ms(self._reference, mark)
                self._earliest_ns = max(self._earliest_ns, not_before_ns - since_ns)
                self._latest_ns = min(self._latest_ns, seen_ns - since_ns)

    @property
    def uncertainty_ns(self) -> float:
        """Distance of the bounds."""
        return self._latest_ns - self._earliest_ns

    def bounds(self, mark: Any) -> tuple[int, int]:
        """Host times in nanoseconds, as of ``now()``, between which the device passed a mark that is ready.

        Raises:
            ValueError: no mark has been looked at yet.
        """
        if self._reference is None:
            raise ValueError("no mark of this stream was seen to be passed yet")
        since_ns = 1e6 * elapsed_ms(self._reference, mark)
        return round(self._earliest_ns + since_ns), round(self._latest_ns + since_ns)


class StepClock:
    """Marks the bounds of steps: on the compute stream of a CUDA device, else on the host.

    Attributes:
        compute_stream: the stream on which the training thread enqueued compute when the clock was made; None on CPU.
    """

    def __init__(self) -> None:
        # Only a process that already uses CUDA is timed on CUDA: asking for the current stream would otherwise create a
        # context, some hundreds of MiB, in a job that trains on the CPU.
        on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.compute_stream = torch.cuda.current_stream() if on_cuda else None
        self._host_times = HostTimes()

    @property
    def device(self) -> str:
        """Name of the device that is timed."""
        if self.compute_stream is None:
            return "cpu"
        return torch.cuda.get_device_name(self.compute_stream.device)

    def mark(self) -> Mark:
        """A mark at this point of the compute stream, or of host time."""
        if self.compute_stream is None:
            return now()
        mark = stream_mark(self.compute_stream)
        self._host_times.recorded(mark)
        self._host_times.look()
        return mark

    def look(self) -> None:
        """See which marks the device has passed, to know their host times the better; from any thread."""
        if self.compute_stream is not None:
            leave_captures_alone()
            self._host_times.look()

    def host_bounds_ns(self, mark: Mark) -> tuple[int, int]:
        """Host times, as of ``now()``, between which a mark that is ready was passed."""
        if isinstance(mark, int):
            return mark, mark
        self.look()
        return self._host_times.bounds(mark)
