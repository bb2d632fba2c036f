"""Power limits and locked clocks of NVIDIA GPUs, through NVML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlap_callbacks.experiments.caps.settings import Before, CapError
from overlap_callbacks.instruments.power.nvml import NvmlLibrary
from overlap_callbacks.instruments.power.source import PowerUnavailableError

_MW = 1000.0


class NvmlDriver:
    """The driver of NVIDIA's GPUs.

    Raises:
        CapError: NVML is missing, or does not start.
    """

    def __init__(self) -> None:
        try:
            self._library = NvmlLibrary()
        except PowerUnavailableError as error:
            raise CapError(f"no caps: {error}") from error
        self._nvml = self._library.pynvml
        self._handles: dict[str, Any] = {}

    def uuids(self) -> list[str]:
        return self._library.uuids()

    def power_limit_w(self, uuid: str) -> float:
        return float(self._do(self._nvml.nvmlDeviceGetPowerManagementLimit, uuid)) / _MW

    def power_range_w(self, uuid: str) -> tuple[float, float]:
        low_mw, high_mw = self._do(self._nvml.nvmlDeviceGetPowerManagementLimitConstraints, uuid)
        return low_mw / _MW, high_mw / _MW

    def set_power_limit(self, uuid: str, power_w: float) -> None:
        self._do(self._nvml.nvmlDeviceSetPowerManagementLimit, uuid, round(power_w * _MW))

    def clocks_mhz(self, uuid: str) -> tuple[int, int]:
        memory_mhz = max(self._do(self._nvml.nvmlDeviceGetSupportedMemoryClocks, uuid))
        clocks_mhz = self._do(self._nvml.nvmlDeviceGetSupportedGraphicsClocks, uuid, memory_mhz)
        return min(clocks_mhz), max(clocks_mhz)

    def sm_clock_mhz(self, uuid: str) -> int:
        return int(self._do(self._nvml.nvmlDeviceGetClockInfo, uuid, self._nvml.NVML_CLOCK_SM))

    def lock_clocks(self, uuid: str, lowest_mhz: int, highest_mhz: int) -> None:
        self._do(self._nvml.nvmlDeviceSetGpuLockedClocks, uuid, lowest_mhz, highest_mhz)

    def unlock_clocks(self, uuid: str) -> None:
        self._do(self._nvml.nvmlDeviceResetGpuLockedClocks, uuid)

    def undo_command(self, before: Before) -> str:
        commands = [] if before.power_w is None else [f"nvidia-smi -i {before.uuid} -pl {before.power_w:g}"]
        commands += [f"nvidia-smi -i {before.uuid} -rgc"] if before.clocks_locked else []
        return " && ".join(commands)

    def close(self) -> None:
        self._library.close()

    def _do(self, function: Callable[..., Any], uuid: str, *arguments: Any) -> Any:
        try:
            if uuid not in self._handles:
                self._handles[uuid] = self._library.device(uuid, "")
            return function(self._handles[uuid], *arguments)
        except (self._nvml.NVMLError, PowerUnavailableError) as error:
            raise CapError(f"{function.__name__} of {uuid}: {error}") from error
