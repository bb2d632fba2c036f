"""The power source of NVIDIA GPUs, through NVML (``nvidia-ml-py``).

Power is NVML's instantaneous field if the driver has it, else the 1 s average field, else ``nvmlDeviceGetPowerUsage``,
whose meaning depends on the chip. A value that the device does not support, that the user may not read or that the
driver fails to read is absent. Only a read without power and a lost device are errors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from overlap_callbacks.analysis.results.power import SourceInfo
from overlap_callbacks.instruments.power.nvml_fast import CLOCK_SM, FIELD_ENERGY, VALUE_NAMES, GpmMeter, NvmlTick
from overlap_callbacks.instruments.power.sensors import AMPERE, ONE_SECOND, Sensor, nvidia_instant, nvidia_usage
from overlap_callbacks.instruments.power.source import (
    Clock,
    DeviceLostError,
    EnergyCounter,
    GpuSource,
    GpuValues,
    PowerError,
    PowerUnavailableError,
    SlowValues,
    host_clock,
    sane_w,
)

_INSTALL = "pip install 'overlap-callbacks[nvidia]'"

_FIELD_AVERAGE = 185
_FIELD_INSTANT = 186
_SCOPE_GPU = 0

# The energy counter is updated every 10 to 100 ms, depending on the device.
_ENERGY_LAG_S = 0.1

_NOT_SUPPORTED = 3
_FUNCTION_NOT_FOUND = 13
_GPU_IS_LOST = 15
_VERSION_MISMATCH = 25  # package and driver disagree on the layout of the argument

# Errors after which a call is not repeated; other errors may be temporary.
_PERMANENT = (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _VERSION_MISMATCH)

_LOST = "the GPU is lost: it fell off the bus, or its driver gave it up"

# Clock limit reasons, by bit; older drivers call them throttle reasons and use the same bits.
_REASONS = (
    (0x001, "gpu_idle"),
    (0x002, "application_clocks"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal_slowdown"),
    (0x040, "hw_thermal_slowdown"),
    (0x080, "hw_power_brake"),
    (0x100, "display_clocks"),
)


@functools.cache
def _reasons_of(bits: int) -> frozenset[str]:
    return frozenset(word for bit, word in _REASONS if bits & bit)


class NvmlLibrary:
    """NVML, initialised. Finds devices by UUID or PCI address, never by index.

    Raises PowerUnavailableError if the Python package, the driver's library or the driver is missing.
    """

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise PowerUnavailableError(f"no power of NVIDIA GPUs: nvidia-ml-py is missing; {_INSTALL}") from error
        if not hasattr(pynvml, "nvmlDeviceGetFieldValues"):
            raise PowerUnavailableError(
                f"no power of NVIDIA GPUs: the pynvml that is installed is not NVIDIA's nvidia-ml-py; {_INSTALL}"
            )
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise PowerUnavailableError(f"no power of NVIDIA GPUs: NVML does not start: {error}") from error
        self.pynvml = pynvml
        self._open = True

    def device(self, uuid: str, pci_bus_id: str) -> Any:
        """The handle of a device, by UUID (with or without ``GPU-`` or ``MIG-``) or PCI address; either may be empty.

        Raises PowerUnavailableError if the device is a MIG instance, or NVML knows no such device.
        """
        nvml = self.pynvml
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        handle = None
        if bare and not uuid.startswith("MIG-"):
            handle = self._or_none(nvml.nvmlDeviceGetHandleByUUID, f"GPU-{bare}")
        if handle is None and bare and self._or_none(nvml.nvmlDeviceGetHandleByUUID, f"MIG-{bare}") is not None:
            raise PowerUnavailableError(_mig(f"MIG-{bare}"))
        if handle is None and pci_bus_id:
            handle = self._or_none(nvml.nvmlDeviceGetHandleByPciBusId, pci_bus_id)
        if handle is None:
            known = ", ".join(self.uuids()) or "none"
            raise PowerUnavailableError(
                f"no power: NVML knows no GPU with UUID {uuid or 'unknown'} or PCI address "
                f"{pci_bus_id or 'unknown'}; it knows {known}"
            )
        modes = self._or_none(nvml.nvmlDeviceGetMigMode, handle)
        if modes is not None and modes[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            raise PowerUnavailableError(_mig(uuid or pci_bus_id))
        return handle

    def uuids(self) -> list[str]:
        nvml = self.pynvml
        handles = [self._or_none(nvml.nvmlDeviceGetHandleByIndex, i) for i in range(nvml.nvmlDeviceGetCount())]
        return [str(self._or_none(nvml.nvmlDeviceGetUUID, handle)) for handle in handles if handle is not None]

    def close(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(self.pynvml.NVMLError):
                self.pynvml.nvmlShutdown()

    def _or_none(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self.pynvml.NVMLError:
            return None


class NvmlSource(GpuSource):
    """Reads one NVIDIA GPU; with ``utilisation`` the GPM counters too, if the device has them (Hopper and newer).

    A tick makes three driver calls: power and energy together, the SM clock, and the reasons for that clock. The
    processes on the device are never read: that call takes milliseconds.

    Raises PowerUnavailableError like ``NvmlLibrary`` and its ``device``, or if the device has no power sensor.
    """

    def __init__(
        self, uuid: str = "", pci_bus_id: str = "", *, utilisation: bool = True, clock_ns: Clock = host_clock
    ) -> None:
        library = NvmlLibrary()
        super().__init__(library, clock_ns)
        self._nvml = library.pynvml
        self._gpm: GpmMeter | None = None
        with self._opening():
            self.device = library.device(uuid, pci_bus_id)
            self._power_field, sensor = self._find_power()
            self._energy_is_field = FIELD_ENERGY in self._optional_fields([FIELD_ENERGY])
            self.info = self._describe(sensor)
            if utilisation:
                self._gpm = GpmMeter.of(self._nvml, self.device)
        # NVML counts energy in millijoules on every device.
        self._counter = EnergyCounter(tick_j=1e-3)
        wanted = (self._power_field, FIELD_ENERGY if self._energy_is_field else None)
        self._tick_fields = [field for field in wanted if field is not None]
        if self._power_field is not None and self._energy_is_field:
            self.tick = NvmlTick.of(self._nvml, self.device, self._power_field)

    def _read_fast(self) -> GpuValues | None:
        values = self.tick.read(self._clock_ns)
        if values is None or sane_w(values[2]) is None:
            return None
        begin_ns, end_ns, power_w, energy_mj, sm_clock_mhz, bits = values
        return GpuValues(begin_ns, end_ns, power_w, self._counter.read(energy_mj), sm_clock_mhz, _reasons_of(bits))

    def _read_slowly(self) -> GpuValues:
        begin_ns = self._clock_ns()
        power_w, energy_j = self._read_power_and_energy()
        end_ns = self._clock_ns()
        sm_clock_mhz = self._optional(self._nvml.nvmlDeviceGetClockInfo, CLOCK_SM)
        return GpuValues(begin_ns, end_ns, power_w, energy_j, sm_clock_mhz, self._read_reasons())

    def _with_counts(self, values: GpuValues) -> GpuValues:
        return values if self._gpm is None else values._replace(utilisation=self._gpm.read(values.end_ns))

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None
        super().close()

    # -- power and energy

    def _find_power(self) -> tuple[int | None, Sensor]:
        """The field for power (None for ``nvmlDeviceGetPowerUsage``), and its sensor."""
        chip = self._chip()
        for field, sensor in ((_FIELD_INSTANT, nvidia_instant(*chip)), (_FIELD_AVERAGE, ONE_SECOND)):
            if field in self._optional_fields([field]):
                return field, sensor
        if self._optional(self._nvml.nvmlDeviceGetPowerUsage) is None:
            raise PowerUnavailableError(f"no power: {self._name()} has no power sensor that NVML can read")
        return None, nvidia_usage(*chip)

    def _chip(self) -> tuple[int | None, bool]:
        """NVML's architecture number, and whether the chip is GA100 (A100, A800, A30)."""
        architecture = self._optional(self._nvml.nvmlDeviceGetArchitecture)
        pci = self._optional(self._nvml.nvmlDeviceGetPciInfo)
        # The upper half of pciDeviceId is the chip: 0x20.. is GA100 in all its variants.
        is_ga100 = architecture == AMPERE and pci is not None and pci.pciDeviceId >> 24 == 0x20
        return architecture, is_ga100

    def _read_power_and_energy(self) -> tuple[float | None, float | None]:
        """Watts and joules, in one call if the driver has fields for them; None for values not available now."""
        if self._power_field is not None:
            values = self._fields(self._tick_fields)
            power_mw = values.get(self._power_field)
        else:
            values = self._optional_fields(self._tick_fields) if self._tick_fields else {}
            power_mw = self._optional(self._nvml.nvmlDeviceGetPowerUsage)
        if self._energy_is_field:
            energy_mj = values.get(FIELD_ENERGY)
        else:
            energy_mj = self._optional(self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        power_w = sane_w(power_mw / 1e3) if power_mw is not None else None
        if power_w is None and energy_mj is None:
            raise PowerError(f"NVML gave no power for {self.info.device_name}")
        return power_w, self._counter.read(energy_mj) if energy_mj is not None else None

    def _fields(self, fields: list[int]) -> dict[int, int]:
        """The values of the fields that the device has, by field. Raises like ``sample``."""
        call = self._nvml.nvmlDeviceGetFieldValues
        try:
            items = call(self.device, [(field, _SCOPE_GPU) for field in fields])
        except self._nvml.NVMLError as error:
            self._raise_if_lost(error)
            raise PowerError(f"{call.__name__}: {error}") from error
        values: dict[int, int] = {}
        for item in items:
            if item.nvmlReturn == _GPU_IS_LOST:
                raise DeviceLostError(_LOST)
            name = VALUE_NAMES.get(item.valueType)
            if item.nvmlReturn == 0 and name is not None:
                values[item.fieldId] = getattr(item.value, name)
        return values

    def _optional_fields(self, fields: list[int]) -> dict[int, int]:
        """Like ``_fields``, but empty if the call fails."""
        try:
            return self._fields(fields)
        except DeviceLostError:
            raise
        except PowerError:
            return {}

    # -- the rest

    def _describe(self, sensor: Sensor) -> SourceInfo:
        nvml = self._nvml
        has_energy = self._energy_is_field or self._optional(nvml.nvmlDeviceGetTotalEnergyConsumption) is not None
        return SourceInfo(
            name="nvml",
            device_name=self._name(),
            device_id=str(self._optional(nvml.nvmlDeviceGetUUID)),
            power_kind=sensor.kind,
            averaging_s=sensor.clear_s,
            energy_lag_s=_ENERGY_LAG_S if has_energy else None,
            default_interval_s=0.1,
            tdp_w=self._optional_w(nvml.nvmlDeviceGetPowerManagementDefaultLimit),
            limit_w=self._optional_w(nvml.nvmlDeviceGetEnforcedPowerLimit),
            window_s=sensor.window_s,
            renewed_s=sensor.renewed_s,
        )

    def _name(self) -> str:
        return str(self._optional(self._nvml.nvmlDeviceGetName) or "the GPU")

    def _optional_w(self, function: Callable[..., Any]) -> float | None:
        """Watts from a call that returns milliwatts; see ``_optional``."""
        power_mw = self._optional(function)
        return sane_w(power_mw / 1e3) if power_mw is not None else None

    def _read_slow_values(self) -> SlowValues:
        nvml = self._nvml
        memory_clock_mhz = self._optional(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM)
        enforced_limit = nvml.nvmlDeviceGetEnforcedPowerLimit
        return SlowValues(memory_clock_mhz, self._read_temperature_c(), self._optional_w(enforced_limit))

    def _read_temperature_c(self) -> float | None:
        # The call without V is deprecated and goes with CUDA 14; drivers before CUDA 12.8 have no other.
        nvml = self._nvml
        for name in ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"):
            function = getattr(nvml, name, None)
            value = self._optional(function, nvml.NVML_TEMPERATURE_GPU) if function is not None else None
            if value is not None:
                return float(value)
        return None

    def _read_reasons(self) -> frozenset[str] | None:
        nvml = self._nvml
        bits = self._optional(nvml.nvmlDeviceGetCurrentClocksEventReasons)
        if bits is None:
            bits = self._optional(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return _reasons_of(bits) if bits is not None else None

    def _is_permanent(self, error: Any, name: str) -> bool:
        if not isinstance(error, self._nvml.NVMLError):
            raise error
        self._raise_if_lost(error)
        return error.value in _PERMANENT

    def _raise_if_lost(self, error: Any) -> None:
        if error.value == _GPU_IS_LOST:
            raise DeviceLostError(_LOST) from error


def _mig(device: str) -> str:
    return (
        f"no power: {device} is or is part of a GPU in MIG mode, where power, energy and clocks exist for the whole "
        "GPU only, not for an instance of it"
    )


# -- NVLink


def nvlink_devices(uuid: str, pci_bus_id: str) -> tuple[str, ...] | None:
    """PCI addresses, e.g. ``0000:3b:00.0``, of the host's other GPUs that a GPU reaches by NVLink.

    None if NVML is missing, does not know the GPU, or does not report one of its neighbours.
    """
    try:
        library = NvmlLibrary()
    except PowerUnavailableError:
        return None
    nvml = library.pynvml
    try:
        own = library.device(uuid, pci_bus_id)
        own_address = _address(nvml, own)
        linked = []
        for index in range(nvml.nvmlDeviceGetCount()):
            other = nvml.nvmlDeviceGetHandleByIndex(index)
            address = _address(nvml, other)
            if address == own_address:
                continue
            status = nvml.nvmlDeviceGetP2PStatus(own, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if status == nvml.NVML_P2P_STATUS_OK:
                linked.append(address)
        return tuple(linked)
    except (nvml.NVMLError, PowerUnavailableError, AttributeError):
        return None
    finally:
        library.close()


def _address(nvml: Any, handle: Any) -> str:
    """The PCI address in torch's form: NVML writes the domain with eight digits, and in capitals."""
    bus_id = nvml.nvmlDeviceGetPciInfo(handle).busId
    text = (bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)).lower()
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}"
