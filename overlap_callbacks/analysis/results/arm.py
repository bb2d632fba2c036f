"""One window of an arm: its steps compared with the job as configured. Plain data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from overlap_callbacks.analysis.equations import slowdown
from overlap_callbacks.analysis.results.catalogue import MEASUREMENT_OVERHEAD
from overlap_callbacks.analysis.results.figure import HIGHEST, ISO, OV, SEQ, STEP, Family, Figure, Formula
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import WindowReport
from overlap_callbacks.analysis.results.report_parts import Parts

# Steps with the arm replace sequential ones: first timed, then profiled steps.
_TIMED, _PROFILED = (SEQ, STEP), (ISO, OV)


def _arm(name: str, unit: str, meaning: str, **facts: Any) -> Figure:
    return Figure(f"arm/{{arm}}_{name}", unit, meaning, **facts)


def _both(
    name: str,
    unit: str,
    meaning: str,
    samples: tuple[int, int] | None = None,
    of: Callable[[Any], float] | None = None,
    **facts: Any,
) -> tuple[Figure, Figure]:
    formulas = [None, None] if samples is None or of is None else [Formula((sample,), of) for sample in samples]
    return (
        _arm(name, unit, f"{meaning}, with the arm", formula=formulas[0], **facts),
        _arm(f"configured_{name}", unit, f"{meaning}, as configured", formula=formulas[1], **facts),
    )


def _exposed_ms(means: Any) -> float:
    exposed_ms: float = means.comm_busy_ms - means.hidden_comm_ms
    return exposed_ms


ARM_FIGURES = (
    _arm("speedup", "fraction", "step time as configured over that with the arm, less one: above 0 the arm wins",
         signed=True, formula=Formula(_TIMED, lambda arm, configured: slowdown(configured.step_ms, arm.step_ms))),
    *_both("step_ms", "ms", "step time", _TIMED, lambda means: means.step_ms, log=True),
    _arm("compute_slowdown", "fraction", "compute kernels' time with the arm over that as configured, less one",
         signed=True,
         formula=Formula(_PROFILED, lambda arm, configured: slowdown(arm.compute_ms, configured.compute_ms))),
    *_both("compute_ms", "ms", "sum of the compute kernels' times", _PROFILED, lambda means: means.compute_ms,
           log=True),
    *_both("comm_ms", "ms", "time in which communication is in flight", _PROFILED, lambda means: means.comm_busy_ms),
    *_both("exposed_comm_ms", "ms", "communication without compute", _PROFILED, _exposed_ms),
    _arm("exposed_comm_change_ms", "ms", "exposed communication with the arm less that as configured",
         between=(-math.inf, math.inf),
         formula=Formula(_PROFILED, lambda arm, configured: _exposed_ms(arm) - _exposed_ms(configured))),
)  # fmt: skip
# Figures of power and memory, without intervals.
ARM_DEVICE_FIGURES = (
    *_both("avg_w", "W", "mean power of a device"),
    *_both("peak_w", "W", "highest power of a device", aggregate=HIGHEST),
    *_both("energy_per_step_j", "J", "energy of a step, all devices"),
    *_both("peak_memory_bytes", "bytes", "highest memory of a device", aggregate=HIGHEST),
)


def _headline(report: ArmReport) -> Parts:
    if report.counts and not report.control:
        yield {"arm": report.arm.name}, report.figures()


def _flags(report: ArmReport) -> Parts:
    yield {"arm": report.arm.name}, {"valid": report.valid, "equal_results": report.arm.equal_results}
    yield {}, {"measurement_overhead": report.measurement_overhead}


def _device(report: ArmReport) -> Parts:
    if not report.counts or report.control:
        return
    values: dict[str, float | None] = {}
    for prefix, mode in (("", Mode.SEQUENTIAL), ("configured_", Mode.OVERLAPPED)):
        power = None if report.power is None else report.power.of(mode)
        if power is not None:
            values[f"{prefix}avg_w"] = power.mean_avg_w
            values[f"{prefix}peak_w"] = power.peak_w
            values[f"{prefix}energy_per_step_j"] = power.energy_per_step_j
        peaks = [row.peak_bytes for row in report.memory if row.mode is mode]
        values[f"{prefix}peak_memory_bytes"] = peaks[0] if peaks else None
    yield {"arm": report.arm.name}, values


ARM_FAMILIES = (
    Family(_flags, (
        _arm("valid", "", "1 if the window's figures hold"),
        _arm("equal_results", "", "1 if losses and weights are the same with the arm"),
        MEASUREMENT_OVERHEAD,
    )),
    Family(_headline, ARM_FIGURES),
    Family(_device, ARM_DEVICE_FIGURES),
)  # fmt: skip


class ComparedArm(msgspec.Struct, frozen=True):
    """The arm that the steps as configured were compared with.

    Attributes:
        equal_results: losses and weights do not change.
        family: of arms that differ in one number, their ``setting``; empty if none.
    """

    name: str
    equal_results: bool
    sequential: bool = False
    family: str = ""
    setting: float | None = None


if TYPE_CHECKING:
    _Figures = WindowReport
else:
    _Figures = WindowReport.with_fields(ARM_FIGURES, ARM_FAMILIES)


class ArmReport(_Figures, frozen=True, kw_only=True):
    """One window of an arm, all ranks. A figure that was not measured is None, never zero and never NaN.

    ``ARM_FIGURES`` has the meaning of each figure. ``power`` and ``memory`` are in the modes ``overlapped`` (as
    configured) and ``sequential`` (with the arm). The metrics of a window that does not count are its validity alone.
    ``same_order``: whether all ranks issue the same collectives with the arm as without, in the same order; None if not
    known.
    """

    arm: ComparedArm
    num_ranks: int
    same_order: bool | None = None
