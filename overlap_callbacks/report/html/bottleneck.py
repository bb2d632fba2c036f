"""What bounds a step, and what to try: a section of the page."""

from __future__ import annotations

from overlap_callbacks.analysis.bottleneck import run_bottleneck
from overlap_callbacks.analysis.formatting import PAGE, page_text
from overlap_callbacks.report.html.elements import Block, Cell, Section, Table, heads
from overlap_callbacks.report.html.run import RunView


def bottleneck(view: RunView) -> list[Section]:
    """The section; none where no profile shows what bounds steps."""
    found = run_bottleneck(view.summary)
    if found is None:
        return []
    rows = [(Cell(page_text(advice.what)), Cell(page_text(advice.why)), Cell(advice.link)) for advice in found.advice]
    blocks: list[Block] = [Table("Advice", heads("*Try", "*Since", "*The docs say more"), tuple(rows), "", sorts=False)]
    return [Section("What bounds a step, and what to try?", page_text(found.sentence(PAGE)), blocks)]
