"""Display of a job's traffic: a matrix small enough to read, with labels, and its picture."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.communication.placement import UNKNOWN
from overlap_callbacks.analysis.communication.rank_grids import Ranks, ranks_in
from overlap_callbacks.analysis.communication.traffic import RING, Matrix, matrix_of
from overlap_callbacks.analysis.formatting import bytes_in_words, ranges, shortened
from overlap_callbacks.analysis.results.messages import JobMessages
from overlap_callbacks.analysis.svg import mark, picture

RANK, HOST, STAGE = "rank", "host", "stage"
LABELS = (RANK, HOST, STAGE)
LOGICAL, PHYSICAL = "logical", "physical"
# Maximum rows and columns of a readable matrix.
MAX_CELLS = 64


class ViewError(ValueError):
    """The traffic cannot be shown as asked; the message says why."""


@dataclass(frozen=True)
class TrafficView:
    """A matrix to show.

    Attributes:
        by: meaning of rows and columns, one of ``LABELS``.
        labels: of the rows and columns.
        sent: ``sent[i, j]`` bytes a step go from label i to label j.
        title: what is shown.
        bounds: rows at which a new host begins, if ranks are in physical order.
        unplaced_bytes: bytes in no cell.
    """

    by: str
    labels: tuple[str, ...]
    sent: Matrix
    title: str
    bounds: tuple[int, ...] = ()
    unplaced_bytes: float = 0.0

    @property
    def rows(self) -> list[list[float]]:
        rows: list[list[float]] = self.sent.tolist()
        return rows


@dataclass(frozen=True)
class Placement:
    """The number of each rank's host, and names of hosts by number."""

    hosts: Ranks
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether the host of every rank is known."""
        return bool((self.hosts != UNKNOWN).all())

    @property
    def num_hosts(self) -> int:
        return int(self.hosts.max(initial=-1)) + 1

    def name(self, host: int) -> str:
        return self.names.get(host, f"host {host}")


def stages_of(messages: JobMessages, world_size: int) -> Ranks:
    """The pipeline stage of each rank; -1 if it has none."""
    stages = np.full(world_size, -1, dtype=np.int64)
    for group in messages.groups:
        if group.stage >= 0 and group.whole:
            ranks = ranks_in(group.ranks)
            stages[ranks[ranks < world_size]] = group.stage
    return stages


def view_of(
    messages: JobMessages,
    placement: Placement,
    *,
    by: str | None = None,
    order: str = LOGICAL,
    algorithm: str = RING,
) -> TrafficView:
    """The matrix of a job; ViewError if the traffic cannot be shown like that.

    By default rows and columns are ranks if there are few, else hosts, else stages. ``algorithm``: of all-reduces.
    """
    stages = stages_of(messages, len(placement.hosts))
    by = by or _default(placement, stages)
    bounds: tuple[int, ...] = ()
    if by == RANK:
        labels, texts, title, bounds = _by_rank(placement, order)
    elif by == HOST:
        labels, texts, title = _by_host(placement)
    else:
        if (stages < 0).all():
            raise ViewError("by stage: no rank told a pipeline stage")
        labels, title = stages, "Bytes sent between stages"
        texts = [f"stage {number}" for number in range(int(stages.max()) + 1)]
    matrix = matrix_of(messages, placement.hosts, labels, algorithm)
    return TrafficView(by, tuple(texts), matrix.sent, title, bounds, matrix.unplaced_bytes)


def _default(placement: Placement, stages: Ranks) -> str:
    if len(placement.hosts) <= MAX_CELLS:
        return RANK
    if placement.known and placement.num_hosts > 1:
        return HOST
    return STAGE if (stages >= 0).any() else RANK


def _by_rank(placement: Placement, order: str) -> tuple[Ranks, list[str], str, tuple[int, ...]]:
    """The label of each rank, the labels' names, the title, and the labels at which a new host begins."""
    hosts = placement.hosts
    world_size = len(hosts)
    physical = order == PHYSICAL and placement.known
    ranks = np.lexsort((np.arange(world_size), hosts)) if physical else np.arange(world_size)
    per_cell = -(-world_size // MAX_CELLS)
    labels = np.empty(world_size, dtype=np.int64)
    labels[ranks] = np.arange(world_size) // per_cell
    texts = [ranges(ranks[at : at + per_cell].tolist(), 2) for at in range(0, world_size, per_cell)]
    if per_cell > 1:
        return labels, texts, f"Bytes sent between ranks, {per_cell} ranks a cell", ()
    bounds = tuple((np.flatnonzero(np.diff(hosts[ranks])) + 1).tolist()) if physical else ()
    return labels, texts, "Bytes sent between ranks" + (", by host" if physical else ""), bounds


def _by_host(placement: Placement) -> tuple[Ranks, list[str], str]:
    if not placement.known:
        raise ViewError("by host: on which host each rank runs is not known")
    number = placement.num_hosts
    per_cell = -(-number // MAX_CELLS)
    if per_cell == 1:
        return placement.hosts, [placement.name(host) for host in range(number)], "Bytes sent between hosts"
    texts = [f"hosts {ranges(range(at, min(at + per_cell, number)))}" for at in range(0, number, per_cell)]
    return placement.hosts // per_cell, texts, f"Bytes sent between hosts, {per_cell} hosts a cell"


# -- pictures: SVG, which needs no plotting library, or PNG, by matplotlib

STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--dim:#59636e;--paper:#ffffff;--none:#f0f2f4;--hue:#084c8d;--line:#8c959f}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9198a1;--paper:#16181d;--none:#22262d;--hue:#7ec3ff;
--line:#8b949e}}
.map text{font:11px system-ui,sans-serif;fill:var(--ink)}.map .dim{fill:var(--dim)}.map .none{fill:var(--none)}
.map .cell{fill:var(--hue)}.map .host{stroke:var(--line);stroke-width:1.5}
"""
_MAX_LABEL = 14
_WIDTH = 480.0
# Minimum opacity of a cell with traffic, and maximum number of cells that have room for figures.
_FAINTEST = 0.18
_MAX_LABELLED = 16


def strength(value: float, most: float) -> float:
    """Strength of a cell's colour, from 0 (nothing is sent) to 1 (the maximum of all cells)."""
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
    # Square root, as in the SVG, so that small traffic differs visibly from none.
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
