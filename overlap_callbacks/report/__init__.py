"""The report page: one HTML file that needs nothing else, made from records.

Figures and words are made here, in Python; Jinja2 puts them into HTML, with everything that comes from a record
escaped; the charts are drawn in the browser by Observable Plot, whose two files (``vendor/``) are copied into the page.

Why Observable Plot: it draws SVG, so charts are crisp in print and take their colours from the page's style sheet,
which gives light, dark and paper for nothing; it draws for the width that there is, which a phone needs; with d3 it is
0.5 MB, so a page of a thousand windows stays far below 5 MB. Plotly's only bundle in its Python package is 4.7 MB;
matplotlib's SVG has the text of a wide screen on a phone, and one set of colours; canvas libraries (uPlot, Chart.js)
blur in print.

The way of the data: a ``Record`` becomes sections of ``blocks`` (``questions``, ``along_the_run``, ``power``,
``quality``, several records ``comparison``), and ``page`` makes those one file. A figure that was not measured is a
``Note`` that says so.
"""

from overlap_callbacks.report.html.page import page, write_page

__all__ = ["page", "write_page"]
