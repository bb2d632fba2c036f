"""Pools the power of all ranks' devices; a device that several ranks share counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import (
    DevicePower,
    JobModePower,
    JobPower,
    ModePower,
    UnitUtilisation,
)


def pool(by_rank: Mapping[int, Sequence[DevicePower]], *, whole: bool = True) -> JobPower:
    """Power over all ranks. If ranks share a device, the figures of the lowest rank that has power figures count.

    Args:
        by_rank: power of each rank's devices; empty for a rank without a source.
        whole: whether these are the devices of all ranks of the job. If not, there are no sums.
    """
    with_power = {rank: of_rank for rank, of_rank in sorted(by_rank.items()) if of_rank}
    all_power = [power for of_rank in with_power.values() for power in of_rank]
    devices: dict[str, DevicePower] = {}
    for power in all_power:
        known = devices.get(power.source.device_id)
        if known is None or (not _measured(known) and _measured(power)):
            devices[power.source.device_id] = power
    modes = []
    for mode in Mode:
        of_mode = [in_mode for power in devices.values() if (in_mode := power.of(mode)) is not None]
        if of_mode:
            pooled = _pool_mode(mode, of_mode, all_devices=len(devices) if whole else None)
            modes.append(_with_compute_clock(pooled, devices.values()))
    problems = dict.fromkeys(problem for power in all_power for problem in (*power.problems, *_missing(power)))
    return JobPower(
        num_devices=len(devices),
        ranks=tuple(with_power),
        without=tuple([rank for rank in sorted(by_rank) if not by_rank[rank]]),
        modes=tuple(modes),
        problems=tuple(problems),
        source=all_power[0].source if all_power else None,
    )


def _missing(power: DevicePower) -> list[str]:
    return [f"power of {m.mode.value} steps was not measured: {m.missing}" for m in power.modes if m.missing]


def _measured(power: DevicePower) -> bool:
    return any(mode.avg_w is not None for mode in power.modes)


def _pool_mode(mode: Mode, devices: list[ModePower], all_devices: int | None) -> JobModePower:
    def column(value: Callable[[ModePower], float | None]) -> list[float]:
        return [known for device in devices if (known := value(device)) is not None]

    def total(values: list[float]) -> float | None:
        return sum(values) if values and len(values) == all_devices else None

    avg_w, energies_j = column(lambda d: d.avg_w), column(lambda d: d.energy_per_step_j)
    clocks, throttled = column(lambda d: d.sm_clock_mhz), column(lambda d: d.throttle_fraction)
    methods = {device.energy_method for device in devices if device.energy_method}
    return JobModePower(
        mode=mode,
        num_devices=len(avg_w),
        total_avg_w=total(avg_w),
        mean_avg_w=_mean(avg_w),
        peak_w=max(column(lambda d: d.peak_w), default=None),
        energy_per_step_j=total(energies_j),
        energy_method="mixed" if len(methods) > 1 else "".join(methods),
        avg_tdp_fraction=_mean(column(lambda d: d.avg_tdp_fraction)),
        sm_clock_mhz=_mean(clocks),
        min_sm_clock_mhz=min(clocks, default=None),
        throttle_fraction=_mean(throttled),
        max_throttle_fraction=max(throttled, default=None),
        p99_w=max(column(lambda d: d.p99_w), default=None),
        peak_tdp_fraction=max(column(lambda d: d.peak_tdp_fraction), default=None),
        reasons=_mean_reasons([device.reasons for device in devices if device.reasons is not None]),
        parts=_mean_parts([device.parts for device in devices if device.parts is not None]),
    )


def _with_compute_clock(pooled: JobModePower, devices: Iterable[DevicePower]) -> JobModePower:
    """With the mean over the devices that have it in both modes: else one mode's would be of other devices."""
    in_both = [
        of_mode
        for device in devices
        if (of_mode := device.of(pooled.mode)) is not None
        and all((of := device.of(mode)) is not None and of.compute_clock_mhz is not None for mode in Mode)
    ]
    return msgspec.structs.replace(
        pooled,
        compute_clock_mhz=_mean([of.compute_clock_mhz for of in in_both if of.compute_clock_mhz is not None]),
        compute_clock_readings=sum(of.compute_clock_readings for of in in_both),
    )


def _mean_reasons(devices: Sequence[dict[str, float]]) -> dict[str, float] | None:
    """Mean over devices of the fraction of time for each reason."""
    if not devices:
        return None
    words = sorted({word for reasons in devices for word in reasons})
    return {word: sum(reasons.get(word, 0.0) for reasons in devices) / len(devices) for word in words}


def _mean_parts(devices: Sequence[UnitUtilisation]) -> UnitUtilisation | None:
    """Means over the devices that have each counter."""
    if not devices:
        return None
    names = [name for name in UnitUtilisation.__struct_fields__ if name != "measured_s"]
    means = {name: _mean([v for parts in devices if (v := getattr(parts, name)) is not None]) for name in names}
    return UnitUtilisation(measured_s=sum(parts.measured_s for parts in devices), **means)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
