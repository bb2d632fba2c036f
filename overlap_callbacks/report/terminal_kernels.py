"""Kernels and what ran beside them, as tables for the terminal: compute and communication apart."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.beside_words import beside_in_words
from overlap_callbacks.analysis.formatting import PLAIN, column_decimals
from overlap_callbacks.analysis.results.kernel_times import KernelTime, PairTime
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report.slowdown_words import (
    PAIRS_TITLE,
    WITH_WAITING,
    left_out_in_words,
    ran_alone,
    together,
    with_losses,
)
from overlap_callbacks.report.terminal_cells import name_cell
from overlap_callbacks.report.terminal_parts import change, kernel_name

# Maximum rows of a table; W&B and the record hold everything.
_MAX_ROWS = 8


def kernel_parts(window: OverlapReport) -> list[RenderableType]:
    """A table of compute kernels, and one of those that communicate."""
    decimals = column_decimals([kernel.overlapped_ms for kernel in window.kernels])
    parts: list[RenderableType] = []
    for communication, title in (
        (False, "Compute kernels that lose most time under overlap"),
        (True, "Communication kernels, overlapped and sequential"),
    ):
        kernels = [kernel for kernel in window.kernels if kernel.communication is communication]
        shown, number = with_losses(kernels, decimals)
        if shown:
            note = WITH_WAITING if communication else together(kernels, window.window, decimals)
            caption = f"Per step, means over the ranks. {note}{left_out_in_words(number, 'kernel', decimals)}"
            parts += [
                Text(),
                _kernel_table(shown, f"{title} (window {window.window})", decimals),
                Text(caption, style="dim"),
            ]
    return parts


def _kernel_table(kernels: Sequence[KernelTime], title: str, decimals: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("kernel")
    for column in ("slowdown", "lost", "overlapped", "sequential"):
        table.add_column(column, justify="right", no_wrap=True)
    for kernel in kernels[:_MAX_ROWS]:
        slowdown = change(kernel.slowdown)
        times = (
            PLAIN.quantity(ms, "ms", decimals=decimals)
            for ms in (kernel.lost_ms, kernel.overlapped_ms, kernel.sequential_ms)
        )
        table.add_row(kernel_name(kernel.name), slowdown, *times)
    if len(kernels) > _MAX_ROWS:
        table.add_row(f"... {len(kernels) - _MAX_ROWS} more", style="dim")
    return table


def pair_parts(pairs: Sequence[PairTime], of: str = "") -> list[RenderableType]:
    """A table of compute kernels by what ran beside them, and one of communication.

    Args:
        pairs: of a window, or of two traces.
        of: what they are of, for the titles.
    """
    parts: list[RenderableType] = []
    for communication, title, note in (
        (False, PAIRS_TITLE, ran_alone(pairs)),
        (True, f"{PAIRS_TITLE}, of communication", WITH_WAITING),
    ):
        of_kind = [pair for pair in pairs if pair.communication is communication]
        decimals = column_decimals([pair.time_ms for pair in of_kind])
        shown, number = with_losses(of_kind, decimals)
        if shown:
            parts += [Text(), pair_table(shown, f"{title} {of}".strip(), decimals)]
            caption = f"{note}{left_out_in_words(number, 'row', decimals)}".strip()
            parts += [Text(caption, style="dim")] if caption else []
    return parts


def pair_table(pairs: Sequence[PairTime], title: str, decimals: int | None = None) -> Table:
    """Kernel families beside collectives, or the other way round, the most expensive first.

    Args:
        pairs: its rows.
        title: above it.
        decimals: of its times; None for those of ``column_decimals`` of these rows.
    """
    if decimals is None:
        decimals = column_decimals([pair.time_ms for pair in pairs])
    table = Table(title=Text(title), title_justify="left")
    table.add_column("kernels")
    table.add_column("beside")
    for column in ("slowdown", "during", "lost", "time", "alone"):
        table.add_column(column, justify="right", no_wrap=True)
    for pair in pairs[:_MAX_ROWS]:
        slowdown, during = change(pair.slowdown), change(pair.slowdown_during)
        times = (PLAIN.quantity(ms, "ms", decimals=decimals) for ms in (pair.lost_ms, pair.time_ms, pair.alone_ms))
        table.add_row(name_cell(pair.victim), name_cell(beside_in_words(pair.beside)), slowdown, during, *times)
    if len(pairs) > _MAX_ROWS:
        table.add_row(f"... {len(pairs) - _MAX_ROWS} more", style="dim")
    return table
