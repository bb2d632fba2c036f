"""The results of a study: a document with a section for each of its questions, and plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    caveats,
    clear_changes,
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
    Column,
    Document,
    Facts,
    Note,
    RunPage,
    Section,
    Table,
    Tile,
    Tiles,
    estimate_cells,
    interval_columns,
    name_cell,
    table_of,
)
from overlap_callbacks.report.views.power import trace_chart

_METHOD = (
    "The questions are those of figures 1 and 4 to 11 of arXiv 2507.03114, and equations 1, 2 and 4 are its own. Each "
    "configuration is one run: its 95% interval is over blocks or windows of that run, for one look at its end, and "
    "does not hold what differs from one run to the next. Intervals of means and of changes follow from those of "
    "their parts, whose errors are taken as independent. The largest of several measured figures is "
    "somewhat too large on average."
)
# What the study has and another may lack: a name, and what to do.
_NO_KERNELS = ("Compute slowdown", "No kernels were compared.")
_NO_STEPS = ("What overlap saves", "Step times of both modes are missing.")
_NO_POWER = ("Power", "No sensor could be read. The documentation of power says which there are.")
_NO_RATIO = ("Slowdown against overlap ratio", "Train two configurations or more.")
_NO_BENCH = (
    "Matrix products during an all-reduce (figure 8 of the study)",
    "Run: overlap bench gemm-allreduce. The page shows it where its bench.jsonl lies in this folder.",
)


def study_document(study: Study) -> Document:
    """The results of a study. Results of ``overlap bench gemm-allreduce`` in its folder get a section too."""
    start, names, rows = study.start, Names(study.settings), last_rows(study.start, study.lines)
    name = page_text(study.folder.resolve().name, 80) or "study"
    failed = [(names.whole(row.configuration), row.failure or "no figures") for row in rows if row.figures is None]
    notes = [*map(page_sentence, caveats(start, rows)), *map(page_text, failures_in_words(failed))]
    run = RunPage(
        "study",
        name,
        page_text(where(start, rows)),
        page_sentence(verdict(start, rows)),
        (_tiles(study, rows, names), *[Note(text, warning=True) for text in notes]),
        (
            *_sections(study, rows, names),
            Section("All configurations", "", [*_overall_table(study, rows, names), _configuration_table(rows, names)]),
            Section("How was it measured?", "", [_setting(study, rows)]),
        ),
    )
    return Document(f"Overlap study: {name}", (run,), _METHOD, max_rows=None)


def study_data(study: Study) -> dict[str, Any]:
    """Everything, as plain data; unknown values are null or absent."""
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
        slower = clear_changes(rows, SLOWDOWN, "With overlap, compute is", "slower in", "faster in")
        compared = pairs(rows, BATCH)
        answer = f"{page_sentence(slower)} {pair_answer(compared, names, BATCH)}".strip()
        table = [replace(pair_table(compared, names, BATCH), folded=True)] if compared else []
        sections.append(Section("What does overlap cost compute?", answer, [slowdowns, *table]))
    if ratio is not None:
        sections.append(Section("Does more overlap cost more?", "", [ratio]))
    if savings is not None:
        longer = clear_changes(rows, LONGER, "Sequential steps are", "longer in", "shorter in")
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
        return "Peaks of power have no interval here: how they differ between the modes is inconclusive."
    return page_sentence(clear_changes(rows, PEAK, "With overlap, the highest power is", "higher in", "lower in"))


def _products(study: Study) -> list[Section]:
    """Matrix products during all-reduces, if their results are in the study's folder and can be read."""
    try:
        return gemm_section(Bench.read(study.folder))
    except ResultsError:
        return []


def _power_trace(study: Study, rows: Sequence[StudyRow], names: Names) -> Chart | None:
    """Power along a window of the configuration whose peak power rises most; None if no record has it."""

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
    """Means and extremes over the configurations, next to the study's on GPUs; nothing for a single configuration."""
    known = _overall(rows)
    if max([figure.number for figure in known], default=0) < 2:
        return []
    compares = not on_cpu(study.start)
    published: Mapping[str, tuple[float | None, float | None]] = PUBLISHED if compares else {}
    labels = {**TITLES, GAP: "Gap to ideal", RATIO: "Overlap ratio"}

    def cells(figure: Overall, one: Estimate) -> tuple[Cell, Cell]:
        return estimate_cells(one, "fraction", signed=figure.key != RATIO)

    table = table_of(
        "Over all configurations",
        known,
        Column("*Figure", lambda figure: labels[figure.key]),
        Column("-Configurations", lambda figure: figure.number, "whole"),
        *interval_columns("Mean", lambda figure: cells(figure, figure.mean)),
        *interval_columns("Largest", lambda figure: cells(figure, figure.most.estimate)),
        Column("*Of", lambda figure: names.whole(figure.most.configuration)),
        *interval_columns("-Smallest", lambda figure: cells(figure, figure.least.estimate), "-95% interval"),
        Column("-*Of", lambda figure: names.whole(figure.least.configuration)),
        Column("Study, mean", lambda figure: published.get(figure.key, (None, None))[0], "change"),
        Column("_Study, largest", lambda figure: published.get(figure.key, (None, None))[1], "change"),
        caption="The study's figures are of four A100, H100, MI210 or MI250 GPUs." if compares else "",
        first=True,
        drop_empty=True,
    )
    return [table]


def _configuration_table(rows: Sequence[StudyRow], names: Names) -> Table:
    """Every configuration with its figures, or why it failed."""

    def figure(key: str) -> Callable[[StudyRow], Estimate | None]:
        return lambda row: value_of(row, key)

    def change(key: str) -> Callable[[StudyRow], tuple[Cell, Cell]]:
        return lambda row: estimate_cells(value_of(row, key), "fraction", signed=True)

    def failure(row: StudyRow) -> Cell:
        return name_cell(row.failure or "no figures") if row.figures is None else EMPTY

    def place(row: StudyRow) -> Cell:
        return EMPTY if row.record is None else name_cell(row.record, row.record.removesuffix(f"/{FILE_NAME}"))

    return table_of(
        "Every configuration",
        rows,
        Column("+*Configuration", lambda row: names.whole(row.configuration)),
        Column("-*Model", lambda row: row.configuration.model),
        Column("-*Strategy", lambda row: strategy_in_words(row.configuration.strategy)),
        Column("-Batch", lambda row: Cell(str(row.configuration.batch), row.configuration.batch)),
        Column("-*Precision", lambda row: row.configuration.precision),
        Column("-Power cap, W", lambda row: row.configuration.power_cap_w, "whole"),
        Column("-Clock cap, MHz", lambda row: row.configuration.clock_cap_mhz, "whole"),
        Column("-Ideal, ms", figure(IDEAL)),
        Column("Step, ms", figure(STEP)),
        Column("-Sequential, ms", figure(SEQUENTIAL)),
        *interval_columns("Sequential longer by", change(LONGER)),
        *interval_columns("Compute slowdown", change(SLOWDOWN)),
        Column("Overlap ratio", lambda row: estimate_cells(value_of(row, RATIO), "fraction")[0]),
        Column("-Mean W with overlap", figure(POWER), "whole"),
        Column("-sequential", figure(power_key(Mode.SEQUENTIAL, "avg_w")), "whole"),
        Column("Highest W with overlap", figure(power_key(Mode.OVERLAPPED, "peak_w")), "whole"),
        Column("-sequential", figure(power_key(Mode.SEQUENTIAL, "peak_w")), "whole"),
        Column("-J a step", figure(ENERGY), 1),
        Column("-Windows", lambda row: None if row.figures is None else row.figures.num_windows, "whole"),
        Column("-Steps of a mode", lambda row: None if row.figures is None else row.figures.num_steps, "whole"),
        Column("-Seconds", lambda row: row.seconds, "whole"),
        Column("-*Failed", failure),
        Column("-*Record", place),
        caption="Seconds are those of the whole job.",
        first=True,
        drop_empty=True,
    )


_KNOWN = {"python": "Python", "threads": "Threads of a rank", "quick": "A quick look", "device": "Ranks are on"}


def _setting(study: Study, rows: Sequence[StudyRow]) -> Facts:
    """What ran, and on what."""
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
