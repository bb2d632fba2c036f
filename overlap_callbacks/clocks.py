"""Points in time on the device or the host, and the time between them.

A mark on a CUDA (or ROCm) stream is an event: recording it does not block, and it is read later, once the device has
passed it. A mark on the host is ``time.perf_counter_ns``. Nothing here ever waits for the device.
"""

from __future__ import annotations

import time
from typing import Union

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


def elapsed_ms(start: Mark, end: Mark) -> float:
    """Time from ``start`` to ``end`` in milliseconds. Both must be ready, and of one kind."""
    if isinstance(start, int) and isinstance(end, int):
        return (end - start) / 1e6
    if isinstance(start, int) or isinstance(end, int):
        raise TypeError("a mark of the host and a mark of a stream have no common clock")
    milliseconds: float = start.elapsed_time(end)
    return milliseconds


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

    @property
    def device(self) -> str:
        """Name of the device that is timed."""
        if self.compute_stream is None:
            return "cpu"
        return torch.cuda.get_device_name(self.compute_stream.device)

    def mark(self) -> Mark:
        """A mark at this point of the compute stream, or of host time."""
        return now() if self.compute_stream is None else stream_mark(self.compute_stream)
