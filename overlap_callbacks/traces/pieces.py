"""The figures of a device are added up over pieces of its time, so that a long trace need not be in memory as a whole.

Nothing runs at the bounds of a piece, and each step lies in one piece: a piece ends with the last kernel of a step. A
trace that is in memory is one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from overlap_callbacks.analysis.intervals import Intervals, distinct_values
from overlap_callbacks.analysis.kernels.critical_path import LastRows
from overlap_callbacks.analysis.kernels.queue import Queue, queues
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.traces.estimate import slowdown_estimate
from overlap_callbacks.traces.figures import SlowdownEstimate
from overlap_callbacks.traces.launches import launch_interval_ns
from overlap_callbacks.traces.trace import Trace


class Span(NamedTuple):
    """A span of time, in nanoseconds on the clock of the file."""

    start_ns: int
    end_ns: int


class Outline(msgspec.Struct, frozen=True):
    """What is known of the kernels of one device before its pieces are looked at.

    Attributes:
        device: its number.
        steps: indices of the steps that have kernels, ascending.
        communicates: whether any kernel communicates.
        span: from the first row's start to the last one's end; None without rows.
        ran: the same of the rows that took time; None without any.
        launches_known: whether the launch of any row is known.
        records_waits: as in ``Launches``.
    """

    device: int
    steps: tuple[int, ...]
    communicates: bool
    span: Span | None
    ran: Span | None
    launches_known: bool
    records_waits: bool


class Piece(msgspec.Struct, frozen=True):
    """A piece of a device's time.

    Attributes:
        trace: the trace with the rows of the piece alone. Numbers of names, shapes, streams, steps and what is known of
            collectives are those of the whole trace.
        begin_ns: where it begins: the last end of the rows before; in the first piece, its first start.
        before: the last rows before.
        is_whole: whether it has all rows of the device.
    """

    trace: Trace
    begin_ns: int
    before: LastRows
    is_whole: bool


class Device(Protocol):
    """The kernels of one device, and the figures that need all of them at once."""

    @property
    def head(self) -> Trace:
        """The trace, with any rows or none."""
        ...

    @property
    def outline(self) -> Outline:
        """What is known of the kernels."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """The pieces, in order of time."""
        ...

    def in_one_piece(self) -> Device:
        """The same device in one piece, which takes memory for all rows."""
        ...

    def queues(self) -> tuple[Queue, ...]:
        """The queue of each stream."""
        ...

    def kernel_ns(self) -> float | None:
        """Median time of the rows that compute; None without any."""
        ...

    def launch_interval_ns(self) -> float | None:
        """Median time from one launch to the next; None with fewer than two."""
        ...

    def estimating(self) -> Estimating:
        """Works out the slowdown beside communication, see ``estimate``."""
        ...


class Estimating(Protocol):
    """Estimates the slowdown beside communication from the pieces of a device."""

    def add(self, trace: Trace) -> None:
        """Add the next piece."""
        ...

    def figures(self) -> SlowdownEstimate | None:
        """The estimate, once all pieces were added; None if no call beside communication matches one alone."""
        ...


class DeviceInMemory:
    """The kernels of one device, all in memory: one piece.

    Args:
        trace: the kernels of the device.
        device: its number.
    """

    def __init__(self, trace: Trace, device: int) -> None:
        self.head = trace
        kernels, launches = trace.kernels, trace.launches
        ran = kernels.intervals[kernels.intervals.durations_ns > 0]
        steps = distinct_values(kernels.step)
        self.outline = Outline(
            device=device,
            steps=tuple(steps[steps >= 0].tolist()),
            communicates=bool((kernels.kind == Kind.COMMUNICATION).any()),
            span=_span(kernels.intervals),
            ran=_span(ran),
            launches_known=launches is not None and launches.known,
            records_waits=launches is not None and launches.records_waits,
        )

    def pieces(self) -> Iterator[Piece]:
        """The trace as one piece."""
        yield Piece(self.head, self.outline.ran.start_ns if self.outline.ran else 0, LastRows.none(), is_whole=True)

    def in_one_piece(self) -> Device:
        """The same device."""
        return self

    def queues(self) -> tuple[Queue, ...]:
        """The queue of each stream."""
        return () if self.head.launches is None else queues(self.head.kernels, self.head.launches.launched_ns)

    def kernel_ns(self) -> float | None:
        """Median time of the rows that compute; None without any."""
        compute_ns = self.head.kernels.of(Kind.COMPUTE).durations_ns
        return float(np.median(compute_ns)) if len(compute_ns) else None

    def launch_interval_ns(self) -> float | None:
        """Median time from one launch to the next; None with fewer than two."""
        return None if self.head.launches is None else launch_interval_ns(self.head.launches.launched_ns)

    def estimating(self) -> Estimating:
        """Works out the slowdown beside communication."""
        return _EstimatingInMemory()


class _EstimatingInMemory:
    """The estimate of a trace that is one piece."""

    def __init__(self) -> None:
        self._trace: Trace | None = None

    def add(self, trace: Trace) -> None:
        """Take the piece."""
        self._trace = trace

    def figures(self) -> SlowdownEstimate | None:
        """The estimate."""
        return None if self._trace is None else slowdown_estimate(self._trace)


def _span(intervals: Intervals) -> Span | None:
    return Span(int(intervals.start_ns.min()), int(intervals.end_ns.max())) if len(intervals) else None
