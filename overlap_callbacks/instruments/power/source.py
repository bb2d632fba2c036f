"""What a source of power readings is: one reading, the interface, and what the reasons for a clock mean."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from overlap_callbacks.analysis.power.readings import Reading
from overlap_callbacks.analysis.results.power import SourceInfo

INSTANTANEOUS = "instantaneous"
AVERAGE_1_S = "1 s average"
MEAN_BETWEEN_READS = "mean between reads"

# No accelerator and no CPU package draws as much: a larger figure is a wrong unit, or the mark of a missing value.
MAX_SANE_W = 10_000.0

# What changes slowly (limits, temperature, the memory's clock) is read this often.
SLOW_INTERVAL_S = 1.0


class PowerError(Exception):
    """A reading failed; the next one may not."""


class DeviceLostError(PowerError):
    """The device is gone and does not come back in this process."""


class PowerUnavailableError(PowerError):
    """There is no power to be read from this device; the message says why and what would help."""


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


class CachedRead:
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
