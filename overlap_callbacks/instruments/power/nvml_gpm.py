"""Reads how busy the parts of an NVIDIA GPU are, by GPU performance monitoring (GPM) of Hopper and newer.

A GPM figure is the difference between two samples of the device's counters. Samples are buffers of the driver and not
thread-safe: the thread that reads the source makes, reads and frees them.
"""

from __future__ import annotations

import contextlib
from typing import Any

from overlap_callbacks.analysis.power.readings import Utilisation

# NVML needs some 100 ms between two samples. The limit is a little less: at 100 ms, every other tick would be too soon.
_MIN_GAP_NS = 90_000_000

# Number of each metric, the name of its field in ``Utilisation``, and the factor from NVML's unit (percent, or MiB/s).
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


class GpmMeter:
    """Alternates between two samples of the counters.

    Args:
        nvml: the ``pynvml`` module, initialised.
        device: handle of a device that has GPM.
    """

    def __init__(self, nvml: Any, device: Any) -> None:
        self._nvml = nvml
        self._device = device
        self._last: Any = None
        self._spare: Any = None
        self._last_ns: int | None = None
        self._query = nvml.c_nvmlGpmMetricsGet_t()  # 23 KB: made once
        self._query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._query.numMetrics = len(_METRICS)
        # Views of the query: they follow what the driver writes.
        self._items = [(item, *rest) for item, (_, *rest) in zip(self._query.metrics, _METRICS, strict=False)]
        for (item, _, _), (metric, _, _) in zip(self._items, _METRICS, strict=True):
            item.metricId = metric
        self._samples: list[Any] = []
        for _ in range(2):
            self._samples.append(nvml.nvmlGpmSampleAlloc())
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
        """How busy the device was since the previous call; None for the first call, and if it is too soon.

        If GPM fails, only its figures are missing: power is still read.

        Args:
            now_ns: the current time, as of ``time.perf_counter_ns``.
        """
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
        """Free the samples."""
        samples, self._samples = self._samples, []
        for sample in samples:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSampleFree(sample)
