"""The drivers that cap this machine's GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from overlap_callbacks.instruments.caps.settings import Before, CapError, Driver
from overlap_callbacks.instruments.power.amd import AmdSmiLibrary, amd_words
from overlap_callbacks.instruments.power.nvml import NvmlLibrary
from overlap_callbacks.instruments.power.source import PowerUnavailableError


def find_driver() -> Driver:
    """The driver of the GPUs: NVIDIA's, else AMD's. Raises a CapError that says what each of them lacks."""
    reasons: list[str] = []
    for make in (NvmlDriver, AmdDriver):
        try:
            driver: Driver = make()
            if driver.uuids():
                return driver
            driver.close()
            reasons.append(f"no caps: {make.__name__.removesuffix('Driver')} knows no GPU")
        except CapError as error:
            reasons.append(str(error))
    raise CapError("; ".join(reasons))


class _Driver:
    """Shared by both vendors' drivers: a library, which may be missing (CapError), and device handles."""

    # The commands to restore a device's power limit, and to release its clocks.
    set_power: ClassVar[str]
    free_clocks: ClassVar[str]

    def __init__(self, library: Callable[[], Any]) -> None:
        try:
            self._library = library()
        except PowerUnavailableError as error:
            raise CapError(f"no caps: {error}") from error
        self._handles: dict[str, Any] = {}

    def undo_command(self, before: Before) -> str:
        commands = [] if before.power_w is None else [self.set_power]
        commands += [self.free_clocks] if before.clocks_locked else []
        return " && ".join(commands).format(uuid=before.uuid, power_w=before.power_w)

    def close(self) -> None:
        self._library.close()


# -- AMD
# Power limits and clock caps of AMD GPUs, through AMD SMI. A clock cap is AMD's performance determinism: the device
# keeps its clock at or below a value. It shows in the device's performance level, which can be read. So the driver
# refuses devices whose clocks somebody has already set, and can verify that they are released afterwards.


_UW = 1e6
_LEVEL = "AMDSMI_DEV_PERF_LEVEL_"
_FREE, _CAPPED = "AUTO", "DETERMINISM"


class AmdDriver(_Driver):
    set_power = "amd-smi set --gpu {uuid} --power-cap {power_w:.0f}"  # which takes whole watts only
    free_clocks = "amd-smi reset --gpu {uuid} --perf-determinism"

    def __init__(self) -> None:
        super().__init__(AmdSmiLibrary)
        self._smi = self._library.smi

    def uuids(self) -> list[str]:
        try:
            handles = self._smi.amdsmi_get_processor_handles()
            self._handles = {self._smi.amdsmi_get_gpu_device_uuid(handle): handle for handle in handles}
        except Exception as error:  # the package itself fails on unexpected values
            raise CapError(f"AMD SMI does not name its devices: {amd_words(error)}") from error
        return list(self._handles)

    def power_limit_w(self, uuid: str) -> float:
        return float(self._do(self._smi.amdsmi_get_power_cap_info, uuid)["power_cap"]) / _UW

    def power_range_w(self, uuid: str) -> tuple[float, float]:
        found = self._do(self._smi.amdsmi_get_power_cap_info, uuid)
        return found["min_power_cap"] / _UW, found["max_power_cap"] / _UW

    def set_power_limit(self, uuid: str, power_w: float) -> None:
        self._do(self._smi.amdsmi_set_power_cap, uuid, 0, round(power_w * _UW))

    def clocks_mhz(self, uuid: str) -> tuple[int, int]:
        level = self._level(uuid)
        if level != _FREE:
            raise CapError(
                f"the clocks of {uuid} are set by hand (performance level {level}): free them by "
                f"amd-smi reset --gpu {uuid} --perf-determinism --clocks, or leave out --clock-cap"
            )
        found = self._clock(uuid)
        low_mhz, high_mhz = found.get("min_clk"), found.get("max_clk")
        if not isinstance(low_mhz, int) or not isinstance(high_mhz, int):
            raise CapError(f"AMD SMI does not tell which clocks {uuid} takes")
        return low_mhz, high_mhz

    def sm_clock_mhz(self, uuid: str) -> int:
        clock_mhz = self._clock(uuid).get("clk")
        if not isinstance(clock_mhz, int):
            raise CapError(f"AMD SMI does not tell the clock of {uuid}")
        return clock_mhz

    def lock_clocks(self, uuid: str, lowest_mhz: int, highest_mhz: int) -> None:
        del lowest_mhz  # the device may always go lower
        self._do(self._smi.amdsmi_set_gpu_perf_determinism_mode, uuid, highest_mhz)
        self._expect(uuid, _CAPPED)

    def unlock_clocks(self, uuid: str) -> None:
        self._do(self._smi.amdsmi_set_gpu_perf_level, uuid, self._smi.AmdSmiDevPerfLevel.AUTO)
        self._expect(uuid, _FREE)

    def _clock(self, uuid: str) -> dict[str, Any]:
        found: dict[str, Any] = self._do(self._smi.amdsmi_get_clock_info, uuid, self._smi.AmdSmiClkType.GFX)
        return found

    def _level(self, uuid: str) -> str:
        return str(self._do(self._smi.amdsmi_get_gpu_perf_level, uuid)).removeprefix(_LEVEL)

    def _expect(self, uuid: str, level: str) -> None:
        found = self._level(uuid)
        if found != level:
            raise CapError(f"the performance level of {uuid} was set to {level}, and reads {found}")

    def _do(self, function: Callable[..., Any], uuid: str, *arguments: Any) -> Any:
        if uuid not in self._handles and uuid not in self.uuids():
            raise CapError(f"AMD SMI knows no GPU with UUID {uuid}; it knows {', '.join(self._handles) or 'none'}")
        try:
            return function(self._handles[uuid], *arguments)
        except Exception as error:
            raise CapError(f"{function.__name__} of {uuid}: {amd_words(error)}") from error


# -- NVIDIA


_MW = 1000.0


class NvmlDriver(_Driver):
    set_power = "nvidia-smi -i {uuid} -pl {power_w:g}"
    free_clocks = "nvidia-smi -i {uuid} -rgc"

    def __init__(self) -> None:
        super().__init__(NvmlLibrary)
        self._nvml = self._library.pynvml

    def uuids(self) -> list[str]:
        return list(self._library.uuids())

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

    def _do(self, function: Callable[..., Any], uuid: str, *arguments: Any) -> Any:
        try:
            if uuid not in self._handles:
                self._handles[uuid] = self._library.device(uuid, "")
            return function(self._handles[uuid], *arguments)
        except (self._nvml.NVMLError, PowerUnavailableError) as error:
            raise CapError(f"{function.__name__} of {uuid}: {error}") from error
