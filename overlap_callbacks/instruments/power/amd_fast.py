"""The library calls of one tick of an AMD GPU, with their arguments made once.

As ``nvml_tick``, and for its reason: the package checks its arguments and makes a dictionary of all that a call gives,
which costs more than the call. Here its own structure stays and is filled again. Whatever is not as expected is left to
``AmdSource``, which asks again through the package's functions.
"""

from __future__ import annotations

import ctypes
from typing import Any

from overlap_callbacks.instruments.power.source import MAX_SANE_W, Clock

# Releases of the package differ in what they make of the library's units. Two reads at once differ by less.
_AGREE = (0.5, 2.0)


class AmdTick:
    """Power, the count of the energy counter, and the clock of the compute units.

    Args:
        smi: the ``amdsmi`` module, initialised.
        device: handle of the device.
        power_key: which figure of power.

    Raises:
        AttributeError: the package is another than those that this is for, or its functions take other arguments.
    """

    def __init__(self, smi: Any, device: Any, power_key: str) -> None:
        wrapper = smi.amdsmi_interface.amdsmi_wrapper
        self._get_power, self._get_energy = wrapper.amdsmi_get_power_info, wrapper.amdsmi_get_energy_count
        self._get_clock = wrapper.amdsmi_get_clock_info
        functions = self._get_power, self._get_energy, self._get_clock
        if [len(function.argtypes) for function in functions] != [2, 4, 3]:
            raise AttributeError  # seen by ``of`` alone
        self._device = device
        self._key = power_key
        self._power, self._clock = wrapper.amdsmi_power_info_t(), wrapper.amdsmi_clk_info_t()
        self._count, self._resolution_uj, self._timestamp = ctypes.c_uint64(), ctypes.c_float(), ctypes.c_uint64()
        self._power_at, self._clock_at = ctypes.byref(self._power), ctypes.byref(self._clock)
        self._energy_at = tuple(ctypes.byref(item) for item in (self._count, self._resolution_uj, self._timestamp))
        self._kind = smi.AmdSmiClkType.GFX

    @classmethod
    def of(cls, smi: Any, device: Any, power_key: str, power_w: float) -> AmdTick | None:
        """None where it is otherwise; ``power_w`` is what the package's own function gave just now."""
        try:
            tick = cls(smi, device, power_key)
            read = tick.read(lambda: 0)
        except Exception:  # whatever another package raises: there is the long way
            return None
        return tick if read is not None and _AGREE[0] * power_w <= read[2] <= _AGREE[1] * power_w else None

    def read(self, clock_ns: Clock) -> tuple[int, int, int, int, float, int] | None:
        """Read the device now.

        Returns:
            When the read of power and energy began and ended, power in W, the energy counter's count, how many uJ one
            count is, and the clock in MHz; None where any of it did not go well.
        """
        begin_ns = clock_ns()
        failed = self._get_power(self._device, self._power_at) or self._get_energy(self._device, *self._energy_at)
        end_ns = clock_ns()
        if failed or self._get_clock(self._device, self._kind, self._clock_at):
            return None
        power_w = getattr(self._power, self._key)
        if power_w > MAX_SANE_W:  # all ones, in however many bits: the device lacks it
            return None
        return begin_ns, end_ns, power_w, self._count.value, self._resolution_uj.value, self._clock.clk
