"""Shares against time as a line of bars of any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.text import Text

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
