"""Small pictures in HTML, for vendors that show it: no script, no network, every name escaped.

Drawn as SVG by hand: a bar with its interval and a line need no plotting library, and must look the same in a run that
is offline.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.power import PowerTrace
from overlap_callbacks.analysis.results.report import Estimate, OverlapReport

# Ideal, overlapped, sequential: told apart by the colour-blind and on a grey printer.
BARS = (
    ("e2e_ideal_ms", "ideal", "ideal"),
    ("e2e_overlapped_ms", "overlapped", "overlapped"),
    ("e2e_sequential_ms", "sequential", "sequential"),
)
ROWS = (
    ("speedup_vs_sequential", "speed-up of overlap over sequential"),
    ("compute_slowdown", "compute slowdown"),
    ("comm_slowdown", "communication slowdown"),
    ("gap_to_ideal", "gap to ideal"),
    ("exposed_comm_ms", "exposed communication"),
    ("hidden_comm_fraction", "communication hidden behind compute"),
    ("residual_overlap", "overlap left in sequential steps"),
)
_COMPARES = frozenset(figure.name for figure in FIGURES if figure.compares)
_SIGNED = frozenset({"speedup_vs_sequential", "compute_slowdown", "comm_slowdown", "gap_to_ideal"})
_MOST_NOTES, _LONGEST_NOTE = 10, 400

# Of a picture, in its own units: a panel of a dashboard is about so wide, so its text is as large as the text beside.
_WIDTH = 420.0

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--dim:#59636e;--paper:#ffffff;--line:#d1d9e0;
--ideal:#7a8794;--overlapped:#1f6feb;--sequential:#d9822b}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9198a1;--paper:#16181d;--line:#3d444d;
--ideal:#8b949e;--overlapped:#58a6ff;--sequential:#f0a04b}}
body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:12px;max-width:46em;
overflow-wrap:anywhere}
p{margin:0 0 .6em}.dim{color:var(--dim)}svg{width:100%;max-width:480px;height:auto;display:block}
text{font:13px system-ui,sans-serif;fill:var(--ink)}.dim text,text.dim{fill:var(--dim)}
table{border-collapse:collapse;margin:.6em 0}td,th{padding:.15em .9em .15em 0;text-align:right;font-weight:400}
td:first-child,th:first-child{text-align:left}td:nth-child(2){white-space:nowrap}
td{overflow-wrap:normal}th{color:var(--dim)}tr{border-bottom:1px solid var(--line)}
.ideal{fill:var(--ideal)}.overlapped{fill:var(--overlapped)}.sequential{fill:var(--sequential)}
.bound{stroke:var(--ink);stroke-width:1.5}.axis{stroke:var(--line)}.shade{opacity:.16}.flight{opacity:.5}
.trace{fill:none;stroke:var(--ink);stroke-width:1.2}.limit{stroke:var(--dim);stroke-dasharray:5 4}
"""


def step_card(report: OverlapReport, verdict: str, power: str | None) -> str:
    """Step time ideal, overlapped and sequential side by side, with intervals; the verdict; the headline figures."""
    figures = {
        name: value
        for name, value in report.figures().items()
        if report.valid or report.control or name not in _COMPARES
    }
    heard = f"{len(report.ranks)} of {report.world_size} ranks"
    body = [
        f'<p><span class="dim">The run so far</span><br><b>{_text(verdict)}</b></p>',
        f'<p class="dim">Window {report.window}, from step {report.first_step}, {heard}, {_text(report.device)}</p>',
    ]
    bars = [(label, style, figures[name]) for name, label, style in BARS if name in figures]
    body.append(_bars(bars) if bars else '<p class="dim">Step times were not measured in this window.</p>')
    body.append(_rows(figures))
    if power is not None:
        body.append(f"<p>What the compute slowdown is due to: {_text(power)}</p>")
    body += [f'<p class="dim">Note: {_text(note)}</p>' for note in report.problems[:_MOST_NOTES]]
    if len(report.problems) > _MOST_NOTES:
        body.append(f'<p class="dim">and {len(report.problems) - _MOST_NOTES} more notes: see the record</p>')
    return _page("Step time", body)


def power_card(report: OverlapReport, trace: PowerTrace) -> str:
    """Power against time, the modes shaded, communication in flight below."""
    width, height, left, top = _WIDTH, 220.0, 52.0, 10.0
    known = [value for value in (trace.tdp_w, trace.limit_w) if value is not None]
    highest = max([*trace.power_w, *known]) * 1.05 or 1.0
    length = max(trace.time_ms[-1], *(segment.end_ms for segment in trace.segments), 1e-9)

    def x(time: float) -> float:
        return left + (width - left - 6) * time / length

    def y(power: float) -> float:
        return top + (height - top - 40) * (1 - power / highest)

    parts = [
        f'<rect class="shade {segment.arm.value}" x="{x(segment.start_ms):.1f}" y="{top}" '
        f'width="{x(segment.end_ms) - x(segment.start_ms):.1f}" height="{y(0) - top:.1f}"/>'
        for segment in trace.segments
    ]
    parts += [
        f'<rect class="flight overlapped" x="{x(start):.1f}" y="{y(0) + 3:.1f}" '
        f'width="{x(end) - x(start):.1f}" height="6"/>'
        for start, end in trace.communication
    ]
    if trace.limit_w is not None:
        parts.append(
            f'<line class="limit" x1="{left}" x2="{width - 6}" '
            f'y1="{y(trace.limit_w):.1f}" y2="{y(trace.limit_w):.1f}"/>'
        )
        parts.append(
            f'<text class="dim" x="{left + 4}" y="{y(trace.limit_w) - 4:.1f}">limit {trace.limit_w:.0f} W</text>'
        )
    points = " ".join(f"{x(time):.1f},{y(power):.1f}" for time, power in zip(trace.time_ms, trace.power_w, strict=True))
    parts.append(f'<polyline class="trace" points="{points}"/>')
    parts.append(f'<line class="axis" x1="{left}" x2="{width - 6}" y1="{y(0):.1f}" y2="{y(0):.1f}"/>')
    for share in (0.0, 0.5, 1.0):
        power = highest * share / 1.05
        parts.append(f'<text class="dim" x="{left - 6}" y="{y(power) + 4:.1f}" text-anchor="end">{power:.0f} W</text>')
        time = length * share
        anchor = ("start", "middle", "end")[round(2 * share)]
        parts.append(
            f'<text class="dim" x="{x(time):.1f}" y="{height - 8}" text-anchor="{anchor}">{time / 1e3:.1f} s</text>'
        )
    chart = (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="Power against time">{"".join(parts)}</svg>'
    )
    legend = "Shaded: overlapped (blue) and sequential (orange) blocks."
    if trace.communication:
        legend += " Below: communication in flight, known of the profiled steps alone."
    where = f"Window {report.window}, rank 0's device, {trace.num_readings} readings."
    return _page("Power", [chart, f'<p class="dim">{legend} {where}</p>'])


def _bars(bars: Sequence[tuple[str, str, Estimate]]) -> str:
    # Words above each bar: beside it, the longest interval would leave no room for the bars.
    width, row, bar = _WIDTH, 44.0, 18.0
    highest = max(max(figure.value, figure.ci_high or 0.0) for _, _, figure in bars) or 1.0
    scale = (width - 4) / highest
    parts = []
    for number, (label, style, figure) in enumerate(bars):
        text, top = number * row + 13, number * row + 19
        middle = top + bar / 2
        shown = f"{figure.value:.2f} ms"
        if figure.ci_low is not None and figure.ci_high is not None:
            shown += f" [{figure.ci_low:.2f}, {figure.ci_high:.2f}]"
        parts.append(f'<text x="0" y="{text}">{label}</text>')
        parts.append(f'<text x="{width}" y="{text}" text-anchor="end">{shown}</text>')
        length = max(figure.value, 0.0) * scale
        parts.append(f'<rect class="{style}" x="0" y="{top}" width="{length:.1f}" height="{bar}" rx="2"/>')
        if figure.ci_low is not None and figure.ci_high is not None:
            low, high = (max(bound, 0.0) * scale + 1 for bound in (figure.ci_low, figure.ci_high))
            parts.append(
                f'<path class="bound" fill="none" d="M{low:.1f} {middle}H{high:.1f}'
                f'M{low:.1f} {middle - 5}v10M{high:.1f} {middle - 5}v10"/>'
            )
    height = len(bars) * row
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="Step time">{"".join(parts)}</svg>'


def _rows(figures: Mapping[str, Estimate]) -> str:
    cells = ["<tr><th></th><th>value</th><th>95 % interval</th></tr>"]
    for name, label in ROWS:
        figure = figures.get(name)
        if figure is None:
            cells.append(f'<tr class="dim"><td>{label}</td><td>not measured</td><td></td></tr>')
            continue
        has_interval = figure.ci_low is not None and figure.ci_high is not None
        interval = f"{_value(name, figure.ci_low)} to {_value(name, figure.ci_high)}" if has_interval else ""
        cells.append(f"<tr><td>{label}</td><td>{_value(name, figure.value)}</td><td>{interval}</td></tr>")
    return f"<table>{''.join(cells)}</table>"


def _value(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name.endswith("_ms"):
        return f"{value:.2f} ms"
    return f"{value:+.1%}" if name in _SIGNED else f"{value:.1%}"


def _text(text: str) -> str:
    return html.escape(name_rules.clean(text)[:_LONGEST_NOTE])


def _page(title: str, body: Sequence[str]) -> str:
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return f"<!doctype html><html><head>{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"
