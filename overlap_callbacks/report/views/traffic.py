"""Which ranks send how much to which: the traffic of a step, measured or predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from overlap_callbacks.analysis.bench import size_in_words
from overlap_callbacks.analysis.communication.placement import (
    UNKNOWN,
    MappingError,
    equal_hosts,
    host_numbers,
    layout_of,
    order_of,
    parse_order,
    placed,
)
from overlap_callbacks.analysis.communication.rank_grids import Ranks
from overlap_callbacks.analysis.communication.traffic import RING, are_sound, dimension_totals
from overlap_callbacks.analysis.communication.view import LOGICAL, PHYSICAL, Placement, TrafficView, strength, view_of
from overlap_callbacks.analysis.formatting import PLAIN, bytes_in_words, count, page_text, rounded
from overlap_callbacks.analysis.name_rules import collective_in_words, collective_of
from overlap_callbacks.analysis.results.environment import JobEnvironment
from overlap_callbacks.analysis.results.messages import (
    NO_STAGE,
    SEVERAL_STAGES,
    DimensionTraffic,
    JobMessages,
    MessageGroup,
    Sizes,
)
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.elements import (
    MAX_MATRIX,
    Block,
    Cell,
    Chart,
    Column,
    Document,
    Note,
    RunPage,
    Section,
    Table,
    number_cell,
    table_of,
)


def traffic(record: Record) -> list[Section]:
    """The traffic of a step; nothing if the record has none."""
    if latest_messages(record) is None:
        return []
    found = traffic_of(record, MatrixOptions(order=PHYSICAL))
    return [Section("Who sends what to whom?", _answer(found), traffic_blocks(found))]


def _answer(found: RunTraffic) -> str:
    as_run = found.mappings[0]
    sent = sum(row.sent_bytes for row in as_run.dimensions)
    crossing = crossing_in_words(between_hosts(as_run), sent, found.num_hosts)
    return f"In a step the ranks send {bytes_in_words(sent)}. {crossing} {regularity(found.num_steps, found.num_alike)}"


def traffic_document(found: RunTraffic, drawn: Sequence[str], by_size: Sequence[Block]) -> Document:
    """The document of ``overlap traffic``: the traffic, transfer rates by message size, and files with the matrix."""
    where = "" if found.num_hosts is None else f", {count(found.num_hosts, 'host')}"
    blocks = [*traffic_blocks(found, by_size, drawn=bool(drawn)), *_drawn_in(drawn)]
    head = f"A step of all ranks{where}, window {found.window}"
    run = RunPage("traffic", "", head, _answer(found), tuple(blocks), ())
    return Document("Traffic", (run,), "")


def predicted_blocks(mappings: Sequence[Mapping], drawn: Sequence[str]) -> list[Block]:
    """Predicted traffic, by dimension of parallelism, and the matrix, or the files that have it."""
    caption = f"A step of all ranks, as predicted. {SENT}"
    return [dimension_table(mappings, caption, "as given"), *heat_maps(mappings, bool(drawn)), *_drawn_in(drawn)]


def _drawn_in(files: Sequence[str]) -> list[Block]:
    return [Note(f"The matrix is drawn in {page_text(' and '.join(files), 2000)}.")] if files else []


def traffic_blocks(found: RunTraffic, by_size: Sequence[Block] = (), *, drawn: bool = False) -> list[Block]:
    """Who sends what to whom, in each layout of the job; ``drawn``: whether the matrix is in a file."""
    caption = f"All ranks, the recorded step of window {found.window}. {SENT}"
    tables = [group_table(found), size_table(found), *by_size]
    return [*heat_maps(found.mappings, drawn), dimension_table(found.mappings, caption), *tables]


def heat_maps(mappings: Sequence[Mapping], drawn: bool) -> list[Block]:
    """The matrix of each layout that sends anything; if it is in a file, only if a terminal can show it."""
    several = len(mappings) > 1
    return [
        heat_map(mapping.view, mapping.name if several else "")
        for mapping in mappings
        if any(row.sent_bytes > 0 for row in mapping.dimensions)
        and not (drawn and len(mapping.view.labels) > MAX_MATRIX)
    ]


def heat_map(view: TrafficView, layout: str = "") -> Chart:
    """The matrix as cells, stronger for more bytes; with the name of the layout if there are several."""
    most = float(view.sent.max(initial=0.0))
    cells = [
        [row, column, rounded(value), rounded(strength(value, most)), bytes_in_words(value)]
        for row, values in enumerate(view.rows)
        for column, value in enumerate(values)
        if value > 0
    ]
    strongest = bytes_in_words(most)
    caption = f"Rows send, columns receive. The strongest cell is {strongest} a step; shades follow the square root."
    if view.bounds:
        caption += " Lines part the hosts."
    if view.unplaced_bytes:
        caption += f" {bytes_in_words(view.unplaced_bytes)} are in no cell: between which ranks they go is not known."
    labels = [page_text(label, 40) for label in view.labels]
    title = f"{view.title}, {page_text(layout, 40)}" if layout else view.title
    return Chart("heatMap", title, {"labels": labels, "cells": cells, "bounds": list(view.bounds)}, caption)


def dimension_table(mappings: Sequence[Mapping], caption: str, own: str = "as run") -> Table:
    """What all ranks send, by dimension of parallelism, and how much of it crosses hosts in each layout.

    ``own``: name of the job's own layout, the first, next to others.
    """
    totals = mappings[0].dimensions

    def crossing(mapping: Mapping) -> Column[DimensionTraffic]:
        of_mapping = {row.dimension: row.between_hosts_bytes for row in mapping.dimensions}
        head = _between(mapping, own if len(mappings) > 1 else "")
        return Column(head, lambda row: _crossing(of_mapping[row.dimension]))

    made = table_of(
        "Traffic by dimension of parallelism",
        totals,
        Column("~Dimension", lambda row: row.dimension),
        Column("Messages", lambda row: row.messages, "whole"),
        Column("Bytes", lambda row: row.bytes, "bytes"),
        Column("Sent", lambda row: row.sent_bytes, "bytes"),
        *map(crossing, mappings),
        caption=caption,
    )
    if len(totals) < 2:
        return made
    messages, size, sent = (sum([getattr(row, name) for row in totals]) for name in ("messages", "bytes", "sent_bytes"))
    crosses = [_crossing(between_hosts(mapping)).text for mapping in mappings]
    every = ("all", f"{messages:,}", bytes_in_words(size), bytes_in_words(sent), *crosses)
    return dataclasses.replace(made, rows=(*made.rows, tuple(map(Cell, every))))


def _between(mapping: Mapping, own: str) -> str:
    """The head of a layout's column; ``own``: the name of the job's own layout, empty if it is the only one."""
    if not own:
        return "Between hosts"
    return f"Between hosts, {page_text(mapping.name, 40)}" + (f", {own}" if mapping.as_run else "")


def _crossing(value: float | None) -> Cell:
    return Cell("not known") if value is None else number_cell(value, "bytes")


def group_table(found: RunTraffic) -> Table:
    """What each rank sends, by stage."""

    def of_rank(group: MessageGroup, amount: float, in_words: Callable[[float], str]) -> Cell:
        mean = amount / group.num_members
        return Cell(f"{'' if group.alike else 'mean '}{in_words(mean)}", mean)

    groups = found.messages.groups
    return table_of(
        "Messages of each rank",
        groups,
        Column("~Dimension", lambda group: group.dimension),
        Column("Stage", lambda group: Cell(stage_in_words(group.stage), group.stage)),
        Column("~Collective", lambda group: collective_in_words(group.operator)),
        Column("Group", lambda group: Cell(str(group.group_size or ""), group.group_size)),
        Column("Ranks", lambda group: group.num_members, "whole"),
        Column("Messages", lambda group: of_rank(group, group.messages, "{:,.0f}".format)),
        Column("Bytes", lambda group: of_rank(group, group.bytes, bytes_in_words)),
        caption="Messages and bytes are of one rank and step. Ranks are those that send the same. The stage is that of "
        "the pipeline.",
        folded=len(groups) > 12,
    )


def size_table(found: RunTraffic) -> Table:
    rows = [(dimension, kind, *row) for dimension, kind, sizes in kinds_of(found.messages.groups) for row in sizes]
    return table_of(
        "Sizes of messages",
        rows,
        Column("~Dimension", lambda row: row[0]),
        Column("~Collective", lambda row: row[1]),
        Column("From", lambda row: Cell(size_in_words(2 ** row[2] if row[2] >= 0 else 0), row[2])),
        Column("Messages", lambda row: row[3], "whole"),
        Column("Bytes", lambda row: row[4], "bytes"),
        caption="All ranks. A row holds messages of this size or more, and less than twice that.",
        folded=True,
    )


# -- text


SENT = (
    "Bytes are messages times size: the larger of what a call reads and writes on a rank. Sent "
    "is what ranks put on the "
    "wire if collectives run as rings: of an all-reduce of S bytes on n ranks, each rank sends 2(n-1)/n S."
)


def regularity(num_steps: int, num_alike: int) -> str:
    """Whether the counted steps send the same as the recorded step."""
    if not num_steps:
        return "Whether steps send the same was not measured."
    if num_alike == num_steps:
        return "Every counted step sent the same messages as the recorded step, on every rank."
    return (
        f"Of the counted steps, summed over ranks, {PLAIN.percent(num_alike / num_steps)} sent the same messages as "
        "the recorded step: the figures here are of the recorded step."
    )


def stage_in_words(stage: int) -> str:
    return {NO_STAGE: "", SEVERAL_STAGES: "several"}.get(stage, str(stage))


def kinds_of(groups: Sequence[MessageGroup]) -> list[tuple[str, str, Sizes]]:
    """Message sizes by dimension and kind of collective, most bytes first.

    Sends and receives describe the same messages: only sends count.
    """
    sums: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
    for group in groups:
        if group.operator.startswith("recv"):
            continue
        of_kind = sums.setdefault((group.dimension, collective_of(group.operator)), {})
        for size, number, total in group.sizes:
            known = of_kind.get(size, (0, 0))
            of_kind[size] = known[0] + number, known[1] + total
    found = [
        (dimension, kind, tuple([(size, *amounts) for size, amounts in sorted(sizes.items())]))
        for (dimension, kind), sizes in sums.items()
    ]
    return sorted(found, key=lambda item: (-sum([total for _, _, total in item[2]]), item[0], item[1]))


def crossing_in_words(between: float | None, sent: float, num_hosts: int | None) -> str:
    if between is None or num_hosts is None:
        return "Which of it crosses hosts is not known."
    if num_hosts == 1:
        return "All of it stays on one host."
    return f"{bytes_in_words(between)} of it, {PLAIN.percent(between / sent if sent else 0.0)}, crosses hosts."


# -- the messages


class NoTrafficError(ValueError):
    """The record has no messages."""


class Mapping(NamedTuple):
    """The traffic of a layout of the job's dimensions on its hosts.

    Attributes:
        name: the order of the dimensions, innermost first; empty for the job as run, if it has no such order.
        as_run: whether the job ran in this layout.
        dimensions: what is sent.
        view: who sends it to whom.
    """

    name: str
    as_run: bool
    dimensions: tuple[DimensionTraffic, ...]
    view: TrafficView


class RunTraffic(NamedTuple):
    """The traffic of a run, in its own layout and in the one requested by the user.

    Attributes:
        num_steps, num_alike: counted steps of all windows, summed over ranks, and those that sent the same.
        num_hosts: hosts; None if not known.
    """

    window: int
    messages: JobMessages
    num_steps: int
    num_alike: int
    num_hosts: int | None
    mappings: tuple[Mapping, ...]


@dataclass(frozen=True, kw_only=True)
class MatrixOptions:
    """The options of a matrix.

    Attributes:
        by: the meaning of rows and columns; see ``view_of``.
        order: of ranks.
        algorithm: of all-reduces.
        mapping: another order of the dimensions to compare with, e.g. ``tp-dp-pp``.
        ranks_per_host: assume hosts of this many consecutive ranks each, instead of the known ones.
    """

    by: str | None = None
    order: str = LOGICAL
    algorithm: str = RING
    mapping: str | None = None
    ranks_per_host: int | None = None


_DEFAULTS = MatrixOptions()


def traffic_of(record: Record, options: MatrixOptions = _DEFAULTS, *, names: bool = True) -> RunTraffic:
    """The traffic of a run; hosts have their names if the record has them, otherwise numbers.

    Raises:
        NoTrafficError: the record has no messages.
        MappingError: the job cannot be laid out like that.
        ViewError: the traffic cannot be shown like that.
    """
    window = latest_messages(record)
    if window is None or window.messages is None:
        raise NoTrafficError(f"{record.path} has no messages: it is of an earlier version, or no window was measured")
    messages = window.messages
    if options.ranks_per_host is None:
        hosts = host_numbers(messages, window.world_size)
        host_names = _names(hosts, record.job_environment) if names else {}
    else:
        hosts, host_names = equal_hosts(window.world_size, options.ranks_per_host), {}
    placement = Placement(hosts, host_names)
    counted = [report.traffic for report in record.windows if report.traffic is not None]
    counted = [traffic for traffic in counted if 0 <= traffic.num_alike <= traffic.num_steps]  # others are implausible
    return RunTraffic(
        window=window.window,
        messages=messages,
        num_steps=sum([traffic.num_steps for traffic in counted]),
        num_alike=sum([traffic.num_alike for traffic in counted]),
        num_hosts=placement.num_hosts if placement.known else None,
        mappings=_laid_out(messages, placement, options),
    )


def predicted_traffic(
    messages: JobMessages, world_size: int, options: MatrixOptions = _DEFAULTS
) -> tuple[Mapping, ...]:
    """The predicted traffic of a job. Without ``ranks_per_host`` hosts are unknown.

    Raises:
        MappingError: the job cannot be laid out like that.
        ViewError: the traffic cannot be shown like that.
    """
    if options.ranks_per_host is None:
        hosts = np.full(world_size, UNKNOWN, dtype=np.int64)
    else:
        hosts = equal_hosts(world_size, options.ranks_per_host)
    return _laid_out(messages, Placement(hosts), options)


def _laid_out(messages: JobMessages, placement: Placement, options: MatrixOptions) -> tuple[Mapping, ...]:
    """The traffic of a job in its own layout, and in another order of its dimensions if requested."""

    def mapped(name: str, placement: Placement, *, as_run: bool) -> Mapping:
        totals, _ = dimension_totals(messages, placement.hosts, options.algorithm)
        view = view_of(messages, placement, by=options.by, order=options.order, algorithm=options.algorithm)
        return Mapping(name, as_run, totals, view)

    try:
        layout = layout_of(messages, len(placement.hosts))
    except MappingError:
        if options.mapping is not None:
            raise
        layout = ()
    found = [mapped(order_of([dimension.name for dimension in layout]), placement, as_run=True)]
    if options.mapping is not None:
        other = parse_order(options.mapping, layout)
        moved = Placement(placement.hosts[placed(layout, other)], placement.names)
        found.append(mapped(order_of(other), moved, as_run=False))
    return tuple(found)


def between_hosts(mapping: Mapping) -> float | None:
    """Bytes that cross hosts in all dimensions; None if not known."""
    values = [row.between_hosts_bytes for row in mapping.dimensions]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def host_names(record: Record) -> dict[int, str]:
    """The names of all hosts by number, if the record has them; empty if one is missing."""
    window = latest_messages(record)
    if window is None or window.messages is None:
        return {}
    return _names(host_numbers(window.messages, window.world_size), record.job_environment)


def latest_messages(record: Record) -> OverlapReport | None:
    """The last window with messages (later ones are identical); None if they are implausible."""
    window = record.latest("messages")
    if window is None or window.messages is None or not are_sound(window.messages, window.world_size):
        return None
    return window


def _names(hosts: Ranks, environment: JobEnvironment | None) -> dict[int, str]:
    """The names of all hosts; none if the record names only some of them, which would confuse."""
    places = () if environment is None else environment.places
    names = {int(hosts[place.rank]): place.hostname for place in reversed(places) if place.rank < len(hosts)}
    return names if len(names) == int(hosts.max(initial=-1)) + 1 else {}
