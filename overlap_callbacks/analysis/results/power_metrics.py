"""Power of a window as flat metrics: the names, units and meanings that every sink uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import Cause, JobModePower, JobPower, SlowdownCause


class PowerMetric(NamedTuple):
    """A metric of one mode.

    Attributes:
        section, name: ``<section>/<mode>_<name>`` is its key.
        unit: e.g. ``W``.
        meaning: its definition.
        of: its value.
    """

    section: str
    name: str
    unit: str
    meaning: str
    of: Callable[[JobModePower], float | None]

    def key(self, mode: Mode) -> str:
        return f"{self.section}/{mode.value}_{self.name}"


def _part(name: str) -> Callable[[JobModePower], float | None]:
    return lambda m: None if m.parts is None else getattr(m.parts, name)


POWER_METRICS = (
    PowerMetric("power", "avg_w", "W", "mean power of a device", lambda m: m.mean_avg_w),
    PowerMetric("power", "total_w", "W", "mean power of all devices together", lambda m: m.total_avg_w),
    PowerMetric("power", "peak_w", "W", "highest power of any device", lambda m: m.peak_w),
    PowerMetric("power", "p99_w", "W", "highest 99th percentile of any device's power, by time", lambda m: m.p99_w),
    PowerMetric("power", "energy_per_step_j", "J", "energy of a step, all devices", lambda m: m.energy_per_step_j),
    PowerMetric(
        "power", "avg_tdp_fraction", "fraction", "mean power over the default limit", lambda m: m.avg_tdp_fraction
    ),
    PowerMetric(
        "power", "peak_tdp_fraction", "fraction", "highest power over the default limit", lambda m: m.peak_tdp_fraction
    ),
    PowerMetric("device", "sm_clock_mhz", "MHz", "mean SM clock", lambda m: m.sm_clock_mhz),
    PowerMetric(
        "device",
        "throttle_fraction",
        "fraction",
        "time in which the clock was held back",
        lambda m: m.throttle_fraction,
    ),
    PowerMetric(
        "device", "power_cap_fraction", "fraction", "the same for a power cap", lambda m: m.cause_fraction(Cause.POWER)
    ),
    PowerMetric(
        "device", "thermal_fraction", "fraction", "the same for heat", lambda m: m.cause_fraction(Cause.TEMPERATURE)
    ),
    PowerMetric(
        "device",
        "hardware_fraction",
        "fraction",
        "the same by the hardware's own protection",
        lambda m: m.cause_fraction(Cause.HARDWARE),
    ),
    PowerMetric("device", "sm_busy_fraction", "fraction", "SMs that are busy", _part("sm")),
    PowerMetric(
        "device", "sm_occupancy_fraction", "fraction", "warps that are active, of the most", _part("sm_occupancy")
    ),
    PowerMetric("device", "tensor_busy_fraction", "fraction", "time in which tensor cores work", _part("tensor")),
    PowerMetric("device", "dram_busy_fraction", "fraction", "memory bandwidth in use", _part("dram")),
    PowerMetric("device", "nvlink_rx_gb_s", "GB/s", "NVLink traffic in", _part("nvlink_rx_gb_s")),
    PowerMetric("device", "nvlink_tx_gb_s", "GB/s", "NVLink traffic out", _part("nvlink_tx_gb_s")),
)

ENERGY_PER_TOKEN = "energy_per_token_j"
ENERGY_SAVING = "power/energy_saving_vs_sequential"


def power_metrics(
    power: JobPower | None, verdict: SlowdownCause | None, *, tokens_per_step: int | None, valid: bool
) -> dict[str, float]:
    """The metrics; what was not measured has no key.

    Args:
        power: of the window.
        verdict: on its slowdown.
        tokens_per_step: of the whole job.
        valid: whether its sequential steps were sequential: else nothing is said of them.
    """
    if power is None:
        return {}
    flat: dict[str, float] = {}
    for mode in power.modes:
        if mode.mode is Mode.SEQUENTIAL and not valid:
            continue
        for metric in POWER_METRICS:
            value = metric.of(mode)
            if value is not None:
                flat[metric.key(mode.mode)] = value
        if tokens_per_step and mode.energy_per_step_j is not None:
            flat[f"power/{mode.mode.value}_{ENERGY_PER_TOKEN}"] = mode.energy_per_step_j / tokens_per_step
    saving = energy_saving(power) if valid else None
    if saving is not None:
        flat[ENERGY_SAVING] = saving
    if verdict is not None and valid:
        for name, share in (("slowdown_from_clock", verdict.from_clock), ("slowdown_beyond_clock", verdict.contention)):
            if share is not None:
                flat[f"device/{name}"] = share
    return flat


def energy_saving(power: JobPower) -> float | None:
    """How much more energy a sequential step takes than an overlapped one, as a fraction; negative where it takes less.

    None where the energy of a mode is not known, or was not measured by the same method in both.
    """
    overlapped, sequential = power.of(Mode.OVERLAPPED), power.of(Mode.SEQUENTIAL)
    if overlapped is None or sequential is None or overlapped.energy_method != sequential.energy_method:
        return None
    if not overlapped.energy_per_step_j or sequential.energy_per_step_j is None:
        return None
    return sequential.energy_per_step_j / overlapped.energy_per_step_j - 1


def units() -> dict[str, str]:
    """Unit of each metric, by key."""
    found = {metric.key(mode): metric.unit for metric in POWER_METRICS for mode in Mode}
    found |= {f"power/{mode.value}_{ENERGY_PER_TOKEN}": "J" for mode in Mode}
    return {**found, ENERGY_SAVING: "fraction", "device/slowdown_from_clock": "fraction",
            "device/slowdown_beyond_clock": "fraction"}  # fmt: skip


def meanings() -> dict[str, str]:
    """Meaning of each metric, by key."""
    found = {metric.key(mode): f"{metric.meaning}, {mode.value} steps" for metric in POWER_METRICS for mode in Mode}
    found |= {f"power/{mode.value}_{ENERGY_PER_TOKEN}": f"energy per token, {mode.value} steps" for mode in Mode}
    return {
        **found,
        ENERGY_SAVING: "energy of a sequential step over that of an overlapped one, less one",
        "device/slowdown_from_clock": "sequential over overlapped SM clock, less one: the most that the clock explains",
        "device/slowdown_beyond_clock": "the least of the compute slowdown that remains: contention",
    }
