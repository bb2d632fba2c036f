"""What the terminal's tables of traces have in common."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.formatting import PLAIN, one_line

# Kernels of a trace may be short: microseconds are shown.
number = functools.partial(PLAIN.number, decimals=3)


def plain_table(title: str, first: str, *columns: str, first_width: int = 14) -> Table:
    """A table of figures: the first column has names, the others numbers."""
    table = Table(title=Text(title), title_justify="left")
    table.add_column(Text(first), min_width=first_width)
    for column in columns:
        table.add_column(Text(column), justify="right", no_wrap=True)
    return table


def more(count: int, shown: int, what: str) -> list[RenderableType]:
    """The line below a table that was cut; empty if it was not."""
    return [Text(f"... and {count - shown} more {what}", style="dim")] if count > shown else []


def notes(problems: Iterable[str]) -> list[RenderableType]:
    """Problems as notes, for people; what several files have in common is said once."""
    counts = Counter(problems)
    return [
        Text(f"Note: {problem}" + (f" ({times} files)" if times > 1 else ""), style="yellow")
        for problem, times in counts.items()
    ]


def warnings(problems: Iterable[str]) -> list[RenderableType]:
    """What must be read before any figure, for people."""
    return [Text(f"Attention: {problem}", style="bold red") for problem in problems]


def name_cell(name: str) -> Text:
    """A name as it is, without markup; it is cut where the table is too narrow."""
    return Text(one_line(name), no_wrap=True, overflow="ellipsis")


def change(fraction: float | None) -> str:
    """A relative change, e.g. ``+6.2%``; empty where there is none."""
    return "" if fraction is None else PLAIN.percent(fraction, signed=True)
