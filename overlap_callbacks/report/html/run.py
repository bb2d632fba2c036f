"""A record as the page sees it: which figures stand for the run, and which window is shown in detail."""

from __future__ import annotations

from functools import cached_property

from overlap_callbacks.analysis.results.report import Estimate, OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.report import terminal
from overlap_callbacks.report.record import Record


class Subject:
    """What a page of one run is about.

    Args:
        record: the record.

    Attributes:
        record: the same.
        run: the last start of the job.
        control: whether it was an A/A run.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.run: RunInfo = record.runs[-1]
        self.control = bool(self.run.schedule.get("control"))

    @cached_property
    def figures(self) -> dict[str, Estimate]:
        """Means over the valid windows; of a run that has none, what a window that was cut short had measured."""
        found = self.record.pooled()
        partial = None if found else self.record.partial
        return found if partial is None else partial.figures()

    @property
    def windows(self) -> list[OverlapReport]:
        return self.record.windows

    @property
    def measured(self) -> bool:
        """Whether there is any window, whole or not."""
        return bool(self.record.windows) or self.record.unfinished is not None

    @cached_property
    def verdict(self) -> str:
        """In a sentence."""
        if not self.measured:
            return terminal.NOTHING_YET
        if self.control:
            return "A/A control: both sides ran overlapped, so every difference is chance."
        if not self.figures:
            return "No window counts, so whether overlap is worth it here is not known."
        return terminal.headline(self.record)

    def latest_valid(self, part: str) -> OverlapReport | None:
        """The last valid window that has a part, e.g. ``kernels``."""
        return next((window for window in reversed(self.record.valid_windows) if getattr(window, part)), None)

    def latest(self, part: str) -> OverlapReport | None:
        """The last window that has a part; a valid one if there is any."""
        found = self.latest_valid(part)
        return found or next((window for window in reversed(self.record.windows) if getattr(window, part)), None)

    @property
    def head(self) -> str:
        """What ran where, in a line."""
        run = self.run
        parts = (run.framework, f"{run.world_size:,} ranks", run.backend, run.device, f"started {run.started_at}")
        return " · ".join(part for part in parts if part)
