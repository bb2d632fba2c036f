"""Draws a document in the terminal. What only a chart can show is left to the page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from overlap_callbacks.analysis.communication.heat_map import unit_of
from overlap_callbacks.analysis.formatting import MINUS, NBSP, PAGE, shortened
from overlap_callbacks.analysis.safe_text import printable
from overlap_callbacks.report.terminal_names import distinct_cells
from overlap_callbacks.report.views.elements import (
    MAX_MATRIX,
    Block,
    Chart,
    Document,
    Facts,
    Note,
    RunPage,
    Section,
    Table,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

# Rows of a table; the page, JSON and the record have all of them.
_MAX_ROWS, _MAX_ROWS_OF_ALL = 12, 50
_LOOK: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "title_justify": "left"}
_MAX_LENGTH = 4000
_PLAIN = str.maketrans({MINUS: "-", NBSP: " "})


class SanitizedRenderable:
    """A renderable without the characters that steer a terminal: a name in a record may hold any character."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._content, options):
            yield segment if segment.control else Segment(printable(segment.text, keep="\n"), segment.style)


def drawn(document: Document, everything: bool = False) -> RenderableType:
    """The document, for people.

    Args:
        document: what to show.
        everything: whether to show all tables; if not, only verdicts, figures, answers and what is doubtful.
    """
    return Group(*(_Everything() if everything else _First()).document(document))


def drawn_blocks(blocks: Sequence[Block]) -> Iterator[RenderableType]:
    """Parts of a document by themselves."""
    return _Everything().blocks(blocks)


class _First:
    """What to read first: verdicts, figures, answers, what is doubtful, and the tables that say they are first."""

    def __init__(self) -> None:
        self._rest = ""

    def document(self, document: Document) -> Iterator[RenderableType]:
        self._rest = document.rest
        for run in document.runs:
            yield from self.run(run)
        yield from self.ending()

    def run(self, run: RunPage) -> Iterator[RenderableType]:
        yield _text(run.verdict, "bold")
        yield from map(_text, run.more)
        if run.head:
            yield _text(run.head, "dim")
        warnings = [block for block in run.blocks if isinstance(block, Note)]
        yield from map(_note, warnings)
        if run.figures is not None:
            yield Text()
            yield from drawn_table(run.figures)
        yield from self.blocks([block for block in run.blocks if not isinstance(block, Note)])
        yield from self.sections(run.sections)

    def sections(self, sections: Sequence[Section]) -> Iterator[RenderableType]:
        for section in sections:
            if section.answer and (section.first or not section.folded):
                yield Text()
                yield Text.assemble((f"{_plain(section.title)} ", "bold"), _plain(section.answer))
            yield from self.blocks(section.blocks)

    def blocks(self, blocks: Sequence[Block]) -> Iterator[RenderableType]:
        for block in blocks:
            if isinstance(block, Table) and block.first:
                yield Text()
                yield from drawn_table(block, _MAX_ROWS, "--all") if self._rest else drawn_table(block)
            elif isinstance(block, Note) and (block.warning or block.first):
                yield _note(block)
            elif isinstance(block, Chart) and block.data.get("name_parts"):
                yield Text()
                yield from _instead(block)

    def ending(self) -> Iterator[RenderableType]:
        if self._rest:
            yield Text(self._rest, style="dim")


class _Everything(_First):
    def __init__(self) -> None:
        super().__init__()
        self._has_charts = False

    def sections(self, sections: Sequence[Section]) -> Iterator[RenderableType]:
        for section in sections:
            parts = list(self.blocks(section.blocks))
            if parts or section.answer:
                yield Text()
                yield _text(section.title, "bold underline")
            if section.answer:
                yield _text(section.answer)
            yield from parts

    def blocks(self, blocks: Sequence[Block]) -> Iterator[RenderableType]:
        for block in blocks:
            if isinstance(block, Table):
                yield Text()
                yield from drawn_table(block)
            elif isinstance(block, Note):
                yield _note(block)
            elif isinstance(block, Facts) and block.facts:
                yield Text()
                yield _facts(block)
            elif isinstance(block, Chart):
                instead = list(_instead(block))
                self._has_charts |= not instead
                yield from instead

    def ending(self) -> Iterator[RenderableType]:
        if self._has_charts:
            yield Text()
            yield Text("The page has charts too: overlap report.", style="dim")


def _plain(text: str) -> str:
    """Text as a line of its own, with the characters of a terminal."""
    return shortened(printable(text.translate(_PLAIN).replace(" · ", ", ")), _MAX_LENGTH)


def _text(text: str, style: str = "") -> Text:
    return Text(_plain(text), style=style)


def _note(note: Note) -> Text:
    return _text(f"- {note.text}", "yellow" if note.warning else "")


def _facts(facts: Facts) -> RichTable:
    table = RichTable(title=_text(facts.title), show_header=False, padding=(0, 2, 0, 0), **_LOOK)
    table.add_column("")
    table.add_column("", overflow="fold")
    for name, value in facts.facts:
        table.add_row(_text(name), _text(value))
    return table


def drawn_table(table: Table, max_rows: int = _MAX_ROWS_OF_ALL, all_rows: str = "--json") -> Iterator[RenderableType]:
    """The table, and how to read it; nothing of one without rows.

    Args:
        table: to draw.
        max_rows: that are drawn.
        all_rows: the option that shows the others.
    """
    if not table.rows:
        return
    shown = table.on("terminal")
    rows = shown.rows[:max_rows]
    groups: list[list[int]] = []
    for place, head in enumerate(shown.columns):
        if head.below and groups:
            groups[-1].append(place)
        else:
            groups.append([place])
    space = 1 if len(groups) > 5 else 2
    made = RichTable(title=_text(table.title), padding=(0, space, 0, 0), **_LOOK)
    columns: list[Sequence[RenderableType]] = []
    for group in groups:
        head, cells = shown.columns[group[0]], [row[group[0]] for row in rows]
        if head.words:
            made.add_column(Text(_plain(head.text)), overflow="fold")
            columns.append(
                distinct_cells([_plain(cell.text) for cell in cells])
                if head.names
                else [Text(shortened(_plain(cell.full or cell.text))) for cell in cells]
            )
        else:  # a head is broken between its words, where it is longer than what is below it
            titles = [_plain(shown.columns[place].text) for place in group]
            lines = [[_plain(row[place].text) for place in group if row[place].text] for row in rows]
            longest = max([1, *map(len, " ".join(titles).split()), *[len(line) for cell in lines for line in cell]])
            broken = [line for title in titles for line in textwrap.wrap(title, longest)]
            made.add_column(Text("\n".join(broken)), justify="right", overflow="ellipsis")
            columns.append([Text("\n".join(cell)) for cell in lines])
    for row in zip(*columns, strict=True):
        made.add_row(*row)
    yield made
    if len(table.rows) > max_rows:
        yield Text(f"... {len(table.rows) - max_rows:,} more rows: {all_rows} has all", style="dim")
    if table.caption:
        yield _text(table.caption, "dim")


def _instead(chart: Chart) -> Iterator[RenderableType]:
    """What a terminal has for a chart: the parts of a stack in words, a table for a small matrix; else nothing."""
    if chart.draw == "stack":
        yield _text(chart.title, "bold")
        if chart.data.get("name_parts"):  # the legend has their values
            yield _text(f"  {', '.join(name for name, _ in chart.legend)}")
        else:
            for row in chart.data["rows"]:
                parts = [f"{part['name']} {PAGE.by_size(part['value'])}" for part in row["parts"]]
                yield _text(f"  {row['label']}: {', '.join(parts)} {chart.data['unit']}")
        yield _text(chart.caption, "dim")
    elif chart.draw == "heatMap":
        yield Text()
        if len(chart.data["labels"]) <= MAX_MATRIX:
            yield _matrix(chart)
            yield _text(chart.caption, "dim")
        else:
            yield _text(f"{chart.title} ({chart.data['labels'][0]} to {chart.data['labels'][-1]})")
            yield Text("The matrix is too large for a terminal: overlap traffic --svg or --png draw it.", style="dim")


def _matrix(chart: Chart) -> RichTable:
    labels = [_plain(label) for label in chart.data["labels"]]
    values = {(row, column): value for row, column, value, *_ in chart.data["cells"]}
    unit, size = unit_of(max(values.values(), default=0.0))
    table = RichTable(title=_text(f"{chart.title}, {unit} (rows send, columns receive)"), title_justify="left")
    table.add_column("", no_wrap=True, min_width=min(14, max(map(len, labels))))
    for label in labels:
        table.add_column(Text(label, no_wrap=True, overflow="ellipsis"), justify="right", no_wrap=True)
    for row, label in enumerate(labels):
        sent = [values.get((row, column), 0.0) for column in range(len(labels))]
        table.add_row(Text(label), *[f"{value / size:.3g}" if value else "" for value in sent])
    return table
