"""A record as the page sees it: which figures stand for the run, and which window is shown in detail."""

from __future__ import annotations

import datetime
from functools import cached_property

from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.headline import Headline, run_headline
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.analysis.results.step_parts import StepParts
from overlap_callbacks.report.record import Record


class RunView:
    """One run, for its sections of the page.

    Args:
        record: the record.
        charts: whether charts are made.

    Attributes:
        record: the same.
        charts: the same.
        summary: which windows count.
        info: the last start of the job.
        control: whether it was an A/A run.
    """

    def __init__(self, record: Record, *, charts: bool = True) -> None:
        self.record = record
        self.charts = charts
        self.summary = record.summary
        self.info: RunInfo = record.runs[-1]
        self.control = self.summary.control

    @cached_property
    def figures(self) -> dict[str, Estimate]:
        """Means over the valid windows; of a run without any, what a window that was cut short had measured."""
        return self.summary.figures()

    @cached_property
    def shown_windows(self) -> list[OverlapReport]:
        """The windows that count; of a run without any, the one that was cut short after its timed part."""
        partial = self.summary.partial
        if self.valid_windows or partial is None:
            return self.valid_windows
        return [self.record.whole(window) for window in self.windows if window.window == partial.window][-1:]

    def latest(self, part: str) -> OverlapReport | None:
        """The last of ``shown_windows`` that has a part, e.g. ``kernels``; with its details."""
        if self.valid_windows:
            return self.record.latest_valid(part)
        return next((window for window in self.shown_windows if getattr(window, part)), None)

    @property
    def basis(self) -> str:
        """What the figures are means over."""
        if not self.summary.pooled():
            return "one unfinished window"
        return f"{len(self.valid_windows):,} of {count(len(self.record.windows), 'window')}"

    @cached_property
    def valid_windows(self) -> list[OverlapReport]:
        """The windows that count."""
        return self.summary.valid_windows

    @property
    def windows(self) -> list[OverlapReport]:
        """All windows, in the order of measurement."""
        return self.record.windows

    @property
    def measured(self) -> bool:
        """Whether there is any window, whole or not."""
        return self.summary.measured

    @cached_property
    def headline(self) -> Headline:
        """What overlap does to the steps of this run, or why that is not known."""
        return run_headline(self.summary, len(self.record.arms))

    @cached_property
    def parts(self) -> StepParts | None:
        """Where the time of an overlapped step goes; None without a profile."""
        return self.summary.step_parts()

    @property
    def head(self) -> str:
        """What ran where, in a line."""
        info = self.info
        parts = (
            info.framework,
            count(info.world_size, "rank"),
            info.backend,
            info.device,
            f"started {_moment(info.started_at)}",
        )
        return " · ".join(part for part in parts if part)


def _moment(started_at: str) -> str:
    """A wall clock's ISO 8601 as people write it, to the minute; a text of another form as it is."""
    try:
        found = datetime.datetime.fromisoformat(started_at)
    except ValueError:
        return started_at
    return f"{found:%Y-%m-%d %H:%M} {found.tzname() or ''}".rstrip()
