"""The figures of an arm's window: the steps with its switch turned against those as configured.

The blocks are those of any window: what the job as configured is compared with has the place of sequential steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from overlap_callbacks.analysis.figures import FigureSums, interval_by, samples_of
from overlap_callbacks.analysis.results.arm import ARM_FIGURES, ArmReport, ComparedArm
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.statistics import CHANGE, LOG, PLAIN, Interval, Scale


def arm_scale(figure: Figure) -> Scale:
    """The scale on which the intervals of a figure are symmetric."""
    if figure.unit == "ms":
        return LOG if figure.name.removeprefix("configured_") in ("step_ms", "compute_ms") else PLAIN
    return CHANGE


def arm_intervals(sums: FigureSums[Any]) -> dict[str, Interval]:
    """All figures of ``ARM_FIGURES`` over the ranks of these sums; those that were not measured are left out."""
    samples = samples_of(sums)
    found = {}
    for figure in ARM_FIGURES:
        assert figure.formula is not None
        of_figure = [samples[place] for place in figure.formula.samples]
        interval = interval_by(figure.formula.of, *of_figure, scale=arm_scale(figure))
        if interval is not None:
            found[figure.name] = dataclasses.replace(interval, bounds=figure.bounds)
    return found


def arm_report_of(report: OverlapReport, arm: ComparedArm, sums: FigureSums[Any]) -> ArmReport:
    """The report of an arm's window.

    Args:
        report: what is made of the same window, with the arm in the place of sequential steps.
        arm: what the steps as configured were compared with.
        sums: of all ranks heard.
    """
    made = ArmReport(
        arm=arm,
        window=report.window,
        first_step=report.first_step,
        num_steps=report.num_steps,
        complete=report.complete,
        control=report.control,
        world_size=report.world_size,
        num_ranks=report.num_heard,
        backend=report.backend,
        device=report.device,
        valid=report.valid,
        problems=report.problems,
        measurement_overhead=report.measurement_overhead,
        measurement_overhead_ci_low=report.measurement_overhead_ci_low,
        measurement_overhead_ci_high=report.measurement_overhead_ci_high,
        lost_ms=report.lost_ms,
        power=report.power,
        memory=report.memory,
    )
    if not made.complete:
        return made  # its blocks are not balanced
    figures = {name: interval.estimate() for name, interval in arm_intervals(sums).items()}
    return msgspec.structs.replace(made, **figures)
