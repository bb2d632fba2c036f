"""Energy against time over configurations, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.trade_off import TradeOffRow
from overlap_callbacks.report.terminal_trace_parts import name_cell


def trade_off_table(rows: Sequence[TradeOffRow], title: str = "Energy against time of a step") -> Table:
    """The rows in their order; those on the Pareto front are marked.

    Args:
        rows: of ``overlap_callbacks.analysis.trade_off.trade_off``.
        title: above the table.
    """
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("")
    for column in ("step ms", "energy J", "power W", "slowdown", "energy saved"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("front")
    for row in rows:
        table.add_row(
            name_cell(row.point.name),
            PLAIN.by_size(row.point.step_ms, "ms"),
            PLAIN.by_size(row.point.energy_j, "J"),
            PLAIN.by_size(row.power_w, "W"),
            PLAIN.percent(row.slowdown, signed=True),
            PLAIN.percent(row.saving, signed=True),
            "yes" if row.on_front else "",
            style="" if row.on_front else "dim",
        )
    table.caption = "front: no other configuration is at least as good in both, and better in one."
    return table
