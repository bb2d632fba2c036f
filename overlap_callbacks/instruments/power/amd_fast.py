"""The fast way to read an AMD GPU: the library calls of one tick, with arguments that are made once.

As in ``nvml_fast``: the package checks its arguments and makes a dictionary of everything that a call returns, which
costs more than the call. Here the package's structures are reused. If anything is unexpected, ``AmdSource`` reads again
through the package's own functions.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from overlap_callbacks.instruments.power.source import MAX_SANE_W, Clock

# Releases of the package convert the library's units differently. Two reads in a row differ by less than these factors.
_AGREE = (0.5, 2.0)


class AmdValues(NamedTuple):
    """The values of one tick, in AMD SMI's units.

    Attributes:
        begin_ns, end_ns: when the read of power and energy began and ended.
        power_w: power.
        energy_count: the energy counter.
        resolution_uj: microjoules per count.
        clock_mhz: clock of the compute units.
    """

    begin_ns: int
    end_ns: int
    power_w: int
    energy_count: int
    resolution_uj: float
    clock_mhz: int


class AmdTick:
    """Reads power, the energy counter, and the clock of the compute units.

    Args:
        smi: the ``amdsmi`` module, initialised.
        device: handle of the device.
        power_key: name of the field that holds the power.

    Raises:
        AttributeError: the package lacks what this needs, or its functions take other arguments.
    """

    def __init__(self, smi: Any, device: Any, power_key: str) -> None:
        wrapper = smi.amdsmi_interface.amdsmi_wrapper
        self._get_power, self._get_energy = wrapper.amdsmi_get_power_info, wrapper.amdsmi_get_energy_count
        self._get_clock = wrapper.amdsmi_get_clock_info
        functions = self._get_power, self._get_energy, self._get_clock
        if [len(function.argtypes) for function in functions] != [2, 4, 3]:
            raise AttributeError  # only ``of`` sees it
        self._device = device
        self._key = power_key
        self._power, self._clock = wrapper.amdsmi_power_info_t(), wrapper.amdsmi_clk_info_t()
        self._count, self._resolution_uj, self._timestamp = ctypes.c_uint64(), ctypes.c_float(), ctypes.c_uint64()
        self._power_at, self._clock_at = ctypes.byref(self._power), ctypes.byref(self._clock)
        self._energy_at = tuple([ctypes.byref(item) for item in (self._count, self._resolution_uj, self._timestamp)])
        self._kind = smi.AmdSmiClkType.GFX

    @classmethod
    def of(cls, smi: Any, device: Any, power_key: str, power_w: float) -> AmdTick | None:
        """A tick of the device; None if the package does not allow the fast way, or the fast way gives another power.

        Args:
            smi: as for the class.
            device: as for the class.
            power_key: as for the class.
            power_w: the power that the package's own function returned just now.
        """
        try:
            tick = cls(smi, device, power_key)
            values = tick.read(lambda: 0)
        except Exception:  # another version of the package may raise anything; the slow way remains
            return None
        return tick if values is not None and _AGREE[0] * power_w <= values.power_w <= _AGREE[1] * power_w else None

    def read(self, clock_ns: Clock) -> AmdValues | None:
        """Read the device now; None if any part of the read failed."""
        begin_ns = clock_ns()
        failed = self._get_power(self._device, self._power_at) or self._get_energy(self._device, *self._energy_at)
        end_ns = clock_ns()
        if failed or self._get_clock(self._device, self._kind, self._clock_at):
            return None
        power_w = getattr(self._power, self._key)
        if power_w > MAX_SANE_W:  # all ones, in any number of bits, means that the device lacks the value
            return None
        return AmdValues(begin_ns, end_ns, power_w, self._count.value, self._resolution_uj.value, self._clock.clk)
