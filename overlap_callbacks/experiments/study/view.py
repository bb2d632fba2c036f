"""The outcome of a study: a document with a part for each question of the study, and plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from overlap_callbacks.analysis.formatting import PAGE, count, page_sentence, page_text
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.analysis.study import (
    BATCH,
    ENERGY,
    GAP,
    IDEAL,
    LONGER,
    PEAK,
    POWER,
    PRECISION,
    PUBLISHED,
    RATIO,
    SEQUENTIAL,
    SLOWDOWN,
    STEP,
    Overall,
    StudyRow,
    last_rows,
    overall,
    pairs,
    power_key,
    value_of,
)
from overlap_callbacks.experiments.bench.results import Bench
from overlap_callbacks.experiments.bench.view import gemm_section
from overlap_callbacks.experiments.study import charts
from overlap_callbacks.experiments.study.factors import (
    CAPS,
    factor_sections,
    missing_factors,
    pair_answer,
    pair_table,
    trade_off_data,
)
from overlap_callbacks.experiments.study.sweep import Study
from overlap_callbacks.experiments.study.verdict import (
    TITLES,
    Names,
    beyond_chance,
    caveats,
    on_cpu,
    strategy_in_words,
    verdict,
    where,
)
from overlap_callbacks.experiments.sweep import ResultsError, failures_in_words
from overlap_callbacks.report import record
from overlap_callbacks.report.views.elements import (
    EMPTY,
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
    change_cell,
    estimate_cells,
    heads,
    name_cell,
    number_cell,
)
from overlap_callbacks.report.views.power import trace_chart

_METHOD = (
    "The questions are those of figures 1 and 4 to 11 of arXiv 2507.03114, and equations 1, 2 and 4 are its own. Each "
    "configuration is one run: its 95% interval is over blocks or windows of that run, and does not hold what differs "
    "from one run to the next. Intervals of means and of changes follow from those of their parts, whose errors are "
    "taken as independent. The largest of several measured figures is somewhat too large on average."
)
# What the study has and another one may lack: a name, and what to do for it.
_NO_KERNELS = ("Compute slowdown", "No kernels were compared.")
_NO_STEPS = ("What overlap saves", "Step times of both modes are missing.")
_NO_POWER = ("Power", "No sensor could be read. The documentation of power says which there are.")
_NO_RATIO = ("Slowdown against overlap ratio", "Train two configurations or more.")
_NO_BENCH = (
    "Matrix products beside an all-reduce (figure 8 of the study)",
    "Run: overlap bench gemm-allreduce. The page shows it where its bench.jsonl lies in this folder.",
)


def study_document(study: Study) -> Document:
    """What a study found. If the folder has results of ``overlap bench gemm-allreduce``, they have a part too."""
    start, names, rows = study.start, Names(study.settings), last_rows(study.start, study.lines)
    name = page_text(study.folder.resolve().name, 80) or "study"
    failed = [(names.whole(row.configuration), row.failure or "no figures") for row in rows if row.figures is None]
    notes = [*map(page_sentence, caveats(start, rows)), *map(page_text, failures_in_words(failed))]
    run = RunPage(
        "study",
        name,
        page_text(where(start, rows)),
        page_sentence(verdict(start, rows, bounds=False)),
        (_tiles(study, rows, names), *[Note(text, warning=True) for text in notes]),
        (
            *_sections(study, rows, names),
            Section("All configurations", "", [*_overall_table(study, rows, names), _configuration_table(rows, names)]),
            Section("How was it measured?", "", [_setting(study, rows)]),
        ),
    )
    return Document(f"Overlap study: {name}", (run,), _METHOD, max_rows=None)


def study_data(study: Study) -> dict[str, Any]:
    """Everything, as plain data: what is not known is null or absent."""
    start, rows = study.start, last_rows(study.start, study.lines)
    return {
        "folder": str(study.folder),
        "verdict": verdict(start, rows),
        "notes": caveats(start, rows),
        "start": start,
        "over_configurations": {
            figure.key: {
                "configurations": figure.number,
                "mean": figure.mean,
                "largest": {"configuration": figure.most.configuration, "figure": figure.most.estimate},
                "smallest": {"configuration": figure.least.configuration, "figure": figure.least.estimate},
                "study": None if figure.key not in PUBLISHED else PUBLISHED[figure.key]._asdict(),
            }
            for figure in _overall(rows)
        },
        "configurations": [msgspec.structs.asdict(row) for row in rows],
        "pairs": {
            factor: [{"base": pair.base, "other": pair.other, "changes": pair.changes} for pair in pairs(rows, factor)]
            for factor in (BATCH, PRECISION, *CAPS)
        },
        "trade_offs": trade_off_data(rows, Names(study.settings)),
    }


def _overall(rows: Sequence[StudyRow]) -> list[Overall]:
    return [found for key in (LONGER, SLOWDOWN, GAP, RATIO, PEAK) if (found := overall(rows, key)) is not None]


def _tiles(study: Study, rows: Sequence[StudyRow], names: Names) -> Tiles:
    measured = sum([row.figures is not None for row in rows])
    failed = f", {len(rows) - measured} failed" if measured < len(rows) else ""
    tiles = [_tile(study, rows, names, key) for key in (LONGER, SLOWDOWN, PEAK)]
    return Tiles((*tiles, Tile("Configurations measured", f"{measured:,}", "", f"of {len(study.settings)}{failed}")))


def _tile(study: Study, rows: Sequence[StudyRow], names: Names, key: str) -> Tile:
    figure = overall(rows, key)
    if figure is None:
        return Tile(TITLES[key], "not measured")
    parts = []
    if figure.number > 1:
        most = f"{PAGE.percent(figure.most.estimate.value, signed=True)}, {names.whole(figure.most.configuration)}"
        parts.append(f"Mean of {count(figure.number, 'configuration')}; most: {most}")
    if not on_cpu(study.start):
        mean, most_of_study = PUBLISHED[key]
        on_average = "" if mean is None else f"{PAGE.percent(mean, signed=True)} on average, "
        parts.append(f"The study: {on_average}up to {PAGE.percent(most_of_study, signed=True)}")
    bounds = PAGE.interval(figure.mean, "fraction", signed=True) or "too few blocks for an interval"
    return Tile(TITLES[key], PAGE.percent(figure.mean.value, signed=True), bounds, page_text(". ".join(parts)))


# -- the questions of the study


def _sections(study: Study, rows: Sequence[StudyRow], names: Names) -> list[Section]:
    slowdowns = charts.of_figure(
        rows, names, SLOWDOWN, "Compute slowdown", "slower with overlap, %",
        "Time of the compute kernels with overlap over that without, less 1 (equation 1).",
    )  # fmt: skip
    peaks = charts.of_figure(
        rows, names, PEAK, "Highest power with overlap against sequential steps", "higher with overlap, %",
        "Highest power of any device in overlapped steps over that in sequential ones, less 1.",
    )  # fmt: skip
    ratio, savings, products = charts.against_ratio(rows, names), charts.savings(rows, names), _products(study)
    drawn = [
        chart for chart in (charts.power(rows, names), peaks, _power_trace(study, rows, names)) if chart is not None
    ]
    sections = []
    if slowdowns is not None:
        slower = beyond_chance(rows, SLOWDOWN, "With overlap, compute is", "slower in", "faster in")
        compared = pairs(rows, BATCH)
        answer = f"{page_sentence(slower)} {pair_answer(compared, names, BATCH)}".strip()
        table = [replace(pair_table(compared, names, BATCH), folded=True)] if compared else []
        sections.append(Section("What does overlap cost compute?", answer, [slowdowns, *table]))
    if ratio is not None:
        sections.append(Section("Does more overlap cost more?", "", [ratio]))
    if savings is not None:
        longer = beyond_chance(rows, LONGER, "Sequential steps are", "longer in", "shorter in")
        sections.append(Section("What does overlap save?", page_sentence(longer), [savings]))
    if drawn:
        sections.append(Section("What does overlap do to power?", _power_answer(rows), drawn))
    sections += products
    sections += factor_sections(rows, names)
    lacking = [
        fact
        for fact, known in (
            (_NO_KERNELS, slowdowns), (_NO_RATIO, ratio), (_NO_STEPS, savings), (_NO_POWER, drawn),
            (_NO_BENCH, products),
        )
        if not known
    ]  # fmt: skip
    lacking += missing_factors(rows, on_cpu=on_cpu(study.start))
    if lacking:
        sections.append(Section("What was not measured?", "", [Facts("Not measured, and what to do", tuple(lacking))]))
    return sections


def _power_answer(rows: Sequence[StudyRow]) -> str:
    figure = overall(rows, PEAK)
    if figure is None:
        return ""
    if figure.mean.ci_low is None:
        return "Peaks of power have no interval here: how they differ between the modes may be chance."
    return page_sentence(beyond_chance(rows, PEAK, "With overlap, the highest power is", "higher in", "lower in"))


def _products(study: Study) -> list[Section]:
    """Matrix products beside all-reduces, where their results lie in the folder of the study and can be read."""
    try:
        return gemm_section(Bench.read(study.folder))
    except ResultsError:
        return []


def _power_trace(study: Study, rows: Sequence[StudyRow], names: Names) -> Chart | None:
    """Power along a window of the configuration whose highest power rises most; None if no record has it."""

    def rise(row: StudyRow) -> float:
        found = value_of(row, PEAK)
        return float("-inf") if found is None else found.value

    for row in sorted(rows, key=rise, reverse=True):
        window = _window_with_trace(study, row)
        if window is not None and window.power_trace is not None:
            chart = trace_chart(window, window.power_trace)
            return replace(chart, title=f"{chart.title}: {names.whole(row.configuration)}")
    return None


def _window_with_trace(study: Study, row: StudyRow) -> OverlapReport | None:
    if row.record is None or row.figures is None or not any(key.startswith("power/") for key in row.figures.values):
        return None
    try:
        return record.read(study.folder / row.record, details=False).latest_valid("power_trace")
    except record.RecordError:
        return None


# -- tables


def _overall_table(study: Study, rows: Sequence[StudyRow], names: Names) -> list[Table]:
    """Means and extremes over the configurations, beside the study's on GPUs; none of one configuration alone."""
    known = _overall(rows)
    if max([figure.number for figure in known], default=0) < 2:
        return []
    compares = not on_cpu(study.start)
    labels = {**TITLES, GAP: "Gap to ideal", RATIO: "Overlap ratio"}
    lines = []
    for figure in known:
        published = PUBLISHED.get(figure.key) if compares else None
        signed = figure.key != RATIO
        lines.append(
            (
                name_cell(labels[figure.key]),
                number_cell(figure.number, 0),
                *estimate_cells(figure.mean, "fraction", signed=signed),
                *estimate_cells(figure.most.estimate, "fraction", signed=signed),
                name_cell(names.whole(figure.most.configuration)),
                *estimate_cells(figure.least.estimate, "fraction", signed=signed),
                name_cell(names.whole(figure.least.configuration)),
                EMPTY if published is None else change_cell(published.mean),
                EMPTY if published is None else change_cell(published.most),
            )
        )
    columns = heads(
        "*Figure", "-Configurations", "Mean", "_95% interval", "Largest", "_95% interval", "*Of", "-Smallest",
        "-95% interval", "-*Of", "Study, mean", "_Study, largest",
    )  # fmt: skip
    caption = "The study's figures are of four A100, H100, MI210 or MI250 GPUs." if compares else ""
    table = Table("Over all configurations", columns, tuple(lines), caption, first=True)
    return [table.without_empty_columns()]


def _configuration_table(rows: Sequence[StudyRow], names: Names) -> Table:
    """Every configuration with its figures, or why it failed."""
    lines = []
    for row in rows:
        one, figures = row.configuration, row.figures
        lines.append(
            (
                name_cell(names.whole(one)),
                name_cell(one.model),
                name_cell(strategy_in_words(one.strategy)),
                Cell(str(one.batch), one.batch),
                name_cell(one.precision),
                number_cell(one.power_cap_w, 0),
                number_cell(one.clock_cap_mhz, 0),
                *[_number(value_of(row, key)) for key in (IDEAL, STEP, SEQUENTIAL)],
                *estimate_cells(value_of(row, LONGER), "fraction", signed=True),
                *estimate_cells(value_of(row, SLOWDOWN), "fraction", signed=True),
                estimate_cells(value_of(row, RATIO), "fraction")[0],
                *[_number(value_of(row, key), 0) for key in (POWER, power_key(Mode.SEQUENTIAL, "avg_w"))],
                *[_number(value_of(row, power_key(mode, "peak_w")), 0) for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL)],
                _number(value_of(row, ENERGY), 1),
                number_cell(None if figures is None else figures.num_windows, 0),
                number_cell(None if figures is None else figures.num_steps, 0),
                number_cell(row.seconds, 0),
                name_cell(row.failure or "no figures") if figures is None else EMPTY,
                EMPTY if row.record is None else name_cell(row.record, row.record.removesuffix(f"/{FILE_NAME}")),
            )
        )
    columns = heads(
        "+*Configuration", "-*Model", "-*Strategy", "-Batch", "-*Precision", "-Power cap, W", "-Clock cap, MHz",
        "-Ideal, ms", "Step, ms", "-Sequential, ms", "Sequential longer by", "_95% interval", "Compute slowdown",
        "_95% interval", "Overlap ratio", "-Mean W with overlap", "-sequential", "Highest W with overlap",
        "-sequential", "-J a step", "-Windows", "-Steps of a mode", "-Seconds", "-*Failed", "-*Record",
    )  # fmt: skip
    caption = "Seconds are those of the whole job."
    return Table("Every configuration", columns, tuple(lines), caption, first=True).without_empty_columns()


def _number(value: Estimate | None, decimals: int | None = None) -> Cell:
    return number_cell(None if value is None else value.value, decimals)


_KNOWN = {"python": "Python", "threads": "Threads of a rank", "quick": "A quick look", "device": "Ranks are on"}


def _setting(study: Study, rows: Sequence[StudyRow]) -> Facts:
    """What ran, with what."""
    start = study.start
    models = {row.configuration.model: row.model for row in rows if row.model}
    facts = [
        ("Device", start.device),
        ("Ranks", str(start.ranks)),
        ("Link", start.link),
        ("Measured steps of each mode", str(start.steps)),
        ("Scale of the models", f"{start.scale:g}"),
        *[
            (f"Model {name}", ", ".join([f"{key} {_option(value)}" for key, value in sizes.items()]))
            for name, sizes in models.items()
        ],
        ("Started", start.started_at),
        ("Time in jobs", f"{sum([row.seconds for row in rows]):,.0f} s"),
        *[(_KNOWN.get(name, name), version) for name, version in start.versions.items()],
        *[(_KNOWN.get(name, name), _option(value)) for name, value in start.options.items()],
    ]
    return Facts("Setting", tuple([(page_text(name, 80), page_text(value, 500)) for name, value in facts]))


def _option(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
