"""The interface of a power source, its errors, and code shared by all vendors' sources."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from overlap_callbacks.analysis.power.readings import Reading, Reasons, Utilisation
from overlap_callbacks.analysis.results.power import SourceInfo

_Value = TypeVar("_Value")
Clock = Callable[[], int]
host_clock: Clock = time.perf_counter_ns

# Kinds of power, for ``SourceInfo.power_kind``.
INSTANTANEOUS = "instantaneous"
AVERAGE_1_S = "1 s average"
MEAN_BETWEEN_READS = "mean between reads"

# No accelerator and no CPU package draws this much. A larger figure is in a wrong unit, or marks a missing value.
MAX_SANE_W = 10_000.0

# Read interval of values that change slowly: limits, temperature, the memory clock.
_SLOW_INTERVAL_S = 1.0

# Some counters are narrower than the type that the library returns. This width is tried if none is stated.
_NARROW = 2**32


class PowerError(Exception):
    """A reading failed; the next one may succeed."""


class DeviceLostError(PowerError):
    """The device is gone and will not come back in this process."""


class PowerUnavailableError(PowerError):
    """Power cannot be read from this device; the message says why and what would help."""


class PowerSource(ABC):
    """Reads one device. It never changes anything on the device.

    One thread at a time makes, reads and closes a source.

    Attributes:
        info: what the source reads and what its figures mean. Set it in the constructor.
    """

    info: SourceInfo

    @abstractmethod
    def sample(self) -> Reading:
        """Read the device now.

        Raises:
            DeviceLostError: the device is gone.
            PowerError: this read failed; the next one may succeed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the device; closing twice is harmless."""


class CachedRead(Generic[_Value]):
    """Caches a function's result for ``interval_s``: for values that change slowly and cost a driver call."""

    def __init__(self, read: Callable[[], _Value], interval_s: float = _SLOW_INTERVAL_S) -> None:
        self._read = read
        self._interval_ns = int(interval_s * 1e9)
        self._cached: tuple[int, _Value] | None = None  # read time and value

    def at(self, now_ns: int) -> _Value:
        """The value, read again if the cached one has expired at ``now_ns``."""
        if self._cached is None or now_ns - self._cached[0] >= self._interval_ns:
            self._cached = now_ns, self._read()
        return self._cached[1]

    def if_expired(self, now_ns: int) -> _Value | None:
        """A fresh value if the cached one has expired, else None. For readings that must not be reused."""
        before = self._cached
        value = self.at(now_ns)
        return None if self._cached is before else value


class EnergyCounter:
    """Joules since the first read, from a device counter, which wraps and may be reset.

    ``tick_j``: joules per count. ``counts``: where the counter wraps to zero; None if not known.
    """

    def __init__(self, tick_j: float, counts: int | None = None) -> None:
        self._tick_j = tick_j
        self._counts = counts
        self._last: int | None = None
        self._total = 0  # in counts: integers add up without rounding errors

    def read(self, value: int) -> float | None:
        """Joules since the first read; None if the counter went back without having wrapped.

        Then it was reset (by reloading the driver, say) or is faulty, so the energy since the last read is unknown.
        """
        last, self._last = self._last, value
        if last is None:
            return 0.0
        used = value - last
        if used < 0:
            counts = self._counts if self._counts is not None else _width(last, value)
            if counts is None or used + counts < 0:
                return None
            used += counts
        self._total += used
        return self._total * self._tick_j


def _width(last: int, value: int) -> int | None:
    """The width at which a counter of unknown width wrapped: it was close to it, and is now close to zero."""
    margin = _NARROW // 16
    return _NARROW if _NARROW - margin <= last < _NARROW and value < margin else None


# -- GPUs


class SlowValues(NamedTuple):
    """Slowly changing values of a GPU, read once a second; None for those that the device lacks."""

    memory_clock_mhz: float | None
    temperature_c: float | None
    limit_w: float | None


class GpuValues(NamedTuple):
    """The values of one tick of a GPU, as in ``Reading``, and when the read of power and energy began and ended."""

    begin_ns: int
    end_ns: int
    power_w: float | None
    energy_j: float | None
    sm_clock_mhz: float | None
    reasons: Reasons | None = None
    reasons_since_ns: int | None = None
    utilisation: Utilisation | None = None


class _Library(Protocol):
    def close(self) -> None: ...


class GpuSource(PowerSource):
    """Reads one GPU through its vendor's library: by a fast path if there is one, else by the library's own functions.

    A call that the device does not support is made once; its value is absent in the readings. Memory clock, limit and
    temperature are read once a second. ``device``: the library's handle. ``tick``: the fast path; None if the driver or
    the package does not allow it. The library is closed with the source.
    """

    device: Any
    tick: Any = None

    def __init__(self, library: _Library, clock_ns: Clock) -> None:
        self._library = library
        self._clock_ns = clock_ns
        self._unsupported: set[tuple[Any, ...]] = set()
        self._slow = CachedRead(self._read_slow_values)

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        """Context for the first reads of a device: closes the library if one fails."""
        try:
            yield
        except Exception as error:
            self._library.close()
            if isinstance(error, PowerError) and not isinstance(error, PowerUnavailableError):
                raise PowerUnavailableError(f"no power: {error}") from error  # a device that fails between two calls
            raise

    def sample(self) -> Reading:
        values = self._read_fast() if self.tick is not None else None
        if values is None:  # read again, through the functions that report what is wrong
            num_unsupported = len(self._unsupported)
            values = self._read_slowly()
            if len(self._unsupported) > num_unsupported:  # the fast path, which reads everything, would fail again
                self.tick = None
        slow = self._slow.at(values.begin_ns)
        values = self._with_counts(values)  # last: if another read fails, no count is lost
        return Reading(
            time_ns=(values.begin_ns + values.end_ns) // 2,
            averaging_s=self.info.averaging_s or 0.0,
            power_w=values.power_w,
            energy_j=values.energy_j,
            sm_clock_mhz=values.sm_clock_mhz,
            memory_clock_mhz=slow.memory_clock_mhz,
            temperature_c=slow.temperature_c,
            limit_w=slow.limit_w,
            reasons=values.reasons,
            utilisation=values.utilisation,
            reasons_since_ns=values.reasons_since_ns,
        )

    def close(self) -> None:
        self._library.close()

    @abstractmethod
    def _read_fast(self) -> GpuValues | None:
        """The values of ``tick``; None if any part of the read failed."""

    @abstractmethod
    def _read_slowly(self) -> GpuValues:
        """The values, by the library's own functions. Raises like ``sample``."""

    @abstractmethod
    def _with_counts(self, values: GpuValues) -> GpuValues:
        """Add the device's counts since the last reading, if due."""

    @abstractmethod
    def _read_slow_values(self) -> SlowValues:
        """The values that are read once a second."""

    def _optional(self, function: Callable[..., Any], *arguments: Any, name: str = "") -> Any:
        """The result of a call for this device; None if it fails, or has failed permanently before.

        ``name`` is the call's name in error messages; by default its own. Raises like ``_is_permanent``.
        """
        if self._unsupported and (function, *arguments) in self._unsupported:
            return None
        try:
            return function(self.device, *arguments)
        except Exception as error:
            if self._is_permanent(error, name or function.__name__):
                self._unsupported.add((function, *arguments))
            return None

    @abstractmethod
    def _is_permanent(self, error: Exception, name: str) -> bool:
        """Whether a failed call need not be made again.

        Raises DeviceLostError if the device is gone, PowerError for an error that must not be ignored.
        """


def sane_w(value: Any) -> float | None:
    """``value`` in watts as a float; None if it is not a number, is negative, or is more than any device draws."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= MAX_SANE_W else None
