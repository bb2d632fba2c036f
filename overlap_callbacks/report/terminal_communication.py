"""How well a run communicates, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.communication.heat_map import bytes_in_words
from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.stages import PipelineBubble
from overlap_callbacks.analysis.stragglers import Straggler
from overlap_callbacks.report.communication_words import (
    BUBBLE,
    BY_SIZE,
    LATE,
    Bandwidths,
    Waiting,
    bandwidths_of,
    bubble_sentence,
    latest_pipeline,
    peaks_in_words,
    reach_in_words,
    shares_sentence,
    shares_window,
    waiting_of,
    waiting_sentence,
    windows_in_words,
)
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.terminal_cells import name_cell

# Rows of a table; ``--json`` has all.
_MAX_ROWS = 40


def communication_details(record: Record) -> dict[str, list[RenderableType]]:
    """What ``overlap show`` says of it, by subject."""
    details: dict[str, list[RenderableType]] = {}
    shares = shares_window(record)
    if shares is not None:
        details["shares of a step"] = [Text(), Text(shares_sentence(shares.dimension_shares()))]
    pipeline = latest_pipeline(record)
    if pipeline is not None:
        details["bubble by stage"] = [Text(), *bubble_parts(*pipeline)]
    waiting = waiting_of(record)
    if waiting is not None:
        details["who comes last"] = [Text(), *waiting_parts(waiting)]
    by_size = bandwidths_of(record)
    if by_size is not None:
        details["bandwidth by size"] = [Text(), *bandwidth_parts(by_size)]
    return details


def waiting_parts(found: Waiting) -> list[RenderableType]:
    """Who comes last, in a sentence and as tables."""
    parts: list[RenderableType] = [Text(waiting_sentence(found))]
    for title, rows in (("Ranks that come last", found.ranks), ("Hosts whose ranks come last", found.hosts)):
        if rows:
            parts += [Text(), _late_table(title, found, rows)]
    return [*parts, Text(LATE, style="dim")] if found.ranks or found.hosts else parts


def _late_table(title: str, found: Waiting, rows: Sequence[Straggler]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("who")
    table.add_column("dimension")
    for column in ("steps", "95% interval", "chance", "last", "others\nwait", "lost", "windows"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            name_cell(found.who(row)),
            name_cell(row.dimension),
            PLAIN.percent(row.share, decimals=0),
            row.interval(),
            PLAIN.percent(row.chance, decimals=0),
            PLAIN.percent(row.last_share, decimals=0),
            PLAIN.quantity(row.waiting_ms, "ms"),
            PLAIN.percent(row.lost_fraction),
            windows_in_words(row),
            style=None if row.sure else "dim",
        )
    return table


def bandwidth_parts(found: Bandwidths) -> list[RenderableType]:
    """The table of sizes, and what its shares are of."""
    table = Table(title=f"Effective bandwidth by size (window {found.window})", title_justify="left")
    table.add_column("dimension")
    table.add_column("collective")
    # Where no link is known the column would be empty, and the names are short of room.
    has_peaks = any(row.peak_fraction is not None for row in found.rows)
    for column in ("ranks", "on", "size", "calls", "time", "GB/s", *(("of peak",) if has_peaks else ())):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found.rows[:_MAX_ROWS]:
        transfer = row.transfer
        table.add_row(
            name_cell(transfer.dimension),
            name_cell(transfer.operator.strip("_")),
            str(transfer.group_size),
            reach_in_words(transfer.reach),
            bytes_in_words(row.mean_bytes),
            str(transfer.calls),
            PLAIN.quantity(row.transfer_ms, "ms"),
            f"{row.gb_s:.3g}",
            *(("" if row.peak_fraction is None else PLAIN.percent(row.peak_fraction),) if has_peaks else ()),
        )
    if len(found.rows) > _MAX_ROWS:
        table.add_row(f"... {len(found.rows) - _MAX_ROWS} more", style="dim")
    return [table, Text(f"{BY_SIZE} {peaks_in_words(found.peaks)}", style="dim")]


def bubble_parts(window: int, pipeline: PipelineBubble) -> list[RenderableType]:
    """The bubble of each stage beside the expected one."""
    table = Table(title=f"Bubble by stage (window {window})", title_justify="left")
    for column in ("stage", "ranks", "step", "bubble", "measured", "expected"):
        table.add_column(column, justify="right", no_wrap=True)
    expected = pipeline.expected_fraction
    for stage in pipeline.stages:
        table.add_row(
            str(stage.stage),
            str(stage.num_ranks),
            PLAIN.quantity(stage.step_ms, "ms"),
            PLAIN.quantity(stage.bubble_ms, "ms"),
            PLAIN.percent(stage.fraction),
            "" if expected is None else PLAIN.percent(expected),
        )
    return [Text(bubble_sentence(pipeline)), table, Text(BUBBLE, style="dim")]
