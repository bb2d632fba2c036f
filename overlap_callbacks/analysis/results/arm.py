"""One window of an arm: the job as configured beside the same with a switch turned. Plain data."""

from __future__ import annotations

import math

import msgspec

from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.memory import MemoryPeak
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import JobModePower, JobPower


class ArmFigure(msgspec.Struct, frozen=True):
    """A figure of arms.

    Attributes:
        name: of the field of ``ArmReport``, and the end of its key.
        unit: ``ms``, or ``fraction``.
        meaning: in words.
    """

    name: str
    unit: str
    meaning: str

    @property
    def is_time(self) -> bool:
        """Whether it is a time; else it is a fraction."""
        return self.unit == "ms"

    @property
    def is_change(self) -> bool:
        """Whether it is a difference of times, which may be below zero."""
        return self.name.endswith("_change_ms")

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the most that it can be."""
        if self.is_change:
            return -math.inf, math.inf
        return (0.0 if self.is_time else -1.0), math.inf


ARM_FIGURES = (
    ArmFigure("speedup", "fraction", "step time as configured over that with the arm, less one: above 0 the arm wins"),
    ArmFigure("step_ms", "ms", "step time with the arm"),
    ArmFigure("configured_step_ms", "ms", "step time as configured, in the same windows"),
    ArmFigure("compute_slowdown", "fraction", "compute kernels' time with the arm over that as configured, less one"),
    ArmFigure("compute_ms", "ms", "sum of the compute kernels' times with the arm"),
    ArmFigure("configured_compute_ms", "ms", "sum of the compute kernels' times as configured"),
    ArmFigure("comm_ms", "ms", "time in which communication is in flight with the arm"),
    ArmFigure("configured_comm_ms", "ms", "time in which communication is in flight as configured"),
    ArmFigure("exposed_comm_ms", "ms", "communication without compute beside it, with the arm"),
    ArmFigure("configured_exposed_comm_ms", "ms", "communication without compute beside it, as configured"),
    ArmFigure("exposed_comm_change_ms", "ms", "exposed communication with the arm less that as configured"),
)


# What else is measured with the arm and, after "configured_", as configured.
_OTHERS = (
    ArmFigure("avg_w", "W", "mean power of a device"),
    ArmFigure("peak_w", "W", "highest power of a device"),
    ArmFigure("energy_per_step_j", "J", "energy of a step, all devices"),
    ArmFigure("peak_memory_bytes", "bytes", "highest memory of a device"),
)
_FLAGS = (
    ArmFigure("valid", "", "1 if the window's figures hold"),
    ArmFigure("equal_results", "", "1 if losses and weights are the same with the arm"),
)


def arm_keys() -> dict[str, ArmFigure]:
    """What may follow ``arm/<name>_`` in ``ArmReport.metrics()``, but for the bounds of intervals."""
    known = {figure.name: figure for figure in (*ARM_FIGURES, *_FLAGS)}
    for other in _OTHERS:
        for before, when in (("", "with the arm"), ("configured_", "as configured")):
            name = f"{before}{other.name}"
            known[name] = ArmFigure(name, other.unit, f"{other.meaning}, {when}")
    return known


class ComparedArm(msgspec.Struct, frozen=True):
    """What the steps as configured were compared with.

    Attributes:
        name: of the arm.
        equal_results: whether it leaves losses and weights as they are.
        sequential: whether its steps are sequential.
    """

    name: str
    equal_results: bool
    sequential: bool = False


class ArmReport(msgspec.Struct, frozen=True, kw_only=True):
    """One window of an arm, all ranks. A figure that was not measured is None, never zero and never NaN.

    ``ARM_FIGURES`` has the meaning of each figure.

    Attributes:
        arm: what the steps as configured were compared with.
        window, first_step, num_steps: which window.
        complete: False where it was cut short.
        control: whether nothing was turned: an A/A run.
        world_size, num_ranks: ranks of the job, and those heard.
        backend, device: of the lowest rank heard.
        valid: False where the figures do not hold; ``problems`` says why.
        problems: what is missing or doubtful, in words.
        measurement_overhead, measurement_overhead_ci_low, measurement_overhead_ci_high, lost_ms: what the window cost,
            as in ``OverlapReport``.
        power: in the modes ``overlapped`` (as configured) and ``sequential`` (with the arm); None without a sensor.
        memory: peaks of the same modes; empty on CPU.
    """

    arm: ComparedArm
    window: int
    first_step: int
    num_steps: int
    complete: bool
    control: bool
    world_size: int
    num_ranks: int
    backend: str
    device: str
    valid: bool
    problems: tuple[str, ...]
    measurement_overhead: float | None = None
    measurement_overhead_ci_low: float | None = None
    measurement_overhead_ci_high: float | None = None
    lost_ms: float | None = None
    speedup: Estimate | None = None
    step_ms: Estimate | None = None
    configured_step_ms: Estimate | None = None
    compute_slowdown: Estimate | None = None
    compute_ms: Estimate | None = None
    configured_compute_ms: Estimate | None = None
    comm_ms: Estimate | None = None
    configured_comm_ms: Estimate | None = None
    exposed_comm_ms: Estimate | None = None
    configured_exposed_comm_ms: Estimate | None = None
    exposed_comm_change_ms: Estimate | None = None
    power: JobPower | None = None
    memory: tuple[MemoryPeak, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether its figures hold."""
        return self.valid and self.complete

    def figures(self) -> dict[str, Estimate]:
        """The figures that were measured, by name, in the order of ``ARM_FIGURES``."""
        values = ((figure.name, getattr(self, figure.name)) for figure in ARM_FIGURES)
        return {name: value for name, value in values if value is not None}

    def of(self, *, turned: bool) -> tuple[JobModePower | None, int | None]:
        """Power and peak memory in bytes, with the arm or as configured; None for what is not known."""
        mode = Mode.SEQUENTIAL if turned else Mode.OVERLAPPED
        peak = next((row.peak_bytes for row in self.memory if row.mode is mode), None)
        return None if self.power is None else self.power.of(mode), peak

    def metrics(self) -> dict[str, float]:
        """The report as flat metrics ``arm/<name>_...``; of a window that does not count, its validity alone."""
        key = f"arm/{self.arm.name}"
        flat = {f"{key}_valid": float(self.valid), f"{key}_equal_results": float(self.arm.equal_results)}
        if self.measurement_overhead is not None:
            flat["overlap/measurement_overhead"] = self.measurement_overhead
        if not self.counts:
            return flat
        for name, figure in self.figures().items():
            flat[f"{key}_{name}"] = figure.value
            if figure.ci_low is not None and figure.ci_high is not None:
                flat[f"{key}_{name}_ci_low"] = figure.ci_low
                flat[f"{key}_{name}_ci_high"] = figure.ci_high
        for prefix, turned in (("", True), ("configured_", False)):
            power, peak_bytes = self.of(turned=turned)
            values = {
                "avg_w": None if power is None else power.mean_avg_w,
                "peak_w": None if power is None else power.peak_w,
                "energy_per_step_j": None if power is None else power.energy_per_step_j,
                "peak_memory_bytes": peak_bytes,
            }
            flat.update({f"{key}_{prefix}{name}": value for name, value in values.items() if value is not None})
        return flat
