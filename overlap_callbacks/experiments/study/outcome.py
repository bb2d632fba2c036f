"""The outcome of a study for people: the one place that knows how it is shown.

Here is a plain table; a page and tables of the study's figures take its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.study import StudyRow, StudyStart
from overlap_callbacks.experiments.study.words import in_words
from overlap_callbacks.report.terminal_cells import one_line

_SHOWN = ("e2e_overlapped_ms", "e2e_sequential_ms", "speedup_vs_sequential", "compute_slowdown", "overlap_ratio")
_HEADS = {
    "e2e_overlapped_ms": "step", "e2e_sequential_ms": "sequential", "speedup_vs_sequential": "speed-up",
    "compute_slowdown": "compute slowdown", "overlap_ratio": "overlap ratio",
}  # fmt: skip


def write_study_page(folder: Path, start: StudyStart, rows: list[StudyRow]) -> Path | None:
    """Write the page into the folder of the results. Returns its path; None where there is no page.

    Raises:
        OSError: it cannot be written.
    """
    return None


def study_tables(start: StudyStart, rows: list[StudyRow]) -> RenderableType:
    """What was measured, for the terminal."""
    table = Table(title=one_line(_extent(start, rows)), title_justify="left", title_style="")
    for head in ("model", "strategy", "batch", "precision"):
        table.add_column(head, overflow="fold")
    shown = [figure for figure in FIGURES if figure.name in _SHOWN]
    for figure in shown:
        table.add_column(_HEADS[figure.name], justify="right")
    for row in rows:
        if row.figures is None:
            continue
        values = [row.figures.values.get(figure.key) for figure in shown]
        cells = [
            "" if value is None else PLAIN.figure(figure, value.value)
            for figure, value in zip(shown, values, strict=True)
        ]
        one = row.configuration
        table.add_row(one.model, one.strategy, str(one.batch), one.precision, *cells)
    parts: list[RenderableType] = [table]
    parts += [
        Text(one_line(f"Failed: {in_words(row.configuration)}: {row.failure}", 500)) for row in rows if row.failure
    ]
    return Group(*parts)


def study_json(folder: Path, start: StudyStart, rows: list[StudyRow]) -> dict[str, Any]:
    """Everything, as plain data."""
    return {"start": msgspec.to_builtins(start), "rows": msgspec.to_builtins(rows), "folder": str(folder)}


def _extent(start: StudyStart, rows: list[StudyRow]) -> str:
    scale = "" if start.scale == 1 else f", models shrunk by {start.scale:g}"
    return (
        f"{len(rows)} of {len(start.configurations)} configurations, {start.ranks} ranks, {start.link}, "
        f"{start.device}, {start.steps} steps of each mode{scale}"
    )
