"""The screens of a record: the report page, one self-contained HTML file, and the terminal.

``views`` turns a ``Record`` into a ``Document`` of sections; ``html`` renders it as that file, ``terminal`` as text.
Jinja2 escapes everything that comes from a record. Observable Plot draws the charts in the browser; its two files
(``html/vendor/``) are copied into the page.

Why Observable Plot: it draws SVG, which is crisp in print, takes its colours from the page's style sheet and fits the
width of a phone. With d3 it has 0.5 MB; Plotly's only bundle in its Python package has 4.7 MB. Matplotlib's SVG has
fixed colours, and canvas libraries blur in print.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlap_callbacks.report.record import Record

__all__ = ["page", "write_page"]

# The page is imported on first use: the terminal needs no templates.


def page(records: Sequence[Record], axis: str | None = None) -> str:
    """The page, as HTML.

    Args:
        records: one or more; several are compared first.
        axis: what varies between several; None for the number of ranks, if it does.

    Raises:
        ValueError: ``records`` is empty; or no record has the value of ``axis``.
    """
    from overlap_callbacks.report.html import as_html
    from overlap_callbacks.report.views.runs import runs_document

    return as_html(runs_document(records, axis))


def write_page(records: Sequence[Record], path: str | os.PathLike[str], axis: str | None = None) -> int:
    """Write the page atomically, or directly if ``path`` is a pipe or a device. Returns its size in bytes.

    Args:
        records: as for ``page``.
        path: of the file. An existing file is replaced; a link's target likewise.
        axis: as for ``page``.

    Raises:
        ValueError: as for ``page``.
        OSError: the file cannot be written.
    """
    from overlap_callbacks.report.html import write_document
    from overlap_callbacks.report.views.runs import runs_document

    return write_document(runs_document(records, axis), path)
