"""The interface of a sink."""

from __future__ import annotations

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.analysis.results.window import TimedBlock


class Sink:
    """Takes reports somewhere. Whatever it raises costs the sink, not the job: it is dropped with one message.

    Its methods are called on rank 0 alone, on one thread that is not the training thread and that writes the record
    too: what may stall belongs on a thread of its own (``sinks/aside.py``). Optional packages are imported when they
    are needed, never at the top of a module.
    """

    # Writes the record: called first, on the caller's own thread.
    keeps_record = False
    # Bounds its own waiting, on a thread of its own.
    has_own_thread = False

    def open(self, run: RunInfo) -> None:
        """Called once, before anything else."""

    def block(self, window: int, first_step: int, block: TimedBlock) -> None:
        """Called as soon as rank 0 has measured a timed block, so that a crash in mid-window loses little."""

    def log(self, report: OverlapReport) -> None:
        """Called once for each window."""
        raise NotImplementedError

    def close(self) -> None:
        """Called once, at the end; safe to call without ``open``, and twice."""
