"""Opens the job of two ranks in this process, and lets its phantom rank speak to the library's rank 0."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from overlap_callbacks.experiments.loopback import job
from overlap_callbacks.experiments.loopback.collectives import Call, LoopSettings
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


class LoopJob(job.LoopJob):
    """A job that keeps what it issues on groups with more than one rank, in ``issued``, which may be cleared."""

    def __init__(self, settings: LoopSettings) -> None:
        super().__init__(settings)
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
