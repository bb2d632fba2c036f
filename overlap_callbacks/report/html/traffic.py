"""Who sends how much to whom: the traffic of a step."""

from __future__ import annotations

from overlap_callbacks.analysis.communication.heat_map import bytes_in_words, strength
from overlap_callbacks.analysis.communication.view import PHYSICAL, TrafficView
from overlap_callbacks.analysis.formatting import page_text, rounded
from overlap_callbacks.report.html.elements import Block, Cell, Chart, Section, Table, heads
from overlap_callbacks.report.html.run import RunView
from overlap_callbacks.report.html.tables import EMPTY, name_cell
from overlap_callbacks.report.traffic import RunTraffic, between_hosts, latest_messages, traffic_of
from overlap_callbacks.report.traffic_words import (
    SENT,
    crossing_in_words,
    kinds_of,
    regularity,
    size_in_words,
    stage_in_words,
)


def traffic(view: RunView) -> Section | None:
    """What is sent in a step; None where the record does not tell."""
    if latest_messages(view.record) is None:
        return None
    found = traffic_of(view.record, order=PHYSICAL)
    as_run = found.mappings[0]
    sent = sum(row.sent_bytes for row in as_run.dimensions)
    crossing = crossing_in_words(between_hosts(as_run), sent, found.num_hosts)
    answer = (
        f"In a step the ranks send {bytes_in_words(sent)}. {crossing} {regularity(found.num_steps, found.num_alike)}"
    )
    blocks: list[Block] = []
    if sent > 0:
        blocks.append(heat_map(as_run.view))
    blocks += [dimension_table(found), group_table(found), size_table(found)]
    return Section("Who sends what to whom?", answer, blocks)


def heat_map(view: TrafficView) -> Chart:
    """The matrix as cells, the stronger the more is sent."""
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
    return Chart("heatMap", view.title, {"labels": labels, "cells": cells, "bounds": list(view.bounds)}, caption)


def dimension_table(found: RunTraffic) -> Table:
    """What all ranks send, by dimension of parallelism."""
    rows = []
    for row in found.mappings[0].dimensions:
        crossing = EMPTY if row.between_hosts_bytes is None else _bytes(row.between_hosts_bytes)
        rows.append(
            (
                name_cell(row.dimension),
                Cell(f"{row.messages:,}", row.messages),
                _bytes(row.bytes),
                _bytes(row.sent_bytes),
                crossing,
            )
        )
    return Table(
        "Traffic by dimension of parallelism",
        heads("*Dimension", "Messages", "Bytes", "Sent", "Between hosts"),
        tuple(rows),
        f"All ranks, the recorded step of window {found.window}. {SENT}",
    )


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
        heads("*Dimension", "Stage", "*Collective", "Group", "Ranks", "Messages", "Bytes"),
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
        heads("*Dimension", "*Collective", "From", "Messages", "Bytes"),
        tuple(rows),
        "All ranks. A row holds messages of this size or more, and less than twice that.",
        folded=True,
    )


def _bytes(value: float) -> Cell:
    return Cell(bytes_in_words(value), value)
