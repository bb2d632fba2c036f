"""The driver calls of one tick, with their arguments made once.

Most of what a tick costs is Python that has gone cold since the tick before: the fewer steps of it, the better. So
where all goes well a tick calls NVML with buffers that stay, in the structures of ``nvidia-ml-py`` and through the
library that it loaded. Whatever is not as expected is left to ``NvmlSource``, which asks again through the package's
own functions and knows what each error means.
"""

from __future__ import annotations

import ctypes
from typing import Any

from overlap_callbacks.instruments.power.source import Clock

FIELD_ENERGY = 83
CLOCK_SM = 1

# Where the value of a field stands, by the type that NVML says it has. Power and energy are whole numbers.
VALUE_NAMES = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


class NvmlTick:
    """Power and energy in one call, the SM clock, and the reasons for it.

    Args:
        nvml: the ``pynvml`` module, initialised.
        device: handle of the device.
        power_field: the field of the power; energy is read as a field too.

    Raises:
        AttributeError: the package or the driver is another than the one this is written for.
    """

    def __init__(self, nvml: Any, device: Any, power_field: int) -> None:
        library = nvml.nvmlLib
        # Items of a CDLL, unlike its attributes, are function objects of our own.
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
        """None where the package, the driver or the device has it otherwise."""
        try:
            tick = cls(nvml, device, power_field)
            return tick if tick.read(lambda: 0) is not None else None
        except Exception:  # whatever another package raises: there is the long way
            return None

    def read(self, clock_ns: Clock) -> tuple[int, int, int, int, int, int] | None:
        """Read the device now.

        Returns:
            When the read of power and energy began and ended, power in mW, energy in mJ, the SM clock in MHz and the
            bits of its reasons; None where any of it did not go well.
        """
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
        return (
            begin_ns,
            end_ns,
            getattr(power_value, power_name),
            getattr(energy_value, energy_name),
            self._clock.value,
            self._reasons.value,
        )
