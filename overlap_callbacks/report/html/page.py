"""From records to one HTML file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from overlap_callbacks.analysis.formatting import page_sentence, page_text
from overlap_callbacks.report.axis import compared
from overlap_callbacks.report.html.arms import arms
from overlap_callbacks.report.html.bottleneck import bottleneck
from overlap_callbacks.report.html.communication import communication
from overlap_callbacks.report.html.comparison import comparison
from overlap_callbacks.report.html.document import document, write_document
from overlap_callbacks.report.html.elements import Block, Note, RunPage, Section
from overlap_callbacks.report.html.environment import environment, warnings
from overlap_callbacks.report.html.experts import experts
from overlap_callbacks.report.html.quality import configuration, quality
from overlap_callbacks.report.html.run import RunView
from overlap_callbacks.report.html.scaling import scaling
from overlap_callbacks.report.html.sections import cost, headline, ideal, worth
from overlap_callbacks.report.html.throughput import throughput
from overlap_callbacks.report.html.traffic import traffic
from overlap_callbacks.report.html.trends import changed
from overlap_callbacks.report.html.usage import usage
from overlap_callbacks.report.record import Record

_METHOD = (
    "Equations 1 to 5 are those of arXiv 2507.03114, section IV-D. Intervals are 95% confidence intervals, over blocks "
    "of steps within a window and over windows within a run."
)


def page(records: Sequence[Record], axis: str | None = None) -> str:
    """The page, as HTML.

    Args:
        records: one or more; several are compared first.
        axis: what varies between several; None for the number of ranks, if it does.

    Raises:
        ValueError: ``records`` is empty; or no record tells what ``axis`` asks for.
    """
    if not records:
        raise ValueError("records must hold at least one record, got none")
    views = [RunView(record) for record in records]
    names = distinct_names(records)
    runs = [_run(f"run-{i}", name, view) for i, (name, view) in enumerate(zip(names, views, strict=True), 1)]
    sections = _compared(names, views, axis) if len(runs) > 1 else []
    return document("Overlap report: " + ", ".join(names[:4]), runs, method=_METHOD, compared=sections)


def write_page(records: Sequence[Record], path: str | os.PathLike[str], axis: str | None = None) -> int:
    """Write the page, whole or not at all; into a pipe or a device, directly. Returns its size in bytes.

    Args:
        records: as for ``page``.
        path: of the file. An older file is replaced; of a link, the file that it points to.
        axis: as for ``page``.

    Raises:
        ValueError: as for ``page``.
        OSError: the file cannot be written.
    """
    return write_document(page(records, axis), path)


def distinct_names(records: Sequence[Record]) -> list[str]:
    """What to call each run: its folder's name, with a number where two have the same."""
    names: list[str] = []
    for record in records:
        name = page_text(record.path.resolve().parent.name, 80) or "run"
        free = (f"{name} ({number})" for number in itertools.count(2))
        names.append(name if name not in names else next(other for other in free if other not in names))
    return names


def _compared(names: Sequence[str], views: Sequence[RunView], axis: str | None) -> list[Section]:
    found = compared(names, [view.record for view in views], axis)
    return [comparison(names, views), *([] if found is None else [scaling(found)])]


def _run(identity: str, name: str, view: RunView) -> RunPage:
    blocks: list[Block] = []
    if view.figures:
        blocks.append(headline(view.figures))
    if view.control:
        blocks.append(
            Note(
                "A control run: overlap was never switched off. Every difference below is an error of the measurement, "
                "and of its 95% intervals 95 in 100 should hold zero.",
                warning=True,
            )
        )
    if view.figures and not view.valid_windows:
        blocks.append(Note("The figures are of one unfinished window: no whole one counts.", warning=True))
    blocks += warnings(view)
    sections: list[Section] = []
    if view.measured:
        sections += [
            worth(view),
            cost(view),
            ideal(view),
            *bottleneck(view),
            changed(view),
            *usage(view),
            *throughput(view),
        ]
    sections += arms(view)
    sent = traffic(view)
    if sent is not None:
        sections.append(sent)
    sections += experts(view)
    sections += communication(view)
    sections.append(quality(view))
    ran_on = environment(view)
    if ran_on is not None:
        sections.append(ran_on)
    sections.append(configuration(view))
    head = page_text(view.head)
    return RunPage(identity, name, head, page_sentence(view.verdict), tuple(blocks), tuple(sections))
