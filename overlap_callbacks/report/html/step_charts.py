"""Charts of step time: the modes side by side, where a step's time goes, and when."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.formatting import PAGE, change_in_words, may_be_chance, rounded
from overlap_callbacks.analysis.results.catalogue import STEP_TIMES
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.kernel_times import StepTimeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report.html.elements import Chart

# The colour of each step time, as a variable of the style sheet.
COLORS = {"e2e_ideal_ms": "ideal", "e2e_overlapped_ms": "overlapped", "e2e_sequential_ms": "sequential"}

Pairs = Sequence[tuple[float, float]]


def mode_bars(runs: Sequence[tuple[str, dict[str, Estimate]]]) -> Chart:
    """Ideal, overlapped and sequential step time, with intervals; several runs stand side by side.

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
                        "label": figure.title,
                        "color": COLORS[figure.name],
                        "value": rounded(estimate.value),
                        "low": rounded(estimate.ci_low),
                        "high": rounded(estimate.ci_high),
                    }
                )
    caption = "Whiskers are 95% intervals."
    if any("e2e_ideal_ms" in figures for _, figures in runs):
        caption = (
            "Ideal is the overlapped step less what contention adds to its compute kernels (equation 4). " + caption
        )
    return Chart(
        "bars",
        "Step time",
        {"unit": "ms", "rows": rows},
        caption,
    )


def step_parts(figures: dict[str, Estimate]) -> Chart | None:
    """An overlapped step divided: compute alone, both, communication alone, neither; None without a profile."""
    compute, hidden, exposed, idle = (
        figures.get(name) for name in ("compute_busy_ms", "hidden_comm_ms", "exposed_comm_ms", "idle_ms")
    )
    if compute is None or hidden is None or exposed is None:
        return None
    parts = [
        ("compute alone", "compute", max(0.0, compute.value - hidden.value)),
        ("both", "both", hidden.value),
        ("communication exposed", "communication", exposed.value),
    ]
    if idle is not None:
        parts.append(("neither", "idle", idle.value))
    data = [{"name": name, "color": color, "value": rounded(value)} for name, color, value in parts]
    return Chart(
        "stack",
        "Where the time of an overlapped step goes",
        {"unit": "ms", "rows": [{"label": "", "parts": data}], "name_parts": True},
        _of_profiled(figures),
        tuple((name, color) for name, color, _ in parts),
    )


def _of_profiled(figures: dict[str, Estimate]) -> str:
    """What the parts are of, and why they do not add up to the step time that stands above them."""
    profiler = figures.get("profiler_slowdown")
    if profiler is None:
        return "Means over the ranks, of profiled steps."
    change = change_in_words(profiler.value, "longer", "less time", PAGE)
    chance = ", which may be chance" if may_be_chance(profiler) else ""
    return (
        f"Means over the ranks, of profiled steps. Those take {change} than the steps without the profiler{chance}, so "
        "the parts do not add up to the step time above."
    )


def timeline(window: OverlapReport) -> Chart:
    """When compute ran and communication was in flight, one step of each mode."""
    pictures = sorted(window.pictures, key=lambda picture: list(Mode).index(picture.arm))
    closed = any(picture.closed_compute_ms or picture.closed_communication_ms for picture in pictures)
    caption = f"One profiled step of each mode on rank {window.first_rank}, window {window.window}."
    if closed:
        caption += " The shortest gaps are closed, to keep the page small."
    if not window.valid:
        caption += " This window is not valid."
    return Chart(
        "timeline",
        "One step, as it passes",
        {"unit": "ms", "modes": [_lanes(picture) for picture in pictures]},
        caption,
        (("compute", "compute"), ("communication", "communication"), ("both at once", "both")),
    )


def _lanes(picture: StepTimeline) -> dict[str, object]:
    return {
        "mode": picture.arm.value.capitalize(),
        "step_ms": rounded(picture.step_ms),
        "compute": _short(picture.compute),
        "communication": _short(picture.communication),
        "both": _short(both(picture.compute, picture.communication)),
    }


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
