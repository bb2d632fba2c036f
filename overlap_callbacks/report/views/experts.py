"""How evenly a mixture of experts spreads its tokens: along the run, step by step, and by expert rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlap_callbacks.analysis.formatting import PAGE, count, page_text, rounded
from overlap_callbacks.analysis.results.experts import ExpertDetails, ExpertLoads
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.elements import Block, Chart, Column, Section, bar, line, line_chart, table_of
from overlap_callbacks.report.views.trends import MAX_POINTS

# Maximum expert ranks that a chart shows one by one.
MAX_BARS = 32
_MIB = 2**20

Lines = tuple[tuple[str, str, str], ...]
# Name, colour, and field of ``ExpertLoads`` and ``ExpertStep``.
_PEAKS = (
    ("load of expert ranks", "run1", "load_max_over_mean"),
    ("splits of one all-to-all", "run2", "split_max_over_mean"),
)
_SPREADS = (("load of expert ranks", "run1", "load_cv"), ("splits of one all-to-all", "run2", "split_cv"))
_PEAK_UNIT = "times the mean"


def experts(record: Record) -> list[Section]:
    """Expert loads; nothing for a run without all-to-alls that have split sizes."""
    windows = [window for window in record.windows if window.experts is not None]
    if not windows:
        return []
    last = windows[-1].experts
    assert last is not None
    charts: list[Chart] = []
    if len(windows) > 1:
        every = -(-len(windows) // MAX_POINTS)
        of_windows = [(w.first_step, w.window, w.experts) for w in windows[::every]]
        charts += [
            _lines("The most over the mean, along the run", _PEAK_UNIT, _PEAKS, of_windows),
            _lines("Coefficient of variation, along the run", "fraction", _SPREADS, of_windows),
        ]
    detailed = record.latest("expert_details")
    details = None if detailed is None else detailed.expert_details
    blocks: list[Block] = []
    if detailed is not None and details is not None:
        if len(details.steps) > 1:
            of_steps = [(step.step, detailed.window, step) for step in details.steps]
            charts.append(_lines(f"Steps up to window {detailed.window}", _PEAK_UNIT, _PEAKS, of_steps, narrow=False))
        if 1 < len(details.by_expert_rank) <= MAX_BARS:
            charts.append(_by_rank(details))
    blocks += charts
    if details is not None and details.by_expert_rank:
        blocks.append(_table(last, details))
    return [Section("How evenly are the experts loaded?", page_text(loads_in_words(last), 1000), blocks)]


def _lines(title: str, unit: str, lines: Lines, rows: Sequence[tuple[int, int, Any]], *, narrow: bool = True) -> Chart:
    """Figures by name, colour and field. A row is a step, its window, and the object with the fields."""
    series = [
        line(name, color, [(step, window, getattr(found, field)) for step, window, found in rows], of=len(rows))
        for name, color, field in lines
    ]
    is_share = unit == "fraction"
    caption = "" if is_share else "1 is even. The axis does not start at zero."
    return line_chart(title, unit, series, caption, zero=is_share, narrow=narrow)


def _by_rank(details: ExpertDetails) -> Chart:
    rows = [
        bar(size / _MIB, run="", label=f"expert rank {place}", color="run1")
        for place, size in enumerate(details.by_expert_rank)
    ]
    caption = "What a rank receives, by its place in its expert group; ranks at one place have the same experts."
    return Chart("bars", "Bytes received by expert rank", {"unit": "MiB", "rows": rows}, caption)


def _table(loads: ExpertLoads, details: ExpertDetails) -> Block:
    mean = sum(details.by_expert_rank) / len(details.by_expert_rank)
    return table_of(
        f"Expert ranks ({page_text(loads.dimension, 40)} groups of {loads.group_size})",
        enumerate(details.by_expert_rank),
        Column("Place in the group", lambda row: row[0], "whole"),
        Column("MiB a step", lambda row: rounded(row[1] / _MIB)),
        Column("Over the mean", lambda row: rounded(row[1] / mean) if mean > 0 else 0.0, 2),
        caption=f"Means over {count(loads.num_steps, 'step')} and the ranks at each place.",
        folded=True,
    )


# -- text


def loads_in_words(loads: ExpertLoads) -> str:
    """How evenly the tokens of a window were spread."""
    sampled = f", {loads.num_sampled} of them sampled between windows" if loads.num_sampled else ""
    return (
        f"The expert rank with the highest load receives {PAGE.number(loads.load_max_over_mean, 2)} times the mean in "
        f"a step (coefficient of variation {PAGE.percent(loads.load_cv)}). Of one all-to-all, the largest split is "
        f"{PAGE.number(loads.split_max_over_mean, 2)} times the mean ({PAGE.percent(loads.split_cv)}). Rank "
        f"{loads.highest_rank} received most. Means over {count(loads.num_steps, 'step')}{sampled}."
    )
