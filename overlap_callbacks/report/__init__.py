"""The report page: one HTML file that needs nothing else, made from records.

Figures and words are made here, in Python. Jinja2 puts them into HTML and escapes everything that comes from a record.
Observable Plot draws the charts in the browser; its two files (``html/vendor/``) are copied into the page.

Why Observable Plot: it draws SVG. So charts are crisp in print, and take their colours from the page's style sheet, for
light, dark and paper. It draws for the width of the window, which a phone needs. With d3 it has 0.5 MB, so a page of a
thousand windows stays far below 5 MB. The alternatives: Plotly's only bundle in its Python package has 4.7 MB;
matplotlib's SVG has one set of colours, and on a phone the text of a wide screen; canvas libraries (uPlot, Chart.js)
blur in print.

The way of the data: a ``Record`` becomes a ``RunView`` (``html/run``), this becomes sections of elements
(``html/sections``, ``trends``, ``power``, ``quality``; several records, ``comparison``), and ``html/page`` makes those
one file. For a figure that was not measured, a ``Note`` says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_callbacks.report.html.page import page, write_page

__all__ = ["page", "write_page"]


def __getattr__(name: str) -> Any:
    """The page is imported when it is asked for: tables for the terminal need none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from overlap_callbacks.report.html import page as module

    return getattr(module, name)
