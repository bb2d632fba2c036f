"""The interface of a power source, its errors, and what the sources of all vendors share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from overlap_callbacks.analysis.power.readings import Reading, Reasons, Utilisation
from overlap_callbacks.analysis.results.power import SourceInfo

_Value = TypeVar("_Value")

# Kinds of power, for ``SourceInfo.power_kind``.
INSTANTANEOUS = "instantaneous"
AVERAGE_1_S = "1 s average"
MEAN_BETWEEN_READS = "mean between reads"

# No accelerator and no CPU package draws as much. A larger figure is a wrong unit, or the mark of a missing value.
MAX_SANE_W = 10_000.0

# How often values that change slowly are read: limits, temperature, the memory's clock.
SLOW_INTERVAL_S = 1.0


class PowerError(Exception):
    """A reading failed; the next one may not."""


class DeviceLostError(PowerError):
    """The device is gone and does not come back in this process."""


class PowerUnavailableError(PowerError):
    """Power cannot be read from this device; the message says why and what would help."""


class PowerSource(ABC):
    """Reads one device. It never changes anything on the device.

    One thread at a time makes, reads and closes a source.

    Attributes:
        info: what the source reads, and what its figures mean. Set it in the constructor.
    """

    info: SourceInfo

    @abstractmethod
    def sample(self) -> Reading:
        """Read the device now.

        Raises:
            DeviceLostError: the device is gone.
            PowerError: this read failed; the next one may not.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the device; closing twice is harmless."""


class CachedRead(Generic[_Value]):
    """Caches the result of a function, for values that change slowly and cost a driver call to read.

    Args:
        read: reads the value.
        interval_s: age at which a cached value expires.
    """

    def __init__(self, read: Callable[[], _Value], interval_s: float = SLOW_INTERVAL_S) -> None:
        self._read = read
        self._interval_ns = int(interval_s * 1e9)
        self._cached: tuple[int, _Value] | None = None  # when it was read, and the value

    def at(self, now_ns: int) -> _Value:
        """The value, read again if the cached one has expired at ``now_ns``."""
        if self._cached is None or now_ns - self._cached[0] >= self._interval_ns:
            self._cached = now_ns, self._read()
        return self._cached[1]

    def if_expired(self, now_ns: int) -> _Value | None:
        """A fresh value if the cached one has expired, else None. For readings that must not be reused."""
        expired = self._cached is None or now_ns - self._cached[0] >= self._interval_ns
        return self.at(now_ns) if expired else None


class SlowValues(NamedTuple):
    """What changes slowly on a GPU and is therefore read once a second; None for what it cannot tell."""

    memory_clock_mhz: float | None
    temperature_c: float | None
    limit_w: float | None


def gpu_reading(
    begin_ns: int,
    end_ns: int,
    slow: SlowValues,
    *,
    averaging_s: float,
    power_w: float | None,
    energy_j: float | None,
    sm_clock_mhz: float | None,
    reasons: Reasons | None,
    reasons_since_ns: int | None = None,
    utilisation: Utilisation | None = None,
) -> Reading:
    """The reading of a GPU whose power was read between ``begin_ns`` and ``end_ns``; its time is the middle of the two.

    The other arguments are the fields of ``Reading``.
    """
    return Reading(
        time_ns=(begin_ns + end_ns) // 2,
        averaging_s=averaging_s,
        power_w=power_w,
        energy_j=energy_j,
        sm_clock_mhz=sm_clock_mhz,
        memory_clock_mhz=slow.memory_clock_mhz,
        temperature_c=slow.temperature_c,
        limit_w=slow.limit_w,
        reasons=reasons,
        utilisation=utilisation,
        reasons_since_ns=reasons_since_ns,
    )


def sane_w(value: Any) -> float | None:
    """``value`` in watts as a float; None if it is not a number, is negative, or is more than any device draws."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= MAX_SANE_W else None


Clock = Callable[[], int]
host_clock: Clock = time.perf_counter_ns
