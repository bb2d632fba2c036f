"""Every figure, once: its name, unit and meaning, what to call it, its sign, and which direction is worse.

Tables, cards, alerts, pages and the terminal take these facts from here and keep none of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import Cause, JobModePower


class Figure(NamedTuple):
    """A headline figure.

    Attributes:
        name: the field of the report; ``overlap/`` and the name is the metric's key.
        unit: ``ms`` or ``fraction``.
        meaning: its definition.
        label: what to call it in a table.
        short_label: what to call it where its definition is not at hand; empty where that is ``label``.
        part_label: what to call it below the figure that it is a part of; empty where it is no part of one.
        compares: whether it rests on sequential steps, and so means nothing in an invalid window.
        signed: whether it is a relative change, which is shown with its sign; other fractions are shares.
        less_is_worse: whether a limit on it is passed from above.
        optional: whether most jobs have none, so that a summary does not say that it was not measured.
        between: the least and the most that it can be, where its unit and sign do not say so.
    """

    name: str
    unit: str
    meaning: str
    label: str
    short_label: str = ""
    part_label: str = ""
    compares: bool = False
    signed: bool = False
    less_is_worse: bool = False
    optional: bool = False
    between: tuple[float, float] | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the most that it can be: times from 0, shares from 0 to 1, changes from -1."""
        if self.between is not None:
            return self.between
        if self.unit != "fraction":
            return 0.0, math.inf
        return (-1.0, math.inf) if self.signed else (0.0, 1.0)

    @property
    def key(self) -> str:
        """The key of its metric."""
        return f"overlap/{self.name}"

    @property
    def short(self) -> str:
        """What to call it where its definition is not at hand."""
        return self.short_label or self.label

    @property
    def title(self) -> str:
        """``short``, with a capital, e.g. for the title of a chart."""
        return self.short[0].upper() + self.short[1:]


# In the order of a report's metrics.
FIGURES = (
    Figure(
        "compute_slowdown",
        "fraction",
        "eq. 1: (T_comp,ov - T_comp,iso) / T_comp,iso",
        "compute slowdown (eq. 1)",
        "compute slowdown",
        compares=True,
        signed=True,
    ),
    Figure(
        "overlap_ratio",
        "fraction",
        "eq. 2: compute time during which communication is in flight / T_comp,ov",
        "overlap ratio (eq. 2)",
        "overlap ratio",
    ),
    Figure(
        "e2e_overlapped_ms", "ms", "eq. 3: step time, overlapped, measured", "step, overlapped (eq. 3)", "overlapped"
    ),
    Figure(
        "e2e_ideal_ms",
        "ms",
        "eq. 4: e2e_overlapped - (T_comp,ov - T_comp,iso)",
        "step, ideal (eq. 4)",
        "ideal",
        compares=True,
    ),
    Figure(
        "e2e_sequential_model_ms",
        "ms",
        "eq. 5: e2e_ideal + hidden_comm - what collectives wait longer than in sequential steps",
        "step, sequential by the model (eq. 5)",
        "sequential by the model",
        compares=True,
    ),
    Figure(
        "e2e_sequential_ms", "ms", "step time, sequential, measured", "step, sequential", "sequential", compares=True
    ),
    Figure(
        "speedup_vs_sequential",
        "fraction",
        "e2e_sequential / e2e_overlapped - 1",
        "speed-up of overlap over sequential",
        "speed-up of overlap",
        compares=True,
        signed=True,
        less_is_worse=True,
    ),
    Figure(
        "attainable_ms",
        "ms",
        "the longer of slowest_compute and comm_isolated without waiting: a step if overlap were perfect and free",
        "step, attainable by overlap",
        "attainable",
        compares=True,
    ),
    Figure(
        "attained_fraction",
        "fraction",
        "(e2e_sequential - e2e_overlapped) / (e2e_sequential - attainable)",
        "share of the attainable gain",
        "gain attained",
        compares=True,
        less_is_worse=True,
        optional=True,
        between=(-math.inf, 1.0),
    ),
    Figure("gap_to_ideal", "fraction", "e2e_overlapped / e2e_ideal - 1", "gap to ideal", compares=True, signed=True),
    Figure(
        "sequential_model_error",
        "fraction",
        "e2e_sequential_model / e2e_sequential - 1: checks the model",
        "model of equation 5 against the measured step",
        "error of the sequential model",
        compares=True,
        signed=True,
    ),
    Figure(
        "compute_ms",
        "ms",
        "T_comp,ov: sum of compute kernel times of an overlapped step",
        "compute kernel time, overlapped",
    ),
    Figure(
        "compute_isolated_ms",
        "ms",
        "T_comp,iso: the same of a sequential step",
        "compute kernel time, sequential",
        compares=True,
    ),
    Figure(
        "compute_busy_ms",
        "ms",
        "union of the compute kernels' intervals, overlapped step",
        "compute busy, overlapped",
    ),
    Figure(
        "compute_busy_isolated_ms",
        "ms",
        "the same of a sequential step",
        "compute busy, sequential",
        compares=True,
    ),
    Figure(
        "slowest_compute_ms",
        "ms",
        "compute_busy_isolated of the rank that has the most",
        "compute busy, sequential, slowest rank",
        compares=True,
        optional=True,
    ),
    Figure(
        "comm_ms",
        "ms",
        "time in which communication is in flight in an overlapped step: hidden + exposed",
        "communication in flight",
    ),
    Figure(
        "comm_isolated_ms",
        "ms",
        "the same in a sequential step",
        "communication in flight, sequential",
        compares=True,
    ),
    Figure(
        "hidden_comm_ms",
        "ms",
        "communication time beside compute, overlapped step",
        "communication hidden behind compute",
        part_label="hidden behind compute",
    ),
    Figure(
        "exposed_comm_ms",
        "ms",
        "communication time without compute, overlapped step",
        "exposed communication",
        part_label="exposed",
    ),
    Figure(
        "waiting_ms",
        "ms",
        "the part of comm in which collectives and messages wait for other ranks, overlapped step",
        "waiting in communication",
        optional=True,
    ),
    Figure(
        "waiting_isolated_ms",
        "ms",
        "the same in a sequential step",
        "waiting in communication, sequential",
        compares=True,
        optional=True,
    ),
    Figure(
        "hidden_comm_fraction",
        "fraction",
        "hidden_comm / comm: the overlap efficiency",
        "share of communication that is hidden",
        less_is_worse=True,
    ),
    Figure(
        "comm_slowdown",
        "fraction",
        "sum of communication kernel times without waiting, overlapped over sequential, less one; not where sends and "
        "receives are more than 2% of communication: how long they wait for each other is not known",
        "communication slowdown",
        compares=True,
        signed=True,
    ),
    Figure(
        "comm_ratio",
        "fraction",
        "comm / overlapped step under the profiler (compute_busy + exposed_comm + idle)",
        "communication in flight, share of a step",
    ),
    Figure(
        "p2p_ms",
        "ms",
        "time in which sends and receives are in flight, overlapped step",
        "sends and receives in flight",
        optional=True,
    ),
    Figure(
        "idle_ms",
        "ms",
        "time without compute and communication, overlapped step",
        "neither compute nor communication",
    ),
    Figure(
        "idle_isolated_ms",
        "ms",
        "the same in a sequential step",
        "neither compute nor communication, sequential",
        compares=True,
    ),
    Figure(
        "bubble_ms",
        "ms",
        "idle, and time in which nothing is in flight but messages that wait for their peer, overlapped step",
        "bubble of the pipeline",
        optional=True,
    ),
    Figure(
        "residual_overlap",
        "fraction",
        "eq. 2 in sequential steps: must be near zero",
        "residual overlap in sequential steps",
        "residual overlap",
    ),
    Figure(
        "residual_comm_overlap",
        "fraction",
        "share of communication time beside compute in sequential steps: must be near zero",
        "residual overlap, of communication",
        "residual overlap of communication",
    ),
    Figure(
        "profiler_slowdown",
        "fraction",
        "overlapped steps under the profiler / those without - 1",
        "slowdown by the profiler, overlapped steps",
        "slowdown by the profiler",
        signed=True,
    ),
    Figure(
        "profiler_slowdown_isolated",
        "fraction",
        "the same of sequential steps",
        "slowdown by the profiler, sequential steps",
        compares=True,
        signed=True,
    ),
)
# A window's own cost is none of the figures of its steps, but an alert may watch it like one.
MEASUREMENT_OVERHEAD = Figure(
    "measurement_overhead",
    "fraction",
    "time that training lost to the window and on the steps after it, over the time from one window to the next",
    "cost of measuring",
    between=(-math.inf, math.inf),
)

_BY_NAME = {figure.name: figure for figure in (*FIGURES, MEASUREMENT_OVERHEAD)}

# What a summary shows, section by section: what step times are, what follows from them, compute, communication, the
# measurement.
SUMMARY: tuple[tuple[Figure, ...], ...] = tuple(
    [
        tuple([_BY_NAME[name] for name in section])
        for section in (
            ("e2e_ideal_ms", "e2e_overlapped_ms", "e2e_sequential_ms", "e2e_sequential_model_ms"),
            ("speedup_vs_sequential", "attained_fraction", "gap_to_ideal"),
            ("compute_slowdown", "overlap_ratio"),
            (
                "comm_ms",
                "hidden_comm_ms",
                "exposed_comm_ms",
                "waiting_ms",
                "waiting_isolated_ms",
                "comm_slowdown",
                "p2p_ms",
                "idle_ms",
                "bubble_ms",
            ),
            ("residual_overlap", "residual_comm_overlap"),
        )
    ]
)
# Step times of the modes side by side.
STEP_TIMES = tuple([_BY_NAME[name] for name in ("e2e_ideal_ms", "e2e_overlapped_ms", "e2e_sequential_ms")])


def figure_named(name: str) -> Figure:
    """The figure of this name.

    Raises:
        KeyError: there is none.
    """
    return _BY_NAME[name]


def compares(name: str) -> bool:
    """Whether the figure of this name rests on sequential steps; False for a name of another version of the library."""
    figure = _BY_NAME.get(name)
    return figure is not None and figure.compares


class PowerMetric(NamedTuple):
    """A metric of one mode.

    Attributes:
        section, name: ``<section>/<mode>_<name>`` is its key.
        unit: e.g. ``W``.
        meaning: its definition.
        label: what to call it in a table.
        of: its value.
        bounds: of its 95 % interval; None where it has none.
    """

    section: str
    name: str
    unit: str
    meaning: str
    label: str
    of: Callable[[JobModePower], float | None]
    bounds: Callable[[JobModePower], tuple[float | None, float | None]] = lambda m: (None, None)

    @property
    def possible(self) -> tuple[float, float]:
        """The least and the most that it can be: power may be above its default limit, a share of time is 1 at most."""
        return 0.0, 1.0 if self.unit == "fraction" and "tdp" not in self.name else math.inf

    def key(self, mode: Mode) -> str:
        """The key of its metric."""
        return f"{self.section}/{mode.value}_{self.name}"


def _unit_utilisation(name: str) -> Callable[[JobModePower], float | None]:
    return lambda m: None if m.parts is None else getattr(m.parts, name)


# In the order of a report's metrics.
POWER_METRICS = (
    PowerMetric("power", "avg_w", "W", "mean power of a device", "mean power of a device", lambda m: m.mean_avg_w,
                lambda m: (m.mean_avg_w_ci_low, m.mean_avg_w_ci_high)),
    PowerMetric("power", "total_w", "W", "mean power of all devices together", "mean power, all devices",
                lambda m: m.total_avg_w),
    PowerMetric("power", "peak_w", "W", "highest power of any device", "highest power", lambda m: m.peak_w),
    PowerMetric("power", "p99_w", "W", "highest 99th percentile of any device's power, by time",
                "99th percentile of power", lambda m: m.p99_w),
    PowerMetric("power", "energy_per_step_j", "J", "energy of a step, all devices", "energy of a step",
                lambda m: m.energy_per_step_j, lambda m: (m.energy_per_step_j_ci_low, m.energy_per_step_j_ci_high)),
    PowerMetric("power", "avg_tdp_fraction", "fraction", "mean power over the default limit", "mean, of TDP",
                lambda m: m.avg_tdp_fraction),
    PowerMetric("power", "peak_tdp_fraction", "fraction", "highest power over the default limit", "highest, of TDP",
                lambda m: m.peak_tdp_fraction),
    PowerMetric("device", "sm_clock_mhz", "MHz", "mean SM clock", "SM clock", lambda m: m.sm_clock_mhz),
    PowerMetric("device", "compute_sm_clock_mhz", "MHz", "mean SM clock while compute runs, in profiled steps",
                "SM clock while computing", lambda m: m.compute_clock_mhz),
    PowerMetric("device", "throttle_fraction", "fraction", "time in which the clock was held back", "clock held back",
                lambda m: m.throttle_fraction),
    PowerMetric("device", "power_cap_fraction", "fraction", "the same for a power cap", "held back by a power cap",
                lambda m: m.cause_fraction(Cause.POWER)),
    PowerMetric("device", "thermal_fraction", "fraction", "the same for heat", "held back by heat",
                lambda m: m.cause_fraction(Cause.TEMPERATURE)),
    PowerMetric("device", "hardware_fraction", "fraction", "the same by the hardware's own protection",
                "held back by the hardware", lambda m: m.cause_fraction(Cause.HARDWARE)),
    PowerMetric("device", "sm_busy_fraction", "fraction", "SMs that are busy", "SMs busy", _unit_utilisation("sm")),
    PowerMetric("device", "sm_occupancy_fraction", "fraction", "warps that are active, of the most", "warps active",
                _unit_utilisation("sm_occupancy")),
    PowerMetric("device", "tensor_busy_fraction", "fraction", "time in which tensor cores work", "tensor cores busy",
                _unit_utilisation("tensor")),
    PowerMetric("device", "dram_busy_fraction", "fraction", "memory bandwidth in use", "memory bandwidth used",
                _unit_utilisation("dram")),
    PowerMetric("device", "nvlink_rx_gb_s", "GB/s", "NVLink traffic in", "NVLink in",
                _unit_utilisation("nvlink_rx_gb_s")),
    PowerMetric("device", "nvlink_tx_gb_s", "GB/s", "NVLink traffic out", "NVLink out",
                _unit_utilisation("nvlink_tx_gb_s")),
)  # fmt: skip

ENERGY_PER_TOKEN = "energy_per_token_j"
ENERGY_SAVING = "power/energy_saving_vs_sequential"
PEAK_RISE = "power/peak_w_vs_sequential"
SLOWDOWN_FROM_CLOCK = "device/slowdown_from_clock"
SLOWDOWN_BEYOND_CLOCK = "device/slowdown_beyond_clock"
SLOWDOWN_FROM_SMS = "device/slowdown_from_sms"
SLOWDOWN_FROM_WAVES = "device/slowdown_from_waves"
SLOWDOWN_FROM_MEMORY = "device/slowdown_from_memory"
SLOWDOWN_UNEXPLAINED = "device/slowdown_unexplained"
SLOWDOWN_KEYS = (
    SLOWDOWN_FROM_CLOCK, SLOWDOWN_BEYOND_CLOCK, SLOWDOWN_FROM_SMS, SLOWDOWN_FROM_WAVES, SLOWDOWN_FROM_MEMORY,
    SLOWDOWN_UNEXPLAINED,
)  # fmt: skip


def energy_per_token_key(mode: Mode) -> str:
    """The key of the energy per token in one mode."""
    return f"power/{mode.value}_{ENERGY_PER_TOKEN}"


def power_units() -> dict[str, str]:
    """Unit of each metric of power and of the device, by key."""
    by_mode = {metric.key(mode): metric.unit for metric in POWER_METRICS for mode in Mode}
    by_mode |= {energy_per_token_key(mode): "J" for mode in Mode}
    shares = dict.fromkeys((ENERGY_SAVING, PEAK_RISE, *SLOWDOWN_KEYS), "fraction")
    return {**by_mode, **shares}


def power_meanings() -> dict[str, str]:
    """Meaning of each metric of power and of the device, by key."""
    by_mode = {metric.key(mode): f"{metric.meaning}, {mode.value} steps" for metric in POWER_METRICS for mode in Mode}
    by_mode |= {energy_per_token_key(mode): f"energy per token, {mode.value} steps" for mode in Mode}
    return {
        **by_mode,
        ENERGY_SAVING: "energy of a sequential step over that of an overlapped one, less one",
        PEAK_RISE: "highest power of any device in overlapped steps over that in sequential ones, less one",
        SLOWDOWN_FROM_CLOCK: "sequential over overlapped SM clock, less one: the most that the clock explains",
        SLOWDOWN_BEYOND_CLOCK: "the least of the compute slowdown that remains: contention",
        SLOWDOWN_FROM_SMS: "the part of the compute slowdown that the SMs taken by communication have, by a model",
        SLOWDOWN_FROM_WAVES: "the part that further waves of blocks have, by the same model",
        SLOWDOWN_FROM_MEMORY: "what remains where memory bandwidth was exhausted",
        SLOWDOWN_UNEXPLAINED: "the part of the compute slowdown that no known cause has",
    }
