"""The outcome of a tuning for the terminal, and as plain data."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.formatting import PLAIN, one_line
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.experiments.tune.combinations import AS_IS_IN_WORDS
from overlap_callbacks.experiments.tune.ranking import Ranking, Row
from overlap_callbacks.experiments.tune.results import Results
from overlap_callbacks.experiments.tune.words import extent, line_to_use, verdict


def tables(results: Results, ranking: Ranking) -> RenderableType:
    """The verdict, the ranked table and the line to use."""
    tuning = results.tuning
    title = one_line(extent(results, ranking))
    table = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="", pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("", justify="right")
    for axis in tuning.axes:
        table.add_column(one_line(axis.name, 40), justify="right", overflow="fold")
    for head in ("step", "95% interval", "vs first", "95% interval", "runs"):
        table.add_column(head, justify="right")
    for place, row in enumerate(ranking.rows, 1):
        values = [one_line(value or AS_IS_IN_WORDS, 60) for _, value in tuning.combinations[row.number]]
        table.add_row(str(place) if _counts(row) else "", *values, *_cells(row, ranking))
    parts: list[RenderableType] = [Text(one_line(verdict(tuning, ranking), 1000)), Text(), table]
    parts += [Text(one_line(f"Failed: {_settings(results, row)}: {row.failure}", 500)) for row in ranking.failed]
    line = line_to_use(tuning, ranking)
    if line is not None:
        parts += [Text(), Text("Use:"), Text(f"  {one_line(line, 4000)}", overflow="fold")]
    return Group(*parts)


def as_json(results: Results, ranking: Ranking) -> dict[str, Any]:
    """Everything, as plain data."""
    tuning = results.tuning
    rows = [
        {
            "settings": {axis.name: value for axis, value in tuning.combinations[row.number]},
            "runs": row.num_runs,
            "step_ms": row.step_ms,
            "change": row.change,
            "failure": row.failure or None,
        }
        for row in ranking.rows
    ]
    return {
        "verdict": verdict(tuning, ranking),
        "line": line_to_use(tuning, ranking),
        "command": tuning.command,
        "folder": str(results.folder),
        "rows": rows,
    }


def _counts(row: Row) -> bool:
    return row.step_ms is not None and not row.failure


def _settings(results: Results, row: Row) -> str:
    return ", ".join(setting.in_words for setting in results.tuning.combinations[row.number])


def _cells(row: Row, ranking: Ranking) -> list[str]:
    if row.failure:
        return ["failed", "", "", "", str(row.num_runs)]
    change = "first" if row.number == ranking.baseline else ""
    shown = (_value(row.change, "fraction"), _bounds(row.change, "fraction"))
    return [
        _value(row.step_ms, "ms") or "not run",
        _bounds(row.step_ms, "ms"),
        shown[0] or change,
        shown[1],
        str(row.num_runs),
    ]


def _value(estimate: Estimate | None, unit: str) -> str:
    return "" if estimate is None else PLAIN.quantity(estimate.value, unit, signed=unit == "fraction")


def _bounds(estimate: Estimate | None, unit: str) -> str:
    return "" if estimate is None else PLAIN.interval(estimate, unit, signed=unit == "fraction").removesuffix(" ms")
