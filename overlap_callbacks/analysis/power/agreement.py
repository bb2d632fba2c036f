"""Whether the energy counter and the readings of power agree, within each mode or over the window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from overlap_callbacks.analysis.power.mean_power import MeanPower
from overlap_callbacks.analysis.power.readings import Readings
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import SourceInfo

# Energy by the counter over energy by the readings of power. Outside these bounds the counter is not used: some
# counters stand still, some count in another unit.
_PLAUSIBLE_RATIO = (0.1, 10.0)
# Where the two differ by more, one of them is wrong, and nobody knows which.
MAX_DIFFERENCE = 0.05
# Both are known to so much at most, or they are not compared.
_MAX_DOUBT = 0.1
# A difference counts if it is so many times what is to be expected at 95 % confidence.
_BEYOND_CHANCE = 1.5


@dataclass
class Agreement:
    """What comparing the two tells.

    Attributes:
        counter_is_wrong: whether the counter's energy cannot be true.
        disagreement: why neither is used, in words; empty where they agree, or cannot be compared.
        problems: in words.
    """

    counter_is_wrong: bool = False
    disagreement: str = ""
    problems: list[str] = field(default_factory=list)


def compare(
    by_mode: Mapping[Mode, tuple[MeanPower | None, MeanPower | None]],
    readings: Readings,
    source: SourceInfo,
    interval_s: float,
) -> Agreement:
    """Compare the counter with the readings of power.

    Args:
        by_mode: mean power of each mode by readings and by the counter.
        readings: all readings, in order of time.
        source: of the readings.
        interval_s: time between readings.
    """
    if source.energy_lag_s is None or source.averaging_s is None:  # without a counter, or power is made from it
        return Agreement()
    pairs = [
        (f"in {mode.value} steps", counted.power_w, sampled.power_w, math.hypot(counted.error, sampled.error))
        for mode, (sampled, counted) in by_mode.items()
        if sampled is not None and counted is not None and sampled.power_w > 0
    ]
    pairs = [pair for pair in pairs if pair[-1] <= _MAX_DOUBT]
    if not pairs:
        window = _over_window(readings, source.energy_lag_s, interval_s)
        pairs = [] if window is None else [("over the window", *window)]
    found = Agreement()
    for where, counted_w, sampled_w, doubt in pairs:
        ratio = counted_w / sampled_w
        if not _PLAUSIBLE_RATIO[0] <= ratio <= _PLAUSIBLE_RATIO[1]:
            found.counter_is_wrong = True
            found.problems.append(
                f"the energy counter is not used: {where} it gave {ratio:.2g} times the energy that the readings of "
                "power do"
            )
        elif abs(ratio - 1) > max(MAX_DIFFERENCE, _BEYOND_CHANCE * doubt) and not found.disagreement:
            found.disagreement = (
                f"{where} the energy counter gives {counted_w:.4g} W and the readings of power {sampled_w:.4g} W, and "
                "which of the two is wrong is not known"
            )
    if found.counter_is_wrong:
        found.disagreement = ""
    return found


def _over_window(readings: Readings, lag_s: float, interval_s: float) -> tuple[float, float, float] | None:
    """Mean power by the counter and by readings from the first reading to the last, and how far they may be apart.

    None where readings are missing, or too few.
    """
    known = np.flatnonzero(~np.isnan(readings.power_w) & ~np.isnan(readings.energy_j))
    if len(known) < 20 or len(known) < len(readings):
        return None
    times_s = readings.time_ns / 1e9
    span_s = float(times_s[-1] - times_s[0])
    if np.diff(times_s).max() > 3 * interval_s or not span_s > 0:
        return None
    power_w = readings.power_w
    mean_w = float(power_w.mean())
    if not mean_w > 0:
        return None
    counted_w = float(readings.energy_j[-1] - readings.energy_j[0]) / span_s
    chance = math.sqrt(float((np.diff(power_w) ** 2).mean()) / 2 / len(power_w)) / mean_w
    doubt = 2 * chance + (lag_s + interval_s) / span_s
    return (counted_w, mean_w, doubt) if doubt <= _MAX_DOUBT else None
