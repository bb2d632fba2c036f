"""The outcome of a tuning in sentences, for the terminal and the page."""

from __future__ import annotations

from overlap_callbacks.analysis.formatting import PLAIN, Style, change_in_words, count
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.experiments.tune.combinations import in_words, line_of
from overlap_callbacks.experiments.tune.ranking import MIN_RUNS, Ranking
from overlap_callbacks.experiments.tune.results import Results, Tuning

NOTHING = "No combination was measured."


def verdict(tuning: Tuning, ranking: Ranking, style: Style = PLAIN) -> str:
    """Which combination to use, in a sentence or two."""
    names = [in_words(combination) for combination in tuning.combinations]
    if ranking.baseline is None:
        return NOTHING
    baseline = names[ranking.baseline]
    if ranking.winner is not None:
        return _winner(names, ranking, baseline, style)
    measured = ranking.measured
    if len(measured) == 1:
        return f"Only {baseline} gave step times: there is nothing to compare it with."
    changes = [row.change for row in measured if row.change is not None]
    if any(change.ci_low is None for change in changes):
        return (
            f"No difference can be told yet: an interval takes {MIN_RUNS} runs of each combination. "
            f"The fastest so far is {names[measured[0].number]}."
        )
    if all(change.ci_low is not None and change.ci_low > 0 for change in changes):
        return f"{baseline} is the fastest: every other combination is slower, beyond its interval."
    return f"No difference was found: no combination is faster than {baseline} beyond its interval."


def _winner(names: list[str], ranking: Ranking, baseline: str, style: Style) -> str:
    assert ranking.winner is not None
    change = ranking.row(ranking.winner).change
    assert change is not None
    sentence = f"{names[ranking.winner]} is the fastest: a step takes {change_of(change, style)} than with {baseline}."
    if not ranking.as_good:
        return sentence
    others = ", ".join(names[number] for number in ranking.as_good[:3]) + (", ..." if len(ranking.as_good) > 3 else "")
    return f"{sentence} Not told apart from it: {others}."


def change_of(change: Estimate, style: Style = PLAIN) -> str:
    """E.g. ``12.3% less time (95% interval 8.1% to 16.2%)``."""
    words = change_in_words(change.value, "more time", "less time", style)
    if change.ci_low is None or change.ci_high is None:
        return words
    low, high = sorted([abs(change.ci_low), abs(change.ci_high)])
    return f"{words} (95% interval {style.percent(low)} to {style.percent(high)})"


def line_to_use(tuning: Tuning, ranking: Ranking) -> str | None:
    """The line to type for the winner; None where no difference was found."""
    if ranking.winner is None:
        return None
    return line_of(tuning.command, tuning.combinations[ranking.winner])


def extent(results: Results, ranking: Ranking) -> str:
    """What the outcome rests on, in a line."""
    runs = [run for run in results.runs if not run.failure]
    parts = [
        count(len(ranking.rows), "combination"),
        count(len(runs), "run"),
        count(sum(run.num_steps for run in runs), "timed step"),
    ]
    sizes = sorted({run.world_size for run in runs if run.world_size})
    devices = sorted({run.device for run in runs if run.device})
    parts += [count(size, "rank") for size in sizes] + devices
    if ranking.failed:
        parts.append(f"{len(ranking.failed)} failed")
    return ", ".join(parts)
