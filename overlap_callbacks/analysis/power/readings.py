"""What a power source reads at one time (``Reading``), and many readings in columns (``Readings``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Union

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Times = npt.NDArray[np.int64]
# Reasons for a clock, keys of ``REASONS``: those in force, or of each the share of the time in which it was.
Reasons = Union[frozenset[str], Mapping[str, float]]


@dataclass(frozen=True)
class Readings:
    """Readings of one source, in order of time. The fields are those of ``Reading``.

    Attributes:
        time_ns: time of each reading, as of ``time.perf_counter_ns``; shape (n,).
        since_ns: start of the time that each ``power_w`` covers; shape (n,).
        power_w, energy_j, sm_clock_mhz, memory_clock_mhz, temperature_c, limit_w: NaN where a reading has no value;
            shape (n,) each.
        reasons: one entry per reading.
        reasons_since_ns: start of the time that each ``reasons`` covers; shape (n,).
        utilisation: one entry per reading.
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

        def column(name: str) -> Floats:
            return np.array([getattr(r, name) for r in readings], dtype=np.float64)  # None becomes NaN

        return cls(
            time_ns=time_ns,
            since_ns=time_ns - averaging_ns,
            power_w=column("power_w"),
            energy_j=column("energy_j"),
            sm_clock_mhz=column("sm_clock_mhz"),
            memory_clock_mhz=column("memory_clock_mhz"),
            temperature_c=column("temperature_c"),
            limit_w=column("limit_w"),
            reasons=tuple([r.reasons for r in readings]),
            reasons_since_ns=np.array(
                [r.time_ns if r.reasons_since_ns is None else r.reasons_since_ns for r in readings], dtype=np.int64
            ),
            utilisation=tuple([r.utilisation for r in readings]),
        )

    def __len__(self) -> int:
        return len(self.time_ns)


class Utilisation(msgspec.Struct, frozen=True):
    """How busy the parts of a device were in the interval that ends with a reading; None for what it cannot tell.

    Attributes:
        since_ns: start of the interval, as of ``time.perf_counter_ns``.
        sm: fraction of the SMs that were busy.
        sm_occupancy: active warps as a fraction of the maximum number of warps.
        tensor: fraction of time in which the tensor cores worked.
        dram: used fraction of the memory's bandwidth.
        nvlink_rx_gb_s, nvlink_tx_gb_s: traffic on all links, in GB/s.
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

    One is made at every tick. A frozen dataclass with this many fields takes several times as long to make.

    Attributes:
        time_ns: middle of the read, as of ``time.perf_counter_ns``.
        averaging_s: length of the time before ``time_ns`` of which ``power_w`` tells: the sensor averages, and is late.
        power_w: power.
        energy_j: energy since the source was made, from the device's counter, with its wraps removed. None also if the
            counter was reset since the last reading: the energy used meanwhile is unknown.
        sm_clock_mhz, memory_clock_mhz: clocks.
        temperature_c: temperature of the chip.
        limit_w: power limit in force.
        reasons: why the clock is what it is, keys of ``REASONS``; empty if nothing limits the clock. Where the device
            tells for how long, a mapping from each to the share of the time that the reading covers.
        utilisation: how busy the device's parts were, if it has such counters.
        reasons_since_ns: start of the time that ``reasons`` cover, which ends at ``time_ns``; None if they are
            momentary.
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
