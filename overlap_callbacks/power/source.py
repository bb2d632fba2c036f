"""What a source of power readings is: one reading, the interface, and what the reasons for a clock mean."""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

INSTANTANEOUS = "instantaneous"
AVERAGE_1_S = "1 s average"
MEAN_BETWEEN_READS = "mean between reads"

# No accelerator and no CPU package draws as much: a larger figure is a wrong unit, or the mark of a missing value.
MAX_SANE_W = 10_000.0

# What changes slowly (limits, temperature, the memory's clock) is read this often.
SLOW_INTERVAL_S = 1.0


class Cause(enum.Enum):
    """Why a device holds its clock back."""

    POWER = "power cap"
    TEMPERATURE = "temperature"
    HARDWARE = "hardware"
    UNNAMED = "a reason that the driver does not name"


# Every reason that a reading may carry, and the cause for which it throttles; None where it does not. NVML's come
# first. ``sw_power_cap`` is the normal state of a busy device near its limit: it is throttling all the same, and no
# fault. ``hw_slowdown`` halves the clock or worse, for heat, the power brake or a current peak: NVML says for which,
# if at all, by the two other bits of the hardware.
REASONS: dict[str, Cause | None] = {
    "gpu_idle": None,
    "application_clocks": None,
    "sw_power_cap": Cause.POWER,
    "hw_slowdown": Cause.HARDWARE,
    "sync_boost": None,
    "sw_thermal_slowdown": Cause.TEMPERATURE,
    "hw_thermal_slowdown": Cause.TEMPERATURE,
    "hw_power_brake": Cause.HARDWARE,
    "display_clocks": None,
    "package_power_limit": Cause.POWER,
    "socket_thermal": Cause.TEMPERATURE,
    "memory_thermal": Cause.TEMPERATURE,
    "voltage_regulator_thermal": Cause.TEMPERATURE,
    "processor_hot": Cause.TEMPERATURE,
    "throttled": Cause.UNNAMED,
}


class PowerError(Exception):
    """A reading failed; the next one may not."""


class DeviceLostError(PowerError):
    """The device is gone and does not come back in this process."""


class PowerUnavailableError(PowerError):
    """There is no power to be read from this device; the message says why and what would help."""


class Utilisation(msgspec.Struct, frozen=True):
    """How busy the parts of a device were in the interval that ends with a reading; None where it cannot tell.

    Attributes:
        since_ns: start of the interval, on ``time.perf_counter_ns``.
        sm: fraction of the SMs that were busy.
        sm_occupancy: fraction of the warps that were active, of the most there can be.
        tensor: fraction of time in which the tensor cores worked.
        dram: fraction of the memory's bandwidth.
        nvlink_rx_gb_s, nvlink_tx_gb_s: traffic on all links, GB/s.
    """

    since_ns: int
    sm: float | None = None
    sm_occupancy: float | None = None
    tensor: float | None = None
    dram: float | None = None
    nvlink_rx_gb_s: float | None = None
    nvlink_tx_gb_s: float | None = None


class Reading(msgspec.Struct, frozen=True):
    """What a device said at one time; None for what it cannot tell.

    One is made at every tick; a frozen dataclass of so many fields takes several times as long to make.

    Attributes:
        time_ns: the middle of the read, on ``time.perf_counter_ns``.
        averaging_s: ``power_w`` speaks of the time from so long before ``time_ns`` to it.
        power_w: power.
        energy_j: energy since the source was made, from the device's counter, with its wraps taken out. None also
            where the counter was reset since the last reading: what was used in between is not known.
        sm_clock_mhz, memory_clock_mhz: clocks.
        temperature_c: of the chip.
        limit_w: the power limit in force.
        reasons: why the clock is what it is, keys of ``REASONS``; empty where nothing holds it back.
        utilisation: of the device's parts, where it has such counters.
        reasons_since_ns: ``reasons`` speak of the time from then to ``time_ns``; None where they are of that moment.
    """

    time_ns: int
    averaging_s: float = 0.0
    power_w: float | None = None
    energy_j: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    limit_w: float | None = None
    reasons: frozenset[str] | None = None
    utilisation: Utilisation | None = None
    reasons_since_ns: int | None = None


class SourceInfo(msgspec.Struct, frozen=True):
    """Where power figures come from, and what they mean.

    Attributes:
        name: ``nvml``, ``amdsmi`` or ``rapl``.
        device_name: as its maker calls it.
        device_id: the same on every rank that uses the device, and on no other device of any node.
        power_kind: ``instantaneous``, ``1 s average``, ``mean between reads``, ...
        averaging_s: length of the time before a reading of which its power speaks, the sensor's own delay included;
            None where that is the time since the reading before.
        energy_lag_s: how much older than the read the energy counter's value may be; None without a counter.
        default_interval_s: time between readings, unless the user says otherwise.
        tdp_w: the limit that the device has by default.
        limit_w: the limit in force when the source was made.
        notes: what a reader of the figures must know.
    """

    name: str
    device_name: str
    device_id: str
    power_kind: str
    averaging_s: float | None
    energy_lag_s: float | None
    default_interval_s: float
    tdp_w: float | None = None
    limit_w: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def has_energy(self) -> bool:
        return self.energy_lag_s is not None

    def min_block_s(self, interval_s: float) -> float:
        """Length that a block must have, so that it holds at least one reading that speaks of it alone.

        One averaging interval must pass before a reading counts; up to one sampling interval passes until the next
        tick, and one more allows for a late one.
        """
        averaging_s = self.averaging_s if self.averaging_s is not None else interval_s
        return averaging_s + 2 * interval_s


class PowerSource(ABC):
    """Reads one device.

    A source is made, read and closed by one thread at a time. It never changes anything on the device.

    Attributes:
        info: what it reads.
    """

    info: SourceInfo

    @abstractmethod
    def sample(self) -> Reading:
        """Read the device now.

        Raises:
            DeviceLostError: it is gone.
            PowerError: the read failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the device; closing twice is harmless."""

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def device_name(self) -> str:
        return self.info.device_name

    @property
    def device_id(self) -> str:
        return self.info.device_id

    @property
    def power_kind(self) -> str:
        return self.info.power_kind

    @property
    def averaging_s(self) -> float | None:
        return self.info.averaging_s

    @property
    def has_energy(self) -> bool:
        return self.info.has_energy

    @property
    def tdp_w(self) -> float | None:
        return self.info.tdp_w

    @property
    def limit_w(self) -> float | None:
        return self.info.limit_w

    @property
    def default_interval_s(self) -> float:
        return self.info.default_interval_s


class Occasionally:
    """Calls a function again only when its last result is old: for what changes slowly and costs a driver call.

    Args:
        read: what to call.
        interval_s: age from which a result is old.
    """

    def __init__(self, read: Callable[[], Any], interval_s: float = SLOW_INTERVAL_S) -> None:
        self._read = read
        self._interval_ns = int(interval_s * 1e9)
        self._value: Any = None
        self._read_ns: int | None = None

    def at(self, now_ns: int) -> Any:
        """The value, at most ``interval_s`` old."""
        if self._read_ns is None or now_ns - self._read_ns >= self._interval_ns:
            self._value = self._read()
            self._read_ns = now_ns
        return self._value

    def anew(self, now_ns: int) -> Any:
        """The value if it is time to read it again, None until then: for what belongs to the moment of its read."""
        return self.at(now_ns) if self._read_ns is None or now_ns - self._read_ns >= self._interval_ns else None


def sane_w(value: Any) -> float | None:
    """``value`` in watts as a float; None where it is no number, negative, or above what any device draws."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= MAX_SANE_W else None


Clock = Callable[[], int]
host_clock: Clock = time.perf_counter_ns
