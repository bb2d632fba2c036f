"""Renders a document as one self-contained HTML file."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from overlap_callbacks._version import __version__
from overlap_callbacks.report.views.elements import Chart, Document

# In the order in which the page runs them.
_SCRIPTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js", "timeline.js", "page.js", "controls.js")
_LICENCES = (("d3", "vendor/d3.LICENSE"), ("Observable Plot", "vendor/plot.LICENSE"))


@dataclass(frozen=True)
class Script:
    """A script of the page, and its hash, which the page's content security policy allows to run."""

    text: Markup
    hash: str


def as_html(document: Document) -> str:
    charts: list[Chart] = []

    def place(chart: Chart) -> int:
        charts.append(chart)
        return len(charts) - 1

    templates = _templates()
    body = templates.get_template("body.html.j2").render(
        **vars(document),
        place=place,
        version=__version__,
        licences=[(name, _file(file)) for name, file in _LICENCES],
    )
    # The charts' data are complete once the body has placed them.
    return templates.get_template("page.html.j2").render(
        title=document.title,
        body=Markup(body),
        style=Markup(_file("page.css")),
        scripts=[_script(name) for name in _SCRIPTS],
        data=script_json([{"draw": chart.draw, "title": chart.title, **chart.data} for chart in charts]),
    )


def write_document(document: Document, path: str | os.PathLike[str]) -> int:
    """Write the page atomically, or directly if ``path`` is a pipe or a device. Returns its size in bytes.

    An existing file is replaced; a link's target likewise.

    Raises:
        OSError: the file cannot be written.
    """
    content = as_html(document).encode()
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(content)  # raises if it is a folder
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


# Lead-ins of the lines below a verdict.
_LEAD = re.compile(r"^(To try first|What to do|Why|What differs|No advice|Compute slowdown|What overlap saves):")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


@functools.cache
def _templates() -> Environment:
    """Cached: compiling the templates takes longer than filling them in."""
    templates = Environment(
        loader=PackageLoader("overlap_callbacks.report.html", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["with_whole_options"] = with_whole_options
    templates.filters["with_lead"] = with_lead
    return templates


def with_whole_options(text: str) -> Markup:
    """A text in which no line breaks within a command option, such as ``--power-cap``."""
    return Markup(_OPTION.sub(r'<span class="option">\g<0></span>', str(escape(text))))


def with_lead(line: str) -> Markup:
    """A line below a verdict, with its lead-in marked."""
    found = _LEAD.match(line)
    if found is None:
        return with_whole_options(line)
    return Markup(f"<b>{found[0]}</b>") + with_whole_options(line[found.end() :])


def _script(name: str) -> Script:
    text = _file(name)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Script(Markup(text), f"sha256-{digest}")


def _file(name: str) -> str:
    return resources.files("overlap_callbacks.report.html").joinpath(name).read_text(encoding="utf-8")
