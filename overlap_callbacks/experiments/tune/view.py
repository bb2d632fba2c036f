"""The results of a tuning: a document for the page and the terminal, and plain data."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from overlap_callbacks.analysis.fastest import faster_in_words
from overlap_callbacks.analysis.formatting import count, includes_zero, page_sentence, page_text
from overlap_callbacks.experiments.sweep import failures_in_words
from overlap_callbacks.experiments.tune.combinations import AS_IS_IN_WORDS, in_words, line_of
from overlap_callbacks.experiments.tune.ranking import MIN_RUNS, Ranking, Row
from overlap_callbacks.experiments.tune.sweep import Tune
from overlap_callbacks.report.views.elements import (
    EMPTY,
    EMPTY_LEGEND,
    RUN_COLORS,
    Block,
    Cell,
    Chart,
    Column,
    Document,
    Facts,
    Head,
    Note,
    Point,
    RunPage,
    Section,
    Table,
    Tile,
    Tiles,
    estimate_cells,
    estimate_tile,
    has_intervals,
    interval_columns,
    legend_of,
    line,
    name_cell,
    table_of,
)

NOTHING = "No combination was measured."
_MAX_LABEL = 40
_METHOD = (
    "A run gives one number: the mean of the logarithms of its blocks' step times. Intervals of step times are 95% "
    "confidence intervals over runs. Intervals of changes are Welch's over runs, as wide as it takes for all of them "
    "to hold together in 95 of 100 tunings. All are for one look, at the end."
)


def tuning_document(tune: Tune, ranking: Ranking) -> Document:
    """The results of a tuning."""
    name = page_text(tune.folder.resolve().name, 80) or "tuning"
    run = RunPage(
        "tuning",
        name,
        page_text(f"{_extent(tune, ranking)} · started {tune.start.started_at}"),
        page_sentence(verdict(tune, ranking)),
        (*_tiles(tune, ranking), *_notes(tune, ranking)),
        (
            Section("How does the step time change?", "", _charts(tune, ranking)),
            Section("Which combination is fastest?", "", [_table(tune, ranking)]),
            Section("What was run?", "", [_facts(tune)]),
        ),
    )
    return Document(f"Overlap tuning: {name}", (run,), _METHOD, max_rows=None)


def tuning_data(tune: Tune, ranking: Ranking) -> dict[str, Any]:
    """Everything, as plain data."""
    rows = [
        {
            "settings": {axis.name: value for axis, value in tune.combinations[row.number]},
            "runs": row.num_runs,
            "step_ms": row.step_ms,
            "change": row.change,
            "failure": row.failure or None,
        }
        for row in ranking.rows
    ]
    return {
        "verdict": verdict(tune, ranking),
        "line": line_to_use(tune, ranking),
        "command": tune.start.command,
        "folder": str(tune.folder),
        "rows": rows,
    }


# -- text


def verdict(tune: Tune, ranking: Ranking) -> str:
    """Which combination to use, in one or two sentences."""
    if ranking.baseline is None:
        return NOTHING
    baseline = tune.name(ranking.baseline)
    if ranking.winner is not None:
        return _winner(tune, ranking, baseline)
    measured = ranking.measured
    if len(measured) == 1:
        return f"Only {baseline} gave step times: there is nothing to compare it with."
    changes = [row.change for row in measured if row.change is not None]
    if any(change.ci_low is None for change in changes):
        return (
            f"Inconclusive so far: an interval takes {MIN_RUNS} runs of each combination. "
            f"The fastest so far is {tune.name(measured[0].number)}."
        )
    if ranking.is_clear:
        return f"{baseline} is the fastest: every other combination is clearly slower."
    number, change, step_ms = next(
        (row.number, row.change, row.step_ms.value)
        for row in measured
        if row.change is not None and row.step_ms is not None and includes_zero(row.change)
    )
    return faster_in_words(tune.name(number), baseline, change, step_ms)


def _winner(tune: Tune, ranking: Ranking, baseline: str) -> str:
    assert ranking.winner is not None
    row = ranking.row(ranking.winner)
    assert row.change is not None
    assert row.step_ms is not None
    sentence = faster_in_words(tune.name(ranking.winner), baseline, row.change, row.step_ms.value)
    if not ranking.as_good:
        return sentence
    others = ", ".join(map(tune.name, ranking.as_good[:3])) + (", ..." if len(ranking.as_good) > 3 else "")
    return f"{sentence} Inconclusive against it: {others}."


def line_to_use(tune: Tune, ranking: Ranking) -> str | None:
    """The command line of the winner; None if no difference was found."""
    return None if ranking.winner is None else line_of(tune.start.command, tune.combinations[ranking.winner])


def _extent(tune: Tune, ranking: Ranking) -> str:
    """What the outcome is based on, in one line."""
    runs = [run for run in tune.lines if not run.failure]
    parts = [
        count(len(ranking.rows), "combination"),
        count(len(runs), "run"),
        count(sum(run.num_steps for run in runs), "timed step"),
        *[count(size, "rank") for size in sorted({run.world_size for run in runs if run.world_size})],
        *sorted({run.device for run in runs if run.device}),
    ]
    return ", ".join(parts + ([f"{len(ranking.failed)} failed"] if ranking.failed else []))


def _notes(tune: Tune, ranking: Ranking) -> list[Block]:
    line = line_to_use(tune, ranking)
    notes = [] if line is None else [Note(f"Use: {page_text(line, 2000)}", first=True)]
    listed = failures_in_words([(tune.name(row.number), row.failure) for row in ranking.failed])
    not_run = sum(row.step_ms is None and not row.failure for row in ranking.rows)
    if not_run:
        listed.append(f"{count(not_run, 'combination')} did not run yet.")
    if left := len(tune.left):
        listed.append(
            f"Not finished: {left:,} of {len(tune.lines) + left:,} runs did not run yet. "
            f"Go on with: overlap tune --resume {tune.folder}"
        )
    return [*notes, *[Note(page_text(text, 2000), warning=True) for text in listed]]


def _tiles(tune: Tune, ranking: Ranking) -> list[Block]:
    measured = ranking.measured
    if not measured or ranking.baseline is None:
        return []
    first, fastest = ranking.row(ranking.baseline), measured[0]
    tiles = [
        estimate_tile(label, row.step_ms, "ms", page_text(tune.name(row.number), 120))
        for label, row in (("Fastest", fastest), ("The first", first))
        if row.step_ms is not None
    ]
    if fastest.change is not None:
        remark = f"the fastest against the first{'' if ranking.winner == fastest.number else ', inconclusive'}"
        tiles.append(estimate_tile("Change of the step time", fastest.change, "fraction", remark))
    numbers = sorted({row.num_runs for row in measured})
    each = f"{numbers[0]} of each combination" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} of each"
    failed = f", {count(len(ranking.failed), 'combination')} failed" if ranking.failed else ""
    tiles.append(Tile("Runs", str(sum(not run.failure for run in tune.lines)), "", each + failed))
    return [Tiles(tuple(tiles))]


# -- a chart for each axis


def _charts(tune: Tune, ranking: Ranking) -> list[Block]:
    axes = tune.start.axes
    places = [place for place, axis in enumerate(axes) if len(axis.values) > 1]
    if not ranking.measured:
        return [Note(NOTHING, warning=True)]
    return [_chart(tune, ranking, place, narrow=len(axes) > 1) for place in places]


def _chart(tune: Tune, ranking: Ranking, place: int, *, narrow: bool) -> Chart:
    """Step time against one axis: one line per setting of the other axes, the fastest one's first."""
    axis = tune.start.axes[place]
    label = page_text(axis.name, _MAX_LABEL)
    numeric = all(_number(value) is not None for value in axis.values)
    order = {_label(value): number for number, value in enumerate(axis.values)}
    lines: dict[str, list[Point]] = {}
    for row in ranking.measured:
        combination = tune.combinations[row.number]
        value = combination[place].value
        at = _number(value) if numeric else _label(value)
        point = (at, page_text(in_words(combination), 120), row.step_ms)
        others = in_words((*combination[:place], *combination[place + 1 :]))
        lines.setdefault(page_text(others, 80), []).append(point)
    for points in lines.values():
        points.sort(key=lambda point: point[0] if numeric else order.get(point[0], 0))
    series = [line(name, color, points) for color, (name, points) in zip(RUN_COLORS, lines.items(), strict=False)]
    legend = legend_of(series) if len(lines) > 1 else EMPTY_LEGEND
    data = {"unit": "ms", "series": series, "x_label": label, "numeric": numeric, "ideal": 0}
    parts = ["Whiskers are 95% intervals over runs."] if has_intervals(series) else []
    if len(lines) > len(series):
        parts.append(f"Lines of the {len(series)} fastest settings of the other axes; the table has all {len(lines)}.")
    if ranking.failed:
        parts.append("Combinations that failed have no point.")
    caption = " ".join(parts)
    return Chart("against", f"Step time against {label}", data, caption, legend, narrow=narrow)


def _label(value: str) -> str:
    return page_text(value or AS_IS_IN_WORDS, _MAX_LABEL)


def _number(value: str) -> float | int | None:
    try:
        number = float(value)
    except ValueError:
        return None
    if not abs(number) < 1e15:
        return None
    return int(number) if number.is_integer() else number


# -- tables


def _table(tune: Tune, ranking: Ranking) -> Table:
    places = {row.number: place for place, row in enumerate(ranking.rows, 1)}

    def step(row: Row) -> tuple[Cell, Cell]:
        if row.is_ranked:
            return estimate_cells(row.step_ms, "ms")
        return Cell("failed" if row.failure else "not run"), EMPTY

    def change(row: Row) -> tuple[Cell, Cell]:
        if row.number == ranking.baseline:
            return Cell("the first"), EMPTY
        return estimate_cells(row.change, "fraction", signed=True)

    def setting(axis: int) -> Callable[[Row], Cell]:
        return lambda row: _setting(tune.combinations[row.number][axis].value)

    return table_of(
        "Combinations, the fastest first",
        ranking.rows,
        Column("Place", lambda row: Cell(str(places[row.number]), places[row.number]) if row.is_ranked else EMPTY),
        *[Column(Head(page_text(axis.name, 60)), setting(place)) for place, axis in enumerate(tune.start.axes)],
        *interval_columns("Step time", step),
        *interval_columns("Against the first", change),
        Column("Runs", lambda row: Cell(str(row.num_runs), row.num_runs)),
        Column("-*Failed", lambda row: name_cell(row.failure) if row.failure else EMPTY),
        caption="A change is clear where its interval excludes zero.",
        first=True,
        drop_empty=True,
    )


def _setting(value: str) -> Cell:
    number = _number(value)
    return Cell(page_text(value or AS_IS_IN_WORDS, 80), value if number is None else number)


def _facts(tune: Tune) -> Facts:
    start, timing = tune.start, tune.start.timing
    facts = [
        ("Command", shlex.join(start.command)),
        *[(axis.name, ", ".join(value or AS_IS_IN_WORDS for value in axis.values)) for axis in start.axes],
        ("Steps before timing", str(timing.warmup_steps)),
        ("Timed blocks of a run", str(start.blocks)),
        ("Steps of a block", f"{timing.steps_per_block} or more, {timing.min_block_seconds:g} s or more"),
        ("Time in runs", f"{sum(run.seconds for run in tune.lines):,.0f} s"),
        ("overlap-callbacks", start.library_version),
    ]
    return Facts("Configuration", tuple([(page_text(name, 80), page_text(value, 2000)) for name, value in facts]))
