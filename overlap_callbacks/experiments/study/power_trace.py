"""Power along a window of one configuration of a study (its figure 7), from the record of that job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.study import StudyRow
from overlap_callbacks.analysis.study import PEAK, value_of
from overlap_callbacks.experiments.study.names import Names
from overlap_callbacks.report import record
from overlap_callbacks.report.views.elements import Chart
from overlap_callbacks.report.views.power import trace_chart


def power_trace(folder: Path, rows: Sequence[StudyRow], names: Names) -> Chart | None:
    """The trace of the configuration whose highest power differs most between the modes; None if no record has one.

    Args:
        folder: of the study's results, in which the records lie.
        rows: one of each configuration.
        names: of the study's configurations.
    """
    for row in sorted(rows, key=_rise, reverse=True):
        window = _window_with_trace(folder, row)
        if window is not None and window.power_trace is not None:
            chart = trace_chart(window, window.power_trace)
            return replace(chart, title=f"{chart.title}: {names.whole(row.configuration)}")
    return None


def _rise(row: StudyRow) -> float:
    """How much higher the highest power is with overlap; below all others where that was not measured."""
    rise = value_of(row, PEAK)
    return float("-inf") if rise is None else rise.value


def _window_with_trace(folder: Path, row: StudyRow) -> OverlapReport | None:
    if row.record is None or row.figures is None or not any(key.startswith("power/") for key in row.figures.values):
        return None
    try:
        return record.read(folder / row.record, details=False).latest_valid("power_trace")
    except record.RecordError:
        return None
