"""The figures of an arm's window: the steps with its switch turned against those as configured.

The blocks are those of any window: what the job as configured is compared with has the place of sequential steps.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec

from overlap_callbacks.analysis.earlier_windows import EarlierWindows
from overlap_callbacks.analysis.equations import log_slowdown
from overlap_callbacks.analysis.figures import FigureSums, samples_of
from overlap_callbacks.analysis.results.arm import ARM_FIGURES, ArmReport, ComparedArm
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.statistics import Interval, interval_of


def arm_intervals(sums: FigureSums[Any]) -> dict[str, Interval]:
    """All figures of ``ARM_FIGURES`` over the ranks of these sums; those that were not measured are left out."""
    configured, turned, prof_configured, prof_turned = samples_of(sums)

    def exposed(means: Any) -> float:
        return float(means.comm_busy_ms - means.hidden_comm_ms)

    found = {
        "speedup": interval_of(lambda a, b: a.log_step - b.log_step, configured, turned, scale=math.expm1),
        "step_ms": interval_of(lambda b: b.log_step, turned, scale=math.exp),
        "configured_step_ms": interval_of(lambda a: a.log_step, configured, scale=math.exp),
        "compute_slowdown": interval_of(
            lambda b, a: log_slowdown(b.log_compute, a.log_compute), prof_turned, prof_configured, scale=math.expm1
        ),
        "compute_ms": interval_of(lambda b: b.log_compute, prof_turned, scale=math.exp),
        "configured_compute_ms": interval_of(lambda a: a.log_compute, prof_configured, scale=math.exp),
        "comm_ms": interval_of(lambda b: b.comm_busy_ms, prof_turned),
        "configured_comm_ms": interval_of(lambda a: a.comm_busy_ms, prof_configured),
        "exposed_comm_ms": interval_of(exposed, prof_turned),
        "configured_exposed_comm_ms": interval_of(exposed, prof_configured),
        "exposed_comm_change_ms": interval_of(lambda b, a: exposed(b) - exposed(a), prof_turned, prof_configured),
    }
    bounds = {figure.name: figure.bounds for figure in ARM_FIGURES}
    return {
        name: dataclasses.replace(interval, bounds=bounds[name])
        for name, interval in found.items()
        if interval is not None
    }


def arm_report_of(report: OverlapReport, arm: ComparedArm, sums: FigureSums[Any], earlier: EarlierWindows) -> ArmReport:
    """The report of an arm's window.

    Args:
        report: what is made of the same window, with the arm in the place of sequential steps.
        arm: what the steps as configured were compared with.
        sums: of all ranks heard.
        earlier: the arm's windows before this one, which give intervals a least width. It learns this one if it counts.
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
        lost_ms=report.lost_ms,
        power=report.power,
        memory=report.memory,
    )
    if not made.complete:
        return made  # its blocks are not balanced
    intervals = arm_intervals(sums)
    figures = {name: interval.estimate(earlier.half_width(name)) for name, interval in intervals.items()}
    if made.counts:
        earlier.add({name: interval.half_width for name, interval in intervals.items()})
    return msgspec.structs.replace(made, **figures)
