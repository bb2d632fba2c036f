"""What to try against what bounds a step, as a table of the page."""

from __future__ import annotations

from overlap_callbacks.analysis.bottleneck import Bottleneck
from overlap_callbacks.analysis.formatting import page_text
from overlap_callbacks.report.views.elements import Cell, Table, heads


def advice_table(found: Bottleneck) -> Table:
    """What to try, with the reason, the most promising first."""
    rows = [(Cell(page_text(advice.what)), Cell(page_text(advice.why)), Cell(advice.link)) for advice in found.advice]
    return Table("What to try", heads("*Try", "*Since", "*The docs say more"), tuple(rows), "", sorts=False)
