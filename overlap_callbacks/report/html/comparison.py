"""Several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis import formatting
from overlap_callbacks.analysis.results.report import Estimate
from overlap_callbacks.report import terminal
from overlap_callbacks.report.html import tables
from overlap_callbacks.report.html.elements import Block, Cell, Chart, Head, Note, Section, Table
from overlap_callbacks.report.html.power import power_figures
from overlap_callbacks.report.html.quality import run_facts
from overlap_callbacks.report.html.run import Subject
from overlap_callbacks.report.html.step_charts import mode_bars
from overlap_callbacks.report.html.trends import slowdowns

_COMPARED = (
    ("speedup_vs_sequential", "Speed-up of overlap"),
    ("compute_slowdown", "Compute slowdown"),
    ("gap_to_ideal", "Gap to ideal"),
)


def comparison(names: Sequence[str], subjects: Sequence[Subject]) -> Section:
    """Step times and headline figures of all runs, and where their configurations differ."""
    blocks: list[Block] = []
    runs = [(name, subject.figures) for name, subject in zip(names, subjects, strict=True)]
    if any("e2e_overlapped_ms" in figures for _, figures in runs):
        blocks.append(mode_bars(runs))
    shares = _shares(runs)
    if shares is not None:
        blocks.append(shares)
    along = slowdowns(list(zip(names, subjects, strict=True)))
    if along is not None:
        blocks.append(along)
    empty = [name for name, figures in runs if not figures]
    if empty:
        blocks.append(Note(f"Without any figure: {', '.join(empty)}.", warning=True))
    power = _power(names, subjects)
    blocks += [_figures(runs), *([power] if power is not None else []), _differences(names, subjects)]
    return Section("Side by side", "", blocks)


def _shares(runs: Sequence[tuple[str, dict[str, Estimate]]]) -> Chart | None:
    rows = []
    for figure, label in _COMPARED:
        for name, figures in runs:
            found = figures.get(figure)
            if found is not None:
                bounds = [formatting.rounded(value) for value in (found.value, found.ci_low, found.ci_high)]
                rows.append({"figure": label, "run": name, "value": bounds[0], "low": bounds[1], "high": bounds[2]})
    if not rows:
        return None
    return Chart("intervals", "Headline figures", {"unit": "fraction", "rows": rows}, "Bars are 95 % intervals.")


def _figures(runs: Sequence[tuple[str, dict[str, Estimate]]]) -> Table:
    rows = []
    for figure in terminal.LABELS:
        unit, signed = tables.UNITS[figure], figure in terminal.CHANGES
        cells = []
        for _, figures in runs:
            found = figures.get(figure)
            if found is None:
                cells.append(Cell("not measured"))
                continue
            bounds = formatting.interval(found, unit, signed=signed)
            shown = formatting.quantity(found.value, unit, signed=signed)
            cells.append(Cell(f"{shown} ({bounds})" if bounds else shown))
        rows.append((Cell(tables.label(figure)), *cells))
    columns = (Head("Figure", words=True), *(Head(name) for name, _ in runs))
    return Table("All figures", columns, tuple(rows), "With 95 % intervals.", sorts=False)


def _power(names: Sequence[str], subjects: Sequence[Subject]) -> Table | None:
    found = [power_figures(subject.record.valid_windows) for subject in subjects]
    labels = dict.fromkeys(label for figures in found for label in figures)
    if not labels:
        return None
    rows = [(Cell(label), *(Cell(figures.get(label, "not measured")) for figures in found)) for label in labels]
    columns = (Head("Figure", words=True), *(Head(name) for name in names))
    return Table("Power and energy", columns, tuple(rows), "Means over windows, with 95 % intervals.", sorts=False)


def _differences(names: Sequence[str], subjects: Sequence[Subject]) -> Block:
    facts = [
        {**dict(run_facts(subject.run)), **{f"Schedule: {k}": str(v) for k, v in subject.run.schedule.items()}}
        for subject in subjects
    ]
    rows = []
    for label in dict.fromkeys(label for found in facts for label in found):
        values = [found.get(label, formatting.DASH) for found in facts]
        if label != "Started" and len(set(values)) > 1:
            rows.append((tables.name_cell(label), *(tables.name_cell(value) for value in values)))
    if not rows:
        return Note("The runs have the same configuration.")
    columns = tuple(Head(text, words=True) for text in ("Setting", *names))
    return Table("Where their configurations differ", columns, tuple(rows), sorts=False)
