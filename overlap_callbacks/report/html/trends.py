"""The fourth question: has it changed? Figures along the run, and its first half against its second."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from overlap_callbacks.analysis import formatting
from overlap_callbacks.analysis.power.trace import thin
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import Estimate, OverlapReport
from overlap_callbacks.analysis.statistics import Sample, estimate
from overlap_callbacks.report import terminal
from overlap_callbacks.report.html import tables
from overlap_callbacks.report.html.elements import EMPTY_LEGEND, Block, Cell, Chart, Note, Section, Table, heads
from overlap_callbacks.report.html.power import mode_value
from overlap_callbacks.report.html.run import Subject

# Points of one line: more than the pixels of a wide chart cannot be seen.
MAX_POINTS = 1000

# Points of one line, above which its intervals are drawn as a band.
MAX_WHISKERS = 60

# Runs that one chart tells apart; the page's style has a colour for each.
RUN_COLORS = ("run1", "run2", "run3", "run4", "run5", "run6")

# Windows of each half, below which their scatter says too little.
MIN_HALF = 3

_COMPARED = ("e2e_overlapped_ms", "speedup_vs_sequential", "compute_slowdown", "exposed_comm_ms")

Reader = Callable[[OverlapReport], Estimate | None]


def changed(subject: Subject) -> Section:
    """Charts along the run, and whether it changed."""
    title = "Has it changed?"
    windows = _in_order(subject)
    if len(windows) < 2:
        found = "One valid window was" if windows else "No valid window was"
        return Section(title, "", [Note(f"{found} measured, so there is nothing to compare it with.")])
    kept = set(map(id, windows))
    excluded = sorted(w.first_step for w in subject.windows if id(w) not in kept)
    charts = [
        chart
        for chart in (
            _line("Speed-up of overlap", "fraction", "speedup_vs_sequential", windows, excluded),
            _line("Compute slowdown", "fraction", "compute_slowdown", windows, excluded),
            _line("Gap to ideal", "fraction", "gap_to_ideal", windows, excluded),
            _line("Exposed communication", "ms", "exposed_comm_ms", windows, excluded),
            _lines("Step time", "ms", _MODES, windows, excluded, zero=False),
            _lines("Mean power of a device", "W", _POWER, windows, excluded, zero=False),
        )
        if chart is not None
    ]
    if len(charts) % 2:  # the last has the row to itself
        charts[-1] = dataclasses.replace(charts[-1], narrow=False)
    blocks: list[Block] = list(charts)
    answer, table = _halves(windows)
    if table is not None:
        blocks.append(table)
    return Section(title, answer, blocks)


def _read(name: str) -> Reader:
    return lambda window: getattr(window, name)


_MODES: tuple[tuple[str, str, Reader], ...] = (
    ("ideal", "ideal", _read("e2e_ideal_ms")),
    ("overlapped", "overlapped", _read("e2e_overlapped_ms")),
    ("sequential", "sequential", _read("e2e_sequential_ms")),
)
_POWER: tuple[tuple[str, str, Reader], ...] = (
    ("overlapped", "overlapped", mode_value(lambda mode: mode.mean_avg_w, Mode.OVERLAPPED)),
    ("sequential", "sequential", mode_value(lambda mode: mode.mean_avg_w, Mode.SEQUENTIAL)),
)


def _line(title: str, unit: str, name: str, windows: Sequence[OverlapReport], excluded: Sequence[int]) -> Chart | None:
    return _lines(title, unit, ((title, "ink", _read(name)),), windows, excluded)


def _lines(
    title: str,
    unit: str,
    lines: Sequence[tuple[str, str, Reader]],
    windows: Sequence[OverlapReport],
    excluded: Sequence[int],
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
    series = [found for name, color, read in lines if (found := _series(name, color, read, windows)) is not None]
    if not series:
        return None
    thinned = any(line["of"] > len(line["points"]) for line in series)
    crosses = list(excluded[:: max(1, -(-len(excluded) // MAX_POINTS))])
    few = _are_few(series)
    caption = []
    if any(point[3] is not None for line in series for point in line["points"]):
        caption.append(f"{'Whiskers are' if few else 'The band is'} the 95 % intervals of each window.")
    if not zero:
        caption.append("The axis does not start at zero.")
    if excluded:
        which = "1 window that does" if len(excluded) == 1 else f"{len(excluded):,} windows that do"
        caption.append(f"\N{MULTIPLICATION SIGN} marks {which} not count.")
    if thinned:
        caption.append(
            f"Of {len(windows):,} windows at most {MAX_POINTS:,} are drawn: the extremes of each stretch stay."
        )
    legend = tuple((line["name"], line["color"]) for line in series) if len(lines) > 1 else EMPTY_LEGEND
    data = {"unit": unit, "series": series, "excluded": crosses, "few": few, "zero": zero}
    return Chart("lines", title, data, " ".join(caption), legend, narrow=True)


def _series(name: str, color: str, read: Reader, windows: Sequence[OverlapReport]) -> dict[str, Any] | None:
    """A line: its points (step, window, value, bounds), thinned, and of how many they are."""
    points = [(w.first_step, w.window, found) for w in windows if (found := read(w)) is not None]
    if not points:
        return None
    kept = thin(np.array([found.value for _, _, found in points]), MAX_POINTS).tolist()
    shown = [
        [step, window, *(formatting.rounded(value) for value in (found.value, found.ci_low, found.ci_high))]
        for step, window, found in (points[i] for i in kept)
    ]
    return {"name": name, "color": color, "points": shown, "of": len(points)}


def _are_few(series: Sequence[dict[str, Any]]) -> bool:
    return max(len(line["points"]) for line in series) <= MAX_WHISKERS


def slowdowns(runs: Sequence[tuple[str, Subject]]) -> Chart | None:
    """The compute slowdown of several runs, each along its own steps; None where none has any."""
    shown = [
        found
        for color, (name, subject) in zip(RUN_COLORS, runs, strict=False)
        if (found := _series(name, color, _read("compute_slowdown"), _in_order(subject))) is not None
    ]
    if not shown:
        return None
    few = _are_few(shown)
    caption = f"{'Whiskers are' if few else 'The band is'} the 95 % intervals of each window."
    if len(runs) > len(RUN_COLORS):
        caption += f" The first {len(RUN_COLORS)} runs of {len(runs):,}."
    legend = tuple((line["name"], line["color"]) for line in shown)
    data = {"unit": "fraction", "series": shown, "excluded": [], "few": few, "zero": True}
    return Chart("lines", "Compute slowdown along the runs", data, caption, legend)


def _in_order(subject: Subject) -> list[OverlapReport]:
    return sorted(subject.record.valid_windows, key=lambda window: window.first_step)


# -- the halves


def _halves(windows: Sequence[OverlapReport]) -> tuple[str, Table | None]:
    """The first half of the windows against the second, in a sentence and a table."""
    half = len(windows) // 2
    if half < MIN_HALF:
        return (
            f"Too few windows to say: {len(windows)}, and it takes {2 * MIN_HALF} to tell a change from chance.",
            None,
        )
    rows, changes = [], []
    for name in _COMPARED:
        early, late = _sample(windows[:half], name), _sample(windows[-half:], name)
        change = _change(early, late, relative=name not in terminal.CHANGES)
        if change is None:
            continue
        unit, signed = tables.UNITS[name], name in terminal.CHANGES
        label = tables.label(name)
        sides = [formatting.quantity(float(side.blocks.mean()), unit, signed=signed) for side in (early, late)]
        shown, bounds = _points(change) if signed else _relative(change)
        rows.append((Cell(label), Cell(sides[0]), Cell(sides[1]), Cell(shown), Cell(bounds)))
        if not formatting.may_be_chance(change):
            changes.append(f"{label} {shown}")
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
    columns = heads("*Figure", "First half", "Second half", "Change", "95 % interval")
    return answer, Table("First half against second half", columns, tuple(rows), caption, sorts=False)


def _sample(windows: Sequence[OverlapReport], name: str) -> Sample:
    found = [figure for window in windows if (figure := getattr(window, name)) is not None]
    values = np.array([[figure.value] for figure in found], dtype=np.float64).reshape(-1, 1)
    return Sample(values, sum(figure.num_steps for figure in found))


def _change(early: Sample, late: Sample, *, relative: bool) -> Estimate | None:
    """Late over early less one where ``relative``, else their difference; None without an interval."""
    if relative:
        found = estimate(lambda a, b: b[0] / a[0] - 1, early, late, min_blocks=MIN_HALF)
    else:
        found = estimate(lambda a, b: b[0] - a[0], early, late, min_blocks=MIN_HALF)
    return found if found is not None and found.ci_low is not None else None


def _relative(change: Estimate) -> tuple[str, str]:
    return formatting.percent(change.value, signed=True), formatting.interval(change, "fraction", signed=True)


def _points(change: Estimate) -> tuple[str, str]:
    """A difference of two percentages is one of percentage points."""
    shown, bounds = _relative(change)
    return shown.replace("%", f"{formatting.NBSP}pp"), bounds.replace("%", f"{formatting.NBSP}pp")
