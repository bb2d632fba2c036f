"""From records to one HTML file."""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from overlap_callbacks._version import __version__
from overlap_callbacks.analysis.formatting import page_sentence, page_text
from overlap_callbacks.report.axis import compared
from overlap_callbacks.report.html.bottleneck import bottleneck
from overlap_callbacks.report.html.communication import communication
from overlap_callbacks.report.html.comparison import comparison
from overlap_callbacks.report.html.elements import Block, Chart, Note, RunPage, Section
from overlap_callbacks.report.html.environment import environment, warnings
from overlap_callbacks.report.html.experts import experts
from overlap_callbacks.report.html.quality import configuration, quality
from overlap_callbacks.report.html.run import RunView
from overlap_callbacks.report.html.scaling import scaling
from overlap_callbacks.report.html.sections import cost, headline, ideal, worth
from overlap_callbacks.report.html.throughput import throughput
from overlap_callbacks.report.html.traffic import traffic
from overlap_callbacks.report.html.trends import changed
from overlap_callbacks.report.record import Record

# In the order in which the page runs them.
_SCRIPTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js", "page.js")
_FOOT = (
    "Equations 1 to 5 are those of arXiv 2507.03114, section IV-D. Intervals are 95% confidence intervals, over blocks "
    "of steps within a window and over windows within a run."
)
_LICENCES = (("d3", "vendor/d3.LICENSE"), ("Observable Plot", "vendor/plot.LICENSE"))


@dataclass(frozen=True)
class Script:
    """A script of the page, and its hash, by which the page's content security policy lets it run."""

    text: Markup
    hash: str


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
    return html_of("Overlap report: " + ", ".join(names[:4]), runs, sections)


def html_of(title: str, runs: Sequence[RunPage], compared: Sequence[Section] = (), foot: str = _FOOT) -> str:
    """A page of runs, as HTML.

    Args:
        title: of the page.
        runs: one or more.
        compared: what stands before several.
        foot: what the figures rest on, at the end.
    """
    charts: list[Chart] = []

    def place(chart: Chart) -> int:
        charts.append(chart)
        return len(charts) - 1

    scripts = [_script(name) for name in _SCRIPTS]
    templates = _templates()
    body = templates.get_template("body.html.j2").render(
        runs=runs, compared=compared, place=place, version=__version__, licences=_licences(), foot=foot
    )
    # The charts' data are known once the body has placed them.
    html = templates.get_template("page.html.j2").render(
        title=title,
        body=Markup(body),
        style=Markup(_file("page.css")),
        scripts=scripts,
        data=script_json([{"draw": chart.draw, "title": chart.title, **chart.data} for chart in charts]),
    )
    return html


@functools.cache
def _templates() -> Environment:
    """Kept for the next page: to compile the templates takes longer than to fill them in."""
    return Environment(
        loader=PackageLoader("overlap_callbacks.report.html", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


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
    return write_html(page(records, axis), path)


def write_html(html: str, path: str | os.PathLike[str]) -> int:
    """Write a page, as ``write_page`` does. Returns its size in bytes.

    Raises:
        OSError: the file cannot be written.
    """
    content = html.encode()
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(content)  # an error for a folder
        return len(content)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return len(content)


def script_json(content: Any) -> Markup:
    """JSON for a script element: nothing in it can end the element or open a comment."""
    text = msgspec.json.encode(content).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


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
        sections += [worth(view), cost(view), ideal(view), *bottleneck(view), changed(view), *throughput(view)]
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


def _script(name: str) -> Script:
    text = _file(name)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Script(Markup(text), f"sha256-{digest}")


def _licences() -> list[tuple[str, str]]:
    return [(name, _file(file)) for name, file in _LICENCES]


def _file(name: str) -> str:
    return resources.files("overlap_callbacks.report.html").joinpath(name).read_text(encoding="utf-8")
