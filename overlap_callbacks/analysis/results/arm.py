"""One window of an arm: the job as configured beside the same with a switch turned. Plain data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from overlap_callbacks.analysis.equations import slowdown
from overlap_callbacks.analysis.results.catalogue import ISO, MEASUREMENT_OVERHEAD, OV, SEQ, STEP
from overlap_callbacks.analysis.results.figure import HIGHEST, Family, Figure, Formula, Reported
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import JobModePower, JobPower
from overlap_callbacks.analysis.results.report_parts import Parts
from overlap_callbacks.analysis.results.window import MemoryPeak


def _arm(name: str, unit: str, meaning: str, formula: Formula | None = None, **facts: Any) -> Figure:
    return Figure(f"arm/{{arm}}_{name}", unit, meaning, formula=formula, **facts)


def _slowdown(above: str, below: str) -> Callable[..., float]:
    return lambda a, b: slowdown(getattr(a, above), getattr(b, below))


def _exposed_ms(means: Any) -> float:
    exposed_ms: float = means.comm_busy_ms - means.hidden_comm_ms
    return exposed_ms


# The steps with the arm have the place of sequential ones.
ARM_FIGURES = (
    _arm("speedup", "fraction", "step time as configured over that with the arm, less one: above 0 the arm wins",
         Formula((STEP, SEQ), _slowdown("step_ms", "step_ms")), signed=True),
    _arm("step_ms", "ms", "step time with the arm", Formula((SEQ,), lambda b: b.step_ms)),
    _arm("configured_step_ms", "ms", "step time as configured, in the same windows",
         Formula((STEP,), lambda a: a.step_ms)),
    _arm("compute_slowdown", "fraction", "compute kernels' time with the arm over that as configured, less one",
         Formula((ISO, OV), _slowdown("compute_ms", "compute_ms")), signed=True),
    _arm("compute_ms", "ms", "sum of the compute kernels' times with the arm", Formula((ISO,), lambda b: b.compute_ms)),
    _arm("configured_compute_ms", "ms", "sum of the compute kernels' times as configured",
         Formula((OV,), lambda a: a.compute_ms)),
    _arm("comm_ms", "ms", "time in which communication is in flight with the arm",
         Formula((ISO,), lambda b: b.comm_busy_ms)),
    _arm("configured_comm_ms", "ms", "time in which communication is in flight as configured",
         Formula((OV,), lambda a: a.comm_busy_ms)),
    _arm("exposed_comm_ms", "ms", "communication without compute beside it, with the arm",
         Formula((ISO,), _exposed_ms)),
    _arm("configured_exposed_comm_ms", "ms", "communication without compute beside it, as configured",
         Formula((OV,), _exposed_ms)),
    _arm("exposed_comm_change_ms", "ms", "exposed communication with the arm less that as configured",
         Formula((ISO, OV), lambda b, a: _exposed_ms(b) - _exposed_ms(a)), between=(-math.inf, math.inf)),
)  # fmt: skip


def _headline(report: ArmReport) -> Parts:
    if report.counts:
        yield {"arm": report.arm.name}, report.figures()


def _flags(report: ArmReport) -> Parts:
    yield {"arm": report.arm.name}, {"valid": report.valid, "equal_results": report.arm.equal_results}
    yield {}, {"measurement_overhead": report.measurement_overhead}


def _others(report: ArmReport) -> Parts:
    if not report.counts:
        return
    for prefix, turned in (("", True), ("configured_", False)):
        power, peak_bytes = report.of(turned=turned)
        values = {} if power is None else {
            "avg_w": power.mean_avg_w, "peak_w": power.peak_w, "energy_per_step_j": power.energy_per_step_j,
        }  # fmt: skip
        values["peak_memory_bytes"] = peak_bytes
        yield {"arm": report.arm.name}, {f"{prefix}{name}": value for name, value in values.items()}


_OTHERS = tuple([
    _arm(f"{before}{name}", unit, f"{meaning}, {when}", aggregate=aggregate)
    for name, unit, meaning, aggregate in (
        ("avg_w", "W", "mean power of a device", ""),
        ("peak_w", "W", "highest power of a device", HIGHEST),
        ("energy_per_step_j", "J", "energy of a step, all devices", ""),
        ("peak_memory_bytes", "bytes", "highest memory of a device", HIGHEST),
    )
    for before, when in (("", "with the arm"), ("configured_", "as configured"))
])  # fmt: skip
ARM_FAMILIES = (
    Family(_flags, (
        _arm("valid", "", "1 if the window's figures hold"),
        _arm("equal_results", "", "1 if losses and weights are the same with the arm"),
        MEASUREMENT_OVERHEAD,
    )),
    Family(_headline, ARM_FIGURES),
    Family(_others, _OTHERS),
)  # fmt: skip


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


if TYPE_CHECKING:
    _Figures = Reported
else:
    _Figures = Reported.with_fields(ARM_FIGURES, ARM_FAMILIES)


class ArmReport(_Figures, frozen=True, kw_only=True):
    """One window of an arm, all ranks. A figure that was not measured is None, never zero and never NaN.

    ``ARM_FIGURES`` has the meaning of each figure. Of a window that does not count, the metrics are its validity alone.

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
    power: JobPower | None = None
    memory: tuple[MemoryPeak, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether its figures hold."""
        return self.valid and self.complete

    def of(self, *, turned: bool) -> tuple[JobModePower | None, int | None]:
        """Power and peak memory in bytes, with the arm or as configured; None for what is not known."""
        mode = Mode.SEQUENTIAL if turned else Mode.OVERLAPPED
        peak = next((row.peak_bytes for row in self.memory if row.mode is mode), None)
        return None if self.power is None else self.power.of(mode), peak
