"""The driver calls of one tick of an NVIDIA GPU, with preallocated arguments.

Most of a tick's cost is Python code that has dropped out of the CPU's caches. So a tick calls NVML through the library
that ``nvidia-ml-py`` loaded, and reuses that package's structures. If anything is unexpected, ``NvmlSource`` reads
again through the package's own functions, which report what is wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from overlap_callbacks.analysis.power.readings import Utilisation
from overlap_callbacks.instruments.power.source import Clock

FIELD_ENERGY = 83
CLOCK_SM = 1

# The member of NVML's union with a field's value, by NVML's type number. Power and energy are integers.
VALUE_NAMES = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}

# NVML needs about 100 ms between two samples. The limit is slightly lower: at 100 ms, every other tick would be too
# early.
_MIN_GAP_NS = 90_000_000

# Number of each metric, its field in ``Utilisation``, and the factor from NVML's unit (percent, or MiB/s).
_PERCENT = 0.01
_MIB_TO_GB = 2**20 / 1e9
_METRICS = (
    (2, "sm", _PERCENT),
    (3, "sm_occupancy", _PERCENT),
    (5, "tensor", _PERCENT),
    (10, "dram", _PERCENT),
    (60, "nvlink_rx_gb_s", _MIB_TO_GB),
    (61, "nvlink_tx_gb_s", _MIB_TO_GB),
)


class NvmlTick:
    """Reads power and energy in one call, then the SM clock, then the reasons for it.

    Raises AttributeError if the package or the driver lacks what this needs.
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
        """A tick of the device; None if the package, the driver or the device does not allow the fast path."""
        try:
            tick = cls(nvml, device, power_field)
            return tick if tick.read(lambda: 0) is not None else None
        except Exception:  # other versions of the package may raise anything; the slow path remains
            return None

    def read(self, clock_ns: Clock) -> tuple[int, int, float, int, int, int] | None:
        """Read the device now; None if any part failed.

        Returns when the read of power and energy began and ended (ns), watts, the energy counter (mJ), the SM clock
        (MHz), and its reason bits.
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
        power_w = getattr(power_value, power_name) / 1e3
        energy_mj = getattr(energy_value, energy_name)
        return begin_ns, end_ns, power_w, energy_mj, self._clock.value, self._reasons.value


class GpmMeter:
    """Reads the utilisation of a GPU's parts, by GPU performance monitoring (GPM) of Hopper and newer.

    A figure is the difference between two samples of the device's counters. The samples are buffers of the driver and
    not thread-safe: the thread that reads the source creates, reads and frees them.
    """

    def __init__(self, nvml: Any, device: Any) -> None:
        self._nvml = nvml
        self._device = device
        self._last_ns: int | None = None
        self._query = nvml.c_nvmlGpmMetricsGet_t()  # 23 KB: allocated once
        self._query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._query.numMetrics = len(_METRICS)
        self._items = []  # views of the query: they follow what the driver writes
        for item, (metric, field, factor) in zip(self._query.metrics, _METRICS, strict=False):
            item.metricId = metric
            self._items.append((item, field, factor))
        self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        self._last, self._spare = self._samples

    @classmethod
    def of(cls, nvml: Any, device: Any) -> GpmMeter | None:
        """A meter of the device; None if the device or the driver has no GPM."""
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
                return None
            return cls(nvml, device)
        except (nvml.NVMLError, AttributeError):
            return None

    def read(self, now_ns: int) -> Utilisation | None:
        """Utilisation since the previous call; None on the first, if it is too early, and if GPM fails."""
        if self._last_ns is not None and now_ns - self._last_ns < _MIN_GAP_NS:
            return None
        nvml = self._nvml
        try:
            nvml.nvmlGpmSampleGet(self._device, self._spare)
        except nvml.NVMLError:
            self._last_ns = None  # the next sample has no predecessor
            return None
        since_ns, self._last_ns = self._last_ns, now_ns
        self._last, self._spare = self._spare, self._last
        if since_ns is None:
            return None
        query = self._query
        query.sample1, query.sample2 = self._spare, self._last
        try:
            nvml.nvmlGpmMetricsGet(query)
        except nvml.NVMLError:
            return None
        values = {name: item.value * factor for item, name, factor in self._items if item.nvmlReturn == 0}
        return Utilisation(since_ns=since_ns, **values)

    def close(self) -> None:
        samples, self._samples = self._samples, []
        for sample in samples:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSampleFree(sample)
