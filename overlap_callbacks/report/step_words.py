"""Where the time of an overlapped step goes: parts that add up to one total, in words for page and terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from overlap_callbacks.analysis.formatting import PLAIN, Style
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.step_parts import StepParts


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


def named_parts(parts: StepParts, style: Style = PLAIN) -> list[NamedPart]:
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
    return [part for part in found if style.shows(part.ms, "ms")]


def part_in_words(part: NamedPart, total_ms: float, style: Style = PLAIN) -> str:
    """E.g. ``idle 9.00 ms (2.1%)``."""
    return f"{part.name} {style.quantity(part.ms, 'ms')} ({style.percent(part.ms / total_ms)})"


def of_profiled_steps(total_ms: float, figures: Mapping[str, Estimate], style: Style = PLAIN) -> str:
    """Of which steps the parts are. Here, and nowhere else, it is said how much longer the profiler makes them.

    Args:
        total_ms: of the parts.
        figures: of the same windows.
        style: of the medium.
    """
    step = figures.get("e2e_overlapped_ms")
    words = "Means over the ranks, of steps under the profiler"
    if step is None:
        return f"{words}."
    return f"{words}: those take {style.quantity(total_ms, 'ms')}, others {style.quantity(step.value, 'ms')}."
