"""The shares of the causes of a compute slowdown, over the windows that know the same causes."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.figures import FORMULAS, value_by
from overlap_callbacks.analysis.formatting import PAGE, count, page_text
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.run_times import run_means, run_times
from overlap_callbacks.report.views.elements import Cell, Table, heads


def cause_table(windows: Sequence[OverlapReport]) -> Table | None:
    """Each cause with its share and what that rests on; None where no window knows any cause.

    Args:
        windows: those that count.
    """
    known = [(window, window.slowdown_shares) for window in windows if window.slowdown_shares is not None]
    if not known:
        return None
    _, last = known[-1]
    # Shares add up within a window. Means add up only over windows that have the same causes.
    of_alike = [
        (w, shares) for w, shares in known if [s.cause for s in shares.shares] == [s.cause for s in last.shares]
    ]
    alike = [shares for _, shares in of_alike]
    # The slowdown as the headline has it, which is a ratio of mean times. The shares are divided from it.
    means = run_means(run_times([window.figures() for window, _ in of_alike]))
    total = value_by(FORMULAS["compute_slowdown"], means)
    mean = sum([shares.slowdown for shares in alike]) / len(alike)
    scale = 1.0 if total is None or not mean else total / mean
    rows = []
    for share in last.shares:
        fractions = [fraction for shares in alike if (fraction := shares.of(share.cause)) is not None]
        rows.append((Cell(share.cause), _share(fractions, scale), Cell(page_text(share.basis))))
    shown = Cell(PAGE.percent(mean if total is None else total, signed=True))
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
