"""Power, energy and clocks per mode of one device in one window."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from overlap_callbacks.analysis.power.phases import StepPhases, clocks_while_computing
from overlap_callbacks.analysis.power.readings import Floats, Readings
from overlap_callbacks.analysis.power.segments import HeldReadings, Segment, counter_energy_j, hold
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import REASONS, DevicePower, ModePower, SourceInfo, UnitUtilisation

COUNTER = "counter"
HELD_SAMPLES = "held samples"

# Energy by the counter over energy by the readings of power. Outside these bounds the counter is not used: some
# counters stand still, some count in another unit.
_PLAUSIBLE_RATIO = (0.1, 10.0)
# A larger difference is reported. It has good reasons too: some sensors measure only part of the time.
_MAX_SILENT_DIFFERENCE = 0.25


def power_figures(
    source: SourceInfo,
    readings: Readings,
    segments: Sequence[Segment],
    *,
    interval_s: float,
    late: int = 0,
    phases: Sequence[StepPhases] = (),
) -> DevicePower:
    """The power figures of each mode.

    Args:
        source: the source of the readings.
        readings: all readings, in order of time.
        segments: stretches of time in one mode, in any order; they must not overlap.
        interval_s: time between readings.
        late: number of ticks that the sampler skipped.
        phases: when the device computed, in its profiled steps.
    """
    by_mode: dict[Mode, list[Segment]] = defaultdict(list)
    for segment in segments:
        by_mode[segment.arm].append(segment)
    in_order = [(mode, by_mode[mode]) for mode in Mode if mode in by_mode]
    min_block_s = source.min_block_s(interval_s)
    modes = [_measure(mode, of_mode, readings, source, min_block_s) for mode, of_mode in in_order]
    modes, problems = _with_energy(modes, in_order, readings, source)
    modes = _with_compute_clocks(modes, readings, phases)
    problems += _without_reasons(modes, readings)
    if late:
        several = f"{late} readings of power came late and were left out"
        problems.append("1 reading of power came late and was left out" if late == 1 else several)
    rows = _within(readings, segments)
    return DevicePower(
        source=source,
        interval_s=interval_s,
        min_block_s=min_block_s,
        modes=tuple(modes),
        limit_w=_min(readings.limit_w[rows]),
        max_temperature_c=_max(readings.temperature_c[rows]),
        late=late,
        problems=tuple(problems),
    )


def _measure(
    mode: Mode, segments: Sequence[Segment], readings: Readings, source: SourceInfo, min_block_s: float
) -> ModePower:
    """All figures of a mode except the energy by the counter, which depends on the other modes."""
    held = [hold(readings, segment, readings.power_w, readings.since_ns) for segment in segments]
    measured = [(segment, part) for segment, part in zip(segments, held, strict=True) if len(part)]
    clocks = ModePower(
        mode,
        sm_clock_mhz=_mean_now(readings, segments, readings.sm_clock_mhz),
        memory_clock_mhz=_mean_now(readings, segments, readings.memory_clock_mhz),
        reasons=(reasons := _reason_fractions(readings, segments)),
        throttle_fraction=_throttled(readings, segments) if reasons is not None else None,
        parts=_parts_use(readings, segments),
    )
    if not measured:
        return msgspec.structs.replace(clocks, missing=_why_missing(segments, readings, min_block_s))
    rows = np.concatenate([part.rows for _, part in measured])
    seconds = np.concatenate([part.seconds for _, part in measured])
    power_w = readings.power_w[rows]
    measured_s, energy_j = float(seconds.sum()), float(power_w @ seconds)
    num_steps = sum(segment.num_steps for segment, _ in measured)
    avg_w, peak_w = energy_j / measured_s, float(power_w.max())
    return msgspec.structs.replace(
        clocks,
        num_steps=num_steps,
        num_readings=len(rows),
        measured_s=measured_s,
        avg_w=avg_w,
        peak_w=peak_w,
        p99_w=_percentile(power_w, seconds, 0.99),
        avg_tdp_fraction=avg_w / source.tdp_w if source.tdp_w else None,
        peak_tdp_fraction=peak_w / source.tdp_w if source.tdp_w else None,
        sampled_energy_per_step_j=energy_j / num_steps,
    )


def _with_energy(
    modes: Sequence[ModePower],
    by_mode: Sequence[tuple[Mode, Sequence[Segment]]],
    readings: Readings,
    source: SourceInfo,
) -> tuple[list[ModePower], list[str]]:
    """The modes with their energy, and problems in words.

    All modes use one method, since two methods differ by more than the modes do. The counter is used if it gives the
    energy of every mode and is plausible.
    """
    counted = [_counted(segments, readings, source) for _, segments in by_mode]
    problems: list[str] = []
    by_counter = bool(counted) and all(energy is not None for energy in counted)
    for mode, energy in zip(modes, counted, strict=True):
        sampled_j = mode.sampled_energy_per_step_j
        if energy is None or not sampled_j:
            continue
        ratio = energy.per_step_j / sampled_j
        if not _PLAUSIBLE_RATIO[0] <= ratio <= _PLAUSIBLE_RATIO[1]:
            by_counter = False
            problems.append(
                f"the energy counter is not used: in {mode.mode.value} steps it gave {ratio:.2g} times the energy "
                "that the readings of power do"
            )
        elif abs(ratio - 1) > _MAX_SILENT_DIFFERENCE:
            problems.append(
                f"in {mode.mode.value} steps the energy counter gave {ratio:.2f} times the energy that the readings of "
                "power do: the power sensor looks at part of the time only, or the counter lags"
            )
    with_energy = []
    for mode, energy in zip(modes, counted, strict=True):
        if by_counter and energy is not None:
            per_step_j, num_steps, method = energy.per_step_j, energy.num_steps, COUNTER
        elif mode.sampled_energy_per_step_j is not None:
            per_step_j, num_steps, method = mode.sampled_energy_per_step_j, mode.num_steps, HELD_SAMPLES
        else:
            with_energy.append(mode)
            continue
        with_energy.append(
            msgspec.structs.replace(mode, energy_per_step_j=per_step_j, energy_steps=num_steps, energy_method=method)
        )
    return with_energy, problems


class _CountedEnergy(NamedTuple):
    """Energy of a mode by the counter, and the number of steps that used it."""

    energy_j: float
    num_steps: int

    @property
    def per_step_j(self) -> float:
        return self.energy_j / self.num_steps


def _counted(segments: Sequence[Segment], readings: Readings, source: SourceInfo) -> _CountedEnergy | None:
    """Energy of a mode by the counter; None if no segment is long enough for it."""
    if source.energy_lag_s is None:
        return None
    energy_j, num_steps = 0.0, 0
    for segment in segments:
        of_segment_j = counter_energy_j(readings, segment, source.energy_lag_s)
        if of_segment_j is not None:
            energy_j += of_segment_j
            num_steps += segment.num_steps
    return _CountedEnergy(energy_j, num_steps) if num_steps else None


# -- clocks, reasons, parts: these are momentary, unlike power


def _mean_now(readings: Readings, segments: Sequence[Segment], values: Floats) -> float | None:
    total, seconds = 0.0, 0.0
    for segment in segments:
        held = hold(readings, segment, values, readings.time_ns)
        total += float(values[held.rows] @ held.seconds)
        seconds += float(held.seconds.sum())
    return total / seconds if seconds else None


def _with_compute_clocks(
    modes: Sequence[ModePower], readings: Readings, phases: Sequence[StepPhases]
) -> list[ModePower]:
    clocks = clocks_while_computing(readings, phases)
    return [
        msgspec.structs.replace(
            mode, compute_clock_mhz=clocks[mode.mode][0], compute_clock_readings=clocks[mode.mode][1]
        )
        if mode.mode in clocks
        else mode
        for mode in modes
    ]


def _held_reasons(readings: Readings, segments: Sequence[Segment]) -> list[HeldReadings]:
    known = np.array([0.0 if reasons is not None else np.nan for reasons in readings.reasons])
    return [hold(readings, segment, known, readings.reasons_since_ns) for segment in segments]


def _reason_fractions(readings: Readings, segments: Sequence[Segment]) -> dict[str, float] | None:
    seconds: dict[str, float] = defaultdict(float)
    total = 0.0
    for held in _held_reasons(readings, segments):
        for row, held_s in zip(held.rows, held.seconds, strict=True):
            total += float(held_s)
            for word in readings.reasons[row] or ():
                seconds[word] += float(held_s)
    return {word: seconds[word] / total for word in sorted(seconds)} if total else None


def _throttled(readings: Readings, segments: Sequence[Segment]) -> float:
    throttled_s, total = 0.0, 0.0
    for held in _held_reasons(readings, segments):
        for row, held_s in zip(held.rows, held.seconds, strict=True):
            total += float(held_s)
            if any(REASONS.get(word) is not None for word in readings.reasons[row] or ()):
                throttled_s += float(held_s)
    return throttled_s / total


def _parts_use(readings: Readings, segments: Sequence[Segment]) -> UnitUtilisation | None:
    """Means over the intervals that lie within a segment, weighted by their lengths."""
    names = [field for field in UnitUtilisation.__struct_fields__ if field != "measured_s"]
    totals: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    measured_s = 0.0
    for time_ns, use in zip(readings.time_ns.tolist(), readings.utilisation, strict=True):
        if use is None or not any(s.start_ns <= use.since_ns and time_ns <= s.end_ns for s in segments):
            continue
        length_s = (time_ns - use.since_ns) / 1e9
        measured_s += length_s
        for name in names:
            value = getattr(use, name)
            if value is not None:
                totals[name] += value * length_s
                seconds[name] += length_s
    if not measured_s:
        return None
    means: dict[str, float | None] = {name: totals[name] / seconds[name] if seconds[name] else None for name in names}
    return UnitUtilisation(measured_s=measured_s, **means)


def _percentile(values: Floats, seconds: Floats, fraction: float) -> float:
    """The smallest value that is not exceeded for ``fraction`` of the time."""
    order = np.argsort(values)
    reached = np.cumsum(seconds[order])
    # Sums of many lengths have rounding errors; those must not select the next value.
    index = int(np.searchsorted(reached, fraction * reached[-1] * (1 - 1e-12)))
    return float(values[order[min(index, len(values) - 1)]])


# -- problems, in words


def _without_reasons(modes: Sequence[ModePower], readings: Readings) -> list[str]:
    """A problem, if the blocks of a mode are shorter than the time that the device's reasons cover."""
    with_reasons = np.flatnonzero([reasons is not None for reasons in readings.reasons])
    without = [mode.mode.value for mode in modes if mode.reasons is None]
    if not without or len(with_reasons) < 2:
        return []
    covered_ns = readings.time_ns[with_reasons] - readings.reasons_since_ns[with_reasons]
    covered_s = float(np.median(covered_ns)) / 1e9
    every_s = float(np.median(np.diff(readings.time_ns[with_reasons]))) / 1e9
    if not covered_s:  # momentary reasons: no block is too short for them, so the calls failed
        return []
    return [
        f"why the clock was held back in {' and '.join(without)} steps is not known: the device tells it of "
        f"{covered_s:.2g} s at a time, and a block needs {covered_s + every_s:.2g} s for that (min_block_seconds)"
    ]


def _why_missing(segments: Sequence[Segment], readings: Readings, min_block_s: float) -> str:
    if not len(readings):
        return "there are no readings of power"
    longest = max(segments, key=lambda segment: segment.duration_s)
    if longest.duration_s >= min_block_s:
        return "no reading of power falls into these blocks"
    step_s = longest.duration_s / longest.num_steps
    return (
        f"blocks of {longest.duration_s:.3g} s are too short: a power figure needs {min_block_s:.3g} s in one mode, "
        f"which takes {steps_needed(step_s, min_block_s)} steps per block"
    )


def steps_needed(step_s: float, min_block_s: float) -> int:
    """Number of steps that a block needs to last ``min_block_s``.

    Args:
        step_s: time of a step.
        min_block_s: minimum length of a block, see ``SourceInfo.min_block_s``.

    Raises:
        ValueError: ``step_s`` is not positive.
    """
    if not step_s > 0:
        raise ValueError(f"step_s must be positive, got {step_s!r}")
    return max(1, math.ceil(min_block_s / step_s - 1e-9))


def _within(readings: Readings, segments: Sequence[Segment]) -> slice:
    """The rows between the first segment's start and the last one's end."""
    if not segments:
        return slice(0, len(readings))
    edges = (min(s.start_ns for s in segments), max(s.end_ns for s in segments) + 1)
    low, high = np.searchsorted(readings.time_ns, edges)
    return slice(int(low), int(high))


def _min(values: Floats) -> float | None:
    return float(np.nanmin(values)) if len(values) and not np.isnan(values).all() else None


def _max(values: Floats) -> float | None:
    return float(np.nanmax(values)) if len(values) and not np.isnan(values).all() else None
