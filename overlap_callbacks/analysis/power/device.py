"""Power, energy and clocks per mode of one device in one window.

The energy counter misses nothing: watts and joules come from it if its reads span the blocks of every mode well enough,
else from power readings, if these give the mean well enough. Both modes use the same method, because methods differ by
more than modes do. If the methods disagree, neither is used.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.power.mean_power import (
    MAX_ERROR,
    MeanPower,
    compare,
    counted_power,
    estimate_j,
    estimate_w,
)
from overlap_callbacks.analysis.power.phases import StepPhases, clocks_while_computing
from overlap_callbacks.analysis.power.readings import Floats, Readings, Segment, hold, rows_within
from overlap_callbacks.analysis.power.sampled import SampledPower, Unmeasured, covered_s, sampled_power
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import (
    REASONS,
    DevicePower,
    ModePower,
    PositionPower,
    SourceInfo,
    UnitUtilisation,
)
from overlap_callbacks.analysis.sums import grouped

COUNTER = "counter"
SAMPLES = "samples"
# Maximum positions in a block that are distinguished: a longer change along a block is a drift.
_MAX_POSITIONS = 32


class _OfMode(NamedTuple):
    """The results of both methods for a mode."""

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
    stretches: Sequence[Segment] = (),
) -> DevicePower:
    """The power figures of each mode.

    Args:
        source: the source of the readings.
        readings: all readings, in order of time.
        segments: stretches of time in one mode, in any order, without overlap.
        interval_s: time between readings.
        late: ticks that the sampler skipped.
        failed: reads that failed.
        phases: when the device computed, in its profiled steps.
        stretches: all of the window's time in one mode, including warm-up; empty for ``segments``.
    """
    covers_s = covered_s(readings, stretches or segments, source)
    as_known = source
    if covers_s is not None:  # the averaging time that the readings show
        source = msgspec.structs.replace(source, averaging_s=covers_s, window_s=covers_s - source.renewed_s)
    in_order = sorted(segments, key=lambda segment: segment.start_ns)
    by_mode = grouped(in_order, lambda segment: segment.mode)
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
    if agreement.counter_problems:
        found = [of._replace(counted=None) for of in found]
    method = _method(found)
    clocks = clocks_while_computing(readings, phases)
    modes = []
    for of in found:
        power = {"missing": agreement.disagreement}
        if not agreement.disagreement:
            power = _power(of, method, readings, source, interval_s)
        modes.append(msgspec.structs.replace(_momentary(of, readings, clocks), **power))
    problems = [*agreement.counter_problems, *_peaks_missing(modes, found), *_without_reasons(modes, readings)]
    if source.averaging_s is not None:  # the counter was read, the sensor was not
        failed += int(np.isnan(readings.power_w).sum())
    if failed:
        problems.append(f"{count(failed, 'reading')} of power failed [OC417]")
    if late:
        were = "was" if late == 1 else "were"
        problems.append(f"{count(late, 'reading')} of power came late and {were} left out [OC418]")
    if covers_s is not None:
        problems.append(
            f"the sensor covers up to {covers_s:.2g} s before a reading, by how its readings follow the modes, and not "
            f"{as_known.averaging_s:.2g} s as is known of this device: readings count accordingly [OC419]"
        )
    rows = _within(readings, segments)
    return DevicePower(
        source=as_known,
        interval_s=interval_s,
        min_block_s=source.min_block_s(interval_s),
        modes=tuple(modes),
        limit_w=_known_or_none(np.nanmin, readings.limit_w[rows]),
        max_temperature_c=_known_or_none(np.nanmax, readings.temperature_c[rows]),
        late=late,
        problems=tuple(problems),
        failed=failed,
    )


def _method(found: Sequence[_OfMode]) -> str:
    """The method that gives the power of most modes; if equal, the counter."""

    def known(method: str) -> int:
        return sum(power is not None and power.is_known for power in [of.by(method) for of in found])

    return SAMPLES if known(SAMPLES) > known(COUNTER) else COUNTER


def _power(of: _OfMode, method: str, readings: Readings, source: SourceInfo, interval_s: float) -> dict[str, Any]:
    """The power and energy fields of ``ModePower``."""
    power, sampled, tdp_w = of.by(method), of.sampled, source.tdp_w
    peaks: dict[str, Any] = {}
    if len(sampled.power_w):  # readings of this mode only
        peak_w = float(sampled.power_w.max())
        p99_w = _percentile(sampled.power_w, sampled.seconds, 0.99)
        peaks = {"peak_w": peak_w, "p99_w": p99_w, "peak_tdp_fraction": peak_w / tdp_w if tdp_w else None}
    if power is None or not power.is_known:
        return peaks | {"missing": _why_missing(of, readings, source, interval_s)}
    watts, joules = estimate_w(power), estimate_j(power, of.segments)
    step_s = joules.value / watts.value if watts.value else 0.0
    if peaks and peaks["peak_w"] < watts.value * (1 - power.error):  # the readings missed the peak
        peaks = {}
    return peaks | {
        "num_steps": power.num_steps,
        "measured_s": power.measured_s,
        "avg_w": watts.value,
        "avg_w_ci_low": watts.ci_low,
        "avg_w_ci_high": watts.ci_high,
        "avg_tdp_fraction": watts.value / tdp_w if tdp_w else None,
        "energy_per_step_j": joules.value,
        "energy_per_step_j_ci_low": joules.ci_low,
        "energy_per_step_j_ci_high": joules.ci_high,
        "energy_steps": joules.num_steps,
        "energy_method": method,
        "sampled_energy_per_step_j": None if sampled.mean is None else sampled.mean.power_w * step_s,
        "power_error": power.error,
    }


def _percentile(values: Floats, seconds: Floats, fraction: float) -> float:
    """The smallest value that is not exceeded for ``fraction`` of the time."""
    order = np.argsort(values)
    reached = np.cumsum(seconds[order])
    # Rounding errors of long sums must not select the next value.
    index = int(np.searchsorted(reached, fraction * reached[-1] * (1 - 1e-12)))
    return float(values[order[min(index, len(values) - 1)]])


# -- clocks, their reasons, and utilisation of the device's units


def _momentary(of: _OfMode, readings: Readings, clocks: Mapping[Mode, tuple[float, int]]) -> ModePower:
    """The figures of a mode that do not depend on the power method; clocks are from ``clocks_while_computing``."""
    reasons, throttle_fraction = _reason_fractions(readings, of.segments)
    compute_clock_mhz, compute_clock_readings = clocks.get(of.mode, (None, 0))
    return ModePower(
        of.mode,
        sm_clock_mhz=mean_now(readings, of.segments, readings.sm_clock_mhz),
        memory_clock_mhz=mean_now(readings, of.segments, readings.memory_clock_mhz),
        compute_clock_mhz=compute_clock_mhz,
        compute_clock_readings=compute_clock_readings,
        reasons=reasons,
        throttle_fraction=throttle_fraction,
        parts=_parts_use(readings, of.segments),
        sampled_w=None if of.sampled.mean is None else of.sampled.mean.power_w,
        counted_w=None if of.counted is None else of.counted.power_w,
        num_readings=of.sampled.num_readings,
        positions=_by_position(readings, of.segments),
    )


def mean_now(readings: Readings, segments: Sequence[Segment], values: Floats) -> float | None:
    """Mean over time of momentary values; None without any reading."""
    total, seconds = 0.0, 0.0
    for segment in segments:
        held = hold(readings, segment, values, readings.time_ns)
        total += float(values[held.rows] @ held.seconds)
        seconds += float(held.seconds.sum())
    return total / seconds if seconds else None


def _by_position(readings: Readings, segments: Sequence[Segment]) -> tuple[PositionPower, ...]:
    """Clock and power by position in the block, from readings that belong to a single step."""
    columns = (readings.sm_clock_mhz, readings.time_ns), (readings.power_w, readings.since_ns)
    found: dict[int, tuple[list[float], ...]] = defaultdict(lambda: ([], []))
    for segment in segments:
        bounds = [*segment.starts_ns[: _MAX_POSITIONS + 1].tolist(), segment.end_ns]
        for position, (start_ns, end_ns) in enumerate(itertools.pairwise(bounds), segment.position):
            if position < _MAX_POSITIONS:
                for of_position, (values, since_ns) in zip(found[position], columns, strict=True):
                    of_position.extend(values[rows_within(readings, start_ns, end_ns, values, since_ns)].tolist())
    return tuple(
        [
            PositionPower(position, *_number_and_mean(clocks), *_number_and_mean(watts))
            for position, (clocks, watts) in sorted(found.items())
            if clocks or watts
        ]
    )


def _number_and_mean(values: Sequence[float]) -> tuple[int, float | None]:
    return len(values), float(np.mean(values)) if values else None


def _reason_fractions(readings: Readings, segments: Sequence[Segment]) -> tuple[dict[str, float] | None, float | None]:
    """Fraction of time for each reason that occurred, and for which the clock was held back; None without readings.

    Reasons whose times the device counts may coincide: then the second is an upper bound.
    """
    known = np.array([0.0 if reasons is not None else np.nan for reasons in readings.reasons])
    seconds: dict[str, float] = defaultdict(float)
    throttled_s = total_s = 0.0
    for segment in segments:
        held = hold(readings, segment, known, readings.reasons_since_ns)
        for row, held_s in zip(held.rows.tolist(), held.seconds.tolist(), strict=True):
            reasons = readings.reasons[row] or {}
            shares = reasons if isinstance(reasons, Mapping) else dict.fromkeys(reasons, 1.0)
            total_s += held_s
            for word, share in shares.items():
                seconds[word] += share * held_s
            throttled = [share for word, share in shares.items() if REASONS.get(word) is not None]
            throttled_s += held_s * min(1.0, sum(throttled))
    if not total_s:
        return None, None
    return {word: seconds[word] / total_s for word in sorted(seconds)}, throttled_s / total_s


def _parts_use(readings: Readings, segments: Sequence[Segment]) -> UnitUtilisation | None:
    """Means over the intervals within a segment, weighted by their lengths."""
    used = [
        (use, (time_ns - use.since_ns) / 1e9)
        for time_ns, use in zip(readings.time_ns.tolist(), readings.utilisation, strict=True)
        if use is not None and any(s.start_ns <= use.since_ns and time_ns <= s.end_ns for s in segments)
    ]
    measured_s = sum([length_s for _, length_s in used])
    if not measured_s:
        return None
    means = {}
    for name in UnitUtilisation.__struct_fields__[:-1]:
        known = [(value, length_s) for use, length_s in used if (value := getattr(use, name)) is not None]
        seconds = sum([length_s for _, length_s in known])
        means[name] = sum([value * length_s for value, length_s in known]) / seconds if known else None
    return UnitUtilisation(measured_s=measured_s, **means)


# -- problems, as text


def _peaks_missing(modes: Sequence[ModePower], found: Sequence[_OfMode]) -> list[str]:
    without = [
        mode.mode.value
        for mode, of in zip(modes, found, strict=True)
        if mode.avg_w is not None and not len(of.sampled.power_w)
    ]
    if not without:
        return []
    return [
        f"the highest power of {' and '.join(without)} steps is not known: no reading of power is of one block alone "
        "[OC415]"
    ]


def _without_reasons(modes: Sequence[ModePower], readings: Readings) -> list[str]:
    """A problem, if the blocks of a mode are shorter than the time covered by the device's reasons."""
    with_reasons = np.flatnonzero([reasons is not None for reasons in readings.reasons])
    without = [mode.mode.value for mode in modes if mode.reasons is None]
    if not without or len(with_reasons) < 2:
        return []
    covered_ns = readings.time_ns[with_reasons] - readings.reasons_since_ns[with_reasons]
    covered_s = float(np.median(covered_ns)) / 1e9
    every_s = float(np.median(np.diff(readings.time_ns[with_reasons]))) / 1e9
    if not covered_s:  # momentary reasons: no block is too short, so the calls failed
        return []
    return [
        f"why the clock was held back in {' and '.join(without)} steps is not known: the device tells it of "
        f"{covered_s:.2g} s at a time, and a block needs {covered_s + every_s:.2g} s for that (min_block_seconds) "
        "[OC416]"
    ]


def _why_missing(of: _OfMode, readings: Readings, source: SourceInfo, interval_s: float) -> str:
    """Why a mode has no figure, and what would help."""
    if not len(readings):
        return "there are no readings of power"
    longest = max(of.segments, key=lambda segment: segment.duration_s)
    step_s = longest.duration_s / longest.num_steps
    if any(known is not None and known.is_known for known in (of.counted, of.sampled.mean)):
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
    """Minimum steps of ``step_s`` for a block of ``min_block_s``; raises ValueError unless ``step_s`` is positive."""
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


def _known_or_none(extreme: Any, values: Floats) -> float | None:
    return float(extreme(values)) if len(values) and not np.isnan(values).all() else None
