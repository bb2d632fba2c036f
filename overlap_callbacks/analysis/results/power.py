"""Measured power: plain data, as it is sent between ranks and written to the record."""

from __future__ import annotations

import enum

import msgspec

from overlap_callbacks.analysis.results.mode import Mode


class Cause(enum.Enum):
    """Why a device holds its clock back."""

    POWER = "power cap"
    TEMPERATURE = "temperature"
    HARDWARE = "hardware"
    UNNAMED = "a reason that the driver does not name"


# Every reason that a reading may have, and its cause of throttling; None if it does not throttle. NVML's reasons come
# first. ``sw_power_cap`` is the normal state of a busy device near its limit: throttling, but not a fault.
# ``hw_slowdown`` at least halves the clock, for heat, the power brake or a current peak. The two other ``hw_`` reasons
# say which of these it is, if NVML knows.
REASONS: dict[str, Cause | None] = {
    "gpu_idle": None,
    "application_clocks": None,
    "sw_power_cap": Cause.POWER,
    "hw_slowdown": Cause.HARDWARE,
    "sync_boost": None,
    "sw_thermal_slowdown": Cause.TEMPERATURE,
    "hw_thermal_slowdown": Cause.TEMPERATURE,
    "hw_power_brake": Cause.HARDWARE,
    "display_clocks": None,
    "package_power_limit": Cause.POWER,
    "socket_thermal": Cause.TEMPERATURE,
    "memory_thermal": Cause.TEMPERATURE,
    "voltage_regulator_thermal": Cause.TEMPERATURE,
    "processor_hot": Cause.TEMPERATURE,
    "throttled": Cause.UNNAMED,
}


class SourceInfo(msgspec.Struct, frozen=True):
    """The source of power figures, and their meaning.

    Attributes:
        name: ``nvml``, ``amdsmi`` or ``rapl``.
        device_id: the same on every rank that uses the device, and on no other device of any node.
        power_kind: ``instantaneous``, ``1 s average``, ``mean between reads``, ...
        averaging_s: the sensor averages over some part of this time before a reading. None if the reading is
            a mean since the previous one.
        energy_lag_s: maximum age of the energy counter's value at a read; None without a counter.
        default_interval_s: time between readings, unless the user chooses another.
        tdp_w: the device's default limit.
        limit_w: the limit in force when the source was made.
        notes: notes for readers of the figures.
        window_s: averaging time of the sensor; None if not known.
        renewed_s: update interval of the sensor; 0 if shorter than any interval between readings.
    """

    name: str
    device_name: str
    device_id: str
    power_kind: str
    averaging_s: float | None
    energy_lag_s: float | None
    default_interval_s: float
    tdp_w: float | None = None
    limit_w: float | None = None
    notes: tuple[str, ...] = ()
    window_s: float | None = None
    renewed_s: float = 0.0

    @property
    def has_energy(self) -> bool:
        return self.energy_lag_s is not None

    def min_block_s(self, interval_s: float) -> float:
        """Minimum length of a block that contains at least one reading of this block only.

        One averaging interval must pass before a reading counts. Up to one sampling interval passes until the next
        tick, and one more allows for a late tick.
        """
        averaging_s = self.averaging_s if self.averaging_s is not None else interval_s
        return averaging_s + 2 * interval_s


class UnitUtilisation(msgspec.Struct, frozen=True):
    """Utilisation of the device's units, as fractions over ``measured_s`` of a mode; None if not available."""

    sm: float | None
    sm_occupancy: float | None
    tensor: float | None
    dram: float | None
    nvlink_rx_gb_s: float | None
    nvlink_tx_gb_s: float | None
    measured_s: float


class PositionPower(msgspec.Struct, frozen=True):
    """Mean clock and power of the steps at one block position, from 0; None without readings of these alone."""

    position: int
    num_clocks: int
    sm_clock_mhz: float | None
    num_readings: int
    avg_w: float | None


class PowerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Power and clock of one mode, on one device or on several; None if not measured.

    Attributes:
        peak_w, p99_w: highest power, and its 99th percentile by time; the highest of any device.
        avg_tdp_fraction, peak_tdp_fraction: mean and highest power over the device's default limit.
        energy_per_step_j: energy of a step; for several devices the sum. Its 95 % interval is over blocks.
        energy_method: ``counter`` or ``samples`` (``held samples`` in older records, of energy alone), the same for all
            modes; ``mixed`` if devices differ; empty without a figure.
        sm_clock_mhz: mean over time.
        throttle_fraction: fraction of time with a reduced clock, for any cause.
        reasons: fraction of time for each reason that occurred, throttling or not.
        compute_clock_mhz: mean SM clock of the readings during compute of profiled steps; for several devices, over
            those that have it in both modes.
    """

    peak_w: float | None = None
    p99_w: float | None = None
    avg_tdp_fraction: float | None = None
    peak_tdp_fraction: float | None = None
    energy_per_step_j: float | None = None
    energy_per_step_j_ci_low: float | None = None
    energy_per_step_j_ci_high: float | None = None
    energy_method: str = ""
    sm_clock_mhz: float | None = None
    throttle_fraction: float | None = None
    reasons: dict[str, float] | None = None
    parts: UnitUtilisation | None = None
    compute_clock_mhz: float | None = None
    compute_clock_readings: int = 0

    def cause_fraction(self, cause: Cause) -> float | None:
        """Maximum fraction of time for which the clock was reduced by ``cause``: its reasons may coincide.

        None if no device gives reasons.
        """
        if self.reasons is None:
            return None
        return min(1.0, sum(fraction for word, fraction in self.reasons.items() if REASONS.get(word) is cause))


class ModePower(PowerFigures, frozen=True):
    """Power of one mode on one device; None if not measured.

    Attributes:
        num_steps, measured_s: steps whose power was measured, and their time.
        num_readings: power readings in the mean.
        avg_w: mean power, by time. Its 95 % interval is over blocks.
        sampled_energy_per_step_j: energy of a step from power readings; cross-checks the energy counter.
        energy_steps: counted steps; their mean time times mean power is the energy of a step.
        missing: why there is no power figure, and what would help; empty if there is one.
        sampled_w, counted_w: mean power from power readings, and from the energy counter.
        power_error: 95 % bound of the relative error of mean power for these steps.
        positions: clock and power by position in the block, if the sensor resolves single steps: memory effects show
            there first.
    """

    mode: Mode
    num_steps: int = 0
    num_readings: int = 0
    measured_s: float = 0.0
    avg_w: float | None = None
    avg_w_ci_low: float | None = None
    avg_w_ci_high: float | None = None
    sampled_energy_per_step_j: float | None = None
    energy_steps: int = 0
    memory_clock_mhz: float | None = None
    missing: str = ""
    sampled_w: float | None = None
    counted_w: float | None = None
    power_error: float | None = None
    positions: tuple[PositionPower, ...] = ()


class DevicePower(msgspec.Struct, frozen=True):
    """Power of one rank's device in one window.

    Attributes:
        min_block_s: minimum block length for power figures.
        limit_w: lowest power limit in force; None if not available.
        late: ticks skipped because a reading came too late.
        problems: why figures are doubtful or missing.
        failed: reads that failed.
    """

    source: SourceInfo
    interval_s: float
    min_block_s: float
    modes: tuple[ModePower, ...] = ()
    limit_w: float | None = None
    max_temperature_c: float | None = None
    late: int = 0
    problems: tuple[str, ...] = ()
    failed: int = 0

    def of(self, mode: Mode) -> ModePower | None:
        return next((m for m in self.modes if m.mode is mode), None)


class JobModePower(PowerFigures, frozen=True):
    """Power of one mode over several devices.

    There is a sum only if every device of the job has the figure: a partial sum would look like the total.

    Attributes:
        num_devices: devices that have power figures.
        total_avg_w, mean_avg_w: sum and mean of their mean powers. The mean's 95 % interval over blocks is the mean of
            the devices' intervals, as the devices of a job step together.
        min_sm_clock_mhz: of the slowest device, which all others wait for.
        max_throttle_fraction: of the most throttled device.
    """

    mode: Mode
    num_devices: int
    total_avg_w: float | None = None
    mean_avg_w: float | None = None
    mean_avg_w_ci_low: float | None = None
    mean_avg_w_ci_high: float | None = None
    min_sm_clock_mhz: float | None = None
    max_throttle_fraction: float | None = None


class JobPower(msgspec.Struct, frozen=True):
    """Power over ranks.

    Attributes:
        num_devices: devices that the ranks use; two ranks may share one.
        ranks, without: ranks whose devices these are, and those that have no source of power; of many the lowest.
        problems: of the ranks, each once, and why figures of a mode are missing.
        source: source of the lowest rank's figures.
        num_without: ranks that have no source of power; unset where ``without`` lists them all.
    """

    num_devices: int
    ranks: tuple[int, ...]
    without: tuple[int, ...] = ()
    modes: tuple[JobModePower, ...] = ()
    problems: tuple[str, ...] = ()
    source: SourceInfo | None = None
    num_without: int | msgspec.UnsetType = msgspec.UNSET

    def of(self, mode: Mode) -> JobModePower | None:
        return next((m for m in self.modes if m.mode is mode), None)


class TraceSegment(msgspec.Struct, frozen=True):
    """A stretch of the trace in one mode; times are from the start of the trace.

    Attributes:
        counted: whether its steps count; warm-up steps do not. True in records of earlier versions.
        profiled: whether they ran under the profiler; False in records of earlier versions.
    """

    mode: Mode = msgspec.field(name="arm")
    start_ms: float
    end_ms: float
    counted: bool = True
    profiled: bool = False


class PowerTrace(msgspec.Struct, frozen=True):
    """Power and clock against time.

    Attributes:
        start_ns: where the trace starts, on ``time.perf_counter_ns`` of the rank.
        time_ms: of the points, from the start of the trace, ascending.
        sm_clock_mhz: the clock at each, the last known if a reading has none; empty if never available.
        averaging_s: a point is the mean power over this time at most before it; None where it is the mean since the
            previous reading, and of momentary power.
        tdp_w, limit_w: the default limit, and the lowest in force.
        num_readings: number of readings before thinning.
        communication: when communication was in flight, as (start, end) in milliseconds from the start of the trace;
            known for the profiled steps alone.
        both: the part of it during which compute also ran.
    """

    start_ns: int
    time_ms: tuple[float, ...]
    power_w: tuple[float, ...]
    sm_clock_mhz: tuple[float, ...]
    averaging_s: float | None
    tdp_w: float | None
    limit_w: float | None
    segments: tuple[TraceSegment, ...]
    num_readings: int
    communication: tuple[tuple[float, float], ...] = ()
    both: tuple[tuple[float, float], ...] = ()
