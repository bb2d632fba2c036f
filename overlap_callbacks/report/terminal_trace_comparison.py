"""Tables for the terminal of a comparison of two traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.catalogue import SUMMARY
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.report.terminal import drawn_table
from overlap_callbacks.report.terminal_names import kernel_cells
from overlap_callbacks.report.terminal_trace_parts import change, more, notes, number, plain_table
from overlap_callbacks.report.views.tables import pair_tables, row_label
from overlap_callbacks.traces.figures import Comparison

# Longer tables are cut; CSV and JSON hold everything.
_MAX_ROWS = 12


def comparison_tables(comparison: Comparison) -> RenderableType:
    """The tables of a comparison, for people."""
    figures = Table(title=Text(_compared(comparison)), title_justify="left")
    figures.add_column("")
    figures.add_column("per step", justify="right")
    for figure in (figure for section in SUMMARY for figure in section):
        value = comparison.figures.get(figure.name)
        if value is None:
            figures.add_row(row_label(figure), "undefined", style="dim")
        elif figure.unit == "ms":
            figures.add_row(row_label(figure), f"{number(value)} ms")
        else:
            figures.add_row(row_label(figure), PLAIN.figure(figure, value))
    parts: list[RenderableType] = [figures]
    if not comparison.valid:
        parts.insert(0, Text("This comparison does not hold: see the notes.", style="bold red"))
    if comparison.kernels:
        parts.append(_loss_table("Kernels that lose most, per step", "kernel", comparison.kernels))
    if comparison.ranges:
        title = "Compute by module or range of the host, per step"
        parts.append(_loss_table(title, "launched in", comparison.ranges))
    for table in pair_tables(comparison.pairs, "Per step."):
        parts += [Text(), *drawn_table(table, _MAX_ROWS)]
    if comparison.unmatched:
        calls = sum(row.overlapped_calls + row.sequential_calls for row in comparison.unmatched)
        title = f"Kernels without a partner in the other file: {calls} calls, over all steps"
        unknown = plain_table(title, "kernel", "overlapped", "sequential")
        unmatched = comparison.unmatched[:_MAX_ROWS]
        for row, name in zip(unmatched, kernel_cells([row.name for row in unmatched]), strict=True):
            sides = ((row.overlapped_calls, row.overlapped_ms), (row.sequential_calls, row.sequential_ms))
            unknown.add_row(name, *(f"{count} ({number(ms)} ms)" if count else "" for count, ms in sides))
        parts += [unknown, *more(len(comparison.unmatched), _MAX_ROWS, "kernels")]
    return Group(*parts, *notes(comparison.problems))


def _compared(comparison: Comparison) -> str:
    ov, seq = (Path(side.file).name for side in (comparison.overlapped, comparison.sequential))
    steps = comparison.steps
    matched = PLAIN.percent(comparison.matched_fraction)
    return f"{ov} ({steps[0]} steps) against {seq} ({steps[1]}); {matched} of compute matched"


def _loss_table(title: str, head: str, rows: Sequence[KernelTime]) -> Table:
    table = plain_table(title, head, "slowdown", "lost", "overlapped", "sequential")
    shown = rows[:_MAX_ROWS]
    for row, name in zip(shown, kernel_cells([row.name for row in shown]), strict=True):
        slowdown = change(row.slowdown)
        times = (row.lost_ms, row.overlapped_ms, row.sequential_ms)
        table.add_row(name, slowdown, *(f"{number(ms)} ms" for ms in times))
    if len(rows) > _MAX_ROWS:
        table.add_row(f"... {len(rows) - _MAX_ROWS} more", style="dim")
    return table
