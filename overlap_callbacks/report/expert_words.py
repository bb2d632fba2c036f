"""Loads of experts in words, for the terminal and the page."""

from __future__ import annotations

from overlap_callbacks.analysis.formatting import PLAIN, Style, count
from overlap_callbacks.analysis.results.experts import ExpertLoads


def loads_in_words(loads: ExpertLoads, style: Style = PLAIN) -> str:
    """How evenly the tokens of a window were spread."""
    sampled = f", {loads.num_sampled} of them sampled between windows" if loads.num_sampled else ""
    return (
        f"The expert rank with the highest load receives {style.number(loads.load_max_over_mean, 2)} times the mean in "
        f"a step (coefficient of variation {style.percent(loads.load_cv)}). Of one all-to-all, the largest split is "
        f"{style.number(loads.split_max_over_mean, 2)} times the mean ({style.percent(loads.split_cv)}). Rank "
        f"{loads.highest_rank} received most. Means over {count(loads.num_steps, 'step')}{sampled}."
    )
