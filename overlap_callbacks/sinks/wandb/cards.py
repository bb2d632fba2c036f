"""Small HTML pictures, for vendors that show HTML: no script, no network, every name escaped.

They look the same in an offline run.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.bottleneck import run_bottleneck
from overlap_callbacks.analysis.communication.placement import host_numbers
from overlap_callbacks.analysis.communication.view import PHYSICAL, STYLE, Placement, svg, view_of
from overlap_callbacks.analysis.formatting import PLAIN, count, one_line, useful, value_and_certainty
from overlap_callbacks.analysis.headline import Headline, cause_in_words, next_step, run_headline, step_change
from overlap_callbacks.analysis.results.catalogue import FIGURES, STEP_TIMES, compares
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.analysis.results.messages import JobMessages
from overlap_callbacks.analysis.results.power import PowerTrace
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.run_summary import RunSummary, without_sequential
from overlap_callbacks.analysis.svg import mark, picture

# The CSS class of each bar; the colours are distinct for the colour-blind and on a grey printer.
_CLASSES = {"e2e_ideal_ms": "ideal", "e2e_overlapped_ms": "overlapped", "e2e_sequential_ms": "sequential"}
ROWS = tuple([figure for figure in FIGURES if figure.card])
_MAX_NOTES, _MAX_TEXT_LENGTH = 10, 400

# Picture width in its own units: about that of a dashboard panel, so that text has its usual size.
_WIDTH = 420.0

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--dim:#59636e;--paper:#ffffff;--line:#d1d9e0;
--ideal:#7a8794;--overlapped:#1f6feb;--sequential:#d9822b}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9198a1;--paper:#16181d;--line:#3d444d;
--ideal:#8b949e;--overlapped:#58a6ff;--sequential:#f0a04b}}
body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:12px;max-width:46em;
overflow-wrap:anywhere}
h1{font-size:15px;margin:.8em 0 .3em}h1:first-child{margin-top:0}h1 .dim{font-weight:400}
p{margin:0 0 .6em}.dim{color:var(--dim)}svg{width:100%;max-width:480px;height:auto;display:block}
text{font:13px system-ui,sans-serif;fill:var(--ink)}.dim text,text.dim{fill:var(--dim)}
table{border-collapse:collapse;margin:.6em 0}td,th{padding:.15em .9em .15em 0;text-align:right;font-weight:400}
td:first-child,th:first-child{text-align:left}td{vertical-align:top}td:first-child{width:34%}small{color:var(--dim)}
td{overflow-wrap:normal}th{color:var(--dim)}tr{border-bottom:1px solid var(--line)}
.ideal{fill:var(--ideal)}.overlapped{fill:var(--overlapped)}.sequential{fill:var(--sequential)}
.bound{stroke:var(--ink);stroke-width:1.5}.axis{stroke:var(--line)}.shade{opacity:.16}.flight{opacity:.5}
.trace{fill:none;stroke:var(--ink);stroke-width:1.2}.limit{stroke:var(--dim);stroke-dasharray:5 4}
"""


class SoFar(NamedTuple):
    """Summary of the run so far: means over the windows that count, the first step of these, and what bounds steps.

    ``late_rank``: that others wait for, if any.
    """

    headline: Headline
    num_windows: int
    first_step: int | None
    figures: Mapping[str, Estimate]
    why: Sequence[str] = ()
    late_rank: int | None = None

    @classmethod
    def of(cls, summary: RunSummary) -> SoFar:
        """From the run so far."""
        valid, found = summary.valid_windows, run_bottleneck(summary)
        first_step = valid[0].first_step if valid else None
        headline = run_headline(summary)
        why = (
            "" if found is None else found.sentence(),
            "" if summary.control else next_step(summary, headline, found),
        )
        late = None if found is None or found.late is None else found.late.rank
        return cls(headline._replace(what_to_do=""), len(valid), first_step, summary.pooled(), why, late)


def step_card(report: OverlapReport, so_far: SoFar) -> str:
    """The run so far: its headline, and step times side by side; then the figures of the window next to the run's.

    While no window counts, the step times are the window's.
    """
    figures = report.figures()
    if report.control:
        figures = without_sequential(figures)
    elif not report.valid:
        figures = {name: estimate for name, estimate in figures.items() if not compares(name)}
    cause = cause_in_words(report.power_verdict) if report.compared else None
    heard = f"{report.num_reporting} of {report.world_size} ranks"
    body = [
        f'<h1>The run so far <span class="dim">{_covered(so_far)}</span></h1>',
        f"<p><b>{_text(so_far.headline.sentence)}</b></p>",
        *[f"<p>{_text(line)}</p>" for line in (*so_far.headline.more, *so_far.why) if line],
    ]
    body += _bars(so_far.figures)
    body.append(f'<h1>This window <span class="dim">number {report.window}, from step {report.first_step}</span></h1>')
    body.append(f'<p class="dim">{heard}, {_text(report.device)}</p>')
    if not so_far.figures:
        body += _bars(figures) or ['<p class="dim">Step times were not measured in this window.</p>']
    rows = [figure for figure in ROWS if not (report.control and figure.of_sequential)]
    body.append(_rows(rows, figures, so_far.figures))
    if not (report.valid or report.control):
        shown = "only its overlapped steps and the residual overlap are shown"
        body.append(f'<p class="dim">This window does not count: {shown}.</p>')
    if report.cost is not None:
        body.append(f'<p class="dim">Cost of measuring: {PLAIN.measuring_cost(report.cost)}.</p>')
    if cause is not None:
        body.append(f"<p>What the compute slowdown of this window is due to: {_text(cause)}</p>")
    body += [f'<p class="dim">Note: {_text(note)}</p>' for note in report.problems[:_MAX_NOTES]]
    if len(report.problems) > _MAX_NOTES:
        body.append(f'<p class="dim">and {len(report.problems) - _MAX_NOTES} more notes: see the record</p>')
    return _page("Step time", body)


def _covered(so_far: SoFar) -> str:
    if so_far.first_step is None:
        return "no window counts yet"
    counting = "counts" if so_far.num_windows == 1 else "count"
    return f"{count(so_far.num_windows, 'window')} that {counting}, from step {so_far.first_step}"


def traffic_card(messages: JobMessages, world_size: int) -> str:
    """Who sends how much to whom in a step; hosts by number."""
    view = view_of(messages, Placement(host_numbers(messages, world_size)), order=PHYSICAL)
    notes = ['<p class="dim">Lines part the hosts.</p>'] if view.bounds else []
    return _page("Traffic", [f"<style>{STYLE}</style>", svg(view), *notes])


def power_card(report: OverlapReport, trace: PowerTrace) -> str:
    """Power over time, with the modes shaded and communication in flight below."""
    width, height, left, top = _WIDTH, 220.0, 52.0, 10.0
    known = [value for value in (trace.tdp_w, trace.limit_w) if value is not None]
    highest = max([*trace.power_w, *known]) * 1.05 or 1.0
    length = max(trace.time_ms[-1], *(segment.end_ms for segment in trace.segments), 1e-9)

    def x(time: float) -> float:
        return left + (width - left - 6) * time / length

    def y(power: float) -> float:
        return top + (height - top - 40) * (1 - power / highest)

    foot, right = y(0), width - 6

    def band(css: str, start: float, end: float, at: float, thickness: float) -> str:
        return mark("rect", css, x=x(start), y=at, width=x(end) - x(start), height=thickness)

    def level(css: str, at: float) -> str:
        return mark("line", css, x1=left, x2=right, y1=at, y2=at)

    marks = [band(f"shade {part.mode.value}", part.start_ms, part.end_ms, top, foot - top) for part in trace.segments]
    for css, intervals in (("flight overlapped", trace.communication), ("overlapped", trace.both)):
        marks += [band(css, start, end, foot + 3, 6) for start, end in intervals]
    if trace.limit_w is not None:
        limit = y(trace.limit_w)
        marks.append(level("limit", limit))
        marks.append(mark("text", "dim", f"limit {trace.limit_w:.0f} W", x=left + 4, y=limit - 4))
    points = " ".join(f"{x(time):.1f},{y(power):.1f}" for time, power in zip(trace.time_ms, trace.power_w, strict=True))
    marks += [mark("polyline", "trace", points=points), level("axis", foot)]
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        power, time = highest * share / 1.05, length * share
        marks.append(mark("text", "dim", f"{power:.0f} W", x=left - 6, y=y(power) + 4, text_anchor="end"))
        marks.append(mark("text", "dim", f"{time / 1e3:.1f} s", x=x(time), y=height - 8, text_anchor=anchor))
    legend = "Shaded: overlapped (blue) and sequential (orange) blocks."
    if trace.communication:
        darker = ", darker during compute" if trace.both else ""
        legend += f" Below: communication in flight{darker}, known for the profiled steps alone."
    where = f"Window {report.window}, rank 0's device, {trace.num_readings} readings."
    return _page("Power", [picture(width, height, "Power against time", marks), f'<p class="dim">{legend} {where}</p>'])


def _bars(figures: Mapping[str, Estimate]) -> list[str]:
    """Step times side by side, with intervals; empty if none is known."""
    bars = [(figure, figures[figure.name]) for figure in STEP_TIMES if figure.name in figures]
    if not bars:
        return []
    # Text above each bar: next to it, the longest interval would leave no room for the bars.
    width, row, bar = _WIDTH, 44.0, 18.0
    drawn = [useful(estimate, figure.unit) for figure, estimate in bars]
    highest = max(max(estimate.value, estimate.ci_high or 0.0) for estimate in drawn) or 1.0
    scale = (width - 4) / highest
    marks = []
    for number, (figure, estimate) in enumerate(bars):
        baseline, top = number * row + 13, number * row + 19
        bounds = PLAIN.figure_interval(figure, estimate).removesuffix(f" {figure.unit}")
        shown = PLAIN.figure(figure, estimate.value) + (f" ({bounds})" if bounds else "")
        length = max(estimate.value, 0.0) * scale
        marks += [
            mark("text", "", figure.title, x=0, y=baseline),
            mark("text", "", shown, x=width, y=baseline, text_anchor="end"),
            mark("rect", _CLASSES[figure.name], x=0, y=top, width=length, height=bar, rx=2),
        ]
        ends = drawn[number].ci_low, drawn[number].ci_high
        if None not in ends:
            low, high = (max(bound or 0.0, 0.0) * scale + 1 for bound in ends)
            middle = top + bar / 2
            caps = "".join([f"M{end:.1f} {middle - 5}v10" for end in (low, high)])
            marks.append(mark("path", "bound", fill="none", d=f"M{low:.1f} {middle}H{high:.1f}{caps}"))
    return [picture(width, len(bars) * row, "Step time", marks)]


# The headline's base is a step without overlap: a speed-up would be of another.
_IN_ROWS = {"speedup_vs_sequential": ("step time with overlap", step_change)}


def _rows(rows: Sequence[Figure], figures: Mapping[str, Estimate], of_run: Mapping[str, Estimate]) -> str:
    """Headline figures of the window, next to their means over the run so far, if any."""
    heads = ["", "this window", *(["run so far"] if of_run else [])]
    cells = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for figure in rows:
        label, read = _IN_ROWS.get(figure.name, (figure.short, lambda found, name=figure.name: found.get(name)))
        both = [figures, of_run] if of_run else [figures]
        own = [_cell(figure, read(known), known) for known in both]
        dim = ' class="dim"' if read(figures) is None else ""
        cells.append(f"<tr{dim}><td>{label}</td>{''.join(own)}</tr>")
    return f'<table>{"".join(cells)}</table><p class="dim">Below the figures: 95% intervals.</p>'


def _cell(figure: Figure, estimate: Estimate | None, known: Mapping[str, Estimate]) -> str:
    if estimate is None:
        return "<td>not measured</td>"
    if figure.signed:
        value, bounds = value_and_certainty(estimate, PLAIN)
    else:
        value = PLAIN.figure(figure, estimate.value).replace(" ", "&nbsp;")  # the interval may wrap, the value may not
        bounds = PLAIN.figure_interval(figure, estimate, known.get("e2e_overlapped_ms"))
    return f"<td>{value}{f'<br><small>{bounds}</small>' if bounds else ''}</td>"


def _text(text: str) -> str:
    return html.escape(one_line(text, _MAX_TEXT_LENGTH))


def _page(title: str, body: Sequence[str]) -> str:
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return f"<!doctype html><html><head>{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"
