"""The document for one or more runs: the verdict of each, then a section for each question."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Sequence

from overlap_callbacks.analysis.formatting import count, page_sentence, page_text
from overlap_callbacks.analysis.headline import next_step, run_headline
from overlap_callbacks.analysis.race import race_sentence
from overlap_callbacks.analysis.results.race import RaceVerdict
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.arms import arms
from overlap_callbacks.report.views.causal import causal
from overlap_callbacks.report.views.communication import communication
from overlap_callbacks.report.views.comparison import comparison, head_lines
from overlap_callbacks.report.views.elements import Block, Document, Note, RunPage, Section
from overlap_callbacks.report.views.environment import environment, warnings
from overlap_callbacks.report.views.experts import experts
from overlap_callbacks.report.views.quality import QUALITY, configuration, quality, race_of
from overlap_callbacks.report.views.scaling import compared, scaling
from overlap_callbacks.report.views.sections import (
    cost,
    ideal,
    not_measured,
    overview,
    power,
    throughput,
    tiles,
)
from overlap_callbacks.report.views.step_charts import kernels_in_time
from overlap_callbacks.report.views.step_parts import step_parts
from overlap_callbacks.report.views.tables import summary_table
from overlap_callbacks.report.views.traffic import traffic
from overlap_callbacks.report.views.trends import changed, usage

_METHOD = (
    "Equations 1 to 5 are those of arXiv 2507.03114, section IV-D. Intervals are 95% confidence intervals, over blocks "
    "of steps within a window and over windows within a run."
)


def runs_document(records: Sequence[Record], axis: str | None = None, *, charts: bool = True) -> Document:
    """The document for these runs.

    Args:
        records: one or more; several are compared first.
        axis: what varies between several; None for the number of ranks, if it does.
        charts: whether to include charts.

    Raises:
        ValueError: ``records`` is empty; or no record has the value of ``axis``.
    """
    if not records:
        raise ValueError("records must hold at least one record, got none")
    names = distinct_names(records)
    several = len(records) > 1
    runs = tuple(
        [
            _run(f"run-{number}", name, record, compared=several, charts=charts)
            for number, (name, record) in enumerate(zip(names, records, strict=True), 1)
        ]
    )
    title = "Overlap report: " + ", ".join(names[:4])
    if not several:
        return Document(title, runs, _METHOD)
    verdict, *more = map(page_sentence, head_lines(names, records))
    compared = tuple(_compared(names, records, axis))
    return Document(title, runs, _METHOD, f"{len(records)} runs compared", verdict, tuple(more), compared)


def distinct_names(records: Sequence[Record]) -> list[str]:
    """Display name of each run: its folder's name, numbered if two are equal."""
    names: list[str] = []
    for record in records:
        name = page_text(record.path.resolve().parent.name, 80) or "run"
        free = (f"{name} ({number})" for number in itertools.count(2))
        names.append(name if name not in names else next(other for other in free if other not in names))
    return names


def _compared(names: Sequence[str], records: Sequence[Record], axis: str | None) -> list[Section]:
    found = compared(names, records, axis)
    return [comparison(names, records), *([] if found is None else [scaling(found)])]


def _run(identity: str, name: str, record: Record, *, compared: bool, charts: bool) -> RunPage:
    race, others = attention(record)
    blocks: list[Block] = [*race, *tiles(record), *overview(record, compared=compared), *others]
    head, line = page_text(head_of(record)), run_headline(record.summary, len(record.arms))
    step = next_step(record.summary, line, record.bottleneck())
    more = tuple([page_sentence(each) for each in (*line._replace(what_to_do="").more, step) if each])
    sections = tuple([section for section in _sections(record, charts) if section.answer or section.blocks])
    # With several runs, the comparison comes first; each run's own sections open on a click.
    folded = tuple([dataclasses.replace(section, folded=True) for section in sections]) if compared else sections
    figures = summary_table(record.figures, _basis(record)) if record.figures else None
    return RunPage(identity, name, head, page_sentence(line.sentence), tuple(blocks), folded, more, figures)


def attention(record: Record) -> tuple[list[Note], list[Note]]:
    """What must be read before any figure: of a race; of a control run, and serious findings."""
    race, of_race, others = race_of(record), [], warnings(record)
    if race is not None and race.verdict is RaceVerdict.RACE:
        of_race.append(Note(page_text(race_sentence(race), 4000), warning=True))
    if record.control:
        control = (
            "A control run: overlap was never switched off. Every difference here is an error of the measurement, "
            "and of its 95% intervals 95 in 100 should hold zero."
        )
        others.insert(0, Note(control, warning=True))
    return of_race, others


def head_of(record: Record) -> str:
    """What ran where, in one line."""
    info = record.info
    started = f"started {_moment(info.started_at)}"
    parts = (info.framework, count(info.world_size, "rank"), info.backend, info.device, started)
    return " · ".join(part for part in parts if part)


def _moment(started_at: str) -> str:
    """An ISO 8601 time to the minute, in readable form; any other text unchanged."""
    try:
        found = datetime.datetime.fromisoformat(started_at)
    except ValueError:
        return started_at
    return f"{found:%Y-%m-%d %H:%M} {found.tzname() or ''}".rstrip()


def _basis(record: Record) -> str:
    """What the figures are means over."""
    if not record.pooled():
        return "one unfinished window"
    return f"{len(record.valid_windows):,} of {count(len(record.windows), 'window')}"


def _sections(record: Record, charts: bool) -> list[Section]:
    """The sections: what overlap costs and what limits a step are open, the others folded."""
    found: list[Section] = []
    lacking: list[str] = []
    if record.summary.measured:
        found += [cost(record), *ideal(record), *power(record), *changed(record), *throughput(record)]
        lacking = not_measured(record)
    found += [*step_parts(record), *causal(record), *arms(record)]
    further = [
        *([*kernels_in_time(record), *usage(record)] if charts and record.summary.measured else []),
        *traffic(record),
        *experts(record),
        *communication(record),
        quality(record, lacking),
        *environment(record),
        configuration(record),
    ]
    # For a run without figures, the section on the measurement says why.
    asked_why = not record.valid_windows
    if asked_why:
        found = [dataclasses.replace(each, folded=True) for each in found]
    return [
        *found,
        *[dataclasses.replace(each, folded=not (asked_why and each.title == QUALITY)) for each in further],
    ]
