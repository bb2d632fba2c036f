"""A report as flat keys: the names that every sink uses. What was not measured has no key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from overlap_callbacks.analysis.bus_bandwidth import bus_factor
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.catalogue import (
    ENERGY_SAVING,
    PEAK_RISE,
    POWER_METRICS,
    SLOWDOWN_BEYOND_CLOCK,
    SLOWDOWN_FROM_CLOCK,
    SLOWDOWN_FROM_MEMORY,
    SLOWDOWN_FROM_SMS,
    SLOWDOWN_FROM_WAVES,
    SLOWDOWN_UNEXPLAINED,
    compares,
    energy_per_token_key,
)
from overlap_callbacks.analysis.results.estimate import Estimate, Spread
from overlap_callbacks.analysis.results.kernel_times import PairTime
from overlap_callbacks.analysis.results.memory import MemoryPeak, memory_peak_key, memory_peak_limit_key
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import JobPower, SlowdownCause
from overlap_callbacks.analysis.results.shares import MEMORY, SMS, UNEXPLAINED, WAVES, SlowdownShares
from overlap_callbacks.analysis.results.window import CollectiveTime, DimensionTime


def figure_metrics(figures: Mapping[str, Estimate], *, valid: bool) -> dict[str, float]:
    """Each figure and the bounds of its interval; of an invalid window, none that rests on its sequential steps."""
    flat: dict[str, float] = {}
    for name, figure in figures.items():
        if not valid and compares(name):
            continue
        flat[f"overlap/{name}"] = figure.value
        if figure.ci_low is not None and figure.ci_high is not None:
            flat[f"overlap/{name}_ci_low"] = figure.ci_low
            flat[f"overlap/{name}_ci_high"] = figure.ci_high
    return flat


def spread_metrics(spreads: Mapping[str, Spread], *, valid: bool) -> dict[str, float]:
    """The lowest and the highest rank of each figure; of an invalid window, with the same exception."""
    flat: dict[str, float] = {}
    for name, spread in spreads.items():
        if not valid and compares(name):
            continue
        flat[f"overlap/{name}_rank_low"] = spread.low
        flat[f"overlap/{name}_rank_high"] = spread.high
    return flat


def collective_metrics(collectives: Iterable[CollectiveTime], *, valid: bool) -> dict[str, float]:
    """Bytes and messages of each collective, and its bus bandwidth alone, in sequential steps."""
    flat: dict[str, float] = {}
    sent: dict[str, tuple[float, float]] = {}  # bytes over a link, and the time they took
    for row in collectives:
        key = f"comm/{row.operator.strip('_').replace('.', '_')}"
        for suffix, amount in (("bytes", row.bytes_in), ("messages", row.messages)):
            flat[f"{key}_{suffix}"] = flat.get(f"{key}_{suffix}", 0) + amount
        factor = bus_factor(collective_of(row.operator), row.group_size)
        if valid and factor and row.transfer is not None:
            size_bytes, time_ms = sent.get(key, (0.0, 0.0))
            sent[key] = (size_bytes + factor * row.transfer[0], time_ms + row.transfer[1])
    return {**flat, **{f"{key}_busbw_gb_s": size / time_ms / 1e6 for key, (size, time_ms) in sent.items() if time_ms}}


def dimension_metrics(
    dimensions: Iterable[DimensionTime], pairs: Sequence[PairTime], *, valid: bool
) -> dict[str, float]:
    """Time, exposed time, bytes and slowdown of each dimension's communication, and the slowdown of compute beside it.

    Args:
        dimensions: of the window.
        pairs: compute kernels beside the communication of each dimension.
        valid: whether its sequential steps were sequential: else nothing is compared with them.
    """
    flat: dict[str, float] = {}
    for row in dimensions:
        key = f"dimension/{row.dimension.replace('+', '_')}"
        flat[f"{key}_comm_ms"] = row.comm_ms
        flat[f"{key}_exposed_ms"] = row.exposed_ms
        flat[f"{key}_bytes"] = row.bytes_in
        if valid and row.slowdown is not None:
            flat[f"{key}_comm_slowdown"] = row.slowdown
    for dimension, slowdown in compute_slowdowns(pairs).items() if valid else ():
        flat[f"dimension/{dimension.replace('+', '_')}_compute_slowdown"] = slowdown
    return flat


def compute_slowdowns(pairs: Sequence[PairTime]) -> dict[str, float]:
    """How much longer compute kernels take beside each kind of communication, by its name, over all families."""
    slowdowns = {}
    for beside in dict.fromkeys(pair.beside for pair in pairs):
        rows = [pair for pair in pairs if pair.beside == beside and not pair.communication]
        alone_ms = sum(pair.alone_ms for pair in rows)
        if alone_ms > 0:
            slowdowns[beside] = sum(pair.time_ms for pair in rows) / alone_ms - 1
    return slowdowns


def power_metrics(
    power: JobPower | None, cause: SlowdownCause | None, *, tokens_per_step: int | None, valid: bool
) -> dict[str, float]:
    """Power, energy, clocks and utilisation of each mode, and what follows from them.

    Args:
        power: of the window.
        cause: of its slowdown.
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
                low, high = metric.bounds(mode)
                if low is not None and high is not None:
                    flat[f"{metric.key(mode.mode)}_ci_low"], flat[f"{metric.key(mode.mode)}_ci_high"] = low, high
        if tokens_per_step and mode.energy_per_step_j is not None:
            flat[energy_per_token_key(mode.mode)] = mode.energy_per_step_j / tokens_per_step
    saving = energy_saving(power) if valid else None
    if saving is not None:
        flat[ENERGY_SAVING] = saving
    rise = peak_rise(power) if valid else None
    if rise is not None:
        flat[PEAK_RISE] = rise
    if cause is not None and valid:
        for key, share in ((SLOWDOWN_FROM_CLOCK, cause.from_clock), (SLOWDOWN_BEYOND_CLOCK, cause.contention)):
            if share is not None:
                flat[key] = share
    return flat


_SHARE_KEYS = {
    SMS: SLOWDOWN_FROM_SMS,
    WAVES: SLOWDOWN_FROM_WAVES,
    MEMORY: SLOWDOWN_FROM_MEMORY,
    UNEXPLAINED: SLOWDOWN_UNEXPLAINED,
}


def slowdown_metrics(shares: SlowdownShares | None, *, valid: bool) -> dict[str, float]:
    """The share of each cause of the compute slowdown but the clock, which ``power_metrics`` has."""
    if shares is None or not valid:
        return {}
    return {key: fraction for cause, key in _SHARE_KEYS.items() if (fraction := shares.of(cause)) is not None}


def peak_rise(power: JobPower) -> float | None:
    """How much higher the highest power is in overlapped steps than in sequential ones, as a fraction; None without."""
    overlapped, sequential = power.of(Mode.OVERLAPPED), power.of(Mode.SEQUENTIAL)
    if overlapped is None or sequential is None or overlapped.peak_w is None or not sequential.peak_w:
        return None
    return overlapped.peak_w / sequential.peak_w - 1


def memory_metrics(peaks: Iterable[MemoryPeak], *, valid: bool) -> dict[str, float]:
    """The memory peak of each mode where it is known, and where it is bounded from above."""
    flat: dict[str, float] = {}
    for peak in peaks:
        if peak.mode is Mode.SEQUENTIAL and not valid:
            continue
        if peak.peak_bytes is not None:
            flat[memory_peak_key(peak.mode)] = peak.peak_bytes
        if peak.at_most_bytes is not None:
            flat[memory_peak_limit_key(peak.mode)] = peak.at_most_bytes
    return flat


def energy_saving(power: JobPower) -> float | None:
    """The share of a sequential step's energy that an overlapped one saves; negative where it takes more.

    None where the energy of a mode is not known, or was not measured by the same method in both.
    """
    overlapped, sequential = power.of(Mode.OVERLAPPED), power.of(Mode.SEQUENTIAL)
    if overlapped is None or sequential is None or overlapped.energy_method != sequential.energy_method:
        return None
    if overlapped.energy_per_step_j is None or not sequential.energy_per_step_j:
        return None
    return 1 - overlapped.energy_per_step_j / sequential.energy_per_step_j
