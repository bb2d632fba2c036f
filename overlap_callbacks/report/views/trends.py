"""Charts along the run: has it changed, and how are device and memory used?"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from overlap_callbacks.analysis.change import LEAST_VALUES, WINDOWS_PER_FALSE_ALARM, WITHIN_VALUES
from overlap_callbacks.analysis.formatting import NBSP, PAGE, count, page_sentence
from overlap_callbacks.analysis.goodput import goodput_sentence
from overlap_callbacks.analysis.power.trace import thin
from overlap_callbacks.analysis.results.catalogue import STEP_TIMES, every_figure, figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import RankWindow
from overlap_callbacks.analysis.statistics import bounded
from overlap_callbacks.analysis.watch import RunWatch, change_sentence, false_alarms_per_day
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

# Changes of steps that a page names: the last ones.
MAX_CHANGES = 8
# Maximum points of a line: a wide chart has no more pixels.
MAX_POINTS = 1000

Reader = Callable[[OverlapReport], Estimate | float | None]
# Name, colour and figure of a line.
Lines = Sequence[tuple[str, str, Reader]]


def changed(record: Record) -> list[Section]:
    """Charts along the run, whether it changed, and where its time went; nothing if little is known."""
    windows, excluded = in_order(record), excluded_steps(record)
    of_steps = [change_sentence(change) for change in record.changes if change.of_steps][-MAX_CHANGES:]
    notes = [Note(page_sentence(text)) for text in (*of_steps, goodput_sentence(record.goodput)) if text]
    if len(windows) < 2:
        return [Section("Has it changed?", "", [*notes], folded=True)] if notes else []
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
    answer, table = _changes(windows, sum([start.total_s for start in record.goodput]))
    blocks: list[Block] = [*notes, *charts, *([] if table is None else [table])]
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


# -- changes


def _changes(windows: Sequence[OverlapReport], time_s: float) -> tuple[str, Table | None]:
    """The lasting changes of the headline's figures along the run, in a sentence and a table."""
    if len(windows) < LEAST_VALUES:
        return f"Too few windows to say: {len(windows)}, and it takes {LEAST_VALUES} to show a change.", None
    watch = RunWatch()
    found = [change for window in windows for change in watch.window(window)]
    rows = []
    for change in found:
        figure = figure_named(change.what)
        by = change.after - change.before if figure.signed else change.after / change.before - 1
        rows.append((change.first_step, figure, change.before, change.after, _by(figure, by)))
    steps = [
        f"{_by(figure_named(name), step).lstrip('+')} of {figure_named(name).label}"
        for name, step in watch.smallest_steps().items()
    ]
    rows.sort(key=lambda row: row[0])
    would = f" Found within {WITHIN_VALUES} windows in 95% of cases: {'; '.join(steps)}." if steps else ""
    if not rows:
        return f"No headline figure has changed.{would}", None
    answer = "; ".join([f"{figure.label} {by} from step {step:,}" for step, figure, _, _, by in rows])
    cells = tuple(
        [
            tuple(map(Cell, (f"{step:,}", figure.label, *[PAGE.figure(figure, v) for v in values], by)))
            for step, figure, *values, by in rows
        ]
    )
    columns = heads("Since step", "*Figure", "Before", "After", "Change")
    per_day = f"; with the parts of steps {false_alarms_per_day(len(windows), time_s):.2g} a day here" if time_s else ""
    caption = f"At most one false alarm in {WINDOWS_PER_FALSE_ALARM:,} windows, all figures together{per_day}.{would}"
    return f"Changed: {answer}.", Table("Changes along the run", columns, cells, caption, sorts=False)


def _by(figure: Figure, change: float) -> str:
    shown = PAGE.percent(change, signed=True)
    return shown.replace("%", f"{NBSP}pp") if figure.signed else shown  # a difference of two percentages


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
