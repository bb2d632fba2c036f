"""Power and clock of this rank's device in each block, where there is a sensor."""

from __future__ import annotations

import os
from typing import NamedTuple

from overlap_callbacks.analysis.power.device import mean_now
from overlap_callbacks.analysis.power.mean_power import counted_power
from overlap_callbacks.analysis.power.readings import Segment
from overlap_callbacks.analysis.power.sampled import sampled_power
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.instruments.power.discovery import CPU, NoPower, find_source, identify
from overlap_callbacks.instruments.power.sampler import Sampler

# How far the power of one block may be from the truth, as a fraction. Over blocks this averages out, and the interval
# over blocks shows it.
_MAX_ERROR = 0.1


class Read(NamedTuple):
    """What the device did in a block; None for what it does not tell, or not for a block so short."""

    power_w: float | None = None
    clock_mhz: float | None = None


class Sensors:
    """Reads this rank's device until it is closed. Without a sensor there are no figures.

    Of a CPU, the first rank of the host reads for all of them: the sensor is the whole package's.

    Attributes:
        source: what tells the power; empty if nothing does.
        missing: why nothing does; empty if something does.
    """

    def __init__(self) -> None:
        self.source, self.missing = "", ""
        self._sampler: Sampler | None = None
        identity = identify()
        if identity.vendor == CPU and os.environ.get("LOCAL_RANK", "0") != "0":
            return
        found = find_source(identity, utilisation=False)
        if isinstance(found, NoPower):
            self.missing = found.reason
            return
        self.source = f"{found.info.name}, {found.info.power_kind}"
        self._info = found.info
        self._sampler = Sampler(found)
        self._sampler.start()

    def between(self, start_ns: int, end_ns: int) -> Read:
        """Means over a block, as of ``time.perf_counter_ns``."""
        if self._sampler is None or end_ns <= start_ns:
            return Read()
        # The mode says nothing here: what belongs to the stretch of time is asked for.
        segment = Segment(start_ns, end_ns, Mode.OVERLAPPED, 1)
        readings = self._sampler.readings(start_ns)
        found = [
            power
            for power in (
                counted_power(readings, [segment], self._info),
                sampled_power(readings, [segment], self._info, self._sampler.interval_s).mean,
            )
            if power is not None and power.error <= _MAX_ERROR
        ]
        power_w = min(found, key=lambda power: power.error).power_w if found else None
        return Read(power_w, mean_now(readings, [segment], readings.sm_clock_mhz))

    def close(self) -> None:
        """Stop reading."""
        if self._sampler is not None:
            self._sampler.close()
