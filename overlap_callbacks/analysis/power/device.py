"""Power, energy and clocks per mode of one device in one window.

The energy counter is the best source: it misses nothing. Watts and joules come from it where its reads span the blocks
every mode well enough, and else from readings of power, again where these tell the mean well enough. Both modes use one
method, since two methods differ by more than the modes do. Where the two methods disagree, neither can be believed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from overlap_callbacks.analysis.power.agreement import Agreement, compare
from overlap_callbacks.analysis.power.counted import counted_power
from overlap_callbacks.analysis.power.mean_power import MAX_ERROR, MeanPower, estimate_j, estimate_w
from overlap_callbacks.analysis.power.momentary import (
    mean_now,
    parts_use,
    reason_fractions,
    throttled_fraction,
    with_compute_clocks,
)
from overlap_callbacks.analysis.power.phases import StepPhases
from overlap_callbacks.analysis.power.readings import Floats, Readings
from overlap_callbacks.analysis.power.sampled import SampledPower, Unmeasured, sampled_power
from overlap_callbacks.analysis.power.segments import Segment
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import DevicePower, ModePower, SourceInfo

COUNTER = "counter"
SAMPLES = "samples"


@dataclass
class _OfMode:
    """What both methods tell of a mode."""

    mode: Mode
    segments: Sequence[Segment]
    sampled: SampledPower
    counted: MeanPower | None

    def by(self, method: str) -> MeanPower | None:
        return self.counted if method == COUNTER else self.sampled.mean


def power_figures(
    source: SourceInfo,
    readings: Readings,
    segments: Sequence[Segment],
    *,
    interval_s: float,
    late: int = 0,
    failed: int = 0,
    phases: Sequence[StepPhases] = (),
) -> DevicePower:
    """The power figures of each mode.

    Args:
        source: the source of the readings.
        readings: all readings, in order of time.
        segments: stretches of time in one mode, in any order; they must not overlap.
        interval_s: time between readings.
        late: number of ticks that the sampler skipped.
        failed: number of reads that failed.
        phases: when the device computed, in its profiled steps.
    """
    by_mode: dict[Mode, list[Segment]] = defaultdict(list)
    for segment in sorted(segments, key=lambda segment: segment.start_ns):
        by_mode[segment.arm].append(segment)
    found = [
        _OfMode(
            mode,
            by_mode[mode],
            sampled_power(readings, by_mode[mode], source, interval_s),
            counted_power(readings, by_mode[mode], source),
        )
        for mode in Mode
        if mode in by_mode
    ]
    agreement = compare({of.mode: (of.sampled.mean, of.counted) for of in found}, readings, source, interval_s)
    if agreement.counter_is_wrong:
        for of in found:
            of.counted = None
    method = _method(found)
    min_block_s = source.min_block_s(interval_s)
    modes = [_figures(of, method, agreement, readings, source, interval_s) for of in found]
    modes = with_compute_clocks(modes, readings, phases)
    problems = [*agreement.problems, *_peaks_missing(modes, found), *_without_reasons(modes, readings)]
    if source.averaging_s is not None:  # the counter was read, the sensor was not
        failed += int(np.isnan(readings.power_w).sum())
    if failed:
        problems.append("1 reading of power failed" if failed == 1 else f"{failed} readings of power failed")
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
        failed=failed,
    )


def _method(found: Sequence[_OfMode]) -> str:
    """The method that tells most modes; the counter, where both tell as many."""

    def known(method: str) -> int:
        return sum(power is not None and power.is_known for power in [of.by(method) for of in found])

    return SAMPLES if known(SAMPLES) > known(COUNTER) else COUNTER


def _figures(
    of: _OfMode, method: str, agreement: Agreement, readings: Readings, source: SourceInfo, interval_s: float
) -> ModePower:
    segments, power = of.segments, of.by(method)
    figures = ModePower(
        of.mode,
        sm_clock_mhz=mean_now(readings, segments, readings.sm_clock_mhz),
        memory_clock_mhz=mean_now(readings, segments, readings.memory_clock_mhz),
        reasons=reason_fractions(readings, segments),
        throttle_fraction=throttled_fraction(readings, segments),
        parts=parts_use(readings, segments),
        sampled_w=None if of.sampled.mean is None else of.sampled.mean.power_w,
        counted_w=None if of.counted is None else of.counted.power_w,
        num_readings=of.sampled.num_readings,
    )
    if agreement.disagreement:
        return msgspec.structs.replace(figures, missing=agreement.disagreement)
    figures = msgspec.structs.replace(figures, **_peaks(of.sampled, source))
    if power is None or not power.is_known:
        return msgspec.structs.replace(figures, missing=_why_missing(of, power, method, readings, source, interval_s))
    watts, joules = estimate_w(power), estimate_j(power, segments)
    step_s = joules.value / watts.value if watts.value else 0.0
    if figures.peak_w is not None and figures.peak_w < watts.value * (1 - power.error):  # readings that missed it
        figures = msgspec.structs.replace(figures, peak_w=None, p99_w=None, peak_tdp_fraction=None)
    return msgspec.structs.replace(
        figures,
        num_steps=power.num_steps,
        measured_s=power.measured_s,
        avg_w=watts.value,
        avg_w_ci_low=watts.ci_low,
        avg_w_ci_high=watts.ci_high,
        avg_tdp_fraction=watts.value / source.tdp_w if source.tdp_w else None,
        energy_per_step_j=joules.value,
        energy_per_step_j_ci_low=joules.ci_low,
        energy_per_step_j_ci_high=joules.ci_high,
        energy_steps=joules.num_steps,
        energy_method=method,
        sampled_energy_per_step_j=None if of.sampled.mean is None else of.sampled.mean.power_w * step_s,
        power_error=power.error,
    )


def _peaks(sampled: SampledPower, source: SourceInfo) -> dict[str, float | None]:
    """The highest power and its 99th percentile; empty where no reading is of the mode alone."""
    if not len(sampled.power_w):
        return {}
    peak_w = float(sampled.power_w.max())
    return {
        "peak_w": peak_w,
        "p99_w": _percentile(sampled.power_w, sampled.seconds, 0.99),
        "peak_tdp_fraction": peak_w / source.tdp_w if source.tdp_w else None,
    }


def _percentile(values: Floats, seconds: Floats, fraction: float) -> float:
    """The smallest value that is not exceeded for ``fraction`` of the time."""
    order = np.argsort(values)
    reached = np.cumsum(seconds[order])
    # Sums of many lengths have rounding errors; those must not select the next value.
    index = int(np.searchsorted(reached, fraction * reached[-1] * (1 - 1e-12)))
    return float(values[order[min(index, len(values) - 1)]])


# -- problems, in words


def _peaks_missing(modes: Sequence[ModePower], found: Sequence[_OfMode]) -> list[str]:
    without = [
        mode.mode.value
        for mode, of in zip(modes, found, strict=True)
        if mode.avg_w is not None and not len(of.sampled.power_w)
    ]
    if not without:
        return []
    return [
        f"the highest power of {' and '.join(without)} steps is not known: no reading of power is of one block alone"
    ]


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


def _why_missing(
    of: _OfMode, power: MeanPower | None, method: str, readings: Readings, source: SourceInfo, interval_s: float
) -> str:
    """Why a mode has no figure, and what would help."""
    if not len(readings):
        return "there are no readings of power"
    longest = max(of.segments, key=lambda segment: segment.duration_s)
    step_s = longest.duration_s / longest.num_steps
    if power is not None and power.is_known:
        return "it has no figure by the method that the other mode has one by"
    sampled = of.sampled.mean
    if sampled is not None:
        if source.averaging_s is None and of.counted is not None:
            return (
                f"the energy counter tells the mean of power to {of.counted.error:.1%} only, and {MAX_ERROR:.0%} is "
                "allowed: longer blocks would help (min_block_seconds)"
            )
        if not math.isfinite(sampled.error) and of.sampled.num_readings > 1:
            return "the sensor looks at the same place of each step, so that its readings tell no mean"
        if not math.isfinite(sampled.error):
            return "a single reading of power falls into these blocks, and that tells no mean"
        return (
            f"{of.sampled.num_readings} readings tell the mean of a power that swings to {sampled.error:.1%} only, and "
            f"{MAX_ERROR:.0%} is allowed: longer blocks would help (min_block_seconds)"
        )
    reasons = of.sampled.unmeasured
    if Unmeasured.SHORT in reasons:
        need_s = (source.averaging_s or 0.0) + max(step_s, 2 * interval_s)
        return (
            f"blocks of {longest.duration_s:.3g} s are too short: a power figure needs {need_s:.3g} s in one mode, "
            f"which takes {steps_needed(step_s, need_s)} steps per block"
        )
    if Unmeasured.GAP in reasons and _any_within(readings, of.segments):
        return "readings of power are missing in each of these blocks for longer than two intervals"
    return "no reading of power falls into these blocks"


def _any_within(readings: Readings, segments: Sequence[Segment]) -> bool:
    return any(
        np.diff(np.searchsorted(readings.time_ns, (segment.start_ns, segment.end_ns)))[0] > 0 for segment in segments
    )


def steps_needed(step_s: float, min_block_s: float) -> int:
    """Number of steps that a block needs to last ``min_block_s``.

    Args:
        step_s: time of a step.
        min_block_s: minimum length of a block.

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
