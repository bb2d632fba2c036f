"""Several runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from overlap_callbacks.analysis.formatting import PAGE, PLAIN, listed, rounded
from overlap_callbacks.analysis.headline import Fastest, Headline, RunSpeed, fastest, step_change
from overlap_callbacks.analysis.results.catalogue import SUMMARY
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.step_parts import exposed_share
from overlap_callbacks.report.axis import axis_value, common_work, run_figures
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.configurations import (
    difference_table,
    differences,
    differences_in_words,
    of_the_job,
)
from overlap_callbacks.report.views.elements import Block, Cell, Chart, Head, Note, Section, Table
from overlap_callbacks.report.views.power import power_figures
from overlap_callbacks.report.views.run import RunView
from overlap_callbacks.report.views.step_charts import mode_bars
from overlap_callbacks.report.views.trends import slowdowns

# Title, and the figure by the others.
_COMPARED: tuple[tuple[str, Callable[[dict[str, Estimate]], Estimate | None]], ...] = (
    ("Step time with overlap", step_change),
    ("Compute slowdown", lambda figures: figures.get("compute_slowdown")),
    ("Exposed communication, share of a profiled step", exposed_share),
)


def head_lines(names: Sequence[str], views: Sequence[RunView]) -> list[str]:
    """The first lines of the page: which run is faster, its interval, what to try, and what is known to differ."""
    found = fastest_of(names, [view.record for view in views])
    lines = [found.headline.sentence, *found.headline.more]
    if found.name and of_the_job(differences(views)):
        then = views[list(names).index(found.name)].record.bottleneck()
        advice = f" Then: {then.advice[0].what}" if then is not None and then.advice else ""
        lines.append(f"To try first: go on with {found.name}.{advice}")
    return [*lines, differences_in_words(names, views)]


def comparison(names: Sequence[str], views: Sequence[RunView]) -> Section:
    """Step times and headline figures of all runs, and where their configurations differ."""
    blocks: list[Block] = []
    runs = [(name, view.figures) for name, view in zip(names, views, strict=True)]
    if any("e2e_overlapped_ms" in figures for _, figures in runs):
        blocks.append(mode_bars(runs))
    shares = _shares(runs)
    if shares is not None:
        blocks.append(shares)
    along = slowdowns(list(zip(names, views, strict=True)))
    if along is not None:
        blocks.append(along)
    empty = [name for name, figures in runs if not figures]
    if empty:
        blocks.append(Note(f"Without any figure: {', '.join(empty)}.", warning=True))
    power = _power(names, views)
    blocks += [_figures(runs), *([power] if power is not None else []), difference_table(names, views)]
    return Section("Side by side", "", blocks)


def _shares(runs: Sequence[tuple[str, dict[str, Estimate]]]) -> Chart | None:
    rows = []
    for title, read in _COMPARED:
        for name, figures in runs:
            estimate = read(figures)
            if estimate is not None:
                value, low, high = map(rounded, (estimate.value, estimate.ci_low, estimate.ci_high))
                rows.append({"figure": title, "run": name, "value": value, "low": low, "high": high})
    if not rows:
        return None
    return Chart("intervals", "Headline figures", {"unit": "fraction", "rows": rows}, "Bars are 95% intervals.")


def _figures(runs: Sequence[tuple[str, dict[str, Estimate]]]) -> Table:
    rows = []
    for figure in (figure for section in SUMMARY for figure in section):
        cells = []
        for _, figures in runs:
            estimate = figures.get(figure.name)
            if estimate is None:
                cells.append(Cell("not measured"))
                continue
            value, bounds = PAGE.figure(figure, estimate.value), PAGE.figure_interval(figure, estimate)
            cells.append(Cell(f"{value} ({bounds})" if bounds else value))
        if any(figure.name in figures for _, figures in runs):
            rows.append((Cell(figure.label), *cells))
    columns = (Head("Figure", words=True), *(Head(name) for name, _ in runs))
    return Table("All figures", columns, tuple(rows), "With 95% intervals.", folded=True, sorts=False)


def _power(names: Sequence[str], views: Sequence[RunView]) -> Table | None:
    by_run = [power_figures(view.valid_windows) for view in views]
    labels = dict.fromkeys(label for figures in by_run for label in figures)
    if not labels:
        return None
    rows = [(Cell(label), *(Cell(figures.get(label, "not measured")) for figures in by_run)) for label in labels]
    columns = (Head("Figure", words=True), *(Head(name) for name in names))
    return Table(
        "Power and energy", columns, tuple(rows), "Means over windows, with 95% intervals.", folded=True, sorts=False
    )


# -- the faster run


_MOST_NAMED = 3


def fastest_of(names: Sequence[str], records: Sequence[Record]) -> Fastest:
    """Which run is the fastest.

    Steps are compared, or where those of some runs do more, tokens or samples a second. Runs without a window that
    counts, and of different models, are not compared.

    Args:
        names: of the runs.
        records: of the runs, two or more.
    """
    known = [(name, record) for name, record in zip(names, records, strict=True) if _step_ms(record) is not None]
    if len(known) < 2:
        who = f"only {known[0][0]} has" if known else f"none of the {len(records)} runs has"
        return Fastest(Headline(f"Which run is faster is not known: {who} a window that counts."))
    left_out = [name for name in names if name not in dict(known)]
    found = _of_different_models(known) or _fastest(known)
    if not left_out:
        return found
    why = f"Not compared, as no window counts: {listed(left_out, _MOST_NAMED)}."
    headline = found.headline
    return found._replace(headline=headline._replace(interval=f"{headline.interval} {why}"))


def _fastest(known: Sequence[tuple[str, Record]]) -> Fastest:
    records = [record for _, record in known]
    work = common_work(records)
    speeds = []
    for name, record in known:
        figures = run_figures(name, record, record.runs[-1].world_size, work)
        if figures.step_ms is not None:
            speeds.append(RunSpeed(name, figures.step_ms, figures.work_per_s))
    alike = len({axis_value(record, f"{work}_per_step") for record in records}) == 1
    if alike or any(speed.work_per_s is None for speed in speeds):
        work = ""  # of steps that do as much, and of those of which nobody knows what they do, the time is told
    return fastest(speeds, work)


def _of_different_models(known: Sequence[tuple[str, Record]]) -> Fastest | None:
    """Step times without a verdict, where all records tell the shapes of their model and they differ; else None."""
    shapes = [record.runs[-1].configuration.get("shapes") for _, record in known]
    if None in shapes or len(set(shapes)) == 1:
        return None
    times = []
    for name, record in known:
        step_ms = _step_ms(record)
        if step_ms is not None:
            times.append(f"{PLAIN.quantity(step_ms, 'ms')} in {name}")
    sentence = "These runs train different models, so their step times do not say which is faster."
    return Fastest(Headline(sentence, f"A step takes {listed(times)}."))


def _step_ms(record: Record) -> float | None:
    found = record.pooled().get("e2e_overlapped_ms")
    return None if found is None else found.value
