"""The parts of a screen, as plain data: ``html`` and ``terminal`` draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

# Ranks or hosts of a matrix that a terminal can show.
MAX_MATRIX = 8
EMPTY_LEGEND: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Note:
    """A sentence, e.g. of what was not measured and why.

    Attributes:
        text: the sentence.
        warning: whether it casts doubt on figures.
        first: whether a terminal shows it without being asked for everything, as it does warnings.
    """

    kind: ClassVar[str] = "note"
    text: str
    warning: bool = False
    first: bool = False


@dataclass(frozen=True)
class Tile:
    """One figure, large.

    Attributes:
        label: what it is.
        value: the figure, in words.
        interval: its interval; empty without one.
        remark: a few words more.
    """

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
    """A chart, drawn by the function of ``page.js`` that ``draw`` names.

    Attributes:
        draw: the function.
        title: what it shows.
        data: what the function takes; nothing but JSON.
        caption: how to read it.
        legend: names and colours, the latter as variables of the style sheet without their dashes.
        narrow: whether two stand side by side where there is room.
    """

    kind: ClassVar[str] = "chart"
    draw: str
    title: str
    data: dict[str, Any]
    caption: str = ""
    legend: tuple[tuple[str, str], ...] = EMPTY_LEGEND
    narrow: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what stands in it.
        sort: by what its column sorts; None (last, either way) for an empty cell.
        full: the whole of a text that is shortened.
    """

    text: str
    sort: float | str | None = None
    full: str = ""


@dataclass(frozen=True)
class Head:
    """The head of a column.

    Attributes:
        text: what stands in it.
        words: whether the column is of words, on the left; numbers are on the right.
        names: whether these are names, which a terminal may cut.
        below: whether a terminal writes it below the column before it, e.g. an interval.
        only: the one medium that has the column, ``page`` or ``terminal``; empty for both.
    """

    text: str
    words: bool = False
    names: bool = False
    below: bool = False
    only: str = ""


def heads(*texts: str) -> tuple[Head, ...]:
    """Heads of columns by the marks in front: ``*`` words, ``~`` names, ``_`` below the column before it in a terminal,
    ``-`` on the page only, ``+`` in a terminal only.
    """
    made = []
    for text in texts:
        shown = text.lstrip("*~_-+")
        marks = text[: len(text) - len(shown)]
        only = "page" if "-" in marks else "terminal" if "+" in marks else ""
        made.append(Head(shown, "*" in marks or "~" in marks, "~" in marks, "_" in marks, only))
    return tuple(made)


@dataclass(frozen=True)
class Table:
    """A table that sorts by the column that is clicked.

    Attributes:
        title: what it lists.
        columns: their heads.
        rows: one tuple of cells each.
        caption: how to read it.
        folded: whether it is closed at first.
        sorts: whether the order may be changed; not where rows build on each other.
        first: whether a terminal shows it without being asked for everything.
    """

    kind: ClassVar[str] = "table"
    title: str
    columns: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    folded: bool = False
    sorts: bool = True
    first: bool = False

    def on(self, medium: str) -> Table:
        """The table with the columns of a medium, ``page`` or ``terminal``."""
        return self.with_columns([place for place, head in enumerate(self.columns) if head.only in ("", medium)])

    def with_columns(self, places: Sequence[int]) -> Table:
        """The table with these of its columns."""
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
    """A file that the page holds, to be saved.

    Attributes:
        text: of the link.
        file_name: under which it is saved.
        media_type: of the content.
        content: in base 64.
        remark: what to do with it.
    """

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
        title: the question.
        answer: in a sentence or two.
        blocks: what the answer rests on.
        folded: whether the blocks are hidden at first.
        first: whether a terminal shows the answer without being asked for everything, folded or not.
    """

    title: str
    answer: str = ""
    blocks: Sequence[Block] = field(default_factory=tuple)
    folded: bool = False
    first: bool = False


@dataclass(frozen=True)
class RunPage:
    """One run.

    Attributes:
        id: its anchor.
        name: of its folder.
        head: what ran where, in a line.
        verdict: in a sentence.
        more: lines below it: its intervals; why it is missing or doubtful, and what to do.
        blocks: what stands below the verdict.
        sections: the rest.
        figures: the figures as a table, for where no chart can be drawn.
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
    """What a page or a terminal shows.

    Attributes:
        title: of the browser's window.
        runs: what it is about, one or more.
        method: how its figures were made.
        heading: what is compared.
        verdict: of the comparison, in a sentence; empty for the heading alone.
        more: lines below it.
        compared: sections that come below them, before several runs.
        rest: what shows the tables that a terminal leaves out at first; empty where it leaves out no rows either.
    """

    title: str
    runs: tuple[RunPage, ...]
    method: str
    heading: str = ""
    verdict: str = ""
    more: tuple[str, ...] = ()
    compared: tuple[Section, ...] = ()
    rest: str = ""
