"""Every figure, once: key, unit, meaning, name, sign, which direction is worse, and formula.

The source for keys and values of reports, units and meanings in the record, W&B's aggregates, names and labels for
Prometheus, limits, tables, pages and the docs. To add a figure, add an entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from overlap_callbacks.analysis import equations
from overlap_callbacks.analysis.results import report_parts
from overlap_callbacks.analysis.results.estimate import stored_estimate
from overlap_callbacks.analysis.results.figure import (
    HIGHEST,
    ISO,
    LOWEST,
    OV,
    SEQ,
    SHARE,
    STEP,
    Family,
    Figure,
    Formula,
)
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import Cause, JobModePower

# -- headline figures, by mean times of timed steps (overlapped, sequential) and of profiled ones (the same)

# Messages up to this fraction of communication hardly affect its slowdown.
_MOST_MESSAGES = 0.02


def _possible(step_ms: float) -> float:
    # Sums over streams can exceed the step; then no time is left.
    return step_ms if step_ms > 0 else math.nan


def _ideal(step: Any, ov: Any, iso: Any) -> float:
    compute_ms, isolated_ms = _possible(ov.compute_ms), _possible(iso.compute_ms)
    return _possible(equations.ideal_step_ms(step.step_ms, compute_ms, isolated_ms))


def _model(step: Any, ov: Any, iso: Any) -> float:
    compute_ms, isolated_ms = _possible(ov.compute_ms), _possible(iso.compute_ms)
    ideal_ms = equations.ideal_step_ms(step.step_ms, compute_ms, isolated_ms)
    more_waiting_ms = ov.waiting_ms - iso.waiting_ms
    known_ms = 0.0 if math.isnan(more_waiting_ms) else more_waiting_ms
    return _possible(equations.sequential_step_ms(ideal_ms, ov.hidden_comm_ms, known_ms))


def _attainable(iso: Any) -> float:
    waiting_ms = 0.0 if math.isnan(iso.waiting_ms) else iso.waiting_ms
    return equations.attainable_step_ms(iso.slowest_compute_ms, iso.comm_busy_ms - waiting_ms)


def _attained(step: Any, seq: Any, iso: Any) -> float:
    return equations.attained_fraction(seq.step_ms, step.step_ms, _attainable(iso))


def _comm_slowdown(ov: Any, iso: Any) -> float:
    # How long a message takes without waiting is too uncertain where NCCL buffers it.
    of_messages = ov.p2p_ms > _MOST_MESSAGES * ov.comm_busy_ms
    return math.nan if of_messages else equations.slowdown(ov.comm_ms, iso.comm_ms)


_STEPS = (
    Figure("overlap/e2e_ideal_ms", "ms", "eq. 4: e2e_overlapped - (T_comp,ov - T_comp,iso)", "step, ideal (eq. 4)",
           "ideal", compares=True, log=True, formula=Formula((STEP, OV, ISO), _ideal)),
    Figure("overlap/e2e_overlapped_ms", "ms", "eq. 3: step time, overlapped, measured", "step, overlapped (eq. 3)",
           "overlapped", log=True, formula=Formula((STEP,), lambda step: _possible(step.step_ms))),
    Figure("overlap/e2e_sequential_ms", "ms", "step time, sequential, measured", "step, sequential", "sequential",
           compares=True, log=True, formula=Formula((SEQ,), lambda seq: _possible(seq.step_ms))),
    Figure("overlap/e2e_sequential_model_ms", "ms",
           "eq. 5: e2e_ideal + hidden_comm - what collectives wait longer than in sequential steps",
           "step, sequential by the model (eq. 5)", "sequential by the model", compares=True, log=True,
           formula=Formula((STEP, OV, ISO), _model)),
    Figure("overlap/speedup_vs_sequential", "fraction", "e2e_sequential / e2e_overlapped - 1",
           "speed-up of overlap over sequential", "speed-up of overlap", compares=True, signed=True, less_is_worse=True,
           card=True, formula=Formula((SEQ, STEP), lambda seq, step: equations.slowdown(seq.step_ms, step.step_ms))),
    Figure("overlap/attainable_ms", "ms",
           "the longer of slowest_compute and comm_isolated without waiting: a step if overlap were perfect and free",
           "step, attainable by overlap", "attainable", compares=True, detail=True,
           formula=Formula((ISO,), _attainable)),
    Figure("overlap/attained_fraction", "fraction",
           "(e2e_sequential - e2e_overlapped) / (e2e_sequential - attainable)", "share of the attainable gain",
           "gain attained", compares=True, less_is_worse=True, optional=True, between=(-math.inf, 1.0),
           formula=Formula((STEP, SEQ, ISO), _attained)),
    Figure("overlap/gap_to_ideal", "fraction", "e2e_overlapped / e2e_ideal - 1", "gap to ideal", compares=True,
           signed=True, card=True,
           formula=Formula((STEP, OV, ISO),
                           lambda step, ov, iso: equations.slowdown(step.step_ms, _ideal(step, ov, iso)))),
    Figure("overlap/sequential_model_error", "fraction", "e2e_sequential_model / e2e_sequential - 1: checks the model",
           "model of equation 5 against the measured step", "error of the sequential model", compares=True, signed=True,
           detail=True,
           formula=Formula((STEP, OV, ISO, SEQ),
                           lambda step, ov, iso, seq: equations.slowdown(_model(step, ov, iso), seq.step_ms))),
)  # fmt: skip
_COMPUTE = (
    Figure("overlap/compute_slowdown", "fraction", "eq. 1: (T_comp,ov - T_comp,iso) / T_comp,iso",
           "compute slowdown (eq. 1)", "compute slowdown", compares=True, signed=True, card=True,
           formula=Formula((OV, ISO), lambda ov, iso: equations.slowdown(ov.compute_ms, iso.compute_ms))),
    Figure("overlap/overlap_ratio", "fraction",
           "eq. 2: compute time during which communication is in flight / T_comp,ov",
           "overlap ratio (eq. 2)", "overlap ratio",
           formula=Formula((OV,), lambda ov: equations.overlap_ratio(ov.covered_compute_ms, ov.compute_ms))),
    Figure("overlap/compute_ms", "ms", "T_comp,ov: sum of compute kernel times of an overlapped step",
           "compute kernel time, overlapped", log=True, detail=True,
           formula=Formula((OV,), lambda ov: _possible(ov.compute_ms))),
    Figure("overlap/compute_isolated_ms", "ms", "T_comp,iso: the same of a sequential step",
           "compute kernel time, sequential", compares=True, log=True, detail=True,
           formula=Formula((ISO,), lambda iso: _possible(iso.compute_ms))),
    Figure("overlap/compute_busy_ms", "ms", "union of the compute kernels' intervals, overlapped step",
           "compute busy, overlapped", detail=True, formula=Formula((OV,), lambda ov: ov.compute_busy_ms)),
    Figure("overlap/compute_busy_isolated_ms", "ms", "the same of a sequential step", "compute busy, sequential",
           compares=True, detail=True, formula=Formula((ISO,), lambda iso: iso.compute_busy_ms)),
    Figure("overlap/slowest_compute_ms", "ms", "compute_busy_isolated of the rank that has the most",
           "compute busy, sequential, slowest rank", compares=True, optional=True, detail=True,
           formula=Formula((ISO,), lambda iso: iso.slowest_compute_ms)),
)  # fmt: skip
_COMMUNICATION = (
    Figure("overlap/comm_ms", "ms", "time in which communication is in flight in an overlapped step: hidden + exposed",
           "communication in flight", formula=Formula((OV,), lambda ov: ov.comm_busy_ms)),
    Figure("overlap/comm_isolated_ms", "ms", "the same in a sequential step", "communication in flight, sequential",
           compares=True, detail=True, formula=Formula((ISO,), lambda iso: iso.comm_busy_ms)),
    Figure("overlap/hidden_comm_ms", "ms", "communication time during compute, overlapped step",
           "communication hidden behind compute", part_label="hidden behind compute",
           formula=Formula((OV,), lambda ov: ov.hidden_comm_ms)),
    Figure("overlap/exposed_comm_ms", "ms", "communication time without compute, overlapped step",
           "exposed communication", part_label="exposed", card=True,
           formula=Formula((OV,), lambda ov: ov.comm_busy_ms - ov.hidden_comm_ms)),
    Figure("overlap/waiting_ms", "ms",
           "the part of comm in which collectives and messages wait for other ranks, overlapped step",
           "waiting in communication", optional=True, formula=Formula((OV,), lambda ov: ov.waiting_ms)),
    Figure("overlap/waiting_isolated_ms", "ms", "the same in a sequential step", "waiting in communication, sequential",
           compares=True, optional=True, formula=Formula((ISO,), lambda iso: iso.waiting_ms)),
    Figure("overlap/hidden_comm_fraction", "fraction", "hidden_comm / comm: the overlap efficiency",
           "share of communication that is hidden", "hidden share of communication", less_is_worse=True,
           detail=True, card=True,
           formula=Formula((OV,), lambda ov: ov.hidden_comm_ms / ov.comm_busy_ms)),
    Figure("overlap/comm_slowdown", "fraction",
           "sum of communication kernel times without waiting, overlapped over sequential, less one; not where sends "
           "and receives are more than 2% of communication: how long they wait for each other is not known",
           "communication slowdown", compares=True, signed=True, card=True, formula=Formula((OV, ISO), _comm_slowdown)),
    Figure("overlap/comm_ratio", "fraction",
           "comm / overlapped step under the profiler (compute_busy + exposed_comm + idle)",
           "communication in flight, share of a step", detail=True,
           formula=Formula((OV,), lambda ov: ov.comm_busy_ms
                           / (ov.compute_busy_ms + ov.comm_busy_ms - ov.hidden_comm_ms + ov.idle_ms))),
    Figure("overlap/p2p_ms", "ms", "time in which sends and receives are in flight, overlapped step",
           "sends and receives in flight", optional=True, formula=Formula((OV,), lambda ov: ov.p2p_ms)),
    Figure("overlap/idle_ms", "ms", "time without compute and communication, overlapped step",
           "neither compute nor communication", formula=Formula((OV,), lambda ov: ov.idle_ms)),
    Figure("overlap/exposed_on_host_ms", "ms",
           "the part of idle in which the host waits for its own communication (Gloo), overlapped step",
           "exposed communication on the host", optional=True,
           formula=Formula((OV,), lambda ov: ov.exposed_on_host_ms)),
    Figure("overlap/idle_isolated_ms", "ms", "time without compute and communication, sequential step",
           "neither compute nor communication, sequential", compares=True, detail=True,
           formula=Formula((ISO,), lambda iso: iso.idle_ms)),
    Figure("overlap/bubble_ms", "ms",
           "idle, and time in which nothing is in flight but messages that wait for their peer, overlapped step",
           "bubble of the pipeline", optional=True, formula=Formula((OV,), lambda ov: ov.bubble_ms)),
)  # fmt: skip
_QUALITY = (
    Figure("overlap/residual_overlap", "fraction", "eq. 2 in sequential steps: must be near zero",
           "residual overlap in sequential steps", "residual overlap", card=True,
           formula=Formula((ISO,), lambda iso: equations.overlap_ratio(iso.covered_compute_ms, iso.compute_ms))),
    Figure("overlap/residual_comm_overlap", "fraction",
           "share of communication time during compute in sequential steps: must be near zero",
           "residual overlap, of communication", "residual overlap of communication",
           formula=Formula((ISO,), lambda iso: iso.hidden_comm_ms / iso.comm_busy_ms)),
    Figure("overlap/profiler_slowdown", "fraction", "overlapped steps under the profiler / those without - 1",
           "slowdown by the profiler, overlapped steps", "slowdown by the profiler", signed=True, detail=True,
           formula=Formula((OV, STEP), lambda ov, step: equations.slowdown(ov.step_ms, step.step_ms))),
    Figure("overlap/profiler_slowdown_isolated", "fraction", "the same of sequential steps",
           "slowdown by the profiler, sequential steps", compares=True, signed=True, detail=True,
           formula=Formula((ISO, SEQ), lambda iso, seq: equations.slowdown(iso.step_ms, seq.step_ms))),
)  # fmt: skip
# In the order of a report's metrics; their names are fields of the report.
FIGURES = (*_STEPS, *_COMPUTE, *_COMMUNICATION, *_QUALITY)
# A window's own cost is not a figure of its steps, but an alert may watch it like one.
MEASUREMENT_OVERHEAD = Figure(
    "overlap/measurement_overhead",
    "fraction",
    "time that training lost to the window and on the steps after it, over the time from one window to the next",
    "cost of measuring",
    between=(-math.inf, math.inf),
)

# -- power and the device, by mode


def _utilisation(name: str) -> Callable[[JobModePower], float | None]:
    return lambda m: None if m.parts is None else getattr(m.parts, name)


# Power may exceed its default limit; a fraction of time is at most 1.
_OVER_ONE = (0.0, math.inf)
# In the order of a report's metrics.
POWER_METRICS = (
    Figure("power/{mode}_avg_w", "W", "mean power of a device", "mean power of a device",
           of=lambda m: stored_estimate(m, "mean_avg_w")),
    Figure("power/{mode}_total_w", "W", "mean power of all devices together", "mean power, all devices",
           of=lambda m: m.total_avg_w),
    Figure("power/{mode}_peak_w", "W", "highest power of any device", "highest power", aggregate=HIGHEST),
    Figure("power/{mode}_p99_w", "W", "highest 99th percentile of any device's power, by time",
           "99th percentile of power", aggregate=HIGHEST),
    Figure("power/{mode}_energy_per_step_j", "J", "energy of a step, all devices", "energy of a step",
           of=lambda m: stored_estimate(m, "energy_per_step_j")),
    Figure("power/{mode}_avg_tdp_fraction", "fraction", "mean power over the default limit", "mean, of TDP",
           between=_OVER_ONE),
    Figure("power/{mode}_peak_tdp_fraction", "fraction", "highest power over the default limit", "highest, of TDP",
           between=_OVER_ONE, aggregate=HIGHEST),
    Figure("gpu/{mode}_sm_clock_mhz", "MHz", "mean SM clock", "SM clock"),
    Figure("gpu/{mode}_compute_sm_clock_mhz", "MHz", "mean SM clock while compute runs, in profiled steps",
           "SM clock while computing", of=lambda m: m.compute_clock_mhz),
    Figure("gpu/{mode}_throttle_fraction", "fraction", "time in which the clock was held back", "clock held back"),
    Figure("gpu/{mode}_power_cap_fraction", "fraction", "the same for a power cap", "held back by a power cap",
           of=lambda m: m.cause_fraction(Cause.POWER)),
    Figure("gpu/{mode}_thermal_fraction", "fraction", "the same for heat", "held back by heat",
           of=lambda m: m.cause_fraction(Cause.TEMPERATURE)),
    Figure("gpu/{mode}_hardware_fraction", "fraction", "the same by the hardware's own protection",
           "held back by the hardware", of=lambda m: m.cause_fraction(Cause.HARDWARE)),
    Figure("gpu/{mode}_sm_busy_fraction", "fraction", "SMs that are busy", "SMs busy", of=_utilisation("sm")),
    Figure("gpu/{mode}_sm_occupancy_fraction", "fraction", "warps that are active, of the most", "warps active",
           of=_utilisation("sm_occupancy")),
    Figure("gpu/{mode}_tensor_busy_fraction", "fraction", "time in which tensor cores work", "tensor cores busy",
           of=_utilisation("tensor")),
    Figure("gpu/{mode}_dram_busy_fraction", "fraction", "memory bandwidth in use", "memory bandwidth used",
           of=_utilisation("dram")),
    Figure("gpu/{mode}_nvlink_rx_gb_s", "GB/s", "NVLink traffic in", "NVLink in",
           of=_utilisation("nvlink_rx_gb_s")),
    Figure("gpu/{mode}_nvlink_tx_gb_s", "GB/s", "NVLink traffic out", "NVLink out",
           of=_utilisation("nvlink_tx_gb_s")),
)  # fmt: skip
PEAK_RISE = Figure(
    "power/peak_w_vs_sequential",
    "fraction",
    "highest power of any device in overlapped steps over that in sequential ones, less one",
    compares=True,
    aggregate=HIGHEST,
)

THROUGHPUT = (
    Figure("overlap/tokens_per_s", "tokens/s", "tokens that the whole job trains on in a second"),
    Figure("overlap/samples_per_s", "samples/s", "samples that the whole job trains on in a second"),
    Figure("overlap/flop_per_step", "FLOP", "model FLOP of a step of the whole job, without what is recomputed"),
    Figure("overlap/flop_per_s_per_device", "FLOP/s", "model FLOP a second, mean over the devices"),
    Figure("overlap/mfu", "fraction", "model FLOP utilisation: the same over the device's peak"),
)


def _flag(key: str, meaning: str) -> Figure:
    return Figure(key, "", meaning, aggregate=SHARE)


_OF_A_STEP = "as a share of an overlapped step"
FAMILIES = (
    Family(report_parts.headline, FIGURES),
    Family(report_parts.spreads, FIGURES),
    Family(report_parts.window, (
        MEASUREMENT_OVERHEAD,
        Figure("overlap/ranks_heard", "", "ranks that the window's report speaks for", aggregate=LOWEST),
        _flag("overlap/valid", "1 if the sequential steps were sequential"),
        _flag("overlap/verified", "1 if a profile has shown how much overlap the sequential steps had"),
        _flag("overlap/complete", "0 if the window was cut short"),
        _flag("overlap/control", "1 in an A/A run, with both sides overlapped"),
    )),
    Family(report_parts.collectives, (
        Figure("comm/{collective}_bytes", "bytes", "bytes of the rank's input tensors"),
        Figure("comm/{collective}_messages", "messages", "calls"),
        Figure("comm/{collective}_busbw_gb_s", "GB/s",
               "bus bandwidth in sequential steps: the larger of input and output, times nccl-tests' factor for the "
               "group, over the time of the transfer",
               compares=True),
    )),
    Family(report_parts.dimensions, (
        Figure("dimension/{dimension}_comm_ms", "ms",
               "time in which its communication is in flight in an overlapped step"),
        Figure("dimension/{dimension}_exposed_ms", "ms", "the part of it in which no compute runs"),
        Figure("dimension/{dimension}_bytes", "bytes", "bytes of the rank's input tensors"),
        Figure("dimension/{dimension}_comm_slowdown", "fraction",
               "how much longer its kernels take than in a sequential step, without waiting; of no pipeline",
               compares=True, signed=True),
        Figure("dimension/{dimension}_compute_slowdown", "fraction",
               "how much longer the compute kernels take that ran during it", compares=True, signed=True),
        Figure("dimension/{dimension}_step_fraction", "fraction",
               f"its exposed time without waiting messages, {_OF_A_STEP}; with the bubble and the rest these add up "
               "to it"),
    )),
    Family(report_parts.modes, POWER_METRICS),
    Family(report_parts.energy_of_tokens, (
        Figure("power/{mode}_energy_per_token_j", "J", "energy per token"),
    )),
    Family(report_parts.power_changes, (
        Figure("power/energy_saving_vs_sequential", "fraction",
               "1 - energy of an overlapped step over that of a sequential one", compares=True),
        PEAK_RISE,
    )),
    Family(report_parts.slowdown, (
        Figure("gpu/slowdown_from_clock", "fraction",
               "sequential over overlapped SM clock, less one: the most that the clock explains", compares=True),
        Figure("gpu/slowdown_beyond_clock", "fraction", "the least of the compute slowdown that remains: contention",
               compares=True),
        Figure("gpu/slowdown_from_sms", "fraction",
               "the part of the compute slowdown that the SMs taken by communication have, by a model", compares=True),
        Figure("gpu/slowdown_from_waves", "fraction",
               "the part that further waves of blocks have, by the same model",
               compares=True),
        Figure("gpu/slowdown_from_memory", "fraction", "what remains where memory bandwidth was exhausted",
               compares=True),
        Figure("gpu/slowdown_unexplained", "fraction", "the part of the compute slowdown that no known cause has",
               compares=True),
    )),
    Family(report_parts.memory, (
        Figure("gpu/{mode}_memory_peak_bytes", "bytes", "highest memory that tensors hold on any rank",
               of=lambda peak: peak.peak_bytes, aggregate=HIGHEST),
        Figure("gpu/{mode}_memory_peak_at_most_bytes", "bytes", "what the memory peak is at most",
               of=lambda peak: peak.at_most_bytes, aggregate=HIGHEST),
    )),
    Family(report_parts.step, (
        Figure("overlap/step_compute_fraction", "fraction",
               f"compute, for as long as it takes alone, {_OF_A_STEP}; with contention, where that is not known"),
        Figure("overlap/step_contention_fraction", "fraction",
               f"what compute takes longer during communication, {_OF_A_STEP}"),
        Figure("overlap/step_transfer_fraction", "fraction",
               f"exposed communication without waiting and bubble, {_OF_A_STEP}"),
        Figure("overlap/step_waiting_fraction", "fraction",
               f"exposed communication in which ranks wait for the one that comes last, {_OF_A_STEP}"),
        Figure("overlap/step_bubble_fraction", "fraction", f"the bubble of a pipeline, {_OF_A_STEP}"),
        Figure("overlap/step_idle_fraction", "fraction", f"neither compute nor communication, {_OF_A_STEP}"),
        Figure("overlap/step_on_host_fraction", "fraction", f"exposed communication on the host, {_OF_A_STEP}"),
    )),
    Family(report_parts.traffic, (
        Figure("traffic/{dimension}_messages", "messages",
               "calls of all ranks; a message between two ranks is a send and a receive"),
        Figure("traffic/{dimension}_bytes", "bytes",
               "messages times size, over all ranks: of each call, the larger of what it reads and writes"),
        Figure("traffic/{dimension}_sent_bytes", "bytes",
               "what all ranks send if collectives run as rings: of an all-reduce of S bytes on n ranks, 2(n-1) S"),
    )),
    Family(report_parts.all_traffic, (
        Figure("traffic/between_hosts_fraction", "fraction",
               "the part of all bytes sent that crosses from one host to another; absent where a rank's host is not "
               "known"),
        Figure("traffic/steps_alike_fraction", "fraction",
               "counted steps that sent the same as the recorded step, over all ranks"),
    )),
    Family(report_parts.attribute("throughput"), THROUGHPUT),
    Family(report_parts.attribute("experts"), (
        Figure("expert/load_max_over_mean", "ratio",
               "bytes that an expert rank receives in a step: the most over the mean"),
        Figure("expert/load_cv", "ratio", "coefficient of variation of the same over the expert ranks"),
        Figure("expert/split_max_over_mean", "ratio",
               "bytes that a rank sends to each expert rank in an all-to-all: the most over the mean"),
        Figure("expert/split_cv", "ratio", "coefficient of variation of the same"),
        Figure("expert/dispatched_bytes", "bytes",
               "bytes that a rank sends to expert ranks in a step, to be computed there"),
    )),
    Family(report_parts.arrivals, (
        Figure("comm/waiting_fraction", "fraction",
               "time of collectives in which ranks wait for the one that comes last, over all ranks", compares=True),
        Figure("straggler/rank", "", "the rank for which most is lost", compares=True),
        Figure("straggler/worst_fraction", "fraction", "steps in which the others wait for it longest", compares=True),
        Figure("straggler/last_fraction", "fraction", "collectives to which it comes last", compares=True),
        Figure("straggler/chance_fraction", "fraction", "what the two before would be if all ranks were equal",
               compares=True),
        Figure("straggler/lost_fraction", "fraction",
               "the others' waiting for it, of the time that its group spends in these collectives", compares=True),
    )),
    Family(report_parts.bubble, (
        Figure("pipeline/expected_bubble_fraction", "fraction",
               "(p-1)/(p-1+vm) for p stages, m micro-batches and v chunks; absent where m is unknown"),
        Figure("pipeline/bubble_fraction", "fraction",
               f"idle time and messages that wait for their peer, {_OF_A_STEP}, mean over the ranks"),
    )),
    Family(report_parts.stages, (
        Figure("pipeline/stage_{stage}_bubble_fraction", "fraction", "the same of one stage, up to 16 of them"),
    )),
    Family(report_parts.race, (
        Figure("race/found", "", "1 if gradients were not the same overlapped and sequential"),
        Figure("race/repeatable", "", "1 if sequential repetitions agreed; if not, nothing can be said"),
        Figure("race/differing_gradients", "", "gradients that differ, the most of any rank"),
        Figure("race/check_ms", "ms", "time that training stood still for it, the longest of any rank"),
    )),
)  # fmt: skip


def every_figure() -> dict[str, Figure]:
    """All figures of a report by their keys, once, in order."""
    return {figure.key: figure for family in FAMILIES for figure in family.figures}


def keys_of(figure: Figure) -> list[str]:
    """Its keys in both modes, if the mode is a label; else ``general_key``."""
    if figure.labels == ("mode",):
        return [figure.key.format(mode=mode.value) for mode in Mode]
    return [figure.general_key]


def recorded_figures() -> dict[str, Figure]:
    """All figures by their names in records: headline figures by their fields, others by their keys."""
    figures = [(key, figure) for figure in every_figure().values() for key in keys_of(figure)]
    return {figure.name if figure in FIGURES else key: figure for key, figure in figures}


_BY_KEY = {key: figure for figure in every_figure().values() for key in keys_of(figure)}
_BY_NAME = {figure.name: figure for figure in (*FIGURES, MEASUREMENT_OVERHEAD)}


def figure_with_key(key: str) -> Figure:
    """The figure of a report with this key, as in ``keys_of``.

    Raises:
        KeyError: there is none.
    """
    return _BY_KEY[key]


def figure_named(name: str) -> Figure:
    """The headline figure of this name.

    Raises:
        KeyError: there is none.
    """
    return _BY_NAME[name]


def compares(name: str) -> bool:
    """Whether the named figure needs sequential steps; False for names of other versions of the library."""
    figure = _BY_NAME.get(name)
    return figure is not None and figure.compares


# Figures of a summary.
SUMMARY = tuple([figure for figure in FIGURES if not figure.detail])
# Step times of both modes.
STEP_TIMES = tuple([_BY_NAME[name] for name in ("e2e_ideal_ms", "e2e_overlapped_ms", "e2e_sequential_ms")])
# What trackers (W&B, a trainer's loggers) get by default, besides the verdict: panels of W&B's workspace, each with the
# question that it answers.
SHORT = (
    ("Is overlap worth it? Step time", tuple([figure.key for figure in STEP_TIMES])),
    ("Is overlap worth it? Speed-up",
     tuple([f"overlap/speedup_vs_sequential{end}" for end in ("", "_ci_low", "_ci_high")])),
    ("What does it cost? Compute slowdown", ("overlap/compute_slowdown",)),
    ("What does it cost? Power of a device", ("power/{mode}_avg_w",)),
    ("What holds it back? Exposed communication", ("overlap/exposed_comm_ms",)),
    ("What holds it back? Share that is hidden", ("overlap/hidden_comm_fraction",)),
    ("Can it be trusted? Valid windows", ("overlap/valid",)),
    ("Can it be trusted? Cost of measuring", ("overlap/measurement_overhead",)),
)  # fmt: skip
# The same keys, and that of each arm of the user's.
SHORT_KEYS = frozenset(["arm/{arm}_speedup", *[key for _, keys in SHORT for key in keys]])
