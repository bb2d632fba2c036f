"""What the terminal's tables of traces have in common."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
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


_BLOCKS = " ▁▂▃▄▅▆▇█"


class Bars:
    """Shares over time as one line of bars, as many as fit.

    Args:
        label: what stands before them.
        shares: from 0 to 1, of equal parts of the time.
    """

    def __init__(self, label: str, shares: Sequence[float]) -> None:
        self._label, self._shares = label, shares

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = min(options.max_width - len(self._label) - 1, len(self._shares))
        if width < 1:
            return
        levels = "".join(self._character(share, options.ascii_only) for share in _resampled(self._shares, width))
        yield Text(f"{self._label} {levels}", no_wrap=True)

    def _character(self, share: float, ascii_only: bool) -> str:
        return str(min(int(share * 10), 9)) if ascii_only else _BLOCKS[min(int(share * 8 + 0.5), 8)]


def _resampled(shares: Sequence[float], width: int) -> Iterator[float]:
    """Means over ``width`` equal parts of the time; a part of the input may count in two of them."""
    size = len(shares)
    for i in range(width):
        low, high = i * size / width, (i + 1) * size / width
        total = 0.0
        for k in range(int(low), min(int(high) + 1, size)):
            total += shares[k] * max(min(high, k + 1) - max(low, k), 0.0)
        yield total / (high - low)
