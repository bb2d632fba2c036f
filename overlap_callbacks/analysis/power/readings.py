"""One reading of a power source (``Reading``), readings in columns, and which of them belong to a time range.

A reading covers the time from its ``since_ns`` to its ``time_ns``. It belongs to a segment (a time range in one mode)
only if it covers no time outside it: an average over two modes is the value of neither.
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
# Reasons for a clock, keys of ``REASONS``: those in force, or the share of time in which each was.
Reasons = Union[frozenset[str], Mapping[str, float]]
_COLUMNS = ("power_w", "energy_j", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "limit_w")


@dataclass(frozen=True)
class Readings:
    """Readings of one source in columns of shape (n,), ordered by time; NaN or None if a reading has no value.

    ``since_ns`` and ``reasons_since_ns``: start of the time that each ``power_w`` and ``reasons`` covers.
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
    """Utilisation of a device's units since ``since_ns``, as fractions of time or of the maximum; None if not measured.

    ``sm_occupancy``: active warps over the maximum. ``dram``: used share of memory bandwidth. ``nvlink`` rates are over
    all links, in GB/s.
    """

    since_ns: int
    sm: float | None = None
    sm_occupancy: float | None = None
    tensor: float | None = None
    dram: float | None = None
    nvlink_rx_gb_s: float | None = None
    nvlink_tx_gb_s: float | None = None


class Reading(msgspec.Struct, frozen=True):
    """One reading of a device; None for values that it lacks.

    Attributes:
        time_ns: middle of the read, as of ``time.perf_counter_ns``.
        averaging_s: time before ``time_ns`` that ``power_w`` covers: the sensor averages, and is late.
        energy_j: since the source was made, without the counter's wraps. None also if the counter was reset since the
            last reading.
        sm_clock_mhz, memory_clock_mhz: clocks.
        temperature_c: of the chip.
        limit_w: power limit in force.
        reasons: why the clock is what it is, keys of ``REASONS``; empty if nothing limits it. Where the device says for
            how long, the share of the covered time of each.
        utilisation: utilisation of the device's units.
        reasons_since_ns: start of the time that ``reasons`` cover; None if they are momentary.
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
    """A time range in one mode: the counted steps of a block, or its warm-up.

    Attributes:
        start_ns, end_ns: when the device began the first step and finished the last, as of ``time.perf_counter_ns``.
        mode: of its steps.
        num_steps: number of steps in it.
        step_starts_ns: start of each; empty if they are equally long.
        counted, profiled: whether the steps count (those of a warm-up do not), and ran under the profiler.
        length_s: duration by the device's own clock; None for the time between the bounds.
        position: index of its first step among the counted steps of the block, from 0.
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
        return (self.end_ns - self.start_ns) / 1e9 if self.length_s is None else self.length_s

    @property
    def starts_ns(self) -> Times:
        """Start of each step; shape (num_steps,)."""
        if self.step_starts_ns:
            return np.array(self.step_starts_ns, dtype=np.int64)
        step_ns = (self.end_ns - self.start_ns) / self.num_steps
        return self.start_ns + np.round(np.arange(self.num_steps) * step_ns).astype(np.int64)


class HeldReadings(NamedTuple):
    """Indices of a segment's readings, and the seconds for which each is held, which add up to its duration."""

    rows: Rows
    seconds: Floats


def rows_within(readings: Readings, start_ns: int, end_ns: int, values: Floats, since_ns: Times) -> Rows:
    """Indices of the readings that have a value and cover no time outside ``start_ns`` to ``end_ns``.

    ``values``: a column of the readings. ``since_ns``: start of the time that each covers.
    """
    low = np.searchsorted(readings.time_ns, start_ns)
    # a reading at the very end is included
    rows = np.arange(low, np.searchsorted(readings.time_ns, end_ns, side="right"))
    within: Rows = rows[(since_ns[rows] >= start_ns) & ~np.isnan(values[rows])]
    return within


def hold(readings: Readings, segment: Segment, values: Floats, since_ns: Times) -> HeldReadings:
    """A segment's readings with a value, and how long each is held.

    A value is held from the start of the time that it covers until the time that the next reading covers; the first and
    the last extend to the segment's edges. Arguments as in ``rows_within``.
    """
    rows = rows_within(readings, segment.start_ns, segment.end_ns, values, since_ns)
    if not len(rows):
        return HeldReadings(rows, np.empty(0))
    # Hold a value until the time that the next reading covers, however far back that reaches.
    changes = np.maximum(readings.time_ns[rows[:-1]], since_ns[rows[1:]])
    lengths_ns = np.diff(np.concatenate(([segment.start_ns], changes, [segment.end_ns])))
    is_held = lengths_ns > 0  # a momentary reading at the very end belongs to the next segment, if any
    return HeldReadings(rows[is_held], lengths_ns[is_held] / 1e9)
