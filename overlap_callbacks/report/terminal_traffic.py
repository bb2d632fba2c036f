"""The traffic of a run as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.communication.heat_map import bytes_in_words, unit_of
from overlap_callbacks.analysis.formatting import PLAIN, count
from overlap_callbacks.analysis.results.messages import MessageGroup
from overlap_callbacks.report.terminal_cells import name_cell
from overlap_callbacks.report.traffic import Mapping, RunTraffic, between_hosts
from overlap_callbacks.report.traffic_words import (
    SENT,
    kinds_of,
    regularity,
    size_in_words,
    stage_in_words,
)

# Rows of a table; ``--json`` has all. Cells of a matrix that a terminal can show.
_MAX_ROWS, _MAX_CELLS = 40, 8


def tables(found: RunTraffic, drawn: Sequence[str] = (), by_size: Sequence[RenderableType] = ()) -> RenderableType:
    """The traffic, for people.

    Args:
        found: of a run.
        drawn: files into which the matrix was drawn.
        by_size: how fast messages of each size were.
    """
    where = "" if found.num_hosts is None else f", {count(found.num_hosts, 'host')}"
    title = f"Traffic of a step, all ranks (window {found.window}{where})"
    parts: list[RenderableType] = [_dimension_table(found.mappings, title), Text(SENT, style="dim"), Text()]
    parts += [_group_table(found.messages.groups), Text(), _size_table(found.messages.groups)]
    if by_size:
        parts += [Text(), *by_size]
    parts += matrix_parts(found.mappings, drawn)
    parts += [Text(), Text(regularity(found.num_steps, found.num_alike))]
    return Group(*parts)


def predicted_parts(mappings: Sequence[Mapping], drawn: Sequence[str] = ()) -> list[RenderableType]:
    """The traffic that a job should have: by dimension of parallelism, and the matrix."""
    title = "Traffic of a step that is predicted, all ranks"
    return [_dimension_table(mappings, title, "as given"), Text(SENT, style="dim"), *matrix_parts(mappings, drawn)]


def matrix_parts(mappings: Sequence[Mapping], drawn: Sequence[str]) -> list[RenderableType]:
    """The matrices that a terminal can show, and where the others are to be found."""
    parts: list[RenderableType] = []
    for mapping in mappings:
        if len(mapping.view.labels) <= _MAX_CELLS:
            parts += [Text(), _matrix(mapping, several=len(mappings) > 1)]
    if drawn:
        parts += [Text(), Text(f"The matrix is drawn in {' and '.join(drawn)}.", style="dim")]
    elif any(len(mapping.view.labels) > _MAX_CELLS for mapping in mappings):
        parts += [Text(), Text("The matrix is too large for a terminal: --svg or --png draw it.", style="dim")]
    return parts


def _dimension_table(mappings: Sequence[Mapping], title: str, own: str = "as run") -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("dimension")
    for column in ("messages", "bytes", "sent"):
        table.add_column(column, justify="right", no_wrap=True)
    for mapping in mappings:
        table.add_column(_between(mapping, own if len(mappings) > 1 else ""), justify="right")
    by_mapping = [{row.dimension: row for row in mapping.dimensions} for mapping in mappings]
    totals = mappings[0].dimensions
    for row in totals:
        cells = [f"{row.messages:,}", bytes_in_words(row.bytes), bytes_in_words(row.sent_bytes)]
        cells += [_crossing(rows[row.dimension].between_hosts_bytes) for rows in by_mapping]
        table.add_row(name_cell(row.dimension), *cells)
    if len(totals) > 1:
        cells = [
            f"{sum(row.messages for row in totals):,}",
            bytes_in_words(sum(row.bytes for row in totals)),
            bytes_in_words(sum(row.sent_bytes for row in totals)),
        ]
        cells += [_crossing(between_hosts(mapping)) for mapping in mappings]
        table.add_section()
        table.add_row("all", *cells)
    return table


def _between(mapping: Mapping, own: str) -> str:
    """The head of a layout's column; ``own`` is what to call the job's own, empty where there is no other."""
    if not own:
        return "between hosts"
    return f"between hosts,\n{mapping.name}" + (f",\n{own}" if mapping.as_run else "")


def _crossing(value: float | None) -> str:
    return "not known" if value is None else bytes_in_words(value)


def _group_table(groups: Sequence[MessageGroup]) -> Table:
    table = Table(title="Messages of a step, on each rank that sends them", title_justify="left")
    for column in ("dimension", "stage", "collective"):
        table.add_column(column)
    for column in ("group", "ranks", "messages", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for group in groups[:_MAX_ROWS]:
        each = "" if group.alike else "mean "
        cells = (
            str(group.group_size or ""),
            f"{group.num_members:,}",
            f"{each}{PLAIN.number(group.messages / group.num_members, 0)}",
            f"{each}{bytes_in_words(group.bytes / group.num_members)}",
        )
        table.add_row(
            name_cell(group.dimension), stage_in_words(group.stage), name_cell(group.operator.strip("_")), *cells
        )
    if len(groups) > _MAX_ROWS:
        table.add_row(f"... {len(groups) - _MAX_ROWS} more", style="dim")
    return table


def _size_table(groups: Sequence[MessageGroup]) -> Table:
    table = Table(title="Sizes of messages, over all ranks", title_justify="left")
    table.add_column("dimension")
    table.add_column("collective")
    table.add_column("size", justify="right", no_wrap=True)
    for column in ("messages", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = [(dimension, kind, size) for dimension, kind, sizes in kinds_of(groups) for size in sizes]
    for dimension, kind, (size, number, total) in rows[:_MAX_ROWS]:
        table.add_row(name_cell(dimension), name_cell(kind), size_in_words(size), f"{number:,}", bytes_in_words(total))
    if len(rows) > _MAX_ROWS:
        table.add_row(f"... {len(rows) - _MAX_ROWS} more", style="dim")
    return table


def _matrix(mapping: Mapping, *, several: bool) -> Table:
    view = mapping.view
    unit, size = unit_of(float(view.sent.max(initial=0.0)))
    title = f"{view.title}, {unit}" + (f", {mapping.name}" if several else "")
    table = Table(title=Text(f"{title} (rows send, columns receive)"), title_justify="left")
    table.add_column("", no_wrap=True, min_width=min(14, max(map(len, view.labels))))
    for label in view.labels:
        table.add_column(name_cell(label), justify="right", no_wrap=True)
    for label, row in zip(view.labels, view.rows, strict=True):
        table.add_row(name_cell(label), *[f"{value / size:.3g}" if value else "" for value in row])
    return table
