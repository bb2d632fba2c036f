"""The elements of a screen, as plain data; ``html`` and ``terminal`` draw them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, TypedDict, TypeVar, Unpack

from overlap_callbacks.analysis.formatting import (
    PAGE,
    bytes_in_words,
    decimals_of,
    hides,
    millisecond_decimals,
    page_text,
    rounded,
    value_and_certainty,
)
from overlap_callbacks.analysis.results.estimate import Estimate

# The largest matrix that fits a terminal, in ranks or hosts.
MAX_MATRIX = 8
EMPTY_LEGEND: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Note:
    """A sentence, e.g. on what was not measured and why.

    Attributes:
        warning: whether it casts doubt on figures. A terminal always shows it.
        first: whether a terminal shows it even if not asked for everything; a warning then precedes the verdict.
    """

    kind: ClassVar[str] = "note"
    text: str
    warning: bool = False
    first: bool = False


@dataclass(frozen=True)
class Tile:
    """One large figure: its name, value and interval, and a short remark."""

    label: str
    value: str
    interval: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Tiles:
    """Figures side by side."""

    kind: ClassVar[str] = "tiles"
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Chart:
    """A chart, drawn by the function ``draw`` of ``page.js``.

    Attributes:
        data: its arguments, as plain JSON.
        caption: how to read it.
        legend: names and colours; a colour is the name of a CSS variable, without its leading dashes.
        narrow: whether two may be placed side by side.
        in_table: whether a table has its figures, so that a terminal can leave it out.
    """

    kind: ClassVar[str] = "chart"
    draw: str
    title: str
    data: dict[str, Any]
    caption: str = ""
    legend: tuple[tuple[str, str], ...] = EMPTY_LEGEND
    narrow: bool = False
    in_table: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        sort: sort key; None for an empty cell, which comes last in either direction.
        full: the full text, if it is shortened.
    """

    text: str
    sort: float | str | None = None
    full: str = ""


Row = tuple[Cell, ...]


@dataclass(frozen=True)
class Head:
    """The header of a column.

    Attributes:
        words: whether the column holds words, aligned left; numbers are aligned right.
        names: whether these are names, which a terminal may cut.
        below: whether a terminal puts it below the previous column, e.g. an interval.
        only: the only medium that shows this column, ``page`` or ``terminal``; empty for both.
    """

    text: str
    words: bool = False
    names: bool = False
    below: bool = False
    only: str = ""


def heads(*texts: str | Head) -> tuple[Head, ...]:
    """Headers from texts with prefixes: ``*`` words, ``~`` names, ``_`` below the previous column in a terminal, ``-``
    only on the page, ``+`` only in a terminal. A user's text may begin with one of these: make it a ``Head``.
    """
    made = []
    for text in texts:
        if isinstance(text, Head):
            made.append(text)
            continue
        shown = text.lstrip("*~_-+")
        marks = text[: len(text) - len(shown)]
        only = "page" if "-" in marks else "terminal" if "+" in marks else ""
        made.append(Head(shown, "*" in marks or "~" in marks, "~" in marks, "_" in marks, only))
    return tuple(made)


@dataclass(frozen=True)
class Table:
    """A table, sorted by clicking on a column.

    Attributes:
        caption: how to read it.
        folded: whether it is closed at first.
        sorts: whether it can be sorted; not if rows build on each other.
        first: whether a terminal shows it even if not asked for everything.
        few: number of rows shown then.
    """

    kind: ClassVar[str] = "table"
    title: str
    columns: tuple[Head, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    folded: bool = False
    sorts: bool = True
    first: bool = False
    few: int = 12

    def on(self, medium: str) -> Table:
        """The table with only the columns of a medium, ``page`` or ``terminal``."""
        return self.with_columns([place for place, head in enumerate(self.columns) if head.only in ("", medium)])

    def without_empty_columns(self) -> Table:
        """The table without columns that have no text."""
        return self.with_columns(
            [place for place in range(len(self.columns)) if any(row[place].text for row in self.rows)]
        )

    def with_columns(self, places: Sequence[int]) -> Table:
        rows = tuple([tuple([row[place] for place in places]) for row in self.rows])
        return replace(self, columns=tuple([self.columns[place] for place in places]), rows=rows)


@dataclass(frozen=True)
class Facts:
    """Names and values, e.g. of the configuration."""

    kind: ClassVar[str] = "facts"
    title: str
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Download:
    """A file embedded in the page for download: its content in base64, and how to use it."""

    kind: ClassVar[str] = "download"
    text: str
    file_name: str
    media_type: str
    content: str
    remark: str = ""


Block = Note | Tiles | Chart | Table | Facts | Download


@dataclass(frozen=True)
class Section:
    """A question and its answer.

    Attributes:
        answer: one or two sentences.
        blocks: the evidence.
        folded: whether the blocks are hidden at first.
    """

    title: str
    answer: str = ""
    blocks: Sequence[Block] = field(default_factory=tuple)
    folded: bool = False


@dataclass(frozen=True)
class RunPage:
    """One run.

    Attributes:
        id: its anchor.
        head: what ran where, in one line.
        blocks: below the verdict.
        more: lines below the verdict: its intervals; why it is missing or doubtful, and what to do.
        figures: the figures as a table, if no chart can be drawn.
    """

    id: str
    name: str
    head: str
    verdict: str
    blocks: tuple[Block, ...]
    sections: tuple[Section, ...]
    more: tuple[str, ...] = ()
    figures: Table | None = None


@dataclass(frozen=True)
class Document:
    """The content of a page or a terminal.

    Attributes:
        method: how its figures were obtained.
        heading: what is compared.
        verdict: of the comparison, in a sentence; empty for the heading only.
        more: lines below it.
        compared: sections below these, if there are several runs.
        rest: command that shows the tables omitted by a terminal; empty if it omits nothing.
        all_rows: the option with which a terminal shows all rows of a table.
        max_rows: rows of a table in a terminal that shows everything; None for all.
        brief: whether a terminal leaves out captions and answers unless it shows everything.
    """

    title: str
    runs: tuple[RunPage, ...]
    method: str
    heading: str = ""
    verdict: str = ""
    more: tuple[str, ...] = ()
    compared: tuple[Section, ...] = ()
    rest: str = ""
    all_rows: str = "--all"
    max_rows: int | None = 50
    brief: bool = False


# -- cells and tables from values


EMPTY = Cell("")

# Number formats; see ``number_cell``.
Show = Literal["whole", "percent", "whole percent", "change", "bytes", "ms"]
_FORMATTERS: dict[Show, Callable[[float], str]] = {
    "whole": functools.partial(PAGE.number, decimals=0),
    "percent": PAGE.percent,
    "whole percent": functools.partial(PAGE.percent, decimals=0),
    "change": functools.partial(PAGE.percent, signed=True),
    "bytes": bytes_in_words,
    "ms": PAGE.milliseconds,
}


def name_cell(name: str, shown: str | None = None) -> Cell:
    """A name from the record. A long one is cut; the page shows it in full on hovering."""
    whole = page_text(name, 2000)
    short = page_text(name if shown is None else shown)
    return Cell(short, short.lower(), whole if whole != short else "")


def number_cell(value: float | None, show: Show | int | None = None) -> Cell:
    """A number, with decimals by its size or as given, or in one of the formats of ``Show``; None is empty."""
    if value is None:
        return EMPTY
    if show is None:
        return Cell(PAGE.by_size(value), value)
    return Cell(PAGE.number(value, show) if isinstance(show, int) else _FORMATTERS[show](value), value)


def estimate_cells(estimate: Estimate | None, unit: str, *, signed: bool = False) -> tuple[Cell, Cell]:
    """A figure and its interval; empty if there is none."""
    if estimate is None:
        return EMPTY, EMPTY
    bounds = PAGE.interval(estimate, unit, signed=signed)
    shown = Cell(PAGE.quantity(estimate.value, unit, signed=signed), rounded(estimate.value))
    return shown, Cell(bounds, rounded(estimate.ci_low)) if bounds else EMPTY


def estimate_tile(label: str, estimate: Estimate, unit: str, remark: str = "") -> Tile:
    """A large figure with its interval; a change in percent with its sign if it is clear, else how certain it is."""
    if unit == "fraction":
        return Tile(label, *value_and_certainty(estimate, PAGE), remark)
    return Tile(label, PAGE.quantity(estimate.value, unit), PAGE.interval(estimate, unit), remark)


_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Column(Generic[_Item]):
    """A column of a table of items.

    Attributes:
        head: as in ``heads``.
        read: returns an item's value, which may be an estimate, or its cell.
        show: number format, as in ``number_cell``.
    """

    head: str | Head
    read: Callable[[_Item], Any]
    show: Show | int | None = None

    def cell(self, item: _Item) -> Cell:
        """The cell of an item: a name in a column of words, otherwise a number."""
        value = self.read(item)
        if isinstance(value, Cell):
            return value
        if heads(self.head)[0].words:
            return name_cell(value)
        return number_cell(value.value if isinstance(value, Estimate) else value, self.show)


class _Options(TypedDict, total=False):
    """Further attributes of a ``Table``."""

    caption: str
    folded: bool
    sorts: bool
    first: bool
    few: int


def interval_columns(
    head: str, cells: Callable[[_Item], tuple[Cell, Cell]], interval: str = "_95% interval"
) -> tuple[Column[_Item], Column[_Item]]:
    """A figure's column and one for its interval, from a function that makes both cells of an item."""
    return Column(head, lambda item: cells(item)[0]), Column(interval, lambda item: cells(item)[1])


def _with_equal_decimals(column: Column[_Item], items: Sequence[_Item]) -> Column[_Item]:
    """A column of numbers, with the decimals of its largest one."""
    if column.show not in (None, "ms") or heads(column.head)[0].words:
        return column
    values = [value.value if isinstance(value, Estimate) else value for value in map(column.read, items)]
    largest = max([abs(value) for value in values if isinstance(value, (int, float))], default=None)
    if largest is None:
        return column
    return replace(column, show=millisecond_decimals(largest) if column.show == "ms" else decimals_of(largest))


def table_of(
    title: str, items: Iterable[_Item], *columns: Column[_Item], drop_empty: bool = False, **options: Unpack[_Options]
) -> Table:
    """A table with one row per item; ``drop_empty`` omits columns without text."""
    items = list(items)
    columns = tuple([_with_equal_decimals(column, items) for column in columns])
    rows = tuple([tuple([column.cell(item) for column in columns]) for item in items])
    made = Table(title, heads(*[column.head for column in columns]), rows, **options)
    return made.without_empty_columns() if drop_empty else made


# -- charts from values


# Above this number of points, a line's intervals are drawn as a band.
MAX_WHISKERS = 60
# Maximum runs in one chart; the page's style has a colour for each.
RUN_COLORS = ("run1", "run2", "run3", "run4", "run5", "run6")

# A point's position along the axis, its series, and its value.
Point = tuple[Any, Any, "Estimate | float | None"]


def drawn_value(figure: Estimate | float | None, largest: float = 0.0) -> list[float | None]:
    """A value and the ends of its interval, unless this hides the chart's values, of which ``largest`` is one."""
    if isinstance(figure, Estimate):
        if hides(figure, max(largest, abs(figure.value))):
            return [rounded(figure.value), None, None]
        return [rounded(figure.value), rounded(figure.ci_low), rounded(figure.ci_high)]
    return [rounded(figure), None, None]


def bar(figure: Estimate | float, /, **known: str) -> dict[str, Any]:
    """A bar with its interval and further attributes, e.g. label and colour."""
    return {**known, **dict(zip(("value", "low", "high"), drawn_value(figure), strict=True))}


def line(name: str, color: str, points: Iterable[Point], **more: Any) -> dict[str, Any]:
    points = list(points)
    largest = max([abs(figure.value) for *_, figure in points if isinstance(figure, Estimate)], default=0.0)
    drawn = [[*at, *drawn_value(figure, largest)] for *at, figure in points]
    return {"name": name, "color": color, "points": drawn, **more}


def has_intervals(lines: Iterable[dict[str, Any]]) -> bool:
    return any(point[3] is not None for line in lines for point in line["points"])


def legend_of(lines: Iterable[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    return tuple([(line["name"], line["color"]) for line in lines])


def use_whiskers(lines: Iterable[dict[str, Any]]) -> bool:
    """Whether the intervals of the lines are drawn as whiskers."""
    return max([len(line["points"]) for line in lines]) <= MAX_WHISKERS


def line_chart(
    title: str,
    unit: str,
    lines: Sequence[dict[str, Any]],
    caption: str,
    excluded: Sequence[int] = (),
    *,
    zero: bool = True,
    legend: bool = True,
    narrow: bool = False,
) -> Chart:
    """Lines along a run, made by ``line``; with their names, if ``legend``.

    ``excluded``: first steps of windows that do not count. ``zero``: whether the axis extends to zero.
    """
    data = {"unit": unit, "series": list(lines), "excluded": list(excluded), "few": use_whiskers(lines), "zero": zero}
    return Chart("lines", title, data, caption, legend_of(lines) if legend else (), narrow)


def scatter(
    title: str,
    series: dict[str, list[Point]],
    labels: tuple[str, str],
    caption: str,
    limits: Sequence[list[Any]] = (),
) -> Chart:
    """Points of several series, each a name, ``x`` and the figure; ``limits`` are names and values of y."""
    lines = [line(name, color, series[name]) for name, color in zip(series, itertools.cycle(RUN_COLORS), strict=False)]
    data = {"series": lines, "x_label": labels[0], "y_label": labels[1], "limits": list(limits)}
    return Chart("scatter", title, data, caption, legend_of(lines))
