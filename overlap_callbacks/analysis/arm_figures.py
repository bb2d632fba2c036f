"""The figures of an arm's window: the steps with its switch turned against those as configured.

The blocks are those of any window: what the job as configured is compared with has the place of sequential steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from overlap_callbacks.analysis.equations import slowdown
from overlap_callbacks.analysis.figures import FigureSums, ProfiledMeans, interval_by, samples_of
from overlap_callbacks.analysis.results.arm import ARM_FIGURES, ArmFigure, ArmReport, ComparedArm
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.statistics import CHANGE, LOG, PLAIN, Interval, Scale


def arm_scale(figure: ArmFigure) -> Scale:
    """The scale on which the intervals of a figure are symmetric."""
    if figure.is_time:
        return LOG if figure.name.removeprefix("configured_") in ("step_ms", "compute_ms") else PLAIN
    return CHANGE


def arm_intervals(sums: FigureSums[Any]) -> dict[str, Interval]:
    """All figures of ``ARM_FIGURES`` over the ranks of these sums; those that were not measured are left out."""
    configured, turned, prof_configured, prof_turned = samples_of(sums)

    def exposed(means: ProfiledMeans) -> float:
        return means.comm_busy_ms - means.hidden_comm_ms

    formulas: dict[str, tuple[Any, ...]] = {
        "speedup": (lambda a, b: slowdown(a.step_ms, b.step_ms), configured, turned),
        "step_ms": (lambda b: b.step_ms, turned),
        "configured_step_ms": (lambda a: a.step_ms, configured),
        "compute_slowdown": (lambda b, a: slowdown(b.compute_ms, a.compute_ms), prof_turned, prof_configured),
        "compute_ms": (lambda b: b.compute_ms, prof_turned),
        "configured_compute_ms": (lambda a: a.compute_ms, prof_configured),
        "comm_ms": (lambda b: b.comm_busy_ms, prof_turned),
        "configured_comm_ms": (lambda a: a.comm_busy_ms, prof_configured),
        "exposed_comm_ms": (exposed, prof_turned),
        "configured_exposed_comm_ms": (exposed, prof_configured),
        "exposed_comm_change_ms": (lambda b, a: exposed(b) - exposed(a), prof_turned, prof_configured),
    }
    scales = {figure.name: arm_scale(figure) for figure in ARM_FIGURES}
    found = {name: interval_by(of, *samples, scale=scales[name]) for name, (of, *samples) in formulas.items()}
    bounds = {figure.name: figure.bounds for figure in ARM_FIGURES}
    return {
        name: dataclasses.replace(interval, bounds=bounds[name])
        for name, interval in found.items()
        if interval is not None
    }


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
