"""What each arm changes, for the terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.arm_summary import ArmSummary, arm_summaries
from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.report.arm_words import OPTIONAL_ARM_COLUMNS, RESULTS_DIFFER, SPEEDUP_IN_WORDS
from overlap_callbacks.report.record import Record


def arm_parts(record: Record) -> list[RenderableType]:
    """A table of the arms; nothing in a run without any but sequential steps."""
    rows = arm_summaries(record.summary, record.arms)
    if not rows:
        return []
    table = Table(title="Arms: the job with one thing turned, against the job as configured", title_justify="left")
    table.add_column("arm", no_wrap=True)
    for name in ("speed-up", "95% interval", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in rows:
        table.add_row(
            row.arm.name,
            _shown(row.speedup, "fraction"),
            "" if row.speedup is None else PLAIN.interval(row.speedup, "fraction", signed=True),
            _shown(row.figures.get("step_ms"), "ms"),
            row.verdict(),
        )
    counted = ", ".join(f"{row.arm.name} {row.num_windows}" for row in rows)
    notes = [SPEEDUP_IN_WORDS, f"Windows that count: {counted}."]
    notes += [f"{row.arm.name} {RESULTS_DIFFER}" for row in rows if not row.arm.equal_results]
    notes += [f"{row.arm.name}: {problem}" for row in rows for problem in row.problems]
    return [Text(), table, *_further(rows), *[Text(note, style="dim") for note in notes]]


def _further(rows: list[ArmSummary]) -> list[RenderableType]:
    """Compute, exposed communication, power and memory, where they were measured."""
    columns = [column for column in OPTIONAL_ARM_COLUMNS if any(column.of(row) for row in rows)]
    if not columns:
        return []
    table = Table(title="With the arm, and as configured (in brackets)", title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("arm", no_wrap=True)
    for column in columns:
        longest = max(map(len, column.title.split()))  # no word of a head is broken
        table.add_column(column.title, justify="right", overflow="fold", min_width=longest)
    for row in rows:
        table.add_row(row.arm.name, *[column.of(row) for column in columns])
    return [Text(), table]


def arms_as_json(record: Record) -> list[dict[str, Any]]:
    """The same for programs, and each window's metrics."""
    return [
        {**asdict_of(row), "verdict": row.verdict(), "by_window": _windows(record, row.arm.name)}
        for row in arm_summaries(record.summary, record.arms)
    ]


def asdict_of(row: ArmSummary) -> dict[str, Any]:
    """A summary as plain data; the arm by its name."""
    fields = {name: getattr(row, name) for name in asdict(row)}
    return {**fields, "arm": row.arm.name, "equal_results": row.arm.equal_results}


def _windows(record: Record, name: str) -> list[dict[str, Any]]:
    return [
        {"window": report.window, "counts": report.counts, "metrics": report.metrics()}
        for report in record.arms
        if report.arm.name == name
    ]


def _shown(estimate: Estimate | None, unit: str) -> str:
    return "" if estimate is None else PLAIN.quantity(estimate.value, unit, signed=unit == "fraction")
