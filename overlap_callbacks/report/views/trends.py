"""Charts along the run: has it changed, and how are device and memory used?"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from overlap_callbacks.analysis.formatting import NBSP, PAGE, count, may_be_chance, rounded
from overlap_callbacks.analysis.power.trace import thin
from overlap_callbacks.analysis.results.catalogue import STEP_TIMES, figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import RankWindow
from overlap_callbacks.analysis.statistics import Sample, bounded, estimate
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.elements import EMPTY_LEGEND, Block, Cell, Chart, Note, Row, Section, Table, heads
from overlap_callbacks.report.views.power import MEAN_POWER, mode_value
from overlap_callbacks.report.views.step_charts import COLORS, stack

# Maximum points of a line: a wide chart has no more pixels.
MAX_POINTS = 1000

# Above this number of points, the intervals of a line are drawn as a band.
MAX_WHISKERS = 60

# Runs that one chart tells apart; the page's style has a colour for each.
RUN_COLORS = ("run1", "run2", "run3", "run4", "run5", "run6")

# With fewer windows in each half, their scatter says too little.
MIN_HALF = 3

_COMPARED = tuple(
    map(figure_named, ("e2e_overlapped_ms", "speedup_vs_sequential", "compute_slowdown", "exposed_comm_ms"))
)

Reader = Callable[[OverlapReport], Estimate | None]


def changed(record: Record) -> list[Section]:
    """Charts along the run, and whether it changed; nothing with fewer than two windows that count."""
    title = "Has it changed?"
    windows = in_order(record)
    if len(windows) < 2:
        return []
    kept = set(map(id, windows))
    excluded = sorted(w.first_step for w in record.windows if id(w) not in kept)
    charts = [
        chart
        for chart in (
            _line("speedup_vs_sequential", windows, excluded),
            _line("compute_slowdown", windows, excluded),
            _line("exposed_comm_ms", windows, excluded),
            figure_lines("Step time", "ms", _MODES, windows, excluded, zero=False),
            figure_lines("Mean power of a device", "W", _POWER, windows, excluded, zero=False),
        )
        if chart is not None
    ]
    if len(charts) % 2:  # the last has the row to itself
        charts[-1] = dataclasses.replace(charts[-1], narrow=False)
    blocks: list[Block] = list(charts)
    answer, table = _halves(windows)
    if table is not None:
        blocks.append(table)
    return [Section(title, answer, blocks, folded=True)]


def _read(name: str) -> Reader:
    bounds = figure_named(name).bounds

    def read(window: OverlapReport) -> Estimate | None:
        found: Estimate | None = getattr(window, name)
        return None if found is None else bounded(found, bounds)  # records of earlier versions reach beyond them

    return read


_MODES: tuple[tuple[str, str, Reader], ...] = tuple(
    (figure.short, COLORS[figure.name], _read(figure.name)) for figure in STEP_TIMES
)
_POWER: tuple[tuple[str, str, Reader], ...] = (
    ("overlapped", "overlapped", mode_value(MEAN_POWER, Mode.OVERLAPPED)),
    ("sequential", "sequential", mode_value(MEAN_POWER, Mode.SEQUENTIAL)),
)


def _line(name: str, windows: Sequence[OverlapReport], excluded: Sequence[int]) -> Chart | None:
    figure = figure_named(name)
    return figure_lines(figure.title, figure.unit, ((figure.title, "ink", _read(name)),), windows, excluded)


def figure_lines(
    title: str,
    unit: str,
    lines: Sequence[tuple[str, str, Reader]],
    windows: Sequence[OverlapReport],
    excluded: Sequence[int] = (),
    *,
    zero: bool = True,
) -> Chart | None:
    """One chart along the run; None where no window has any of its figures.

    Args:
        title: of the chart.
        unit: of its figures.
        lines: name, colour and figure of each.
        windows: those that count, in the order of their steps.
        excluded: first steps of those that do not.
        zero: whether the axis reaches down to zero; not where lines lie close together far from it.
    """
    series = [line for name, color, read in lines if (line := _series(name, color, read, windows)) is not None]
    if not series:
        return None
    thinned = any(line["of"] > len(line["points"]) for line in series)
    crosses = list(excluded[:: max(1, -(-len(excluded) // MAX_POINTS))])
    few = _are_few(series)
    caption = []
    if any(point[3] is not None for line in series for point in line["points"]):
        caption.append(f"{'Whiskers are' if few else 'The band is'} the 95% intervals of each window.")
    if not zero:
        caption.append("The axis does not start at zero.")
    if excluded:
        verb = "does" if len(excluded) == 1 else "do"
        some = f"; {len(crosses):,} of them are drawn" if len(crosses) < len(excluded) else ""
        caption.append(f"\N{MULTIPLICATION SIGN} marks {count(len(excluded), 'window')} that {verb} not count{some}.")
    if thinned:
        caption.append(
            f"Of {len(windows):,} windows at most {MAX_POINTS:,} are drawn: the extremes of each stretch stay."
        )
    legend = tuple((line["name"], line["color"]) for line in series) if len(lines) > 1 else EMPTY_LEGEND
    data = {"unit": unit, "series": series, "excluded": crosses, "few": few, "zero": zero}
    return Chart("lines", title, data, " ".join(caption), legend, narrow=True)


def _series(name: str, color: str, read: Reader, windows: Sequence[OverlapReport]) -> dict[str, Any] | None:
    """A line: its points (step, window, value, bounds), thinned, and how many there were before."""
    points = [(w.first_step, w.window, figure) for w in windows if (figure := read(w)) is not None]
    if not points:
        return None
    kept = thin(np.array([figure.value for _, _, figure in points]), MAX_POINTS).tolist()
    shown = [
        [step, window, *map(rounded, (figure.value, figure.ci_low, figure.ci_high))]
        for step, window, figure in (points[i] for i in kept)
    ]
    return {"name": name, "color": color, "points": shown, "of": len(points)}


def _are_few(series: Sequence[dict[str, Any]]) -> bool:
    return max(len(line["points"]) for line in series) <= MAX_WHISKERS


def slowdowns(runs: Sequence[tuple[str, Record]]) -> Chart | None:
    """The compute slowdown of several runs, each along its own steps; None where none has two windows."""
    shown = [
        line
        for color, (name, record) in zip(RUN_COLORS, runs, strict=False)
        if (line := _series(name, color, _read("compute_slowdown"), in_order(record))) is not None
    ]
    if not any(len(line["points"]) > 1 for line in shown):
        return None
    few = _are_few(shown)
    caption = f"{'Whiskers are' if few else 'The band is'} the 95% intervals of each window."
    if len(runs) > len(RUN_COLORS):
        caption += f" The first {len(RUN_COLORS)} runs of {len(runs):,}."
    legend = tuple((line["name"], line["color"]) for line in shown)
    data = {"unit": "fraction", "series": shown, "excluded": [], "few": few, "zero": True}
    return Chart("lines", "Compute slowdown along the runs", data, caption, legend)


def in_order(record: Record) -> list[OverlapReport]:
    return sorted(record.valid_windows, key=lambda window: window.first_step)


# -- the halves


def _halves(windows: Sequence[OverlapReport]) -> tuple[str, Table | None]:
    """The first half of the windows against the second, in a sentence and a table."""
    half = len(windows) // 2
    if half < MIN_HALF:
        return (
            f"Too few windows to say: {len(windows)}, and it takes {2 * MIN_HALF} to tell a change from chance.",
            None,
        )
    rows: list[Row] = []
    changes = []
    for figure in _COMPARED:
        early, late = _sample(windows[:half], figure), _sample(windows[-half:], figure)
        change = _change(early, late, relative=not figure.signed)
        if change is None:
            continue
        sides = [PAGE.figure(figure, float(side.blocks.mean())) for side in (early, late)]
        shown, bounds = _points(change) if figure.signed else _relative(change)
        rows.append(tuple(map(Cell, (figure.label, *sides, shown, bounds))))
        if not may_be_chance(change):
            changes.append(f"{figure.label} {shown}")
    if not rows:
        return "", None
    answer = (
        f"Between the halves of the run, these changed by more than chance would: {'; '.join(changes)}."
        if changes
        else "No headline figure changed between the halves of the run by more than chance would."
    )
    caption = (
        f"The first {half} valid windows against the last {half}, taken as independent. With four figures, chance "
        "alone puts one outside its interval in about one run of five."
    )
    columns = heads("*Figure", "First half", "Second half", "Change", "95% interval")
    return answer, Table("First half against second half", columns, tuple(rows), caption, sorts=False)


def _sample(windows: Sequence[OverlapReport], figure: Figure) -> Sample:
    measured = [value for window in windows if (value := getattr(window, figure.name)) is not None]
    values = np.array([[value.value] for value in measured], dtype=np.float64).reshape(-1, 1)
    return Sample(values, sum(value.num_steps for value in measured))


def _change(early: Sample, late: Sample, *, relative: bool) -> Estimate | None:
    """Late over early less one where ``relative``, else their difference; None without an interval."""
    if relative:
        change = estimate(lambda a, b: math.log(b[0] / a[0]), early, late, min_blocks=MIN_HALF, scale=math.expm1)
    else:
        change = estimate(lambda a, b: b[0] - a[0], early, late, min_blocks=MIN_HALF)
    return change if change is not None and change.ci_low is not None else None


def _relative(change: Estimate) -> tuple[str, str]:
    return PAGE.percent(change.value, signed=True), PAGE.interval(change, "fraction", signed=True)


def _points(change: Estimate) -> tuple[str, str]:
    """A difference of two percentages, in percentage points."""
    shown, bounds = _relative(change)
    return shown.replace("%", f"{NBSP}pp"), bounds.replace("%", f"{NBSP}pp")


# -- how are device and memory used?


_GB = 1e9
_PARTS = (
    ("compute alone", "compute"), ("both", "both"), ("communication exposed", "communication"), ("neither", "idle"),
)  # fmt: skip


def usage(record: Record) -> list[Section]:
    """Memory and utilisation; nothing where neither is known."""
    blocks: list[Block] = []
    window = record.latest_valid("samples")
    ranks = None if window is None else rank_chart(window)
    if ranks is not None:
        blocks.append(ranks)
    windows = in_order(record)
    counting = set(map(id, windows))
    excluded = sorted(each.first_step for each in record.windows if id(each) not in counting)
    lines = [
        figure_lines("Highest memory of tensors", "GB", _both(_memory), windows, excluded),
        figure_lines("Time in which the device works", "fraction", (("device", "ink", _busy),), windows, excluded),
        figure_lines("SMs busy", "fraction", _both(_part("sm")), windows, excluded),
        figure_lines("Memory bandwidth used", "fraction", _both(_part("dram")), windows, excluded),
    ]
    charts = [chart for chart in lines if chart is not None]
    blocks += charts
    if not blocks:
        return []
    if not any(chart.title == "SMs busy" for chart in charts):
        blocks.append(Note("How busy SMs and memory were is not known: the device has no counters of its parts."))
    return [Section("How are device and memory used?", _answer(window), blocks)]


def rank_chart(window: OverlapReport) -> Chart | None:
    """An overlapped step of each rank divided; None without a profile of at least two ranks."""
    rows = [(sample.rank, parts) for sample in window.samples if (parts := _step_parts(sample)) is not None]
    if len(rows) < 2:
        return None
    of = (
        ""
        if len(rows) == window.num_reporting
        else f" {len(rows)} of {window.num_reporting} ranks: those that the record has."
    )
    return stack(
        "Where the time of an overlapped step goes, by rank",
        "ms",
        _PARTS,
        [(f"rank {rank}", parts) for rank, parts in rows],
        f"Profiled steps of window {window.window}. Neither: the device is idle.{of}",
    )


def _step_parts(sample: RankWindow) -> tuple[float, float, float, float] | None:
    blocks = [block for block in sample.profiled if block.mode is Mode.OVERLAPPED]
    if not blocks:
        return None

    def mean(read: Callable[[object], float]) -> float:
        return max(0.0, statistics.fmean([read(block) for block in blocks]))

    busy, hidden, comm, idle = (
        mean(lambda block, name=name: getattr(block, name) or 0.0)  # type: ignore[misc]
        for name in ("compute_busy_ms", "hidden_comm_ms", "comm_busy_ms", "idle_ms")
    )
    return max(0.0, busy - hidden), hidden, max(0.0, comm - hidden), idle


def _answer(window: OverlapReport | None) -> str:
    """Which rank idles most, in a sentence; empty where ranks are not known."""
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


def _both(read: Callable[[OverlapReport, Mode], float | None]) -> Sequence[tuple[str, str, Reader]]:
    def reader(mode: Mode) -> Reader:
        def of(window: OverlapReport) -> Estimate | None:
            value = read(window, mode)
            return None if value is None else Estimate(value, None, None, 0, 0)

        return of

    return tuple((mode.value, mode.value, reader(mode)) for mode in Mode)


def _memory(window: OverlapReport, mode: Mode) -> float | None:
    peaks = [peak.peak_bytes for peak in window.memory if peak.mode is mode and peak.peak_bytes is not None]
    return max(peaks) / _GB if peaks else None


def _busy(window: OverlapReport) -> Estimate | None:
    busy, exposed, idle = window.compute_busy_ms, window.exposed_comm_ms, window.idle_ms
    if busy is None or exposed is None or idle is None:
        return None
    works = busy.value + exposed.value
    return Estimate(works / (works + idle.value), None, None, 0, 0) if works + idle.value > 0 else None


def _part(name: str) -> Callable[[OverlapReport, Mode], float | None]:
    def read(window: OverlapReport, mode: Mode) -> float | None:
        of_mode = None if window.power is None else window.power.of(mode)
        parts = None if of_mode is None else of_mode.parts
        value: float | None = None if parts is None else getattr(parts, name)
        return value

    return read
