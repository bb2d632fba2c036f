"""Power over ranks, no device counted twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import (
    DevicePower,
    JobModePower,
    JobPower,
    ModePower,
    UnitUtilisation,
)


def pool(by_rank: Mapping[int, Sequence[DevicePower]], *, whole: bool = True) -> JobPower:
    """Figures over ranks. Of ranks that share a device, the lowest with power figures speaks for it.

    Args:
        by_rank: figures of each rank's devices, of one node or of many; none for a rank without a source.
        whole: whether these are the devices of all ranks of the job: else there are no sums.
    """
    having = {rank: found for rank, found in sorted(by_rank.items()) if found}
    every = [figures for found in having.values() for figures in found]
    devices: dict[str, DevicePower] = {}
    for figures in every:
        known = devices.get(figures.source.device_id)
        if known is None or (not _measured(known) and _measured(figures)):
            devices[figures.source.device_id] = figures
    modes = []
    for mode in Mode:
        of_mode = [found for figures in devices.values() if (found := figures.of(mode)) is not None]
        if of_mode:
            modes.append(_pool_mode(mode, of_mode, all_devices=len(devices) if whole else None))
    problems = dict.fromkeys(problem for figures in every for problem in (*figures.problems, *_missing(figures)))
    return JobPower(
        num_devices=len(devices),
        ranks=tuple(having),
        without=tuple(rank for rank in sorted(by_rank) if not by_rank[rank]),
        modes=tuple(modes),
        problems=tuple(problems),
        source=every[0].source if every else None,
    )


def _missing(figures: DevicePower) -> list[str]:
    return [f"power of {m.mode.value} steps was not measured: {m.missing}" for m in figures.modes if m.missing]


def _measured(figures: DevicePower) -> bool:
    return any(mode.avg_w is not None for mode in figures.modes)


def _pool_mode(mode: Mode, devices: list[ModePower], all_devices: int | None) -> JobModePower:
    def column(value: Callable[[ModePower], float | None]) -> list[float]:
        return [found for device in devices if (found := value(device)) is not None]

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


def _mean_reasons(found: Sequence[dict[str, float]]) -> dict[str, float] | None:
    words = sorted({word for reasons in found for word in reasons})
    return {word: sum(reasons.get(word, 0.0) for reasons in found) / len(found) for word in words} if found else None


def _mean_parts(found: Sequence[UnitUtilisation]) -> UnitUtilisation | None:
    if not found:
        return None
    names = [name for name in UnitUtilisation.__struct_fields__ if name != "measured_s"]
    means = {name: _mean([v for parts in found if (v := getattr(parts, name)) is not None]) for name in names}
    return UnitUtilisation(measured_s=sum(parts.measured_s for parts in found), **means)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
