"""The shares of the causes of a compute slowdown, over the windows that know the same causes."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.formatting import PAGE, count, page_text
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.statistics import pool_changes
from overlap_callbacks.report.html.elements import Cell, Table, heads


def cause_table(windows: Sequence[OverlapReport]) -> Table | None:
    """Each cause with its share and what that rests on; None where no window knows any cause.

    Args:
        windows: those that count.
    """
    known = [window.slowdown_shares for window in windows if window.slowdown_shares is not None]
    if not known:
        return None
    last = known[-1]
    # Shares add up within a window. Means add up only over windows that have the same causes.
    alike = [shares for shares in known if [s.cause for s in shares.shares] == [s.cause for s in last.shares]]
    # The slowdown as the headline has it, which is a mean of logarithms. The shares are divided from it.
    total = pool_changes([Estimate(shares.slowdown, None, None, 0, 1) for shares in alike])
    mean = sum([shares.slowdown for shares in alike]) / len(alike)
    scale = 1.0 if total is None or not mean else total.value / mean
    rows = []
    for share in last.shares:
        fractions = [fraction for shares in alike if (fraction := shares.of(share.cause)) is not None]
        rows.append((Cell(share.cause), _share(fractions, scale), Cell(page_text(share.basis))))
    shown = Cell("" if total is None else PAGE.percent(total.value, signed=True))
    rows.append((Cell("compute slowdown"), shown, Cell("measured (equation 1); the sum of the shares")))
    caption = (
        f"Means over {count(len(alike), 'window')}, as fractions of the compute kernels' time in sequential steps."
    )
    if last.notes:
        caption += f" In the last of them, {page_text('; '.join(last.notes))}."
    return Table(
        "What the compute slowdown is due to", heads("*Cause", "Share", "*Rests on"), tuple(rows), caption, sorts=False
    )


def _share(fractions: Sequence[float], scale: float) -> Cell:
    return Cell(PAGE.percent(scale * sum(fractions) / len(fractions), signed=True) if fractions else "")
