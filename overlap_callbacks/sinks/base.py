"""The interface of a sink."""

from __future__ import annotations

from typing import Any

import msgspec

from overlap_callbacks.metrics import OverlapReport
from overlap_callbacks.samples import TimedBlock

SCHEMA_VERSION = 1


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before the first window: enough to read the rest without this library.

    Attributes:
        schema_version: of the record's layout.
        library_version, torch_version, python_version: of the software.
        started_at: wall clock, ISO 8601 with time zone.
        hostname: of rank 0's machine.
        framework: the adapter in use, with its framework's version.
        world_size: ranks of the job.
        backend: of the default process group.
        device: that rank 0 trains on.
        schedule: configuration of the schedule.
        units: unit of each figure, by name.
        meanings: meaning of each figure, by name.
    """

    schema_version: int = SCHEMA_VERSION
    library_version: str
    torch_version: str
    python_version: str
    started_at: str
    hostname: str
    framework: str
    world_size: int
    backend: str
    device: str
    schedule: dict[str, Any]
    units: dict[str, str]
    meanings: dict[str, str]


class Sink:
    """Takes reports somewhere. Whatever it raises costs the sink, not the job: it is dropped with one message.

    Its methods are called on rank 0 alone, on one thread that is not the training thread and that writes the record
    too: what may stall belongs on a thread of its own (``sinks/aside.py``). Optional packages are imported when they
    are needed, never at the top of a module.
    """

    def open(self, run: RunInfo) -> None:
        """Called once, before anything else."""

    def block(self, window: int, first_step: int, block: TimedBlock) -> None:
        """Called as soon as rank 0 has measured a timed block, so that a crash in mid-window loses little."""

    def log(self, report: OverlapReport) -> None:
        """Called once for each window."""
        raise NotImplementedError

    def close(self) -> None:
        """Called once, at the end; safe to call without ``open``, and twice."""
