"""How fast the job trains: tokens and model FLOP a second, and the share of the devices' peak."""

from __future__ import annotations

from overlap_callbacks.analysis.formatting import PAGE, page_text
from overlap_callbacks.analysis.throughput import GIVEN, run_throughput
from overlap_callbacks.report.throughput_words import throughput_facts
from overlap_callbacks.report.views.elements import Block, Note, Section, Tile, Tiles
from overlap_callbacks.report.views.run import RunView

# What is longer stands below the figures.
_MAX_REMARK = 80


def throughput(view: RunView) -> list[Section]:
    """Throughput over the windows that count; nothing where it is not known."""
    found = run_throughput(view.valid_windows)
    if found is None:
        return []
    tiles = [
        Tile(label, value, "", page_text(basis) if len(basis) <= _MAX_REMARK else "")
        for label, value, basis in throughput_facts(found, PAGE)
    ]
    blocks: list[Block] = [Tiles(tuple(tiles))]
    sources = []
    if len(found.flop_basis) > _MAX_REMARK:
        sources.append(f"Model FLOP: {found.flop_basis}.")
    if found.peak_basis and found.peak_basis != GIVEN and found.mfu is not None:
        sources.append(f"The peak is from {found.peak_basis}.")
    if sources:
        blocks.append(Note(page_text(" ".join(sources))))
    known = "; ".join(f"{tile.label} {tile.value}" for tile in tiles)
    answer = (
        f"{page_text(known)}. By the time of overlapped steps, mean over the windows that count. What is recomputed is "
        "no model FLOP."
    )
    return [Section("How fast does it train?", answer, blocks)]
