"""A traffic matrix as a picture: SVG, which needs no plotting library, or PNG, by matplotlib.

Colours follow the reader's theme, and the square root of the bytes, so that small traffic differs from none.
"""

from __future__ import annotations

import io
import math

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.communication.view import TrafficView
from overlap_callbacks.analysis.formatting import shortened
from overlap_callbacks.analysis.svg import mark, picture

STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--dim:#59636e;--paper:#ffffff;--none:#f0f2f4;--hue:#084c8d;--line:#8c959f}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9198a1;--paper:#16181d;--none:#22262d;--hue:#7ec3ff;
--line:#8b949e}}
.map text{font:11px system-ui,sans-serif;fill:var(--ink)}.map .dim{fill:var(--dim)}.map .none{fill:var(--none)}
.map .cell{fill:var(--hue)}.map .host{stroke:var(--line);stroke-width:1.5}
"""
_MAX_LABEL = 14
_WIDTH = 480.0
# Least opacity of a cell with traffic, and cells in which figures find room.
_FAINTEST = 0.18
_MAX_LABELLED = 16


def bytes_in_words(number: float) -> str:
    """Bytes with a unit of powers of ten, e.g. ``1.5 MB``."""
    unit, size = unit_of(number)
    value = number / size
    return f"{value:.0f} {unit}" if value >= 99.5 or size == 1 else f"{value:.3g} {unit}"


def unit_of(number: float) -> tuple[str, float]:
    """The unit in which to show so many bytes, and its bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size * 0.9995:
            return unit, size
    return "B", 1.0


def strength(value: float, most: float) -> float:
    """How dark a cell is, from 0 (nothing is sent) to 1 (the most of any cell)."""
    return 0.0 if value <= 0 or most <= 0 else max(_FAINTEST, math.sqrt(value / most))


def svg(view: TrafficView, *, standalone: bool = False) -> str:
    """The picture; rows send, columns receive. A standalone one is a file with its own style and background."""
    number = len(view.labels)
    texts = [shortened(safe_text.clean(label), _MAX_LABEL) for label in view.labels]
    left = 14.0 + 6.2 * max([len(text) for text in texts], default=1)
    upright = max([len(text) for text in texts], default=1) > 3 or number > _MAX_LABELLED
    top = 38.0 + (left - 14 if upright else 12)
    side = max(4.0, (_WIDTH - left - 8) / max(1, number))
    if number <= 8:
        side = min(side, 44.0)
    width, height = left + side * number + 8, top + side * number + 26
    width = max(width, 300.0)
    most = float(view.sent.max(initial=0.0))
    marks = [
        mark("text", "", view.title, x=4, y=14),
        mark("text", "dim", f"rows send, columns receive; most {bytes_in_words(most)} a step", x=4, y=28),
    ]
    for at, text in list(enumerate(texts))[:: -(-number // _MAX_LABELLED) or 1]:
        x, y = left + side * (at + 0.5), top + side * (at + 0.5)
        marks.append(mark("text", "", text, x=left - 5, y=y + 4, text_anchor="end"))
        if upright:
            turned = f"rotate(-90 {x:.1f} {top - 5:.1f})"
            marks.append(mark("text", "", text, x=x, y=top - 1, transform=turned, text_anchor="start"))
        else:
            marks.append(mark("text", "", text, x=x, y=top - 5, text_anchor="middle"))
    end = side * number
    marks.append(mark("rect", "none", x=left, y=top, width=end, height=end))
    size = side - min(1.0, side * 0.08)
    for row, values in enumerate(view.rows):
        for column, value in enumerate(values):
            if value > 0:
                title = safe_text.clean(f"{view.labels[row]} to {view.labels[column]}: {bytes_in_words(value)} a step")
                place = {"x": left + side * column, "y": top + side * row, "width": size, "height": size}
                marks.append(mark("rect", "cell", title=title, fill_opacity=strength(value, most), **place))
    for bound in view.bounds:
        x, y = left + side * bound, top + side * bound
        marks.append(mark("line", "host", x1=x, x2=x, y1=top, y2=top + end))
        marks.append(mark("line", "host", x1=left, x2=left + end, y1=y, y2=y))
    if standalone:
        paper = mark("rect", width=width, height=height, fill="var(--paper)")
        marks[:0] = [f"<style>{STYLE}</style>", paper]
    return picture(width, height, view.title, marks, "map", standalone=standalone)


def png(view: TrafficView) -> bytes:
    """The picture, by matplotlib (ImportError if it is not installed). Rows send, columns receive."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(7.2, 6.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    most = float(view.sent.max(initial=0.0)) or 1.0
    # By the square root, as in the SVG: so small traffic can be told from none.
    image = axes.imshow(view.sent, cmap="Blues", norm=PowerNorm(0.5, 0.0, most), interpolation="nearest")
    number = len(view.labels)
    ticks = range(0, number, -(-number // _MAX_LABELLED))
    texts = [shortened(safe_text.clean(view.labels[at]), _MAX_LABEL).replace("$", r"\$") for at in ticks]
    axes.set_xticks(ticks, texts, rotation=90 if max(map(len, texts), default=0) > 3 else 0)
    axes.set_yticks(ticks, texts)
    axes.xaxis.tick_top()
    axes.set_title(f"{view.title}\nof a step; rows send, columns receive", loc="left", fontsize=10)
    for bound in view.bounds:
        axes.axhline(bound - 0.5, color="0.4", linewidth=1)
        axes.axvline(bound - 0.5, color="0.4", linewidth=1)
    figure.colorbar(image, ax=axes, shrink=0.85, format=FuncFormatter(lambda value, _: bytes_in_words(value)))
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()
