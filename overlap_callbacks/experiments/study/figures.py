"""The figures of one job, from its record."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.study import StudyFigures
from overlap_callbacks.analysis.statistics import ONE_LOOK, pool
from overlap_callbacks.report.record import Record

# Of a report's metrics, the sections that a study has beside the figures of the catalogue.
_SECTIONS = ("power", "device", "memory", "throughput")


def figures_of(record: Record) -> StudyFigures | None:
    """The means over the windows that count; None where none does."""
    windows = record.valid_windows
    if not windows:
        return None
    pooled = record.summary.pooled(ONE_LOOK)  # a job of a study has a fixed length
    values = {figure.key: pooled[figure.name] for figure in FIGURES if figure.name in pooled}
    return StudyFigures(
        values={**values, **_metrics(windows)},
        num_windows=len(windows),
        num_steps=sum([_counted_steps(record.whole(window)) for window in windows]),
    )


def _metrics(windows: Sequence[OverlapReport]) -> dict[str, Estimate]:
    """What a window gives without an interval; over several windows it has one."""
    found: dict[str, list[Estimate]] = {}
    for window in windows:
        for value in window.values():
            if value.figure.section in _SECTIONS:
                found.setdefault(value.key, []).append(Estimate(value.number, None, None, window.num_steps, 1))
    pooled = {key: pool(values) for key, values in found.items()}
    return {key: estimate for key, estimate in pooled.items() if estimate is not None}


def _counted_steps(window: OverlapReport) -> int:
    """Timed steps of a mode."""
    blocks = window.samples[0].timed if window.samples else ()
    return sum([len(block.step_ms) for block in blocks if block.arm is Mode.OVERLAPPED])
