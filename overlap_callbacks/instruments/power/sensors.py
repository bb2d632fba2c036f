"""Averaging time and delay of power sensors, by chip and by interface: one table, with its sources.

The averaging window of a reading at time ``t`` lies somewhere between ``t - clear`` and ``t``. So a reading counts for
a mode only if it comes at least ``clear`` after the mode began.

Sources, by number in the table:

1. nvml.h on ``nvmlDeviceGetPowerUsage``: "On Ampere (except GA100) or newer GPUs, the API returns power averaged over 1
   sec interval. On GA100 and older architectures, instantaneous power is returned." On
   ``NVML_FI_DEV_POWER_AVERAGE`` (185): "average power usage over 1 sec interval, Ampere (except GA100) or newer";
   ``NVML_FI_DEV_POWER_INSTANT`` (186): "current power, all architectures".
2. Yang, Adamek, Armour, "Part-time Power Measurements: nvidia-smi's Lack of Attention" (arXiv 2312.02741): A100 and
   H100 look at 25 ms of every 100 ms; other chips average over as much as 100 ms, renewed as often.
3. ROCm/legacy-rocm-build issue 1649: the driver reads the firmware's table at most every millisecond. Over which time
   the firmware averages is not published.

An unpublished delay is assumed to be 100 ms, an unpublished chip to be like the slowest of the others.
"""

from __future__ import annotations

from typing import NamedTuple

from overlap_callbacks.instruments.power.source import AVERAGE_1_S, INSTANTANEOUS

# NVML's architecture numbers; later ones are assumed to be like the last.
TURING, AMPERE, HOPPER = 6, 7, 9


class Sensor(NamedTuple):
    """Properties of a power sensor.

    The averaging time, the time between two values, the delay until a value can be read, and the kind, as in
    ``SourceInfo``.
    """

    window_s: float
    renewed_s: float
    late_s: float
    kind: str = INSTANTANEOUS

    @property
    def clear_s(self) -> float:
        """Time before a reading that it may cover."""
        return self.window_s + self.renewed_s + self.late_s


PART_TIME = Sensor(0.025, 0.1, 0.1)  # source 2: A100 and H100, 225 ms in total
FULL_TIME = Sensor(0.1, 0.1, 0.1)  # source 2: chips that average over the whole time between two values
ONE_SECOND = Sensor(1.0, 0.1, 0.1, AVERAGE_1_S)  # source 1; update interval: source 2
AMD_CURRENT = Sensor(0.02, 0.001, 0.1)  # source 3; the window is an assumption
# Source 3; the window is an assumption, longer than any reported one.
AMD_AVERAGE = Sensor(1.0, 0.001, 0.1, "average, over a time that AMD does not publish")


def nvidia_instant(architecture: int | None, is_ga100: bool) -> Sensor:
    """The sensor behind field 186, and behind ``nvmlDeviceGetPowerUsage`` where that is instantaneous.

    ``architecture``: NVML's number, if known; GA100 is the chip of A100, A800 and A30.
    """
    return PART_TIME if is_ga100 or architecture == HOPPER else FULL_TIME


def nvidia_usage(architecture: int | None, is_ga100: bool) -> Sensor:
    """The sensor behind ``nvmlDeviceGetPowerUsage``: source 1."""
    is_old = architecture is not None and architecture < AMPERE
    return nvidia_instant(architecture, is_ga100) if is_old or is_ga100 else ONE_SECOND
