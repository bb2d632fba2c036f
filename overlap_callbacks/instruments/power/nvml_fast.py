"""The fast way to read an NVIDIA GPU: the driver calls of one tick, with arguments that are made once.

Most of a tick's cost is Python code that is no longer in the CPU's caches, so a tick executes as little of it as
possible: it calls NVML through the library that ``nvidia-ml-py`` loaded, with structures of that package that are
reused. If anything is unexpected, ``NvmlSource`` reads again through the package's own functions, and knows what each
error means.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from overlap_callbacks.instruments.power.source import Clock

FIELD_ENERGY = 83
CLOCK_SM = 1

# Member of NVML's union that holds a field's value, by the type that NVML gives. Power and energy are whole numbers.
VALUE_NAMES = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


class NvmlValues(NamedTuple):
    """The values of one tick, in NVML's units.

    Attributes:
        begin_ns, end_ns: when the read of power and energy began and ended.
        power_mw: power.
        energy_mj: the energy counter.
        sm_clock_mhz: clock of the SMs.
        reason_bits: the reasons for that clock.
    """

    begin_ns: int
    end_ns: int
    power_mw: int
    energy_mj: int
    sm_clock_mhz: int
    reason_bits: int


class NvmlTick:
    """Reads power and energy in one call, then the SM clock, then the reasons for it.

    Args:
        nvml: the ``pynvml`` module, initialised.
        device: handle of the device.
        power_field: the field of the power; energy is read as a field too.

    Raises:
        AttributeError: the package or the driver lacks what this needs.
    """

    def __init__(self, nvml: Any, device: Any, power_field: int) -> None:
        library = nvml.nvmlLib
        # Items of a CDLL are new function objects; its attributes are shared with the package.
        self._get_fields = library["nvmlDeviceGetFieldValues"]
        self._get_clock = library["nvmlDeviceGetClockInfo"]
        self._get_reasons = library["nvmlDeviceGetCurrentClocksEventReasons"]
        self._device = device
        self._fields = (nvml.c_nvmlFieldValue_t * 2)()
        self._power, self._energy = self._fields
        self._power.fieldId, self._energy.fieldId = power_field, FIELD_ENERGY
        self._values = self._power.value, self._energy.value  # views: they follow what the driver writes
        self._clock, self._reasons = ctypes.c_uint(), ctypes.c_ulonglong()
        self._clock_at, self._reasons_at = ctypes.byref(self._clock), ctypes.byref(self._reasons)

    @classmethod
    def of(cls, nvml: Any, device: Any, power_field: int) -> NvmlTick | None:
        """A tick of the device; None if the package, the driver or the device does not allow the fast way."""
        try:
            tick = cls(nvml, device, power_field)
            return tick if tick.read(lambda: 0) is not None else None
        except Exception:  # another version of the package may raise anything; the slow way remains
            return None

    def read(self, clock_ns: Clock) -> NvmlValues | None:
        """Read the device now; None if any part of the read failed."""
        power, energy = self._power, self._energy
        begin_ns = clock_ns()
        failed = self._get_fields(self._device, 2, self._fields)
        end_ns = clock_ns()
        if (
            failed
            or power.nvmlReturn
            or energy.nvmlReturn
            or self._get_clock(self._device, CLOCK_SM, self._clock_at)
            or self._get_reasons(self._device, self._reasons_at)
        ):
            return None
        power_name, energy_name = VALUE_NAMES.get(power.valueType), VALUE_NAMES.get(energy.valueType)
        if power_name is None or energy_name is None:
            return None
        power_value, energy_value = self._values
        return NvmlValues(
            begin_ns,
            end_ns,
            getattr(power_value, power_name),
            getattr(energy_value, energy_name),
            self._clock.value,
            self._reasons.value,
        )
