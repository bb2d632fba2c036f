"""The power source of NVIDIA GPUs, through NVML (``nvidia-ml-py``).

Power is the field that NVML calls instantaneous if the driver has it, else the field for the 1 s average, else
``nvmlDeviceGetPowerUsage``, whose meaning depends on the chip. A value that the device does not support, that the user
may not read or that the driver fails to read is absent in the readings. Only two things are errors: a read without
power, and a device that is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from overlap_callbacks.analysis.power.readings import Reading
from overlap_callbacks.analysis.results.power import SourceInfo
from overlap_callbacks.instruments.power.energy_counter import EnergyCounter
from overlap_callbacks.instruments.power.nvml_fast import CLOCK_SM, FIELD_ENERGY, VALUE_NAMES, NvmlTick
from overlap_callbacks.instruments.power.nvml_gpm import GpmMeter
from overlap_callbacks.instruments.power.sensors import AMPERE, ONE_SECOND, Sensor, nvidia_instant, nvidia_usage
from overlap_callbacks.instruments.power.source import (
    AVERAGE_1_S,
    INSTANTANEOUS,
    MAX_SANE_W,
    CachedRead,
    Clock,
    DeviceLostError,
    PowerError,
    PowerSource,
    PowerUnavailableError,
    SlowValues,
    gpu_reading,
    host_clock,
    sane_w,
)

_INSTALL = "pip install 'overlap-callbacks[nvidia]'"

_FIELD_AVERAGE = 185
_FIELD_INSTANT = 186
_SCOPE_GPU = 0

# The energy counter is refreshed every 10 to 100 ms, depending on the device.
_ENERGY_LAG_S = 0.1

_NOT_SUPPORTED = 3
_FUNCTION_NOT_FOUND = 13
_GPU_IS_LOST = 15
_VERSION_MISMATCH = 25  # the package knows another layout of the argument than the driver does

# Errors after which a call need not be made again; other errors may pass.
_PERMANENT = (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _VERSION_MISMATCH)

_LOST = "the GPU is lost: it fell off the bus, or its driver gave it up"

# Reasons for the clock, by bit; older drivers call them throttle reasons and use the same bits.
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


class NvmlLibrary:
    """NVML, initialised. Finds devices by UUID or PCI address, never by their number.

    Raises:
        PowerUnavailableError: the Python package, the driver's library or the driver is missing.
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
        """The handle of a device.

        Args:
            uuid: with or without its prefix ``GPU-`` or ``MIG-``; empty if unknown.
            pci_bus_id: e.g. ``00000000:3B:00.0``; empty if unknown.

        Raises:
            PowerUnavailableError: the device is a MIG instance, or NVML knows no such device.
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
        """UUIDs of all GPUs."""
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


class NvmlSource(PowerSource):
    """Reads one NVIDIA GPU.

    A tick makes three driver calls: one for power and energy together, one for the SM clock, one for the reasons for
    that clock. Memory clock, limit and temperature are read once a second. The processes on the device are never read:
    that call takes milliseconds.

    Args:
        uuid, pci_bus_id: of the device; see ``NvmlLibrary.device``.
        utilisation: whether to read the GPM counters too, if the device has them (Hopper and newer).
        clock_ns: the clock of the readings.

    Attributes:
        device: handle of the device.
        tick: the fast way to read it; None if the driver or the package does not allow that.

    Raises:
        PowerUnavailableError: as ``NvmlLibrary`` and ``NvmlLibrary.device``, or the device has no power sensor.
    """

    def __init__(
        self, uuid: str = "", pci_bus_id: str = "", *, utilisation: bool = True, clock_ns: Clock = host_clock
    ) -> None:
        self._library = NvmlLibrary()
        self._nvml = self._library.pynvml
        self._clock_ns = clock_ns
        self._unsupported: set[tuple[Any, ...]] = set()
        self._gpm: GpmMeter | None = None
        try:
            self.device = self._library.device(uuid, pci_bus_id)
            self._power_field, kind, sensor = self._find_power()
            self._energy_is_field = FIELD_ENERGY in self._optional_fields([(FIELD_ENERGY, _SCOPE_GPU)])
            self.info = self._describe(kind, sensor)
            if utilisation:
                self._gpm = GpmMeter.of(self._nvml, self.device)
        except PowerError as error:  # a device that fails between two calls
            self._library.close()
            raise PowerUnavailableError(f"no power: {error}") from error
        except Exception:
            self._library.close()
            raise
        # NVML counts energy in millijoules on every device.
        self._counter = EnergyCounter(tick_j=1e-3)
        self._averaging_s = sensor.clear_s
        wanted = (self._power_field, FIELD_ENERGY if self._energy_is_field else None)
        self._tick_fields = [(field, _SCOPE_GPU) for field in wanted if field is not None]
        self._slow = CachedRead(self._read_slow_values)
        self._reasons_by_bits: dict[int, frozenset[str]] = {}
        self.tick: NvmlTick | None = None
        if self._power_field is not None and self._energy_is_field:
            self.tick = NvmlTick.of(self._nvml, self.device, self._power_field)

    def sample(self) -> Reading:
        values = self.tick.read(self._clock_ns) if self.tick is not None else None
        reasons: frozenset[str] | None
        if values is not None and 0 <= values.power_mw <= MAX_SANE_W * 1e3:
            begin_ns, end_ns, power_mw, energy_mj, sm_clock_mhz, bits = values
            power_w: float | None = power_mw / 1e3
            energy_j = self._counter.read(energy_mj)
            reasons = self._reasons_by_bits[bits] if bits in self._reasons_by_bits else self._reasons_of(bits)
        else:  # read again, through the functions that tell what is wrong
            begin_ns, num_unsupported = self._clock_ns(), len(self._unsupported)
            power_w, energy_j = self._read_power_and_energy()
            end_ns = self._clock_ns()
            sm_clock_mhz = self._optional(self._nvml.nvmlDeviceGetClockInfo, CLOCK_SM)
            reasons = self._read_reasons()
            if len(self._unsupported) > num_unsupported:  # the fast way, which reads everything, would fail again
                self.tick = None
        return gpu_reading(
            begin_ns,
            end_ns,
            self._slow.at(begin_ns),
            averaging_s=self._averaging_s,
            power_w=power_w,
            energy_j=energy_j,
            sm_clock_mhz=sm_clock_mhz,
            reasons=reasons,
            utilisation=self._gpm.read(end_ns) if self._gpm is not None else None,
        )

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None
        self._library.close()

    # -- power and energy

    def _find_power(self) -> tuple[int | None, str, Sensor]:
        """How power is read: its field (None for ``nvmlDeviceGetPowerUsage``), its kind, its sensor."""
        chip = self._chip()
        for field, kind, sensor in (
            (_FIELD_INSTANT, INSTANTANEOUS, nvidia_instant(*chip)),
            (_FIELD_AVERAGE, AVERAGE_1_S, ONE_SECOND),
        ):
            if field in self._optional_fields([(field, _SCOPE_GPU)]):
                return field, kind, sensor
        if self._optional(self._nvml.nvmlDeviceGetPowerUsage) is None:
            raise PowerUnavailableError(f"no power: {self._name()} has no power sensor that NVML can read")
        sensor = nvidia_usage(*chip)
        return None, AVERAGE_1_S if sensor is ONE_SECOND else INSTANTANEOUS, sensor

    def _chip(self) -> tuple[int | None, bool]:
        """NVML's number of the chip's architecture, and whether it is GA100 (A100, A800, A30)."""
        architecture = self._optional(self._nvml.nvmlDeviceGetArchitecture)
        pci = self._optional(self._nvml.nvmlDeviceGetPciInfo)
        # The upper half of pciDeviceId is the chip: 0x20.. is GA100 in all its forms.
        is_ga100 = architecture == AMPERE and pci is not None and pci.pciDeviceId >> 24 == 0x20
        return architecture, is_ga100

    def _read_power_and_energy(self) -> tuple[float | None, float | None]:
        """Watts and joules, in one call if the driver has fields for them; None for what it does not give now."""
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

    def _fields(self, fields: list[tuple[int, int]]) -> dict[int, int]:
        """The values of the fields that the device has, by field.

        Args:
            fields: each with its scope.

        Raises:
            DeviceLostError: the device is gone.
            PowerError: the call failed.
        """
        call = self._nvml.nvmlDeviceGetFieldValues
        try:
            items = call(self.device, fields)
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

    def _optional_fields(self, fields: list[tuple[int, int]]) -> dict[int, int]:
        """As ``_fields``, but empty if the call fails."""
        try:
            return self._fields(fields)
        except DeviceLostError:
            raise
        except PowerError:
            return {}

    # -- the rest

    def _describe(self, kind: str, sensor: Sensor) -> SourceInfo:
        nvml = self._nvml
        default_mw = self._optional(nvml.nvmlDeviceGetPowerManagementDefaultLimit)
        has_energy = self._energy_is_field or self._optional(nvml.nvmlDeviceGetTotalEnergyConsumption) is not None
        return SourceInfo(
            name="nvml",
            device_name=self._name(),
            device_id=str(self._optional(nvml.nvmlDeviceGetUUID)),
            power_kind=kind,
            averaging_s=sensor.clear_s,
            energy_lag_s=_ENERGY_LAG_S if has_energy else None,
            default_interval_s=0.1,
            tdp_w=sane_w(default_mw / 1e3) if default_mw is not None else None,
            limit_w=self._enforced_limit_w(),
            window_s=sensor.window_s,
            renewed_s=sensor.renewed_s,
        )

    def _name(self) -> str:
        return str(self._optional(self._nvml.nvmlDeviceGetName) or "the GPU")

    def _enforced_limit_w(self) -> float | None:
        limit_mw = self._optional(self._nvml.nvmlDeviceGetEnforcedPowerLimit)
        return sane_w(limit_mw / 1e3) if limit_mw is not None else None

    def _read_slow_values(self) -> SlowValues:
        memory_clock_mhz = self._optional(self._nvml.nvmlDeviceGetClockInfo, self._nvml.NVML_CLOCK_MEM)
        return SlowValues(memory_clock_mhz, self._read_temperature_c(), self._enforced_limit_w())

    def _read_temperature_c(self) -> float | None:
        # The call without V is deprecated and will be removed with CUDA 14; drivers before CUDA 12.8 have no other.
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
        return self._reasons_of(bits) if bits is not None else None

    def _reasons_of(self, bits: int) -> frozenset[str]:
        reasons = self._reasons_by_bits[bits] = frozenset(word for bit, word in _REASONS if bits & bit)
        return reasons

    def _optional(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a call for this device; None if it fails. After a permanent error it is not made again.

        Raises:
            DeviceLostError: the device is gone.
        """
        if self._unsupported and (function, *arguments) in self._unsupported:
            return None
        try:
            return function(self.device, *arguments)
        except self._nvml.NVMLError as error:
            self._raise_if_lost(error)
            if error.value in _PERMANENT:
                self._unsupported.add((function, *arguments))
            return None

    def _raise_if_lost(self, error: Any) -> None:
        if error.value == _GPU_IS_LOST:
            raise DeviceLostError(_LOST) from error


def _mig(device: str) -> str:
    return (
        f"no power: {device} is or is part of a GPU in MIG mode, where power, energy and clocks exist for the whole "
        "GPU only, not for an instance of it"
    )
