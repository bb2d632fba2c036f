"""Charts along the run: has it changed, and how are device and memory used?"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from overlap_callbacks.analysis.formatting import NBSP, PAGE, count, includes_zero
from overlap_callbacks.analysis.power.trace import thin
from overlap_callbacks.analysis.results.catalogue import STEP_TIMES, every_figure, figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import RankWindow
from overlap_callbacks.analysis.statistics import Sample, bounded, estimate
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.elements import (
    RUN_COLORS,
    Block,
    Cell,
    Chart,
    Note,
    Section,
    Table,
    has_intervals,
    heads,
    line,
    line_chart,
    use_whiskers,
)
from overlap_callbacks.report.views.power import MEAN_POWER, mode_value
from overlap_callbacks.report.views.step_charts import COLORS, stack

# Maximum points of a line: a wide chart has no more pixels.
MAX_POINTS = 1000

# Minimum windows in each half: with fewer, their spread is too uncertain.
MIN_HALF = 3

_COMPARED = tuple(
    map(figure_named, ("e2e_overlapped_ms", "speedup_vs_sequential", "compute_slowdown", "exposed_comm_ms"))
)

Reader = Callable[[OverlapReport], Estimate | float | None]
# Name, colour and figure of a line.
Lines = Sequence[tuple[str, str, Reader]]


def changed(record: Record) -> list[Section]:
    """Charts along the run, and whether it changed; nothing with fewer than two windows that count."""
    windows, excluded = in_order(record), excluded_steps(record)
    if len(windows) < 2:
        return []
    charts = charts_along(
        windows,
        excluded,
        *[
            (figure.title, figure.unit, ((figure.title, "ink", _read(figure.name)),), True)
            for figure in map(figure_named, ("speedup_vs_sequential", "compute_slowdown", "exposed_comm_ms"))
        ],
        ("Step time", "ms", [(figure.short, COLORS[figure.name], _read(figure.name)) for figure in STEP_TIMES], False),
        ("Mean power of a device", "W", _both(MEAN_POWER), False),
    )
    if len(charts) % 2:  # the last has the row to itself
        charts[-1] = dataclasses.replace(charts[-1], narrow=False)
    answer, table = _halves(windows)
    blocks: list[Block] = [*charts, *([] if table is None else [table])]
    return [Section("Has it changed?", answer, blocks, folded=True)]


def in_order(record: Record) -> list[OverlapReport]:
    """The windows that count, ordered by step."""
    return sorted(record.valid_windows, key=lambda window: window.first_step)


def excluded_steps(record: Record) -> list[int]:
    counting = set(map(id, record.valid_windows))
    return sorted(window.first_step for window in record.windows if id(window) not in counting)


def _read(name: str) -> Reader:
    bounds, of_sequential = figure_named(name).bounds, figure_named(name).of_sequential

    def read(window: OverlapReport) -> Estimate | None:
        found: Estimate | None = None if window.control and of_sequential else getattr(window, name)
        return None if found is None else bounded(found, bounds)  # records of earlier versions exceed them

    return read


def _both(figure: Figure) -> Lines:
    """A figure of power in both modes."""
    return [(mode.value, mode.value, mode_value(figure, mode)) for mode in Mode]


def charts_along(
    windows: Sequence[OverlapReport], excluded: Sequence[int], *charts: tuple[str, str, Lines, bool]
) -> list[Chart]:
    """Charts along the run, without those that no window has data for.

    Each has a title, a unit, lines, and whether its axis extends to zero; it does not if lines lie close together far
    from zero.
    """
    made = []
    for title, unit, lines, zero in charts:
        series = [drawn for each in lines if (drawn := _line(*each, windows)) is not None]
        if series:
            caption, crosses = _caption(series, windows, excluded, zero=zero)
            named = len(lines) > 1
            made.append(line_chart(title, unit, series, caption, crosses, zero=zero, legend=named, narrow=True))
    return made


def _caption(
    series: Sequence[dict[str, Any]], windows: Sequence[OverlapReport], excluded: Sequence[int], *, zero: bool
) -> tuple[str, Sequence[int]]:
    """How to read a chart, and how it marks the windows that do not count."""
    crosses = excluded[:: max(1, -(-len(excluded) // MAX_POINTS))]
    caption = [_INTERVALS[use_whiskers(series)]] if has_intervals(series) else []
    if not zero:
        caption.append("The axis does not start at zero.")
    if excluded:
        verb = "does" if len(excluded) == 1 else "do"
        some = f"; {len(crosses):,} of them are drawn" if len(crosses) < len(excluded) else ""
        caption.append(f"\N{MULTIPLICATION SIGN} marks {count(len(excluded), 'window')} that {verb} not count{some}.")
    if any(line["of"] > len(line["points"]) for line in series):
        caption.append(
            f"Of {len(windows):,} windows at most {MAX_POINTS:,} are drawn: the extremes of each stretch stay."
        )
    return " ".join(caption), crosses


# Whether there are few points.
_INTERVALS = {
    True: "Whiskers are the 95% intervals of each window.",
    False: "The band is the 95% intervals of each window.",
}


def _line(name: str, color: str, read: Reader, windows: Sequence[OverlapReport]) -> dict[str, Any] | None:
    """A thinned line, and its number of points; None without any."""
    points = [(w.first_step, w.window, figure) for w in windows if (figure := read(w)) is not None]
    if not points:
        return None
    values = [figure.value if isinstance(figure, Estimate) else figure for _, _, figure in points]
    kept = thin(np.array(values), MAX_POINTS).tolist()
    return line(name, color, [points[place] for place in kept], of=len(points))


def slowdowns(runs: Sequence[tuple[str, Record]]) -> Chart | None:
    """The compute slowdown of several runs, each along its own steps; None if none has two windows."""
    shown = [
        drawn
        for color, (name, record) in zip(RUN_COLORS, runs, strict=False)
        if (drawn := _line(name, color, _read("compute_slowdown"), in_order(record))) is not None
    ]
    if not any(len(line["points"]) > 1 for line in shown):
        return None
    caption = _INTERVALS[use_whiskers(shown)]
    if len(runs) > len(RUN_COLORS):
        caption += f" The first {len(RUN_COLORS)} runs of {len(runs):,}."
    return line_chart("Compute slowdown along the runs", "fraction", shown, caption)


# -- comparing the halves


def _halves(windows: Sequence[OverlapReport]) -> tuple[str, Table | None]:
    """The first half of the windows compared with the second, in a sentence and a table."""
    half = len(windows) // 2
    if half < MIN_HALF:
        return (
            f"Too few windows to say: {len(windows)}, and it takes {2 * MIN_HALF} to show a change.",
            None,
        )
    rows: list[tuple[str, ...]] = []
    changes = []
    for figure in [one for one in _COMPARED if not (windows[0].control and one.of_sequential)]:
        early, late = _sample(windows[:half], figure), _sample(windows[-half:], figure)
        change = _change(early, late, relative=not figure.signed)
        if change is None:
            continue
        sides = [PAGE.figure(figure, float(side.blocks.mean())) for side in (early, late)]
        shown, bounds = PAGE.percent(change.value, signed=True), PAGE.interval(change, "fraction", signed=True)
        if figure.signed:  # a difference of two percentages, in percentage points
            shown, bounds = (text.replace("%", f"{NBSP}pp") for text in (shown, bounds))
        rows.append((figure.label, *sides, shown, bounds))
        if not includes_zero(change):
            changes.append(f"{figure.label} {shown}")
    if not rows:
        return "", None
    answer = (
        f"Between the halves of the run, these changed clearly: {'; '.join(changes)}."
        if changes
        else "No headline figure changed clearly between the halves of the run."
    )
    caption = (
        f"The first {half} valid windows against the last {half}, taken as independent. With four figures, chance "
        "alone puts one outside its interval in about one run of five."
    )
    columns = heads("*Figure", "First half", "Second half", "Change", "95% interval")
    cells = tuple([tuple(map(Cell, row)) for row in rows])
    return answer, Table("First half against second half", columns, cells, caption, sorts=False)


def _sample(windows: Sequence[OverlapReport], figure: Figure) -> Sample:
    measured = [value for window in windows if (value := getattr(window, figure.name)) is not None]
    values = np.array([[value.value] for value in measured], dtype=np.float64).reshape(-1, 1)
    return Sample(values, sum(value.num_steps for value in measured))


def _change(early: Sample, late: Sample, *, relative: bool) -> Estimate | None:
    """Late over early minus one if ``relative``, otherwise their difference; None without an interval."""
    if relative:
        change = estimate(lambda a, b: math.log(b[0] / a[0]), early, late, min_blocks=MIN_HALF, scale=math.expm1)
    else:
        change = estimate(lambda a, b: b[0] - a[0], early, late, min_blocks=MIN_HALF)
    return change if change is not None and change.ci_low is not None else None


# -- how are device and memory used?


_GIB = 2**30
_PARTS = (
    ("compute alone", "compute"), ("both", "both"), ("communication exposed", "communication"), ("neither", "idle"),
)  # fmt: skip


def usage(record: Record) -> list[Section]:
    """Memory and utilisation; nothing if neither is known."""
    blocks: list[Block] = []
    window = record.latest_valid("samples")
    ranks = None if window is None else rank_chart(window)
    if ranks is not None:
        blocks.append(ranks)
    charts = charts_along(
        in_order(record),
        excluded_steps(record),
        ("Highest memory of tensors", "GiB", [(mode.value, mode.value, _memory(mode)) for mode in Mode], True),
        ("Time in which the device works", "fraction", (("device", "ink", _busy),), True),
        ("SMs busy", "fraction", _both(every_figure()["gpu/{mode}_sm_busy_fraction"]), True),
        ("Memory bandwidth used", "fraction", _both(every_figure()["gpu/{mode}_dram_busy_fraction"]), True),
    )
    blocks += charts
    if not blocks:
        return []
    if not any(chart.title == "SMs busy" for chart in charts):
        blocks.append(Note("How busy SMs and memory were is not known: the device has no counters of its parts."))
    return [Section("How are device and memory used?", _answer(window), blocks)]


def rank_chart(window: OverlapReport) -> Chart | None:
    """An overlapped step of each rank, divided into parts; None unless at least two ranks have a profile."""
    rows = [(sample.rank, parts) for sample in window.samples if (parts := _step_parts(sample)) is not None]
    if len(rows) < 2:
        return None
    of = (
        ""
        if len(rows) == window.num_reporting
        else f" {len(rows)} of {window.num_reporting} ranks: those that the record has."
    )
    return stack(
        "Where the time of a profiled step goes, by rank",
        "ms",
        _PARTS,
        [(f"rank {rank}", parts) for rank, parts in rows],
        f"Profiled steps of window {window.window}. Neither: the device is idle.{of}",
    )


def _step_parts(sample: RankWindow) -> tuple[float, float, float, float] | None:
    blocks = [block for block in sample.profiled if block.mode is Mode.OVERLAPPED]
    if not blocks:
        return None

    busy, hidden, comm, idle = (
        max(0.0, statistics.fmean([getattr(block, name) or 0.0 for block in blocks]))
        for name in ("compute_busy_ms", "hidden_comm_ms", "comm_busy_ms", "idle_ms")
    )
    return max(0.0, busy - hidden), hidden, max(0.0, comm - hidden), idle


def _answer(window: OverlapReport | None) -> str:
    """Which rank idles most, in a sentence; empty if ranks are not known."""
    if window is None:
        return ""
    idle = {sample.rank: parts for sample in window.samples if (parts := _step_parts(sample)) is not None}
    shares = {rank: parts[3] / sum(parts) for rank, parts in idle.items() if sum(parts) > 0}
    if len(shares) < 2:
        return ""
    most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
    if PAGE.percent(shares[most]) == PAGE.percent(shares[least]):
        return f"Every rank is idle for {PAGE.percent(shares[most])} of an overlapped step."
    return (
        f"Rank {most} is idle for {PAGE.percent(shares[most])} of an overlapped step, rank {least} for "
        f"{PAGE.percent(shares[least])}: the most and the least."
    )


def _memory(mode: Mode) -> Reader:
    def read(window: OverlapReport) -> float | None:
        rows = () if window.control and mode is Mode.SEQUENTIAL else window.memory
        peaks = [peak.peak_bytes for peak in rows if peak.mode is mode and peak.peak_bytes is not None]
        return max(peaks) / _GIB if peaks else None

    return read


def _busy(window: OverlapReport) -> float | None:
    busy, exposed, idle = window.compute_busy_ms, window.exposed_comm_ms, window.idle_ms
    if busy is None or exposed is None or idle is None:
        return None
    works = busy.value + exposed.value
    return works / (works + idle.value) if works + idle.value > 0 else None
