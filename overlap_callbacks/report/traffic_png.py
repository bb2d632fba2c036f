"""A traffic matrix as a PNG picture, by matplotlib."""

from __future__ import annotations

import io

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.communication.heat_map import bytes_in_words
from overlap_callbacks.analysis.communication.view import TrafficView
from overlap_callbacks.analysis.formatting import shortened

_MAX_TICKS = 16


def png_of(view: TrafficView) -> bytes:
    """The picture. Rows send, columns receive.

    Args:
        view: what to show.

    Raises:
        ImportError: matplotlib is not installed.
    """
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
    ticks = range(0, number, -(-number // _MAX_TICKS))
    texts = [shortened(safe_text.clean(view.labels[at]), 14).replace("$", r"\$") for at in ticks]
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
