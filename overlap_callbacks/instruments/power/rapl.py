"""The power source of CPUs, through Linux's energy counters in ``/sys/class/powercap`` (RAPL: Intel, AMD from Zen on).

Counts whole packages, and on request their memory. The zones ``psys`` and ``core`` overlap with packages.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from overlap_callbacks.analysis.power.readings import Reading
from overlap_callbacks.analysis.results.power import SourceInfo
from overlap_callbacks.instruments.power.source import (
    MEAN_BETWEEN_READS,
    CachedRead,
    Clock,
    EnergyCounter,
    PowerError,
    PowerSource,
    PowerUnavailableError,
    host_clock,
    sane_w,
)

POWERCAP = Path("/sys/class/powercap")

# The counters are updated about every millisecond.
_ENERGY_LAG_S = 0.001


@dataclass
class _Zone:
    """One energy counter: the file ``energy_uj`` of a folder."""

    name: str
    energy: Path
    counter: EnergyCounter


class RaplSource(PowerSource):
    """Reads all CPU packages of this machine as one device; with ``dram`` also the memory's own zones, if any.

    Power is the mean since the previous reading, from the counters; the first reading has none. ``root``: folder of the
    zones. Raises PowerUnavailableError if there are no packages, or their counters are not readable.
    """

    def __init__(self, root: Path = POWERCAP, *, dram: bool = False, clock_ns: Clock = host_clock) -> None:
        self._clock_ns = clock_ns
        self._zones = _find_zones(root, dram)
        self._last: tuple[int, float] | None = None
        self._limits = [zone.energy.parent for zone in self._zones if zone.name.startswith("package")]
        self._limit_w = CachedRead(self._read_limit_w)
        self.info = SourceInfo(
            name="rapl",
            device_name=f"CPU: {', '.join(zone.name for zone in self._zones)}",
            device_id=f"{socket.gethostname()}/cpu",
            power_kind=MEAN_BETWEEN_READS,
            averaging_s=None,
            energy_lag_s=_ENERGY_LAG_S,
            default_interval_s=0.1,
            tdp_w=_sum_w(self._limits, "constraint_0_max_power_uw"),
            limit_w=self._read_limit_w(),
            notes=("power is of all CPU packages of the machine, whoever uses them",),
        )

    def sample(self) -> Reading:
        begin_ns = self._clock_ns()
        try:
            parts = [zone.counter.read(int(zone.energy.read_text())) for zone in self._zones]
        except (OSError, ValueError) as error:
            raise PowerError(f"an energy counter of the CPU cannot be read: {error}") from error
        end_ns = self._clock_ns()
        time_ns = (begin_ns + end_ns) // 2
        limit_w = self._limit_w.at(begin_ns)
        if any(part is None for part in parts):
            self._last = None
            return Reading(time_ns=time_ns, limit_w=limit_w)
        energy_j = sum(part for part in parts if part is not None)
        last, self._last = self._last, (time_ns, energy_j)
        if last is None or time_ns <= last[0]:
            return Reading(time_ns=time_ns, energy_j=energy_j, limit_w=limit_w)
        elapsed_s = (time_ns - last[0]) / 1e9
        power_w = sane_w((energy_j - last[1]) / elapsed_s)
        return Reading(time_ns=time_ns, averaging_s=elapsed_s, power_w=power_w, energy_j=energy_j, limit_w=limit_w)

    def close(self) -> None:
        """Nothing to release."""

    def _read_limit_w(self) -> float | None:
        return _sum_w(self._limits, "constraint_0_power_limit_uw")


def _find_zones(root: Path, dram: bool) -> list[_Zone]:
    """The counters to add up. Raises like ``RaplSource``.

    Zones are called ``intel-rapl:N`` (on AMD too), their parts ``intel-rapl:N:M``. The packages appear a second time
    under ``intel-rapl-mmio``, which is ignored.
    """
    folders = sorted(root.glob("intel-rapl:*")) if root.is_dir() else []
    zones: list[_Zone] = []
    denied: list[Path] = []
    for folder in folders:
        name = _read(folder / "name")
        if name is None or not (name.startswith("package") or (dram and name == "dram")):
            continue
        energy = folder / "energy_uj"
        try:
            energy.read_text()
        except PermissionError:
            denied.append(energy)
            continue
        except OSError:
            continue
        span_uj = _read(folder / "max_energy_range_uj")
        zones.append(_Zone(name, energy, EnergyCounter(tick_j=1e-6, counts=int(span_uj) if span_uj else None)))
    if denied:  # otherwise the power of some packages would pass for that of all
        raise PowerUnavailableError(
            f"no power of the CPU: {denied[0]} may be read by root only; to allow it: "
            f"sudo chmod a+r {root}/intel-rapl:*/energy_uj (until the next start of the machine)"
        )
    if not any(zone.name.startswith("package") for zone in zones):
        raise PowerUnavailableError(
            f"no power of the CPU: {root} has no packages; virtual machines mostly lack these counters, as do kernels "
            "without the module intel_rapl_msr"
        )
    return zones


def _sum_w(folders: list[Path], name: str) -> float | None:
    """The sum of a limit over packages, in watts; None if a package lacks the file, which is in microwatts."""
    values = [_read(folder / name) for folder in folders]
    if not values or not all(value is not None and value.isdecimal() for value in values):
        return None
    return sane_w(sum(int(value) for value in values if value is not None) * 1e-6) or None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
