"""Synthetic windows of arms."""

from __future__ import annotations

import functools

import msgspec

from overlap_callbacks.analysis.arms import arm_report_of
from overlap_callbacks.analysis.figures import figure_sums
from overlap_callbacks.analysis.results.arm import ArmReport, ComparedArm
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import MemoryPeak
from tests.report.runs import rank_window, window
from tests.samples import aggregate_windows


@functools.lru_cache(maxsize=64)
def arm_window(
    number: int, name: str = "prefetch_2_2", *, equal_results: bool = True, power: bool = False
) -> ArmReport:
    """A window with an arm in the place of sequential steps: steps as configured take some 412 ms, with it 468 ms."""
    measured = rank_window(number)
    arm = ComparedArm(name, equal_results)
    report = aggregate_windows([measured], world_size=1, every_n_steps=500, control=True)
    made = arm_report_of(report, arm, figure_sums(measured))
    peaks = (MemoryPeak(Mode.OVERLAPPED, 3 * 2**30, 3 * 2**30), MemoryPeak(Mode.SEQUENTIAL, 5 * 2**30, 5 * 2**30))
    return msgspec.structs.replace(
        made, control=False, memory=peaks, power=window(0, power=True).power if power else None
    )
