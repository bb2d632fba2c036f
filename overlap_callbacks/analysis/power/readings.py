"""What a power source reads at one time (``Reading``), many readings in columns, and which belong to a stretch of time.

A reading covers the time from its ``since_ns`` to its ``time_ns``. It belongs to a segment, a stretch of time in one
mode, only if all that time lies within it: an average over two modes is the value of neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Union

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.results.mode import Mode

Floats = npt.NDArray[np.float64]
Times = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]
# Reasons for a clock, keys of ``REASONS``: those in force, or of each the share of the time in which it was.
Reasons = Union[frozenset[str], Mapping[str, float]]
_COLUMNS = ("power_w", "energy_j", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "limit_w")


@dataclass(frozen=True)
class Readings:
    """Readings of one source in columns of shape (n,), in order of time; NaN or None where a reading has no value.

    ``since_ns`` and ``reasons_since_ns`` are when the time that each ``power_w`` and ``reasons`` covers began.
    """

    time_ns: Times
    since_ns: Times
    power_w: Floats
    energy_j: Floats
    sm_clock_mhz: Floats
    memory_clock_mhz: Floats
    temperature_c: Floats
    limit_w: Floats
    reasons: tuple[Reasons | None, ...]
    reasons_since_ns: Times
    utilisation: tuple[Utilisation | None, ...]

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> Readings:
        """The columns of some readings."""
        time_ns = np.array([r.time_ns for r in readings], dtype=np.int64)
        averaging_ns = np.array([round(r.averaging_s * 1e9) for r in readings], dtype=np.int64)

        return cls(
            time_ns=time_ns,
            since_ns=time_ns - averaging_ns,
            reasons=tuple([r.reasons for r in readings]),
            reasons_since_ns=np.array(
                [r.time_ns if r.reasons_since_ns is None else r.reasons_since_ns for r in readings], dtype=np.int64
            ),
            utilisation=tuple([r.utilisation for r in readings]),
            # None becomes NaN.
            **{name: np.array([getattr(r, name) for r in readings], dtype=np.float64) for name in _COLUMNS},
        )

    def __len__(self) -> int:
        return len(self.time_ns)


class Utilisation(msgspec.Struct, frozen=True):
    """Busy parts of a device since ``since_ns``, as fractions of time or of the maximum; None where not measured.

    ``sm_occupancy`` is active warps over the most there can be, ``dram`` the used share of the memory's bandwidth, and
    the rates of ``nvlink`` are over all links, in GB/s.
    """

    since_ns: int
    sm: float | None = None
    sm_occupancy: float | None = None
    tensor: float | None = None
    dram: float | None = None
    nvlink_rx_gb_s: float | None = None
    nvlink_tx_gb_s: float | None = None


class Reading(msgspec.Struct, frozen=True):
    """What was read from a device at one time; None for what it does not measure.

    Attributes:
        time_ns: middle of the read, as of ``time.perf_counter_ns``.
        averaging_s: length of the time before ``time_ns`` that ``power_w`` covers: the sensor averages, and is late.
        energy_j: since the source was made, without the counter's wraps. None also if the counter was reset since the
            last reading.
        sm_clock_mhz, memory_clock_mhz: clocks.
        temperature_c: of the chip.
        limit_w: power limit in force.
        reasons: why the clock is what it is, keys of ``REASONS``; empty if nothing limits it. Where the device says for
            how long, the share of the covered time of each.
        utilisation: how busy the device's parts were.
        reasons_since_ns: when the time that ``reasons`` cover began; None if they are momentary.
    """

    time_ns: int
    averaging_s: float = 0.0
    power_w: float | None = None
    energy_j: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    limit_w: float | None = None
    reasons: Reasons | None = None
    utilisation: Utilisation | None = None
    reasons_since_ns: int | None = None


@dataclass(frozen=True)
class Segment:
    """A stretch of time in one mode: the counted steps of a block, or its warm-up.

    Attributes:
        start_ns, end_ns: when the device began the first step and finished the last, as of ``time.perf_counter_ns``.
        mode: of its steps.
        num_steps: number of steps in it.
        step_starts_ns: when each of them began; empty for equally long ones.
        counted, profiled: whether the steps count (those of a warm-up do not), and ran under the profiler.
        length_s: length by the device's own clock; None for the time between the bounds.
        position: place of its first step among the counted steps of the block, from 0.
    """

    start_ns: int
    end_ns: int
    mode: Mode
    num_steps: int
    step_starts_ns: tuple[int, ...] = ()
    length_s: float | None = None
    counted: bool = True
    profiled: bool = False
    position: int = 0

    def __post_init__(self) -> None:
        if self.end_ns <= self.start_ns:
            raise ValueError(f"end_ns must be after start_ns ({self.start_ns}), got {self.end_ns}")
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")

    @property
    def duration_s(self) -> float:
        """Length, in seconds."""
        return (self.end_ns - self.start_ns) / 1e9 if self.length_s is None else self.length_s

    @property
    def starts_ns(self) -> Times:
        """When each step began; shape (num_steps,)."""
        if self.step_starts_ns:
            return np.array(self.step_starts_ns, dtype=np.int64)
        step_ns = (self.end_ns - self.start_ns) / self.num_steps
        return self.start_ns + np.round(np.arange(self.num_steps) * step_ns).astype(np.int64)


class HeldReadings(NamedTuple):
    """Indices of the readings of a segment, and the seconds for which each is held; they add up to its duration."""

    rows: Rows
    seconds: Floats


def rows_within(readings: Readings, start_ns: int, end_ns: int, values: Floats, since_ns: Times) -> Rows:
    """Indices of the readings that have a value and cover no time outside two times.

    ``values`` is a column of the readings, ``since_ns`` when the time that each covers began.
    """
    low = np.searchsorted(readings.time_ns, start_ns)
    rows = np.arange(low, np.searchsorted(readings.time_ns, end_ns, side="right"))  # one at the very end belongs to it
    within: Rows = rows[(since_ns[rows] >= start_ns) & ~np.isnan(values[rows])]
    return within


def hold(readings: Readings, segment: Segment, values: Floats, since_ns: Times) -> HeldReadings:
    """The readings of a segment that have a value, and for how long each of them is held.

    A value is held from the start of the time that it covers until the time that the next reading covers; the first and
    the last reach to the segment's edges. Arguments as in ``rows_within``.
    """
    rows = rows_within(readings, segment.start_ns, segment.end_ns, values, since_ns)
    if not len(rows):
        return HeldReadings(rows, np.empty(0))
    # A value is held until the time that the next reading covers, however far back that reaches.
    changes = np.maximum(readings.time_ns[rows[:-1]], since_ns[rows[1:]])
    lengths_ns = np.diff(np.concatenate(([segment.start_ns], changes, [segment.end_ns])))
    is_held = lengths_ns > 0  # a momentary reading at the very end belongs to the next segment, if to any
    return HeldReadings(rows[is_held], lengths_ns[is_held] / 1e9)
