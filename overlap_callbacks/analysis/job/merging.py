"""From what one rank measured to a part, and from parts to one."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.job.part import JobPart
from overlap_callbacks.analysis.results.window import RankWindow


def part_of(window: RankWindow) -> JobPart:
    """What one rank measured, as a part."""
    return JobPart((window,))


def merge(parts: Sequence[JobPart]) -> JobPart:
    """The parts as one: it speaks for the ranks of all.

    Args:
        parts: at least one; no rank is in two of them. Their order does not matter.
    """
    return JobPart(tuple([window for part in parts for window in part.windows]))
