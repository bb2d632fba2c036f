"""The shares of the causes of a compute slowdown, as a table for the terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.report import OverlapReport


def cause_parts(window: OverlapReport) -> list[RenderableType]:
    """The table of a window, and its notes; nothing where no cause is known."""
    found = window.slowdown_shares
    if found is None:
        return []
    title = f"Causes of the compute slowdown of {PLAIN.percent(found.slowdown)} (window {window.window})"
    table = Table(title=title, title_justify="left")
    table.add_column("cause")
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("rests on")
    before = ""
    for share in found.shares:
        basis = "the same" if share.basis == before else share.basis
        table.add_row(share.cause, PLAIN.percent(share.fraction, signed=True), Text(basis))
        before = share.basis
    return [Text(), table, *(Text(f"- {note}") for note in found.notes)]
