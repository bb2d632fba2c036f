"""Charts of step time: the modes side by side, where a step's time goes, and when."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.formatting import PAGE, rounded
from overlap_callbacks.analysis.results.catalogue import STEP_TIMES
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.kernel_times import StepTimeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.step_parts import StepParts
from overlap_callbacks.report.views.elements import Chart

# The colour of each step time, as a variable of the style sheet.
COLORS = {"e2e_ideal_ms": "ideal", "e2e_overlapped_ms": "overlapped", "e2e_sequential_ms": "sequential"}

# Beside exposed communication, which it still has, no step is called ideal: equation 4 has its name in the table.
LABELS = {"e2e_ideal_ms": "Without contention"}

Pairs = Sequence[tuple[float, float]]


def mode_bars(runs: Sequence[tuple[str, dict[str, Estimate]]]) -> Chart:
    """Overlapped and sequential step time, and that without contention, with intervals; several runs side by side.

    Args:
        runs: name (each its own) and figures of each.
    """
    rows = []
    for name, figures in runs:
        for figure in STEP_TIMES:
            estimate = figures.get(figure.name)
            if estimate is not None:
                rows.append(
                    {
                        "run": name,
                        "label": LABELS.get(figure.name, figure.title),
                        "color": COLORS[figure.name],
                        "value": rounded(estimate.value),
                        "low": rounded(estimate.ci_low),
                        "high": rounded(estimate.ci_high),
                    }
                )
    caption = "Whiskers are 95% intervals."
    if any("e2e_ideal_ms" in figures for _, figures in runs):
        caption = (
            "Without contention is worked out: an overlapped step, less what its compute kernels lose (equation 4). "
            + caption
        )
    named = dict.fromkeys(row["run"] for row in rows)
    return Chart(
        "bars",
        f"Step time of {next(iter(named))}" if len(named) == 1 < len(runs) else "Step time",
        {"unit": "ms", "rows": rows},
        caption,
        narrow=len(runs) == 1,
    )


def step_parts(parts: StepParts, figures: dict[str, Estimate], *, narrow: bool = True) -> Chart:
    """An overlapped step under the profiler, divided into parts that add up to it.

    Args:
        parts: of the step.
        figures: of the same windows.
        narrow: whether another chart stands beside it.
    """
    shown = named_parts(parts)
    caption = of_profiled_steps(parts.total_ms, figures)
    if parts.contention_ms > 0:
        caption += " Compute alone is as in sequential steps; what it takes longer is lost to contention."
    chart = stack(
        f"Where the time of an overlapped step goes: {PAGE.quantity(parts.total_ms, 'ms')} under the profiler",
        "ms",
        [(part.name, part.color) for part in shown],
        [("", [part.ms for part in shown])],
        caption,
    )
    return dataclasses.replace(
        chart,
        data={**chart.data, "name_parts": True},
        legend=tuple([(part_in_words(part, parts.total_ms), part.color) for part in shown]),
        narrow=narrow,
        first=True,
    )


def stack(
    title: str,
    unit: str,
    parts: Sequence[tuple[str, str]],
    rows: Iterable[tuple[str, Iterable[float]]],
    caption: str,
    *,
    in_table: bool = False,
) -> Chart:
    """Bars that are divided into parts.

    Args:
        title: of the chart.
        unit: of the values.
        parts: name and colour of each.
        rows: label of each bar, and the values of its parts. Nothing is below zero.
        caption: of the chart.
        in_table: as in ``Chart``.
    """
    bars = []
    for label, values in rows:
        named = zip(parts, values, strict=True)
        divided = [{"name": name, "color": color, "value": rounded(max(value, 0.0))} for (name, color), value in named]
        bars.append({"label": label, "parts": divided})
    return Chart("stack", title, {"unit": unit, "rows": bars}, caption, tuple(parts), in_table=in_table)


def timeline(window: OverlapReport) -> Chart:
    """When compute ran and communication was in flight, one step of each mode."""
    pictures = sorted(window.pictures, key=lambda picture: list(Mode).index(picture.mode))
    caption = f"One profiled step of each mode on rank {window.first_rank}, window {window.window}."
    if not window.valid:
        caption += " This window is not valid."
    return lanes("Timeline of one step", [(picture.mode.value.capitalize(), picture) for picture in pictures], caption)


def lanes(title: str, pictures: Sequence[tuple[str, StepTimeline]], caption: str) -> Chart:
    """When compute ran and communication was in flight, a lane for each of the named steps."""
    if any(picture.closed_compute_ms or picture.closed_communication_ms for _, picture in pictures):
        caption += " The shortest gaps are closed, to keep the page small."
    data = [
        {
            "mode": name,
            "step_ms": rounded(picture.step_ms),
            "compute": _short(picture.compute),
            "communication": _short(picture.communication),
            "both": _short(both(picture.compute, picture.communication)),
        }
        for name, picture in pictures
    ]
    legend = (("compute", "compute"), ("communication", "communication"), ("both at once", "both"))
    return Chart("timeline", title, {"unit": "ms", "modes": data}, caption, legend)


def both(first: Pairs, second: Pairs) -> list[tuple[float, float]]:
    """Where two ascending series of disjoint intervals overlap."""
    overlaps = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            overlaps.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return overlaps


def _short(intervals: Pairs) -> list[list[float]]:
    # A chart of a step cannot show nanoseconds.
    return [[round(start, 4), round(end, 4)] for start, end in intervals]


# -- the parts of a step


class NamedPart(NamedTuple):
    """A part of the step.

    Attributes:
        name: what it is.
        color: of the page's style sheet.
        ms: how long it is.
    """

    name: str
    color: str
    ms: float


def named_parts(parts: StepParts) -> list[NamedPart]:
    """The parts that are not shown as zero; they add up to the step."""
    # Compute that was faster beside communication than alone has lost nothing: what it took is all of it.
    lost_ms = max(0.0, parts.contention_ms)
    exposed = "exposed communication" + (" outside the bubble" if parts.bubble_ms > 0 else "")
    found = (
        NamedPart("compute alone", "compute", parts.compute_ms + parts.contention_ms - lost_ms),
        NamedPart("lost to contention", "lost", lost_ms),
        NamedPart(exposed, "communication", parts.transfer_ms + parts.waiting_ms),
        NamedPart("bubble of the pipeline", "idle", parts.bubble_ms),
        NamedPart("idle", "idle", parts.idle_ms),
    )
    return [part for part in found if PAGE.shows(part.ms, "ms")]


def part_in_words(part: NamedPart, total_ms: float) -> str:
    """E.g. ``idle 9.00 ms (2.1%)``."""
    return f"{part.name} {PAGE.quantity(part.ms, 'ms')} ({PAGE.percent(part.ms / total_ms)})"


def of_profiled_steps(total_ms: float, figures: Mapping[str, Estimate]) -> str:
    """Of which steps the parts are. Here, and nowhere else, it is said how much longer the profiler makes them.

    Args:
        total_ms: of the parts.
        figures: of the same windows.
    """
    step = figures.get("e2e_overlapped_ms")
    words = "Means over the ranks, of steps under the profiler"
    if step is None:
        return f"{words}."
    return f"{words}: those take {PAGE.quantity(total_ms, 'ms')}, others {PAGE.quantity(step.value, 'ms')}."
