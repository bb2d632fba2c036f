"""Names of kernels and files in a column of any width: cut in the middle, so that names that differ still do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

from overlap_callbacks.analysis.formatting import one_line, short_kernel_name

_MIN_WIDTH = 12
# Below this width a name is cut at its end alone.
_MIN_CUT = 7


def kernel_cells(names: Sequence[str]) -> list[DistinctCell]:
    """A cell for each name of a column of kernels."""
    return distinct_cells([short_kernel_name(name) for name in names])


def distinct_cells(names: Sequence[str], min_width: int = _MIN_WIDTH) -> list[DistinctCell]:
    """A cell for each name of a column.

    Args:
        names: of the whole column.
        min_width: what it takes even of a narrow terminal.
    """
    shown = [one_line(name, 2000) for name in names]
    return [DistinctCell(name, shown, min_width) for name in shown]


class DistinctCell:
    """A name in a column: as much of it as fits, and the part in which it differs from the others.

    Args:
        name: the name.
        column: all names of the column.
        min_width: what the column takes even of a narrow terminal.
    """

    def __init__(self, name: str, column: Sequence[str], min_width: int) -> None:
        self._name, self._column, self._min_width = name, column, min_width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text(cut(self._name, self._column, options.max_width), no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        length = min(len(self._name), options.max_width)
        return Measurement(min(self._min_width, length), length)


def _shared(name: str, other: str) -> int:
    """How many characters two names begin with alike."""
    pairs = enumerate(zip(name, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(name), len(other)))


def cut(name: str, column: Sequence[str], width: int) -> str:
    """A name of ``width`` characters at most.

    Its beginning stays. If other names of the column have the same beginning, the rest of the width goes to what comes
    from the first character on in which it differs from any of them; else the beginning takes it all.
    """
    if len(name) <= width:
        return name
    if width < _MIN_CUT:
        return name[: max(width - 1, 0)] + "…"[:width]
    others = [other for other in column if other != name]
    shared = max((_shared(name, other) for other in others), default=0)
    if shared < width - 2:
        return name[: width - 1] + "…"
    head = width // 3
    tail = width - head - 1
    # Some characters before the difference show where it is.
    begin = max(min(shared - min(4, tail - 2), len(name) - tail), head)
    rest = name[begin:]
    return name[:head] + "…" + (rest if len(rest) <= tail else rest[: tail - 1] + "…")
