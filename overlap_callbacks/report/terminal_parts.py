"""Cells and tables for the terminal that runs and traces share. It imports little: a small trace is shown at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.text import Text

from overlap_callbacks.analysis.formatting import PLAIN, short_kernel_name
from overlap_callbacks.analysis.safe_text import printable
from overlap_callbacks.report.terminal_cells import name_cell

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from overlap_callbacks.analysis.results.figure import Figure


class SanitizedRenderable:
    """A renderable without the characters that steer a terminal: a name in a record may hold any character."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._content, options):
            yield segment if segment.control else Segment(printable(segment.text, keep="\n"), segment.style)


def row_label(figure: Figure) -> str:
    """What to call a figure in a table of ``SUMMARY``: a part is indented below its whole."""
    return f"  {figure.part_label}" if figure.part_label else figure.label


def kernel_name(name: str) -> Text:
    """A kernel's name for a table, without the parts that all of torch's kernels share."""
    return name_cell(short_kernel_name(name))


def change(fraction: float | None) -> str:
    """A relative change, e.g. ``+6.2%``; empty where there is none."""
    return "" if fraction is None else PLAIN.percent(fraction, signed=True)
