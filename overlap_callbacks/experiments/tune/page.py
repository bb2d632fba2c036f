"""The outcome of a tuning as one HTML page, with a chart for each axis."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overlap_callbacks.analysis.formatting import PAGE, count, page_sentence, page_text, rounded
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.experiments.tune.combinations import AS_IS_IN_WORDS, Combination, in_words
from overlap_callbacks.experiments.tune.ranking import Ranking, Row
from overlap_callbacks.experiments.tune.results import Results
from overlap_callbacks.experiments.tune.words import extent, line_to_use, verdict
from overlap_callbacks.report.html.document import write_document
from overlap_callbacks.report.views.elements import (
    EMPTY,
    EMPTY_LEGEND,
    Block,
    Cell,
    Chart,
    Document,
    Facts,
    Note,
    RunPage,
    Section,
    Table,
    Tile,
    Tiles,
    heads,
)
from overlap_callbacks.report.views.trends import RUN_COLORS

PAGE_NAME = "tune.html"
_MAX_LABEL = 40
_METHOD = (
    "A run gives one number: the mean of the logarithms of its blocks' step times. Intervals of step times are 95% "
    "confidence intervals over runs. Intervals of changes are Welch's over runs, as wide as it takes for all of them "
    "to hold together in 95 of 100 tunings."
)


def write_page(results: Results, ranking: Ranking) -> Path:
    """Write the page into the folder of the results. Returns its path.

    Raises:
        OSError: it cannot be written.
    """
    path = results.folder / PAGE_NAME
    write_document(tuning_document(results, ranking), path)
    return path


def tuning_document(results: Results, ranking: Ranking) -> Document:
    """What a tuning found."""
    tuning = results.tuning
    name = page_text(results.folder.resolve().name, 80) or "tuning"
    run = RunPage(
        "tuning",
        name,
        page_text(f"{extent(results, ranking)} · started {tuning.started_at}"),
        page_sentence(verdict(tuning, ranking)),
        (*_tiles(results, ranking), *_line(results, ranking), *_notes(results, ranking)),
        (
            Section("How does the step time change?", "", _charts(results, ranking)),
            Section("Which combination is fastest?", "", [_table(results, ranking)]),
            Section("What was run?", "", [_facts(results)]),
        ),
    )
    return Document(f"Overlap tuning: {name}", (run,), _METHOD)


def _tiles(results: Results, ranking: Ranking) -> list[Block]:
    measured = ranking.measured
    if not measured or ranking.baseline is None:
        return []
    first, fastest = ranking.row(ranking.baseline), measured[0]
    tiles = [_time_tile("Fastest", results, fastest), _time_tile("The first", results, first)]
    if fastest.change is not None:
        change = fastest.change
        tiles.append(
            Tile(
                "Change of the step time",
                PAGE.percent(change.value, signed=True),
                PAGE.interval(change, "fraction", signed=True),
                "the fastest against the first" if ranking.winner == fastest.number else "may be chance",
            )
        )
    tiles.append(_runs_tile(results, ranking))
    return [Tiles(tuple(tiles))]


def _runs_tile(results: Results, ranking: Ranking) -> Tile:
    numbers = sorted({row.num_runs for row in ranking.measured})
    each = f"{numbers[0]} of each combination" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} of each"
    failed = f", {count(len(ranking.failed), 'combination')} failed" if ranking.failed else ""
    return Tile("Runs", str(sum(not run.failure for run in results.runs)), "", each + failed)


def _time_tile(label: str, results: Results, row: Row) -> Tile:
    assert row.step_ms is not None
    words = page_text(in_words(results.tuning.combinations[row.number]), 120)
    return Tile(label, PAGE.quantity(row.step_ms.value, "ms"), PAGE.interval(row.step_ms, "ms"), words)


def _line(results: Results, ranking: Ranking) -> list[Block]:
    line = line_to_use(results.tuning, ranking)
    return [] if line is None else [Note(f"Use: {page_text(line, 2000)}")]


def _notes(results: Results, ranking: Ranking) -> list[Block]:
    tuning = results.tuning
    notes: list[Block] = [
        Note(page_text(f"Failed: {in_words(tuning.combinations[row.number])}: {row.failure}"), warning=True)
        for row in ranking.failed[:5]
    ]
    if len(ranking.failed) > 5:
        notes.append(Note(f"{len(ranking.failed) - 5} more failed; the table has them.", warning=True))
    not_run = sum(row.step_ms is None and not row.failure for row in ranking.rows)
    if not_run:
        notes.append(Note(f"{count(not_run, 'combination')} did not run yet.", warning=True))
    if results.num_left:
        left = f"Not finished: {results.num_left:,} of {len(results.runs) + results.num_left:,} runs did not run yet."
        how = f"Go on with: overlap tune --resume {results.folder}"
        notes.append(Note(page_text(f"{left} {how}", 2000), warning=True))
    return notes


# -- a chart for each axis


def _charts(results: Results, ranking: Ranking) -> list[Block]:
    axes = results.tuning.axes
    charts: list[Block] = []
    for position, axis in enumerate(axes):
        if len(axis.values) > 1:
            chart = _chart(results, ranking, position, narrow=len(axes) > 1)
            charts += [] if chart is None else [chart]
    return charts or [Note("No combination was measured.", warning=True)]


def _chart(results: Results, ranking: Ranking, position: int, *, narrow: bool) -> Chart | None:
    """Step time against one axis: a line for each setting of the others, that of the fastest first."""
    tuning = results.tuning
    axis = tuning.axes[position]
    numeric = all(_number(value) is not None for value in axis.values)
    lines: dict[str, list[list[Any]]] = {}
    for row in ranking.measured:
        combination = tuning.combinations[row.number]
        value = combination[position].value
        assert row.step_ms is not None
        place = _number(value) if numeric else page_text(value or AS_IS_IN_WORDS, _MAX_LABEL)
        figures = map(rounded, (row.step_ms.value, row.step_ms.ci_low, row.step_ms.ci_high))
        name = page_text(in_words(combination), 120)
        lines.setdefault(_others(combination, position), []).append([place, name, *figures])
    if not lines:
        return None
    series = [
        {"name": name, "color": color, "points": _in_order(points, axis.values, numeric)}
        for color, (name, points) in zip(RUN_COLORS, lines.items(), strict=False)
    ]
    legend = tuple([(str(line["name"]), str(line["color"])) for line in series]) if len(lines) > 1 else EMPTY_LEGEND
    data = {
        "unit": "ms",
        "series": series,
        "x_label": page_text(axis.name, _MAX_LABEL),
        "numeric": numeric,
        "ideal": 0,
    }
    return Chart(
        "against",
        f"Step time against {page_text(axis.name, _MAX_LABEL)}",
        data,
        _caption(ranking, series, len(lines)),
        legend,
        narrow=narrow,
    )


def _in_order(points: list[list[Any]], values: Sequence[str], numeric: bool) -> list[list[Any]]:
    order = {(value or AS_IS_IN_WORDS)[:_MAX_LABEL]: place for place, value in enumerate(values)}
    return sorted(points, key=lambda point: point[0] if numeric else order.get(point[0], 0))


def _caption(ranking: Ranking, series: Sequence[dict[str, Any]], num_lines: int) -> str:
    parts = []
    if any(point[3] is not None for line in series for point in line["points"]):
        parts.append("Whiskers are 95% intervals over runs.")
    if num_lines > len(series):
        parts.append(f"Lines of the {len(series)} fastest settings of the other axes; the table has all {num_lines}.")
    if ranking.failed:
        parts.append("Combinations that failed have no point.")
    return " ".join(parts)


def _others(combination: Combination, position: int) -> str:
    return page_text(in_words((*combination[:position], *combination[position + 1 :])), 80)


def _number(value: str) -> float | int | None:
    try:
        number = float(value)
    except ValueError:
        return None
    if not abs(number) < 1e15:
        return None
    return int(number) if number.is_integer() else number


# -- tables


def _table(results: Results, ranking: Ranking) -> Table:
    tuning = results.tuning
    rows = []
    for place, row in enumerate(ranking.rows, 1):
        is_ranked = row.step_ms is not None and not row.failure
        rows.append(
            (
                Cell(str(place), place) if is_ranked else EMPTY,
                *[
                    Cell(
                        page_text(value or AS_IS_IN_WORDS, 80), _number(value) if _number(value) is not None else value
                    )
                    for _, value in tuning.combinations[row.number]
                ],
                _quantity(row.step_ms, "ms") if is_ranked else Cell("failed" if row.failure else "not run"),
                _bounds(row.step_ms, "ms") if is_ranked else EMPTY,
                Cell("the first") if row.number == ranking.baseline else _quantity(row.change, "fraction"),
                _bounds(row.change, "fraction"),
                Cell(str(row.num_runs), row.num_runs),
            )
        )
    columns = heads(
        "Place", *[page_text(axis.name, 60) for axis in tuning.axes], "Step time", "95% interval",
        "Against the first", "95% interval", "Runs",
    )  # fmt: skip
    caption = "A change is beyond chance where its interval does not hold zero."
    return Table("Combinations, the fastest first", columns, tuple(rows), caption)


def _quantity(estimate: Estimate | None, unit: str) -> Cell:
    if estimate is None:
        return EMPTY
    return Cell(PAGE.quantity(estimate.value, unit, signed=unit == "fraction"), rounded(estimate.value))


def _bounds(estimate: Estimate | None, unit: str) -> Cell:
    text = "" if estimate is None else PAGE.interval(estimate, unit, signed=unit == "fraction")
    return Cell(text) if text else EMPTY


def _facts(results: Results) -> Facts:
    tuning = results.tuning
    timing = tuning.timing
    facts = [
        ("Command", page_text(shlex.join(tuning.command), 2000)),
        *[(axis.name, ", ".join(value or AS_IS_IN_WORDS for value in axis.values)) for axis in tuning.axes],
        ("Steps before timing", str(timing.warmup_steps)),
        ("Timed blocks of a run", str(tuning.blocks)),
        ("Steps of a block", f"{timing.steps_per_block} or more, {timing.min_block_seconds:g} s or more"),
        ("Time in runs", f"{sum(run.seconds for run in results.runs):,.0f} s"),
        ("overlap-callbacks", tuning.library_version),
    ]
    return Facts("Configuration", tuple([(page_text(name, 80), page_text(value, 2000)) for name, value in facts]))
