"""The outcome of a study as one HTML page: the verdict, and a part for each question of the study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from overlap_callbacks.analysis.formatting import PAGE, count, page_sentence, page_text
from overlap_callbacks.analysis.results.bench import GEMM, BenchResults
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.study import StudyRow, StudyStart
from overlap_callbacks.analysis.study import LONGER, PEAK, PUBLISHED, SLOWDOWN, Overall, last_rows, overall, value_of
from overlap_callbacks.experiments.study import charts
from overlap_callbacks.experiments.study.factors import batch_answer, batches, factor_sections, missing_factors
from overlap_callbacks.experiments.study.names import Names
from overlap_callbacks.experiments.study.page_tables import configuration_table, overall_table, setting
from overlap_callbacks.experiments.study.verdict import (
    TITLES,
    beyond_chance,
    caveats,
    failures,
    on_cpu,
    verdict,
    where,
)
from overlap_callbacks.report import bench_results, bench_words, record
from overlap_callbacks.report.html.document import write_document
from overlap_callbacks.report.views.bench import gemm_blocks
from overlap_callbacks.report.views.elements import Block, Chart, Document, Facts, Note, RunPage, Section, Tile, Tiles
from overlap_callbacks.report.views.power import trace_chart

PAGE_NAME = "study.html"
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


def write_study_page(folder: Path, start: StudyStart, rows: Sequence[StudyRow], bench: Path | None = None) -> Path:
    """Write the page into the folder of the results.

    Args:
        folder: of the results.
        start: of the study.
        rows: as they stand in the file; of several of one configuration the last that was measured counts.
        bench: result file of ``overlap bench gemm-allreduce``, or its folder; by default that of the folder.

    Returns:
        The page's path.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / PAGE_NAME
    name, trace = folder.resolve().name, power_trace(folder, last_rows(start, rows), Names(start.configurations))
    write_document(study_document(name, start, rows, _bench(bench or folder), trace), path)
    return path


def study_document(
    name: str,
    start: StudyStart,
    rows: Sequence[StudyRow],
    bench: BenchResults | None = None,
    trace: Chart | None = None,
) -> Document:
    """What a study found.

    Args:
        name: of the folder.
        start: of the study.
        rows: as they stand in the file.
        bench: results of ``overlap bench gemm-allreduce``; None without.
        trace: power along a window of one of the configurations; None without.
    """
    kept = last_rows(start, rows)
    names = Names(start.configurations)
    shown = page_text(name, 80) or "study"
    blocks: list[Block] = [
        _tiles(start, kept, names),
        *[Note(page_sentence(text), warning=True) for text in caveats(start, kept)],
        *_failures(start, kept),
    ]
    run = RunPage(
        "study",
        shown,
        page_text(where(start, kept)),
        page_sentence(verdict(start, kept, bounds=False)),
        tuple(blocks),
        (*_sections(start, kept, names, bench, trace), *_all(start, kept, names)),
    )
    return Document(f"Overlap study: {shown}", (run,), _METHOD)


def _bench(path: Path) -> BenchResults | None:
    """Results of matrix products beside all-reduces that lie there; None where there are none that can be read."""
    if not bench_results.file_of(path).exists():
        return None
    try:
        results = bench_results.read(path)
    except bench_results.BenchFileError:
        return None
    return results if results.start.plan.bench == GEMM else None


def _failures(start: StudyStart, rows: Sequence[StudyRow]) -> list[Block]:
    listed = failures(start, rows)
    notes: list[Block] = [Note(page_text(text), warning=True) for text in listed[:5]]
    if len(listed) > 5:
        notes.append(Note("More failed, for other reasons; the table of all configurations has them.", warning=True))
    return notes


# -- figures over all configurations


def _tiles(start: StudyStart, rows: Sequence[StudyRow], names: Names) -> Tiles:
    measured, failed = sum([row.figures is not None for row in rows]), sum([row.figures is None for row in rows])
    tiles = [_tile(start, rows, names, key) for key in (LONGER, SLOWDOWN, PEAK)]
    remark = f"of {len(start.configurations)}" + (f", {failed} failed" if failed else "")
    return Tiles((*tiles, Tile("Configurations measured", f"{measured:,}", "", remark)))


def _tile(start: StudyStart, rows: Sequence[StudyRow], names: Names, key: str) -> Tile:
    figure = overall(rows, key)
    if figure is None:
        return Tile(TITLES[key], "not measured")
    several = figure.number > 1
    bounds = PAGE.interval(figure.mean, "fraction", signed=True) or "too few blocks for an interval"
    parts = [f"mean of {count(figure.number, 'configuration')}; most: {_most(figure, names)}"] if several else []
    parts += [] if on_cpu(start) else [f"the study: {_published(key)}"]
    value = PAGE.percent(figure.mean.value, signed=True)
    return Tile(TITLES[key], value, bounds, page_text(". ".join([part[:1].upper() + part[1:] for part in parts])))


def _most(figure: Overall, names: Names) -> str:
    most = figure.most
    return f"{PAGE.percent(most.estimate.value, signed=True)}, {names.whole(most.configuration)}"


def _published(key: str) -> str:
    mean, most = PUBLISHED[key]
    up_to = f"up to {PAGE.percent(most, signed=True)}"
    return up_to if mean is None else f"{PAGE.percent(mean, signed=True)} on average, {up_to}"


# -- the questions of the study


def _sections(
    start: StudyStart, rows: Sequence[StudyRow], names: Names, bench: BenchResults | None, trace: Chart | None
) -> list[Section]:
    slower = beyond_chance(rows, SLOWDOWN, "With overlap, compute is", "slower in", "faster in")
    longer = beyond_chance(rows, LONGER, "Sequential steps are", "longer in", "shorter in")
    slowdowns, ratio = charts.slowdowns(rows, names), charts.against_ratio(rows)
    savings, products = charts.savings(rows, names), [] if bench is None else gemm_blocks(bench)
    drawn = [chart for chart in (charts.power(rows, names), charts.peaks(rows, names), trace) if chart is not None]
    sections = []
    if slowdowns is not None:
        answer = f"{page_sentence(slower)} {batch_answer(rows, names)}".strip()
        sections.append(Section("What does overlap cost compute?", answer, [slowdowns, *batches(rows, names)]))
    if ratio is not None:
        sections.append(Section("Does more overlap cost more?", "", [ratio]))
    if savings is not None:
        sections.append(Section("What does overlap save?", page_sentence(longer), [savings]))
    if drawn:
        sections.append(Section("What does overlap do to power?", _power_answer(rows), drawn))
    if bench is not None and products:
        notes = [Note(page_sentence(text)) for text in bench_words.notes(bench)]
        title = "What do matrix products lose beside an all-reduce (figure 8 of the study)?"
        sections.append(Section(title, page_sentence(bench_words.verdict(bench)), [*products, *notes]))
    sections += factor_sections(rows, names)
    lacking = [
        fact
        for fact, known in (
            (_NO_KERNELS, slowdowns), (_NO_RATIO, ratio), (_NO_STEPS, savings), (_NO_POWER, drawn),
            (_NO_BENCH, products),
        )
        if not known
    ]  # fmt: skip
    lacking += missing_factors(rows, on_cpu=on_cpu(start))
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


def _all(start: StudyStart, rows: Sequence[StudyRow], names: Names) -> list[Section]:
    blocks: list[Block] = []
    together = overall_table(rows, names, compares=not on_cpu(start))
    if together is not None:
        blocks.append(together)
    blocks.append(configuration_table(rows))
    return [
        Section("All configurations", "", blocks),
        Section("How was it measured?", "", [setting(start, rows)]),
    ]


# -- power along a window


def power_trace(folder: Path, rows: Sequence[StudyRow], names: Names) -> Chart | None:
    """The trace of the configuration whose highest power differs most between the modes; None if no record has one.

    Args:
        folder: of the study's results, in which the records lie.
        rows: one of each configuration.
        names: of the study's configurations.
    """
    for row in sorted(rows, key=_rise, reverse=True):
        window = _window_with_trace(folder, row)
        if window is not None and window.power_trace is not None:
            chart = trace_chart(window, window.power_trace)
            return replace(chart, title=f"{chart.title}: {names.whole(row.configuration)}")
    return None


def _rise(row: StudyRow) -> float:
    """How much higher the highest power is with overlap; below all others where that was not measured."""
    rise = value_of(row, PEAK)
    return float("-inf") if rise is None else rise.value


def _window_with_trace(folder: Path, row: StudyRow) -> OverlapReport | None:
    if row.record is None or row.figures is None or not any(key.startswith("power/") for key in row.figures.values):
        return None
    try:
        return record.read(folder / row.record, details=False).latest_valid("power_trace")
    except record.RecordError:
        return None
