"""Who sends how much to whom: the traffic of a step."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.communication.heat_map import bytes_in_words, strength
from overlap_callbacks.analysis.communication.view import PHYSICAL, TrafficView
from overlap_callbacks.analysis.formatting import PLAIN, count, page_text, rounded
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.messages import NO_STAGE, SEVERAL_STAGES, MessageGroup, Sizes
from overlap_callbacks.report.traffic import Mapping, RunTraffic, between_hosts, latest_messages, traffic_of
from overlap_callbacks.report.views.elements import (
    MAX_MATRIX,
    Block,
    Cell,
    Chart,
    Document,
    Head,
    Note,
    RunPage,
    Section,
    Table,
    heads,
)
from overlap_callbacks.report.views.run import RunView
from overlap_callbacks.report.views.tables import name_cell


def traffic(view: RunView) -> Section | None:
    """What is sent in a step; None where the record does not tell."""
    if latest_messages(view.record) is None:
        return None
    found = traffic_of(view.record, order=PHYSICAL)
    return Section("Who sends what to whom?", _answer(found), traffic_blocks(found))


def _answer(found: RunTraffic) -> str:
    as_run = found.mappings[0]
    sent = sum(row.sent_bytes for row in as_run.dimensions)
    crossing = crossing_in_words(between_hosts(as_run), sent, found.num_hosts)
    return f"In a step the ranks send {bytes_in_words(sent)}. {crossing} {regularity(found.num_steps, found.num_alike)}"


def traffic_document(found: RunTraffic, drawn: Sequence[str], by_size: Sequence[Block]) -> Document:
    """What ``overlap traffic`` shows.

    Args:
        found: of a run.
        drawn: files into which the matrix was drawn.
        by_size: how fast messages of each size were.
    """
    where = "" if found.num_hosts is None else f", {count(found.num_hosts, 'host')}"
    blocks = [*traffic_blocks(found, by_size, drawn=bool(drawn)), *_drawn_in(drawn)]
    head = f"A step of all ranks{where}, window {found.window}"
    run = RunPage("traffic", "", head, _answer(found), tuple(blocks), ())
    return Document("Traffic", (run,), "")


def predicted_blocks(mappings: Sequence[Mapping], drawn: Sequence[str]) -> list[Block]:
    """The traffic that a job should have: by dimension of parallelism, and the matrix.

    Args:
        mappings: the layouts, the job's own first.
        drawn: files into which the matrix was drawn.
    """
    caption = f"A step of all ranks, as predicted. {SENT}"
    return [dimension_table(mappings, caption, "as given"), *heat_maps(mappings, bool(drawn)), *_drawn_in(drawn)]


def _drawn_in(files: Sequence[str]) -> list[Block]:
    return [Note(f"The matrix is drawn in {page_text(' and '.join(files), 2000)}.")] if files else []


def traffic_blocks(found: RunTraffic, by_size: Sequence[Block] = (), *, drawn: bool = False) -> list[Block]:
    """Who sends what to whom, in each layout of the job.

    Args:
        found: of a run.
        by_size: how fast messages of each size were.
        drawn: whether the matrix is in a file.
    """
    caption = f"All ranks, the recorded step of window {found.window}. {SENT}"
    tables = [group_table(found), size_table(found), *by_size]
    return [*heat_maps(found.mappings, drawn), dimension_table(found.mappings, caption), *tables]


def heat_maps(mappings: Sequence[Mapping], drawn: bool) -> list[Block]:
    """The matrix of each layout in which anything is sent; what is in a file, only as far as a terminal can show it."""
    several = len(mappings) > 1
    return [
        heat_map(mapping.view, mapping.name if several else "")
        for mapping in mappings
        if any(row.sent_bytes > 0 for row in mapping.dimensions)
        and not (drawn and len(mapping.view.labels) > MAX_MATRIX)
    ]


def heat_map(view: TrafficView, layout: str = "") -> Chart:
    """The matrix as cells, the stronger the more is sent; with the name of the layout where there are several."""
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
    """What all ranks send, by dimension of parallelism, and in each layout what of it crosses hosts.

    Args:
        mappings: the layouts, the job's own first.
        caption: how to read it.
        own: what to call the job's own layout beside another.
    """
    by_mapping = [{row.dimension: row.between_hosts_bytes for row in mapping.dimensions} for mapping in mappings]
    totals = mappings[0].dimensions
    rows = [
        (
            name_cell(row.dimension),
            Cell(f"{row.messages:,}", row.messages),
            _bytes(row.bytes),
            _bytes(row.sent_bytes),
            *[_crossing(of_mapping[row.dimension]) for of_mapping in by_mapping],
        )
        for row in totals
    ]
    if len(totals) > 1:
        messages = sum(row.messages for row in totals)
        rows.append(
            (
                Cell("all", None),
                Cell(f"{messages:,}", None),
                Cell(bytes_in_words(sum(row.bytes for row in totals)), None),
                Cell(bytes_in_words(sum(row.sent_bytes for row in totals)), None),
                *[Cell(_crossing(between_hosts(mapping)).text, None) for mapping in mappings],
            )
        )
    columns = heads("~Dimension", "Messages", "Bytes", "Sent")
    columns += tuple([Head(_between(mapping, own if len(mappings) > 1 else "")) for mapping in mappings])
    return Table("Traffic by dimension of parallelism", columns, tuple(rows), caption)


def _between(mapping: Mapping, own: str) -> str:
    """The head of a layout's column; ``own`` is what to call the job's own, empty where there is no other."""
    if not own:
        return "Between hosts"
    return f"Between hosts, {page_text(mapping.name, 40)}" + (f", {own}" if mapping.as_run else "")


def _crossing(value: float | None) -> Cell:
    return Cell("not known") if value is None else _bytes(value)


def group_table(found: RunTraffic) -> Table:
    """What each rank sends, by stage."""
    rows = []
    for group in found.messages.groups:
        mean = "" if group.alike else "mean "
        messages, size = group.messages / group.num_members, group.bytes / group.num_members
        rows.append(
            (
                name_cell(group.dimension),
                Cell(stage_in_words(group.stage), group.stage),
                name_cell(group.operator.strip("_")),
                Cell(str(group.group_size or ""), group.group_size),
                Cell(f"{group.num_members:,}", group.num_members),
                Cell(f"{mean}{messages:,.0f}", messages),
                Cell(f"{mean}{bytes_in_words(size)}", size),
            )
        )
    return Table(
        "Messages of each rank",
        heads("~Dimension", "Stage", "~Collective", "Group", "Ranks", "Messages", "Bytes"),
        tuple(rows),
        "Messages and bytes are of one rank and step. Ranks are those that send alike. The stage is that of the "
        "pipeline.",
        folded=len(rows) > 12,
    )


def size_table(found: RunTraffic) -> Table:
    """How large the messages are."""
    rows = [
        (
            name_cell(dimension),
            name_cell(kind),
            Cell(size_in_words(size), size),
            Cell(f"{number:,}", number),
            _bytes(total),
        )
        for dimension, kind, sizes in kinds_of(found.messages.groups)
        for size, number, total in sizes
    ]
    return Table(
        "Sizes of messages",
        heads("~Dimension", "~Collective", "From", "Messages", "Bytes"),
        tuple(rows),
        "All ranks. A row holds messages of this size or more, and less than twice that.",
        folded=True,
    )


def _bytes(value: float) -> Cell:
    return Cell(bytes_in_words(value), value)


# -- in words


SENT = (
    "Bytes are messages times size: the larger of what a call reads and writes on a rank. Sent "
    "is what ranks put on the "
    "wire if collectives run as rings: of an all-reduce of S bytes on n ranks, each rank sends 2(n-1)/n S."
)


def regularity(num_steps: int, num_alike: int) -> str:
    """Whether the counted steps send what the recorded step sends."""
    if not num_steps:
        return "Whether steps send the same was not measured."
    if num_alike == num_steps:
        return "Every counted step sent the same messages as the recorded step, on every rank."
    return (
        f"Of the counted steps, summed over ranks, {PLAIN.percent(num_alike / num_steps)} sent the same messages as "
        "the recorded step: the figures here are of the recorded step."
    )


def stage_in_words(stage: int) -> str:
    """A stage of a pipeline."""
    return {NO_STAGE: "", SEVERAL_STAGES: "several"}.get(stage, str(stage))


def size_in_words(exponent: int) -> str:
    """The sizes of an entry of a histogram, by their lower bound, e.g. ``64 kiB``."""
    if exponent < 0:
        return "0 B"
    for unit, power in (("GiB", 30), ("MiB", 20), ("kiB", 10)):
        if exponent >= power:
            return f"{2 ** (exponent - power)} {unit}"
    return f"{2**exponent} B"


def kinds_of(groups: Sequence[MessageGroup]) -> list[tuple[str, str, Sizes]]:
    """Sizes of messages by dimension and kind of collective, those with most bytes first.

    Sends and receives tell the same messages: sends count.
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
    """How much crosses hosts."""
    if between is None or num_hosts is None:
        return "Which of it crosses hosts is not known."
    if num_hosts == 1:
        return "All of it stays on one host."
    return f"{bytes_in_words(between)} of it, {PLAIN.percent(between / sent if sent else 0.0)}, crosses hosts."
