"""Opens the job of two ranks in this process, and lets its phantom rank speak to the library's rank 0."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from overlap_callbacks.experiments.loopback import job
from overlap_callbacks.experiments.loopback.collectives import Call, LoopSettings
from overlap_callbacks.experiments.loopback.host_link import HostLink, single_calls
from tests.gpu.loopback.phantom import phantom_rank


@dataclass(frozen=True)
class Issued:
    """A collective of more than one rank that was issued.

    Attributes:
        operator, kind: of ``c10d``, e.g. ``allreduce_``; e.g. ``all_reduce``.
        group: name of its process group.
        num_bytes: of its inputs or of its outputs, whichever is more.
        asynchronous: the operator's ``async_op``.
        length_ns: how long it takes at least, once it has begun.
        issued_ns: host time, ``time.perf_counter_ns``.
    """

    operator: str
    kind: str
    group: str
    num_bytes: int
    asynchronous: bool
    length_ns: int
    issued_ns: int


class TimedLink(HostLink):
    """Notes when the phantom joins each collective of more than one rank, and when it is complete.

    Attributes:
        joined_ns: when the phantom joined each, ``time.perf_counter_ns``: it cannot have been complete before.
        ended_ns: when each was first seen to be complete, on the same clock; 0 before that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()  # held while a collective gets its number and is issued
        self.joined_ns: list[int] = []
        self.ended_ns: list[int] = []
        self._in_flight: list[tuple[int, Any]] = []
        # Of each part of a collective that the phantom joins: the collective's number if it is the last, else None.
        self._expected: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def issue(self, call: Call, group: Any, settings: LoopSettings) -> Any:
        if group.size() == 1:
            return super().issue(call, group, settings)
        with self._lock:
            number = len(self.ended_ns)
            self.ended_ns.append(0)
            for _ in single_calls(call)[1:]:
                self._expected.put(None)
            self._expected.put(number)
            work = super().issue(replace(call, asynchronous=True), group, settings)
            self._in_flight.append((number, work))
        if not call.asynchronous:
            work.wait()
            self._see_end(number)
        return work

    def _meet(self, theirs: Any, call: Call, work: Any) -> None:
        number = self._expected.get()
        if number is not None:
            self.joined_ns.append(time.perf_counter_ns())
        super()._meet(theirs, call, work)
        if number is not None:
            self._see_end(number)

    def _see_end(self, number: int) -> None:
        """Threads that wait for a collective wake one after another: the first counts."""
        now = time.perf_counter_ns()
        self.ended_ns[number] = self.ended_ns[number] or now

    @property
    def is_busy(self) -> bool:
        """Whether a collective of more than one rank is in flight: issued, and not complete."""
        # Not all of Gloo's works know that they are complete.
        self._in_flight = [
            (number, work) for number, work in self._in_flight if not (self.ended_ns[number] or work.is_completed())
        ]
        return bool(self._in_flight)


class LoopJob(job.LoopJob):
    """A job that keeps what it issues on groups with more than one rank, in ``issued``, which may be cleared."""

    def __init__(self, settings: LoopSettings) -> None:
        super().__init__(settings)
        if isinstance(self.link, HostLink):
            self.link.close()
            self.link = TimedLink()
        self.issued: list[Issued] = []

    def issue(self, call: Call, group: Any) -> Any:
        if group.size() > 1:
            length_ns = self.settings.length_ns(call.num_bytes)
            found = (call.operator, call.kind, group.group_name, call.num_bytes, call.asynchronous, length_ns)
            self.issued.append(Issued(*found, time.perf_counter_ns()))
        return super().issue(call, group)


@contextlib.contextmanager
def open_job(settings: LoopSettings, *, phantom: bool = True) -> Iterator[LoopJob]:
    """Open the job: the process group, and the kernels that run its collectives. One at a time in a process.

    Args:
        settings: of the link.
        phantom: whether rank 1 takes part in what the library's ranks say to each other. Without it, its order check
            and its report are missing, as those of a rank that hangs.
    """
    with job.open_job(settings, LoopJob) as opened, phantom_rank() if phantom else contextlib.nullcontext():
        yield opened
