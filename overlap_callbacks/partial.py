"""What a window that was cut short may still say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from overlap_callbacks.metrics import FIGURES, OverlapReport
from overlap_callbacks.samples import ProfiledBlock, TimedBlock


def comparable(window: OverlapReport, order: str) -> OverlapReport:
    """A window that was cut, without the figures that its blocks do not bear.

    Within less than one balanced group drift is not cancelled, so what compares the modes is left out; and so are all
    figures of a profile that did not get so far.

    Args:
        window: that was cut.
        order: of its blocks, e.g. ``OSSO``.
    """
    sample = window.samples[0]
    missing = []
    if not has_whole_group(sample.timed, order):
        missing += [figure.name for figure in FIGURES if figure.unit != "ms"]
    if not has_whole_group(sample.profiled, order):
        missing += [figure.name for figure in FIGURES if figure.name not in _TIMED]
    return msgspec.structs.replace(window, **dict.fromkeys(missing))


# The figures that need no profile.
_TIMED = frozenset({"e2e_overlapped_ms", "e2e_sequential_ms", "speedup_vs_sequential"})


def has_whole_group(blocks: Iterable[TimedBlock | ProfiledBlock], order: str) -> bool:
    """Whether all blocks of one repetition of the schedule's order are there."""
    length = len(order)
    groups = Counter(block.block // length for block in blocks)
    return any(count == length for count in groups.values())
