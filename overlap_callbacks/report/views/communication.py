"""How well ranks communicate: who comes last, how fast transfers are, and the bubble of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.communication.heat_map import bytes_in_words
from overlap_callbacks.analysis.formatting import NBSP, PAGE, page_text
from overlap_callbacks.analysis.results.stages import PipelineBubble
from overlap_callbacks.analysis.stragglers import Straggler
from overlap_callbacks.report.communication_words import (
    BUBBLE,
    BY_SIZE,
    LATE,
    Bandwidths,
    Waiting,
    bandwidths_of,
    bubble_sentence,
    latest_pipeline,
    peaks_in_words,
    reach_in_words,
    shares_sentence,
    shares_window,
    waiting_of,
    waiting_sentence,
    windows_in_words,
)
from overlap_callbacks.report.views.elements import Block, Cell, Section, Table, heads
from overlap_callbacks.report.views.run import RunView
from overlap_callbacks.report.views.tables import EMPTY, name_cell, number_cell


def communication(view: RunView) -> list[Section]:
    """The section; none where nothing of it was measured."""
    record = view.record
    sentences: list[str] = []
    blocks: list[Block] = []
    waiting = waiting_of(record)
    if waiting is not None:
        sentences.append(page_text(waiting_sentence(waiting, PAGE), 1000))
        for title, rows in (("Ranks that come last", waiting.ranks), ("Hosts whose ranks come last", waiting.hosts)):
            if rows:
                blocks.append(late_table(title, waiting, rows))
    shares = shares_window(record)
    if shares is not None:
        said = page_text(shares_sentence(shares.dimension_shares(), PAGE), 1000)
        sentences.append(f"{said} That is of window{NBSP}{shares.window}.")
    pipeline = latest_pipeline(record)
    if pipeline is not None:
        sentences.append(bubble_sentence(pipeline[1], PAGE))
        blocks.append(bubble_table(*pipeline))
    by_size = bandwidths_of(record)
    if by_size is not None:
        blocks.append(bandwidth_table(by_size))
    if not sentences and not blocks:
        return []
    return [Section("How well do ranks communicate?", " ".join(sentences), blocks)]


def late_table(title: str, found: Waiting, rows: Sequence[Straggler]) -> Table:
    """Who comes last, and how sure that is."""
    cells = []
    for row in rows:
        cells.append(
            (
                name_cell(found.who(row)),
                name_cell(row.dimension),
                Cell(PAGE.percent(row.share, decimals=0), row.share),
                Cell(row.interval(PAGE), row.low),
                Cell(PAGE.percent(row.chance, decimals=0), row.chance),
                Cell(PAGE.percent(row.last_share, decimals=0), row.last_share),
                number_cell(row.waiting_ms),
                Cell(PAGE.percent(row.lost_fraction), row.lost_fraction),
                Cell(windows_in_words(row), row.windows),
                Cell("yes" if row.sure else "may be chance"),
            )
        )
    return Table(
        title,
        heads(
            "~Who",
            "~Dimension",
            "Steps",
            "95% interval",
            "By chance",
            "Last",
            "Others wait, ms",
            "Lost",
            "Windows",
            "*Sure",
        ),
        tuple(cells),
        LATE,
    )


def bandwidth_table(found: Bandwidths) -> Table:
    """Effective bandwidth of each size."""
    rows = []
    for row in found.rows:
        transfer = row.transfer
        rows.append(
            (
                name_cell(transfer.dimension),
                name_cell(transfer.operator.strip("_")),
                Cell(str(transfer.group_size), transfer.group_size),
                Cell(reach_in_words(transfer.reach)),
                Cell(bytes_in_words(row.mean_bytes), row.mean_bytes),
                Cell(str(transfer.calls), transfer.calls),
                number_cell(row.transfer_ms),
                Cell(f"{row.gb_s:.3g}", row.gb_s),
                EMPTY if row.peak_fraction is None else Cell(PAGE.percent(row.peak_fraction), row.peak_fraction),
            )
        )
    return Table(
        "Effective bandwidth by size",
        heads("~Dimension", "~Collective", "Ranks", "*On", "Size", "Calls", "Time, ms", "GB/s", "Of peak"),
        tuple(rows),
        f"Window {found.window}. {BY_SIZE} {peaks_in_words(found.peaks)}",
        folded=len(rows) > 12,
    )


def bubble_table(window: int, pipeline: PipelineBubble) -> Table:
    """The bubble of each stage beside the expected one."""
    expected = pipeline.expected_fraction
    rows = [
        (
            Cell(str(stage.stage), stage.stage),
            Cell(str(stage.num_ranks), stage.num_ranks),
            number_cell(stage.step_ms),
            number_cell(stage.bubble_ms),
            Cell(PAGE.percent(stage.fraction), stage.fraction),
            EMPTY if expected is None else Cell(PAGE.percent(expected), expected),
        )
        for stage in pipeline.stages
    ]
    return Table(
        "Bubble by stage",
        heads("Stage", "Ranks", "Step, ms", "Bubble, ms", "Measured", "Expected"),
        tuple(rows),
        f"Overlapped steps under the profiler, window {window}, means over the ranks of a stage. {BUBBLE}",
    )
