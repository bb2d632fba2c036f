"""Clocks, reasons for the clock, and how busy parts of the device were: of a moment, or of a time that is told."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from overlap_callbacks.analysis.power.phases import StepPhases, clocks_while_computing
from overlap_callbacks.analysis.power.readings import Floats, Readings
from overlap_callbacks.analysis.power.segments import Segment, hold, rows_within
from overlap_callbacks.analysis.results.power import REASONS, ModePower, PositionPower, UnitUtilisation

# Places in a block that are told apart: a change along a block that goes on for longer is a drift.
_MAX_POSITIONS = 32


def mean_now(readings: Readings, segments: Sequence[Segment], values: Floats) -> float | None:
    """Mean over time of what is momentary; None without any reading of it."""
    total, seconds = 0.0, 0.0
    for segment in segments:
        held = hold(readings, segment, values, readings.time_ns)
        total += float(values[held.rows] @ held.seconds)
        seconds += float(held.seconds.sum())
    return total / seconds if seconds else None


def by_position(readings: Readings, segments: Sequence[Segment]) -> tuple[PositionPower, ...]:
    """Clock and power by place in the block, of the readings that are of one step alone."""
    clocks: dict[int, list[float]] = defaultdict(list)
    watts: dict[int, list[float]] = defaultdict(list)
    for segment in segments:
        bounds = [*segment.starts_ns[: _MAX_POSITIONS + 1].tolist(), segment.end_ns]
        for position, (start_ns, end_ns) in enumerate(itertools.pairwise(bounds), segment.position):
            if position < _MAX_POSITIONS:
                for found, values, since_ns in (
                    (clocks, readings.sm_clock_mhz, readings.time_ns),
                    (watts, readings.power_w, readings.since_ns),
                ):
                    found[position] += values[rows_within(readings, start_ns, end_ns, values, since_ns)].tolist()
    return tuple(
        [
            PositionPower(
                position,
                len(clocks[position]),
                float(np.mean(clocks[position])) if clocks[position] else None,
                len(watts[position]),
                float(np.mean(watts[position])) if watts[position] else None,
            )
            for position in sorted(clocks)
            if clocks[position] or watts[position]
        ]
    )


def with_compute_clocks(
    modes: Sequence[ModePower], readings: Readings, phases: Sequence[StepPhases]
) -> list[ModePower]:
    """The modes with the clock of the readings that fall into compute."""
    clocks = clocks_while_computing(readings, phases)
    return [
        msgspec.structs.replace(
            mode, compute_clock_mhz=clocks[mode.mode][0], compute_clock_readings=clocks[mode.mode][1]
        )
        if mode.mode in clocks
        else mode
        for mode in modes
    ]


def reason_fractions(readings: Readings, segments: Sequence[Segment]) -> dict[str, float] | None:
    """Fraction of time for each reason that occurred; None without any reading of reasons."""
    seconds: dict[str, float] = defaultdict(float)
    total = 0.0
    for held_s, shares in _held_reasons(readings, segments):
        total += held_s
        for word, share in shares.items():
            seconds[word] += share * held_s
    return {word: seconds[word] / total for word in sorted(seconds)} if total else None


def throttled_fraction(readings: Readings, segments: Sequence[Segment]) -> float | None:
    """Fraction of time in which the clock was held back, for any cause; None without any reading of reasons.

    Where a device tells for how long each reason was in force, reasons may have been in force at once: then it is the
    most that it can have been.
    """
    throttled_s, total = 0.0, 0.0
    for held_s, shares in _held_reasons(readings, segments):
        total += held_s
        throttled_s += held_s * min(1.0, sum(share for word, share in shares.items() if REASONS.get(word) is not None))
    return throttled_s / total if total else None


def _held_reasons(readings: Readings, segments: Sequence[Segment]) -> Iterator[tuple[float, Mapping[str, float]]]:
    """Of each reading of reasons, the seconds for which it is held, and the share of that time of each reason."""
    known = np.array([0.0 if reasons is not None else np.nan for reasons in readings.reasons])
    for segment in segments:
        held = hold(readings, segment, known, readings.reasons_since_ns)
        for row, held_s in zip(held.rows.tolist(), held.seconds.tolist(), strict=True):
            reasons = readings.reasons[row] or {}
            yield held_s, reasons if isinstance(reasons, Mapping) else dict.fromkeys(reasons, 1.0)


def parts_use(readings: Readings, segments: Sequence[Segment]) -> UnitUtilisation | None:
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
