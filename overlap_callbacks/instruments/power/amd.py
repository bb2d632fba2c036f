"""The power source of AMD GPUs, through AMD SMI (``amdsmi``).

The Python package binds every function of its library when it is imported, and reads structures whose layout differs
from version to version. So its errors become one message that says what is missing, and implausible values become None.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import socket
from typing import Any

from overlap_callbacks.analysis.power.readings import Reasons
from overlap_callbacks.analysis.results.power import SourceInfo
from overlap_callbacks.instruments.power.sensors import AMD_AVERAGE, AMD_CURRENT, Sensor
from overlap_callbacks.instruments.power.source import (
    INSTANTANEOUS,
    MAX_SANE_W,
    CachedRead,
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

_INSTALL = (
    "install ROCm's amd-smi-lib (libamd_smi.so), and the Python package of the same version: "
    "pip install /opt/rocm/share/amd_smi, or pip install 'overlap-callbacks[amd]'"
)

# The counter is in the firmware's table, which is updated every few milliseconds.
_ENERGY_LAG_S = 0.02

# The firmware updates the throttle-time counters about this often, so a value may be this old.
_THROTTLE_LAG_NS = 100_000_000
# Read interval: slightly shorter, since a tick may come slightly early.
_THROTTLE_INTERVAL_S = 0.09

# Releases of the package convert the library's units differently. Two consecutive reads differ by less than these
# factors.
_AGREE = (0.5, 2.0)

# The power keys, best first.
_POWER_KEYS = {"current_socket_power": AMD_CURRENT, "socket_power": AMD_CURRENT, "average_socket_power": AMD_AVERAGE}

_NOT_SUPPORTED = (2, 3, 34, 39, 40)  # not supported, not implemented, driver not loaded, no (or more) data
_NO_SUCH_DEVICE = (20, 31, 51, 52)  # its files in /sys are gone

# Columns of the metrics table that count throttled time, and the reason for each.
_RESIDENCIES = (
    ("ppt_residency_acc", "package_power_limit"),
    ("socket_thm_residency_acc", "socket_thermal"),
    ("hbm_thm_residency_acc", "memory_thermal"),
    ("vr_thm_residency_acc", "voltage_regulator_thermal"),
    ("prochot_residency_acc", "processor_hot"),
)
_COLUMNS = ("accumulation_counter", "throttle_status", *(name for name, _ in _RESIDENCIES))


class AmdSmiLibrary:
    """AMD SMI, initialised: its module ``smi``, and ``notes`` for readers of the figures.

    Raises:
        PowerUnavailableError: the package, its library or the driver is missing, or their versions do not match.
    """

    def __init__(self) -> None:
        printed = io.StringIO()
        try:
            # Without its library the package prints to stdout and raises KeyError; with an older one AttributeError.
            with contextlib.redirect_stdout(printed):
                import amdsmi
        except ModuleNotFoundError as error:
            raise PowerUnavailableError(f"no power of AMD GPUs: amdsmi is missing; {_INSTALL}") from error
        except AttributeError as error:
            raise PowerUnavailableError(
                f"no power of AMD GPUs: libamd_smi.so is older than the Python package amdsmi ({error}); {_INSTALL}"
            ) from error
        except Exception as error:
            why = " ".join(printed.getvalue().split()) or f"{type(error).__name__}: {error}"
            raise PowerUnavailableError(
                f"no power of AMD GPUs: the library of amdsmi, libamd_smi.so, does not load ({why}); {_INSTALL}"
            ) from error
        self.smi = amdsmi
        try:
            amdsmi.amdsmi_init()
        except Exception as error:
            raise PowerUnavailableError(f"no power of AMD GPUs: AMD SMI does not start: {amd_words(error)}") from error
        self._open = True
        self.notes = self._compare_versions()

    def device(self, pci_bus_id: str) -> Any:
        """The handle of the device at a PCI address, e.g. ``0000:c1:00.0``. Handles are not in HIP's order.

        Raises PowerUnavailableError if AMD SMI knows no such device.
        """
        try:
            return self.smi.amdsmi_get_processor_handle_from_bdf(pci_bus_id)
        except Exception as error:
            raise PowerUnavailableError(
                f"no power: AMD SMI knows no GPU with PCI address {pci_bus_id or 'unknown'}: {amd_words(error)}"
            ) from error

    def close(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(Exception):
                self.smi.amdsmi_shut_down()

    def _compare_versions(self) -> tuple[str, ...]:
        """A note if package and library differ in their major version, which changes the layout of structures."""
        package = str(getattr(self.smi, "__version__", ""))
        try:
            version = self.smi.amdsmi_get_lib_version()
        except Exception:  # an old package fails if the build string is missing
            return ()
        library = f"{version['major']}.{version['minor']}.{version['release']}"
        major = package.split(".", maxsplit=1)[0]
        if not major.isdecimal() or _generation(int(major)) == _generation(int(version["major"])):
            return ()
        return (
            f"the Python package amdsmi is version {package}, its library {library}: their structures may differ, and "
            "figures may be wrong; use the package that comes with ROCm",
        )


class AmdSource(GpuSource):
    """Reads one AMD GPU, by PCI address.

    A tick reads power, energy and the clock. The throttle-time counters are read ten times a second; the reading says
    which time they cover. ``amdsmi_get_violation_status`` is not used: it sleeps for 100 ms.

    Raises PowerUnavailableError like ``AmdSmiLibrary`` and its ``device``, or if the device has no power of its own.
    """

    def __init__(self, pci_bus_id: str, *, clock_ns: Clock = host_clock) -> None:
        library = AmdSmiLibrary()
        super().__init__(library, clock_ns)
        self.smi = library.smi
        self._counter: EnergyCounter | None = None
        self._reasons = CachedRead(self._read_reasons, _THROTTLE_INTERVAL_S)
        self._residencies: dict[str, int] = {}
        self._residencies_ns = 0
        with self._opening():
            self.device = library.device(pci_bus_id)
            partition = self._partition()
            if partition:
                # Each partition may report the power of the whole socket: use the first.
                pci_bus_id = f"{pci_bus_id[:-1]}0"
                self.device = library.device(pci_bus_id)
            self._name = self._read_name()
            self._power_key, sensor = self._find_power()
            notes = []
            if self._is_mi200():
                notes.append(f"power and energy are of both dies of the {self._name}: the other one has no sensor")
            if partition:
                notes.append(
                    f"power and energy are of the whole {self._name}, of which the device is a partition "
                    f"({partition}): they count once for all of its partitions, and the clock is that of the first"
                )
            self.info = SourceInfo(
                name="amdsmi",
                device_name=self._name,
                device_id=self._identify(pci_bus_id),
                power_kind=sensor.kind,
                averaging_s=sensor.clear_s,
                energy_lag_s=_ENERGY_LAG_S if self._read_energy() is not None else None,
                default_interval_s=0.02,
                tdp_w=self._cap_w("default_power_cap"),
                limit_w=self._cap_w("power_cap"),
                notes=(*library.notes, *notes),
                window_s=sensor.window_s if sensor.kind == INSTANTANEOUS else None,
                renewed_s=sensor.renewed_s,
            )
            power_w = self._read_power_w() if self.info.has_energy else None
            if power_w is not None:
                self.tick = AmdTick.of(self.smi, self.device, self._power_key, power_w)

    def _read_fast(self) -> GpuValues | None:
        values = self.tick.read(self._clock_ns)
        if values is None:
            return None
        begin_ns, end_ns, power_w, count, resolution_uj, clock_mhz = values
        energy_j = self._energy_of(count, resolution_uj)
        return GpuValues(begin_ns, end_ns, power_w, energy_j, _sane_mhz(clock_mhz))

    def _read_slowly(self) -> GpuValues:
        begin_ns = self._clock_ns()
        power_w, energy_j = self._read_power_w(), self._read_energy()
        end_ns = self._clock_ns()
        if power_w is None and energy_j is None:
            raise PowerError(f"AMD SMI gave no power for {self._name}")
        return GpuValues(begin_ns, end_ns, power_w, energy_j, self._clock("GFX"))

    def _with_counts(self, values: GpuValues) -> GpuValues:
        reasons, since_ns = self._reasons.if_expired(values.begin_ns) or (None, None)
        return values._replace(reasons=reasons, reasons_since_ns=since_ns)

    # -- power and energy

    def _find_power(self) -> tuple[str, Sensor]:
        """The key of the device's power, and its sensor."""
        power = self._optional(self.smi.amdsmi_get_power_info) or {}
        for key, sensor in _POWER_KEYS.items():
            # A field that the device lacks is "N/A", all ones, or zero, which no device draws.
            if sane_w(power.get(key)):
                return key, sensor
        if self._is_mi200():
            raise PowerUnavailableError(
                f"no power: this is the second die of an {self._name}, which has no power sensor of its own; the first "
                "die of the package reports the power of both"
            )
        raise PowerUnavailableError(f"no power: {self._name} gives AMD SMI no power that can be true ({power})")

    def _read_power_w(self) -> float | None:
        return sane_w(self._entry(self._power_key, self.smi.amdsmi_get_power_info))

    def _entry(self, key: str, function: Any, *arguments: Any) -> Any:
        """An entry of the dictionary that a call returns; None if the call fails as in ``_optional``, or lacks it."""
        found = self._optional(function, *arguments)
        return None if found is None else found.get(key)

    def _read_energy(self) -> float | None:
        count = self._optional(self.smi.amdsmi_get_energy_count)
        if count is None:
            return None
        # Older releases call the counter "power".
        return self._energy_of(count.get("energy_accumulator", count.get("power")), count.get("counter_resolution"))

    def _energy_of(self, value: Any, resolution_uj: Any) -> float | None:
        # A counter at zero or at all ones does not exist.
        if not isinstance(value, int) or not 0 < value < 2**64 - 1 or not resolution_uj:
            return None
        if self._counter is None:
            self._counter = EnergyCounter(tick_j=float(resolution_uj) * 1e-6, counts=None)
        return self._counter.read(value)

    def _partition(self) -> str:
        """The socket's partition mode, such as CPX; empty if unpartitioned or unknown."""
        found = None
        with contextlib.suppress(AttributeError, PowerError):
            found = self._optional(self.smi.amdsmi_get_gpu_compute_partition)
        return found if isinstance(found, str) and found.isalpha() and found != "SPX" else ""

    def _is_mi200(self) -> bool:
        return "MI250" in self._name.upper()

    # -- the rest

    def _read_reasons(self) -> tuple[Reasons | None, int | None]:
        """The share of time since the previous read that each reason throttled the device, and when that read was."""
        now = self._optional(self.read_counts, name="amdsmi_get_gpu_metrics_info")
        if now is None:
            return None, None
        if not now.get("accumulation_counter"):
            status = now.get("throttle_status")  # before MI300: momentary bits, which differ by chip
            return (frozenset({"throttled"} if status else ()) if status is not None else None), None
        before, since_ns = self._residencies, self._residencies_ns - _THROTTLE_LAG_NS
        elapsed = now["accumulation_counter"] - before.get("accumulation_counter", 0)
        if before and not elapsed:  # the table was not updated
            return None, None
        self._residencies, self._residencies_ns = now, self._clock_ns()
        if not before or elapsed < 0:  # nothing to compare with, or the counters were reset
            return None, None
        shares = {word: (now.get(name, 0) - before.get(name, 0)) / elapsed for name, word in _RESIDENCIES}
        return {word: min(1.0, share) for word, share in shares.items() if share > 0}, since_ns

    def read_counts(self, device: Any) -> dict[str, int]:
        """The columns of ``_COLUMNS`` in the device's metrics table.

        ``amdsmi_get_gpu_metrics_info`` makes a dictionary of all columns, which takes many times longer than the read.
        So this fills the package's structure directly, if the package has it.
        """
        try:
            wrapper = self.smi.amdsmi_interface.amdsmi_wrapper
            table = wrapper.amdsmi_gpu_metrics_t()
            code = wrapper.amdsmi_get_gpu_metrics_info(device, ctypes.byref(table))
        except (AttributeError, TypeError, ctypes.ArgumentError):
            metrics = self.smi.amdsmi_get_gpu_metrics_info(device)
            return {name: int(metrics[name]) for name in _COLUMNS if isinstance(metrics.get(name), int)}
        if code:
            raise self.smi.AmdSmiLibraryException(code)
        columns = [(name, getattr(type(table), name)) for name in _COLUMNS if hasattr(table, name)]
        values = {name: (getattr(table, name), 2 ** (8 * column.size) - 1) for name, column in columns}
        return {name: value for name, (value, absent) in values.items() if value != absent}

    def _read_slow_values(self) -> SlowValues:
        return SlowValues(self._clock("MEM"), self._read_temperature_c(), self._cap_w("power_cap"))

    def _clock(self, kind: str) -> float | None:
        return _sane_mhz(self._entry("clk", self.smi.amdsmi_get_clock_info, self.smi.AmdSmiClkType[kind]))

    def _cap_w(self, key: str) -> float | None:
        value = self._entry(key, self.smi.amdsmi_get_power_cap_info)
        return (sane_w(value * 1e-6) or None) if isinstance(value, int) else None

    def _read_temperature_c(self) -> float | None:
        kinds, metrics = self.smi.AmdSmiTemperatureType, self.smi.AmdSmiTemperatureMetric
        for kind in ("HOTSPOT", "EDGE"):
            value = self._optional(self.smi.amdsmi_get_temp_metric, kinds[kind], metrics.CURRENT)
            if isinstance(value, int) and value > 0:
                return value / 1000 if value > 1000 else float(value)  # some releases return millidegrees
        return None

    def _read_name(self) -> str:
        name = self._entry("market_name", self.smi.amdsmi_get_gpu_asic_info)
        return str(name) if name and name != "N/A" else "AMD GPU"

    def _identify(self, pci_bus_id: str) -> str:
        uuid = self._optional(self.smi.amdsmi_get_gpu_device_uuid)
        # A PCI address is unique only within its node.
        return str(uuid) if uuid and str(uuid) != "N/A" else f"{socket.gethostname()}/{pci_bus_id}"

    def _is_permanent(self, error: Any, name: str) -> bool:
        if not isinstance(error, self.smi.AmdSmiLibraryException):  # the package itself fails on unexpected values
            raise PowerError(f"{name}: {type(error).__name__}: {error}") from error
        code = error.get_error_code()
        if code in _NO_SUCH_DEVICE:
            raise DeviceLostError(f"the GPU is gone: {amd_words(error)}") from error
        if code not in _NOT_SUPPORTED:
            raise PowerError(f"{name}: {amd_words(error)}") from error
        return True


class AmdTick:
    """Reads power, the energy counter, and the compute units' clock, with as little Python code as possible.

    The package checks its arguments and makes a dictionary of each result, which costs more than the call. This reuses
    its structures. Raises AttributeError if the package lacks them, or its functions take other arguments.
    """

    def __init__(self, smi: Any, device: Any, power_key: str) -> None:
        wrapper = smi.amdsmi_interface.amdsmi_wrapper
        self._get_power, self._get_energy = wrapper.amdsmi_get_power_info, wrapper.amdsmi_get_energy_count
        self._get_clock = wrapper.amdsmi_get_clock_info
        functions = self._get_power, self._get_energy, self._get_clock
        if [len(function.argtypes) for function in functions] != [2, 4, 3]:
            raise AttributeError  # caught by ``of``
        self._device = device
        self._key = power_key
        self._power, self._clock = wrapper.amdsmi_power_info_t(), wrapper.amdsmi_clk_info_t()
        self._count, self._resolution_uj, self._timestamp = ctypes.c_uint64(), ctypes.c_float(), ctypes.c_uint64()
        self._power_at, self._clock_at = ctypes.byref(self._power), ctypes.byref(self._clock)
        self._energy_at = tuple([ctypes.byref(item) for item in (self._count, self._resolution_uj, self._timestamp)])
        self._kind = smi.AmdSmiClkType.GFX

    @classmethod
    def of(cls, smi: Any, device: Any, power_key: str, power_w: float) -> AmdTick | None:
        """A tick of the device; None if the package does not allow it, or its power disagrees with ``power_w``."""
        try:
            tick = cls(smi, device, power_key)
            values = tick.read(lambda: 0)
        except Exception:  # other versions of the package may raise anything; the slow path remains
            return None
        return tick if values is not None and _AGREE[0] * power_w <= values[2] <= _AGREE[1] * power_w else None

    def read(self, clock_ns: Clock) -> tuple[int, int, float, int, float, int] | None:
        """Read the device now; None if any part failed.

        Returns when the read of power and energy began and ended (ns), watts, the energy counter, microjoules per
        count, and the compute units' clock (MHz).
        """
        begin_ns = clock_ns()
        failed = self._get_power(self._device, self._power_at) or self._get_energy(self._device, *self._energy_at)
        end_ns = clock_ns()
        if failed or self._get_clock(self._device, self._kind, self._clock_at):
            return None
        power_w = float(getattr(self._power, self._key))
        if power_w > MAX_SANE_W:  # all ones, in any number of bits: the device lacks the value
            return None
        return begin_ns, end_ns, power_w, self._count.value, self._resolution_uj.value, self._clock.clk


def _sane_mhz(value: Any) -> float | None:
    return float(value) if isinstance(value, int) and 0 < value < 100_000 else None


def _generation(major: int) -> int:
    """The major version of ROCm that a major version of AMD SMI belongs to.

    The library has versions 24.x and 25.x in ROCm 6 and 26.x in ROCm 7. Python packages use those numbers, or ROCm's.
    """
    if major < 23:
        return major
    return 6 if major < 26 else 7


def amd_words(error: Exception) -> str:
    """AMD SMI's error message, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
