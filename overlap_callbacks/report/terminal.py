"""Draws a document in the terminal. What only a chart can show is left to the page."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from overlap_callbacks.analysis.formatting import MINUS, NBSP, PAGE, count, cut, shortened, unit_of
from overlap_callbacks.analysis.safe_text import printable
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
    Tile,
    Tiles,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from overlap_callbacks.report.views.short import Short

_LOOK: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "title_justify": "left"}
_MAX_LENGTH = 4000
# Minimum width of a name column, even in a narrow terminal.
_MIN_WIDTH = 12
# Longest bar of a step time.
_MAX_BAR = 50
# Lines of the short screen; and what gives way first if it has more, and how many of its lines are left.
MAX_LINES = 20
_GIVES_WAY = (
    ("head", 0), ("odd", 3), ("doubts", 4), ("headline", 5), ("cost", 2), ("odd", 2), ("doubts", 2), ("arms", 1),
    ("attention", 3), ("last blank", 0), ("attention", 2), ("blank", 0), ("odd", 1), ("parts", 1), ("doubts", 1),
    ("cost", 1), ("attention", 1), ("arms", 0), ("causal", 0), ("headline", 4), ("step", 2), ("first blank", 0),
    ("step", 1), ("rest", 2),
)  # fmt: skip
# Lines of the screen of a trace.
MAX_SCREEN = 24
_PLAIN = str.maketrans({MINUS: "-", NBSP: " "})


class SanitizedRenderable:
    """A renderable without terminal control characters: a name in a record may contain any character."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._content, options):
            yield segment if segment.control else Segment(printable(segment.text, keep="\n"), segment.style)


def drawn(document: Document, everything: bool = False) -> RenderableType:
    """The document: everything, or only verdicts, figures, answers, and elements marked ``first``."""
    return _Screen(document) if document.brief and not everything else Group(*_Drawing(document, everything).parts())


class ShortScreen:
    """The answer of a run in at most ``MAX_LINES`` lines; ``rest`` is the command that shows all tables."""

    def __init__(self, short: Short, rest: str) -> None:
        notes = f", and {count(short.num_notes, 'note')}" if short.num_notes else ""
        self._short, self._rest = short, f"All tables{notes}: {rest}"
        self._causal = f": {rest.removesuffix('--all')}--causal"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        parts, width = self._parts(console, options), options.max_width
        for name, least in _GIVES_WAY:
            if sum(map(len, parts.values())) <= MAX_LINES:
                break
            if name == "headline":
                parts[name] = _wrapped(" ".join(self._short.headline), console, width, "bold")
            parts[name] = _first_lines(parts[name], least, width)
        for lines in parts.values():
            yield from lines

    def _parts(self, console: Console, options: ConsoleOptions) -> dict[str, list[Text]]:
        """The lines of each part, all of them, from top to bottom."""
        short, width = self._short, options.max_width

        def lines(texts: Sequence[str], style: str = "") -> list[Text]:
            return [line for text in texts if text for line in _wrapped(text, console, width, style)]

        bars, windows = list(self._bars(options)), list(self._windows(options))
        return {
            "attention": lines([f"Attention: {text}" for text in short.attention], "bold red"),
            "headline": lines(short.headline, "bold"),
            "doubts": lines(short.doubts),
            "first blank": [Text()] if bars or short.parts else [],
            "bars": bars,
            "parts": lines([short.parts]),
            "blank": [Text()] if windows or short.odd else [],
            "windows": windows,
            "odd": lines([short.odd]),
            "last blank": [Text()],
            "arms": lines([short.arms]),
            "causal": lines([self._delays(width)]),
            "step": lines([short.step]),
            "cost": lines([short.cost]),
            "head": _first_lines(lines([short.head]), 1, width),
            "rest": lines([self._rest], "dim"),
        }

    def _delays(self, width: int) -> str:
        """What delays say, and the command that says more, whole: on one line, or two if it is long."""
        room = width - len(self._causal)
        said = shortened(self._short.causal, room if room >= width / 2 else max(room, 0) + width - 20)
        return f"{said}{self._causal}" if said else ""

    def _bars(self, options: ConsoleOptions) -> Iterator[Text]:
        bars = self._short.bars
        longest = max([bar.ms for bar in bars], default=0.0) or 1.0
        label = max([len(bar.label) for bar in bars], default=0)
        words = max([len(bar.words) for bar in bars], default=0)
        room = min(_MAX_BAR, options.max_width - label - words - 4)
        for bar in bars:
            drawn = ("#" if options.ascii_only else "█") * round(room * bar.ms / longest)
            yield _text(f"{bar.label.ljust(label)}  {drawn}  {bar.words}")

    def _windows(self, options: ConsoleOptions) -> Iterator[Text]:
        short = self._short
        if short.windows:
            # Figures are not cut: in a narrow terminal columns are closer, and then words are left out.
            for gap, left_out in (("  ", ""), (" ", ""), (" ", "a difference of ")):
                lines = self._window_lines(gap, left_out)
                if all(len(line) <= options.max_width for line, has_times in lines if has_times):
                    break
            for line, _ in lines:
                yield Text(shortened(line, options.max_width), no_wrap=True, overflow="ellipsis")
        if short.saved:
            # The lowest has a bar too, so that no window looks as if it were missing.
            low, high = min(0.0, *short.saved), max(0.0, *short.saved)
            shares = [(1 + 7 * (value - low) / ((high - low) or 1.0)) / 8 for value in short.saved]
            yield from _Bars("saved", shares).lines(options)

    def _window_lines(self, gap: str, left_out: str) -> list[tuple[str, bool]]:
        """A line for each window, and whether it has step times."""
        rows, lines = self._short.windows, []
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells, has_times = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)], any(row[2:-1])
            shown = (*(cells[:-1] if has_times else cells[:2]), row[-1].replace(left_out, ""))
            lines.append((_plain(gap.join(shown)), has_times))
        return lines


class _Room(NamedTuple):
    """How many tables a screen has, their rows, and how long each note and each line of the verdict may be."""

    tables: int
    rows: int
    max_length: int


# From all to little, the last with notes of one line.
_ROOMS = (*itertools.product((9, 3, 2, 1), (9, 3, 2)), (1, 9), (1, 4), (1, 2))


class _Screen:
    """As much of a document as fits on a screen of ``MAX_SCREEN`` lines."""

    def __init__(self, document: Document) -> None:
        self._document = document

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        parts: list[RenderableType] = []
        for place, room in enumerate(_ROOMS, -len(_ROOMS)):
            max_length = _MAX_LENGTH if place < -3 else options.max_width
            parts = list(_Drawing(self._document, False, _Room(*room, max_length)).parts())
            if len(console.render_lines(Group(*parts), options, pad=False)) <= MAX_SCREEN:
                break
        yield from parts


class _Drawing:
    def __init__(self, document: Document, everything: bool, room: _Room | None = None) -> None:
        self._document, self._everything, self._room = document, everything, room
        self._left_out_charts = False
        self._num_tables = 0

    def parts(self) -> Iterator[RenderableType]:
        document, several = self._document, bool(self._document.compared)
        if several:
            if first := document.verdict or document.heading:
                yield from self._verdict(first, document.more, document.compared[0].blocks)
            yield from self._sections(document.compared)
        for run in document.runs if self._everything or not several else ():
            if several:
                yield Text()
                yield _text(f"{run.name} · {run.head}", "bold underline")
            yield from self._verdict(run.verdict, run.more, run.blocks)
            if run.head and not several:
                yield _text(run.head, "dim")
            yield from self._run(run)
        if self._everything and self._left_out_charts:
            yield Text()
            yield Text("The page has charts too: overlap report.", style="dim")
        elif document.rest and not self._everything:
            yield _text(document.rest, "dim")

    def _run(self, run: RunPage) -> Iterator[RenderableType]:
        yield from self._blocks([block for block in run.blocks if isinstance(block, Note)])
        if run.figures is not None:
            yield Text()
            yield from drawn_table(run.figures)
        yield from self._blocks([block for block in run.blocks if not isinstance(block, Note)])
        yield from self._sections(run.sections)

    def _sections(self, sections: Sequence[Section]) -> Iterator[RenderableType]:
        document = self._document
        for section in sections:
            parts = list(self._blocks(section.blocks))
            if self._everything and (parts or section.answer):
                yield Text()
                yield _text(section.title, "bold underline")
                yield from [_text(section.answer)] if section.answer else []
            elif section.answer and not document.brief and not section.folded:
                yield Text()
                yield Text.assemble((f"{_plain(section.title)} ", "bold"), _plain(section.answer))
            yield from parts

    def _blocks(self, blocks: Sequence[Block]) -> Iterator[RenderableType]:
        everything, document = self._everything, self._document
        for block in blocks:
            if isinstance(block, Table) and (everything or block.first) and self._has_room(block):
                yield Text()
                if everything or not document.rest:
                    yield from drawn_table(block, document.max_rows)
                else:
                    few = block.few if self._room is None else min(block.few, self._room.rows)
                    yield from drawn_table(block, few, document.all_rows, captions=not document.brief)
            elif isinstance(block, Note) and (everything or block.warning or block.first) and not _is_alarm(block):
                yield self._line(f"- {block.text}", "yellow" if block.warning else "")
            elif isinstance(block, Chart) and everything and not block.in_table:
                instead = list(_instead(block))
                self._left_out_charts |= not instead
                yield from instead
            elif isinstance(block, Facts) and everything and block.facts:
                yield Text()
                yield _facts(block.title, block.facts)
            elif isinstance(block, Tiles) and everything:
                yield Text()
                yield _facts("", [(tile.label, _in_words(tile)) for tile in block.tiles])
        notes = [block for block in blocks if isinstance(block, Note) and not block.warning]
        left_out = [note for note in notes if not note.first]
        if left_out and len(left_out) < len(notes) and not everything:
            yield Text(f"... {len(left_out):,} more notes: {document.all_rows} has all", style="dim")

    def _verdict(self, verdict: str, more: Sequence[str], blocks: Sequence[Block]) -> Iterator[RenderableType]:
        """A verdict, preceded by what must be read before any figure."""
        for block in blocks:
            if isinstance(block, Note) and _is_alarm(block):
                yield self._line(f"Attention: {block.text}", "bold red")
        yield _text(verdict, "bold")
        yield from map(self._line, more)

    def _line(self, text: str, style: str = "") -> RenderableType:
        return _text(text if self._room is None else shortened(_plain(text), self._room.max_length), style)

    def _has_room(self, table: Table) -> bool:
        if self._room is None or not table.rows:
            return True
        self._num_tables += 1
        return self._num_tables <= self._room.tables


def _plain(text: str) -> str:
    """Text as a line of its own, in the terminal's characters."""
    return shortened(printable(text.translate(_PLAIN).replace(" · ", ", ")), _MAX_LENGTH)


def _text(text: str, style: str = "") -> Text:
    return Text(_plain(text), style=style)


def _wrapped(text: str, console: Console, width: int, style: str = "") -> list[Text]:
    """Text as lines that fit."""
    lines = list(_text(text, style).wrap(console, width))
    for line in lines:
        line.rstrip()
    return lines


def _first_lines(lines: list[Text], number: int, width: int) -> list[Text]:
    """So many lines of a paragraph; the last ends in an ellipsis, and in the code of the message, if any is cut."""
    if len(lines) <= number or not number:
        return lines[:number]
    rest = " ".join([line.plain for line in lines[number - 1 :]])
    return [*lines[: number - 1], Text(shortened(rest, width), lines[0].style)]


def _is_alarm(note: Note) -> bool:
    return note.warning and note.first


def _in_words(tile: Tile) -> str:
    value = f"{tile.value} ({tile.interval})" if tile.interval else tile.value
    return f"{value}, {tile.remark}" if tile.remark else value


def _facts(title: str, facts: Sequence[tuple[str, str]]) -> RichTable:
    table = RichTable(title=_text(title) if title else None, show_header=False, padding=(0, 2, 0, 0), **_LOOK)
    table.add_column("")
    table.add_column("", overflow="fold")
    for name, value in facts:
        table.add_row(_text(name), _text(value))
    return table


def drawn_table(
    table: Table, max_rows: int | None = None, all_rows: str = "--json", *, captions: bool = True
) -> Iterator[RenderableType]:
    """The table and its caption; nothing if it has no rows.

    Of more than ``max_rows`` rows, the rest is left to the option ``all_rows``.
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
            texts = [_plain(cell.text) for cell in cells]
            made.add_column(Text(_plain(head.text)), overflow="fold")
            columns.append(
                [_DistinctCell(text, texts) for text in texts]
                if head.names
                else [Text(shortened(_plain(cell.full or cell.text))) for cell in cells]
            )
        else:  # a longer head than cell wraps between words
            titles = [_plain(shown.columns[place].text) for place in group]
            lines = [_stacked([_plain(row[place].text) for place in group]) for row in rows]
            longest = max([1, *map(len, " ".join(titles).split()), *[len(line) for cell in lines for line in cell]])
            broken = [line for title in titles for line in textwrap.wrap(title, longest)]
            title = Text("\n".join(broken))
            made.add_column(title, justify="right", overflow="ellipsis", no_wrap=len(group) > 1)
            columns.append([Text("\n".join(cell)) for cell in lines])
    for row in zip(*columns, strict=True):
        made.add_row(*row)
    yield made
    if len(rows) < len(table.rows):
        yield Text(f"... {count(len(table.rows) - len(rows), 'more row')}: {all_rows} has all", style="dim")
    if table.caption and captions:
        yield _text(table.caption, "dim")


def _stacked(texts: Sequence[str]) -> list[str]:
    """Texts below each other. An empty one keeps its line if another follows."""
    while texts and not texts[-1]:
        texts = texts[:-1]
    return [text or "-" for text in texts]


def _instead(chart: Chart) -> Iterator[RenderableType]:
    """The terminal's replacement for a chart; nothing for most.

    A stack becomes text, a small matrix a table, and shares over time lines of bars.
    """
    if chart.draw == "stack":
        yield Text()
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
    elif chart.draw == "against" and chart.data["unit"] == "fraction" and chart.data["x_label"] == "ms":
        yield Text()
        yield _text(chart.title, "bold")
        width = max(len(line["name"]) for line in chart.data["series"])
        for line in chart.data["series"]:
            yield _Bars(_plain(line["name"]).ljust(width), [point[2] for point in line["points"]])
    elif chart.draw == "against" and chart.data.get("signed"):  # a family of arms
        (family,) = chart.data["series"]
        points = [f"{PAGE.percent(value, signed=True)} at {at:,.10g}" for at, _, value, *_ in family["points"]]
        yield _text(f"{chart.title}: {', '.join(points)}")


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


# -- shares over time


_BLOCKS = " ▁▂▃▄▅▆▇█"


class _Bars:
    """Shares of equal parts of the time, from 0 to 1, as a line of bars after a label: as many as fit."""

    def __init__(self, label: str, shares: Sequence[float]) -> None:
        self._label, self._shares = label, shares

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        return self.lines(options)

    def lines(self, options: ConsoleOptions) -> Iterator[Text]:
        width = min(options.max_width - len(self._label) - 1, len(self._shares))
        if width < 1:
            return
        levels = "".join(self._character(share, options.ascii_only) for share in _resampled(self._shares, width))
        yield Text(f"{self._label} {levels}", no_wrap=True)

    def _character(self, share: float, ascii_only: bool) -> str:
        return str(min(int(share * 10), 9)) if ascii_only else _BLOCKS[min(int(share * 8 + 0.5), 8)]


def _resampled(shares: Sequence[float], width: int) -> Iterator[float]:
    """Means over ``width`` equal parts of the time; an input part may contribute to two of them."""
    size = len(shares)
    for i in range(width):
        low, high = i * size / width, (i + 1) * size / width
        total = 0.0
        for k in range(int(low), min(int(high) + 1, size)):
            total += shares[k] * max(min(high, k + 1) - max(low, k), 0.0)
        yield total / (high - low)


# -- names of kernels and files in a column of any width


class _DistinctCell:
    """A name in a column: as much as fits, including the part in which it differs from the column's other names."""

    def __init__(self, name: str, column: Sequence[str]) -> None:
        self._name, self._column = name, column

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text(cut(self._name, self._column, options.max_width), no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        length = min(len(self._name), options.max_width)
        return Measurement(min(_MIN_WIDTH, length), length)
