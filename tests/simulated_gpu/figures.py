"""Jobs on simulated devices, and the figures of their reports side by side with what the devices' log says.

``test_truth.py`` holds them to it; ``benchmarks/truth_simulated.py`` prints them all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlap_callbacks import Mode
from overlap_callbacks.analysis.equations import bus_factor
from overlap_callbacks.analysis.name_rules import COPIES, collective_of
from overlap_callbacks.analysis.results.arrivals import ALL_TO_ALL
from overlap_callbacks.analysis.results.kernel_times import ALONE, CLOCK, MEMORY, SMS, WAVES
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report import record
from tests.simulated_gpu import jobs
from tests.simulated_gpu.truth import StepTruth, length

# How far a time of the device may be from the log's, and a figure of samples.
WITHIN, WITHIN_SAMPLED = 0.002, 0.025
# And what the library models: blocks that come in waves.
WITHIN_MODELLED = 0.05


@dataclass(frozen=True)
class Case:
    """A job on devices with known properties.

    Attributes:
        kind: of the job, as ``tests.gpu.jobs`` has it.
        ranks: of the job.
        host_ahead: whether the host is ahead of the device, so that the steps' times are the device's own. Jobs that
            ask the device for a number in every step wait for it.
        window: options of ``attach``.
        parameters: of the device.
    """

    kind: str
    ranks: int = 2
    host_ahead: bool = True
    window: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def must_have(self) -> set[str]:
        """Names of figures without which a comparison proves little."""
        names = {
            "compute_ms", "comm_ms", "hidden_comm_ms", "exposed_comm_ms", "waiting_ms", "idle_ms", "overlap_ratio",
            "1 + compute_slowdown", "e2e_overlapped_ms", "e2e_sequential_ms", "attainable_ms",
        }  # fmt: skip
        if self.host_ahead:
            names |= {"1 + speedup_vs_sequential", "e2e_ideal_ms", "e2e_sequential_model_ms", "1 + gap_to_ideal"}
        if "pipeline" in self.kind:
            number = 2 if "megatron" in self.kind else self.ranks
            stages = {f"pipeline/stage_{stage}_bubble_fraction" for stage in range(number)}
            return names | stages | {"bubble_ms", "p2p_ms"}
        if self.kind == "ddp":
            names |= {"comm/allreduce_busbw_gb_s", "1 + slowdown of all_reduce during gemm"}
        if self.parameters.get("channels_take_sms"):
            names |= {f"share of {SMS}, {WAVES}"}
        return names | {"1 + comm_slowdown"}

    @property
    def memory_bound(self) -> bool:
        """Whether compute and communication together use all of the memory's bandwidth."""
        return (
            float(self.parameters.get("compute_memory", 0)) + float(self.parameters.get("communication_memory", 0)) >= 1
        )


_SMALL = {"most_data_bytes": 100_000}
# The host is behind from the first step on.
_SOON = {"first_step": 4}
_MEGATRON = {"rules": None, "tflops": 17, "link_gbs": 4, **_SMALL}
# Long enough for a sensor of power.
_LONG_BLOCKS = {"repeats": 2, "steps_per_block": 12, "profiled_steps": 2, "power_interval_s": 0.02}
CASES = {
    "DDP": Case("ddp"),
    "DDP, compute 1.3 times slower beside communication": Case("ddp", parameters={"compute_slowdown": 1.3}),
    "DDP, compute 2 times slower beside communication": Case("ddp", parameters={"compute_slowdown": 2.0}),
    "DDP, communication 1.4 times slower beside compute": Case("ddp", parameters={"communication_slowdown": 1.4}),
    "DDP, both slower": Case("ddp", parameters={"compute_slowdown": 1.3, "communication_slowdown": 1.2}),
    "DDP, rank 1 slower by a tenth": Case("ddp", parameters={"slow_rank": "1:1.1"}),
    "DDP on 4 ranks": Case("ddp", 4, parameters={"compute_slowdown": 1.3, "rules": "gemm=8000", **_SMALL}),
    "DDP on 4 ranks, one link at half speed": Case(
        "ddp", 4, parameters={"slow_link": "1-2:0.5", "rules": "gemm=8000", **_SMALL}
    ),
    "DDP of graphed layers": Case("ddp of graphed layers", parameters={"compute_slowdown": 1.3, "rules": "gemm=3000"}),
    "FSDP2": Case("fsdp2", parameters={"compute_slowdown": 1.3, "rules": "gemm=6000"}),
    "HSDP on 2 x 2 ranks": Case("hsdp", 4, parameters={"compute_slowdown": 1.3, "rules": "gemm=12000", **_SMALL}),
    "tensor parallel": Case("tensor", parameters={"compute_slowdown": 1.3, **_SMALL}),
    "ZeRO-2": Case("zero2", host_ahead=False, window=_SOON, parameters={"compute_slowdown": 1.3}),
    "ZeRO-3": Case("zero3", host_ahead=False, window=_SOON, parameters={"compute_slowdown": 1.3}),
    "Megatron-core": Case(
        "megatron", host_ahead=False, window=_SOON, parameters={"compute_slowdown": 1.3, **_MEGATRON}
    ),
    "Megatron-core's pipeline": Case("megatron pipeline", host_ahead=False, window=_SOON, parameters=_MEGATRON),
    "pipeline": Case("pipeline", parameters={"rules": "gemm=1000", **_SMALL}),
    "DDP, power": Case("ddp", window=_LONG_BLOCKS, parameters={"compute_slowdown": 1.3, "power_cap_w": 700, **_SMALL}),
    "DDP, memory exhausted": Case(
        "ddp",
        window=_LONG_BLOCKS,
        parameters={"compute_slowdown": 1.3, "compute_memory": 0.8, "communication_memory": 0.2, **_SMALL},
    ),
    "DDP, power capped": Case("ddp", window=_LONG_BLOCKS, parameters={"power_cap_w": 300, **_SMALL}),
    "DDP, channels that take SMs": Case("ddp", parameters={"channels": 40, "channels_take_sms": True, **_SMALL}),
}


def run(case: Case, folder: Path) -> tuple[OverlapReport, list[StepTruth], list[Compared]]:
    """Train the job, and compare.

    Args:
        case: which.
        folder: for the record and the log.

    Returns:
        The report, what the devices did in sequential steps, and all figures beside their truth.
    """
    run_dir, truths, trained = jobs.train(case.kind, folder, case.ranks, case.window, **case.parameters)
    (window,) = record.read(run_dir).windows
    # Before the window's first step all overlap.
    sequential = [
        step
        for rank, one in zip(truths, trained, strict=True)
        for step, mode in zip(rank, one.modes, strict=True)
        if mode is Mode.SEQUENTIAL
    ]
    return window, sequential, list(compare(window, truths, case))


@dataclass(frozen=True)
class Compared:
    """A figure and its truth.

    Attributes:
        name: of the figure.
        reported: by the library.
        true: by the log, of the steps that the figure is made of.
        within: share by which they may differ.
        slack: by which they may differ besides, in the figure's unit.
        most: where the log tells bounds alone: then ``true`` is the least.
    """

    name: str
    reported: float
    true: float
    within: float = WITHIN
    slack: float = 0.0
    most: float | None = None

    @property
    def holds(self) -> bool:
        most = self.true if self.most is None else self.most
        below, above = (self.within * abs(bound) + self.slack for bound in (self.true, most))
        return self.true - below <= self.reported <= most + above


class Steps:
    """What the devices did in the steps of one mode that figures are made of.

    Args:
        window: the report; its samples say which steps those are, on each rank.
        mode: of the steps.
        truths: of each rank, step by step.

    Attributes:
        profiled, timed: numbers of the steps of each rank.
        blocks: of each profiled block, the same.
    """

    def __init__(self, window: OverlapReport, mode: Mode, truths: Sequence[Sequence[StepTruth]]) -> None:
        self.truths = [[*truths[sample.rank]] for sample in window.samples]
        self.profiled, self.timed = (
            [[n for block in blocks if block.mode is mode for n in block.steps] for blocks in of_ranks]
            for of_ranks in (
                [sample.profiled for sample in window.samples],
                [sample.timed for sample in window.samples],
            )
        )
        of_mode = [[block for block in sample.profiled if block.mode is mode] for sample in window.samples]
        self.blocks = [[block.steps for block in of_ranks] for of_ranks in zip(*of_mode, strict=True)]

    def means(self, of: Callable[[Sequence[StepTruth], int], float], *, timed: bool = False) -> list[float]:
        """Of each rank, of a number of each step."""
        numbers = self.timed if timed else self.profiled
        return [statistics.fmean(of(rank, n) for n in own) for rank, own in zip(self.truths, numbers, strict=True)]

    def mean(self, name: str) -> float:
        """Over the ranks, of the profiled steps."""
        return statistics.fmean(self.means(lambda rank, n: getattr(rank[n], name)))

    @property
    def waiting_ms(self) -> float:
        """The part of the time with communication in flight that is waiting.

        Where several kernels are in flight at once, their time is longer than that, and so is the time that they wait:
        what counts is the share of all ranks' kernels, block by block.
        """
        found = []
        for steps in self.blocks:
            ranks = [[rank[n] for n in own] for rank, own in zip(self.truths, steps, strict=True)]
            waited, kernels, in_flight = (
                statistics.fmean([statistics.fmean([getattr(step, name) for step in own]) for own in ranks])
                for name in ("waiting_ms", "kernels_ms", "communication_ms")
            )
            found.append(in_flight * waited / kernels)
        return statistics.fmean(found)

    def transfers_ms(self, kind: str) -> float:
        """Of a kind of collective."""
        name = "sendrecv" if kind == ALL_TO_ALL else kind.replace("_", "")
        return statistics.fmean(self.means(lambda rank, n: rank[n].transfers_ms(name)))

    @property
    def step_ms(self) -> float:
        """Of the timed steps, from the end of the one before."""
        return statistics.fmean(self.means(lambda rank, n: (rank[n].end - rank[n - 1].end) / 1e6, timed=True))

    @property
    def step_bounds_ms(self) -> tuple[float, float]:
        """The same where the host is behind: a step begins between the end of the one before and its first kernel."""
        least = self.means(lambda rank, n: (rank[n].end - rank[n].begin) / 1e6, timed=True)
        most = self.means(lambda rank, n: (rank[n + 1].begin - rank[n - 1].end) / 1e6, timed=True)
        return statistics.fmean(least), statistics.fmean(most)

    def between(self, name: str) -> float:
        """How much more there was at a timed step's end than at that of the one before, of a running sum."""
        more = self.means(lambda rank, n: getattr(rank[n], name) - getattr(rank[n - 1], name), timed=True)
        return statistics.fmean(more)

    @property
    def idle_ms(self) -> float:
        return statistics.fmean(self.means(idle_ms))

    def bubbles_ms(self) -> list[float]:
        """Of each rank."""
        return self.means(lambda rank, n: idle_ms(rank, n, waiting=True))

    @property
    def spans_ms(self) -> list[float]:
        """Of each rank, from a profiled step's first kernel to its last one's end."""
        return self.means(lambda rank, n: rank[n].span_ns / 1e6)


def compare(window: OverlapReport, truths: Sequence[Sequence[StepTruth]], case: Case) -> Iterator[Compared]:
    """Every figure that the log knows too.

    Args:
        window: the report.
        truths: of each rank, step by step.
        case: the job.
    """
    o, s = (Steps(window, mode, truths) for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL))
    slack_ms = 0.02
    value = {name: figure.value for name, figure in window.figures().items()}
    # Of the steps under the profiler.
    of_steps = {
        "compute_ms": o.mean("compute_ms"),
        "compute_isolated_ms": s.mean("compute_ms"),
        "compute_busy_ms": o.mean("compute_busy_ms"),
        "compute_busy_isolated_ms": s.mean("compute_busy_ms"),
        "slowest_compute_ms": max(s.means(lambda rank, n: rank[n].compute_busy_ms)),
        "comm_ms": o.mean("communication_ms"),
        "comm_isolated_ms": s.mean("communication_ms"),
        "hidden_comm_ms": o.mean("hidden_ms"),
        "exposed_comm_ms": o.mean("exposed_ms"),
        "waiting_ms": o.waiting_ms,
        "waiting_isolated_ms": s.waiting_ms,
        "p2p_ms": o.mean("messages_ms"),
        "idle_ms": o.idle_ms,
        "idle_isolated_ms": s.idle_ms,
        "bubble_ms": statistics.fmean(o.bubbles_ms()),
    }
    for name, true in of_steps.items():
        if name in value:
            yield Compared(name, value[name], true, slack=slack_ms)
    hidden, comm, busy = (of_steps[name] for name in ("hidden_comm_ms", "comm_ms", "compute_busy_ms"))
    ratios = {
        "overlap_ratio": o.mean("covered_ms") / of_steps["compute_ms"],
        "hidden_comm_fraction": hidden / comm,
        "comm_ratio": comm / (busy + comm - hidden + of_steps["idle_ms"]),
    }
    changes = {
        "compute_slowdown": of_steps["compute_ms"] / of_steps["compute_isolated_ms"] - 1,
        "comm_slowdown": o.mean("transfer_ms") / s.mean("transfer_ms") - 1,
    }
    # The steps' times and what follows from them.
    step_ms, sequential_ms = o.step_ms, s.step_ms
    ideal_ms = step_ms - (of_steps["compute_ms"] - of_steps["compute_isolated_ms"])
    model_ms = ideal_ms + hidden - (of_steps["waiting_ms"] - of_steps["waiting_isolated_ms"])
    alone_ms = of_steps["comm_isolated_ms"] - of_steps["waiting_isolated_ms"]
    attainable_ms = max(of_steps["slowest_compute_ms"], alone_ms)
    times = {
        "e2e_overlapped_ms": step_ms,
        "e2e_sequential_ms": sequential_ms,
        "e2e_ideal_ms": ideal_ms,
        "e2e_sequential_model_ms": model_ms,
        "attainable_ms": attainable_ms,
    }
    changes |= {
        "speedup_vs_sequential": sequential_ms / step_ms - 1,
        "gap_to_ideal": step_ms / ideal_ms - 1,
        "sequential_model_error": model_ms / sequential_ms - 1,
    }
    if not case.host_ahead:
        times, changes = {"attainable_ms": attainable_ms}, {n: c for n, c in changes.items() if "slowdown" in n}
        for name, steps in (("e2e_overlapped_ms", o), ("e2e_sequential_ms", s)):
            least, most = steps.step_bounds_ms
            yield Compared(name, value[name], least, most=most)
    for name, true in times.items():
        if name in value:
            yield Compared(name, value[name], true)
    for name, true in ratios.items():
        if name in value:
            yield Compared(name, value[name], true, slack=1e-3)
    for name, true in changes.items():
        if name in value:
            yield Compared(f"1 + {name}", 1 + value[name], 1 + true)
    if "attained_fraction" in value and case.host_ahead:
        attained = (sequential_ms - step_ms) / (sequential_ms - attainable_ms)
        yield Compared("attained_fraction", value["attained_fraction"], attained, slack=1e-3)
    yield from _stages(window, o)
    yield from _contention(window, case, o, s)
    yield from _bus_bandwidth(window, s)
    yield from _power(window, o, s)


def _stages(window: OverlapReport, o: Steps) -> Iterator[Compared]:
    """The bubble of each stage of a pipeline, as a share of its step. Ranks of a stage follow each other."""
    stages = () if window.pipeline is None else window.pipeline.stages
    bubbles, spans = o.bubbles_ms(), o.spans_ms
    for stage in stages:
        ranks = len(spans) // len(stages)
        own = slice(stage.stage * ranks, (stage.stage + 1) * ranks)
        yield Compared(
            f"pipeline/stage_{stage.stage}_bubble_fraction", stage.fraction, sum(bubbles[own]) / sum(spans[own])
        )


def _contention(window: OverlapReport, case: Case, o: Steps, s: Steps) -> Iterator[Compared]:
    """What the device was told: by how much compute is slower while communication is in flight, and the reverse."""
    takes_sms, capped = case.parameters.get("channels_take_sms"), case.parameters.get("power_cap_w", 700) < 700
    for pair in window.pairs:
        if {pair.kernel_family, pair.concurrent_with}.intersection(COPIES):
            continue  # the device's copies contend with nothing
        told = "communication_slowdown" if pair.communication else "compute_slowdown"
        factor = 1.0 if pair.concurrent_with == ALONE else float(case.parameters.get(told, 1.0))
        if pair.kernel_family == ALL_TO_ALL:  # its bytes change from step to step
            factor *= o.transfers_ms(ALL_TO_ALL) / s.transfers_ms(ALL_TO_ALL)
        slowdown = pair.slowdown if pair.concurrent_with == ALONE else pair.slowdown_during
        # Of a kernel of some microseconds, a nanosecond of the profile's is a share; and it may run beside for less.
        if slowdown is not None and pair.time_ms > 0.1 and (pair.communication or not (takes_sms or capped)):
            yield Compared(f"1 + slowdown of {pair.kernel_family} during {pair.concurrent_with}", 1 + slowdown, factor)
    shares = window.slowdown_shares
    causes = (SMS, WAVES) if takes_sms else (CLOCK,) if capped else (MEMORY,) if case.memory_bound else ()
    if shares is not None and window.compute_slowdown is not None and causes:
        found = sum(shares.of(cause) or 0.0 for cause in causes)
        true = window.compute_slowdown.value
        if capped and window.power_verdict is not None:  # of the ratio of two clocks, each from samples
            yield Compared(f"1 + share of {CLOCK}", 1 + found, 1 + true, WITHIN_SAMPLED)
        elif takes_sms or window.power_verdict is not None:
            yield Compared(f"share of {', '.join(causes)}", found, true, WITHIN_MODELLED)


def _bus_bandwidth(window: OverlapReport, s: Steps) -> Iterator[Compared]:
    """Of each kind of collective that runs on one group alone: its bytes over the log's time of transfers."""
    metrics = window.metrics()
    for kind in {collective_of(row.operator) for row in window.collectives}:
        rows = [row for row in window.collectives if collective_of(row.operator) == kind]
        name, factor = f"comm/{kind.replace('_', '')}_busbw_gb_s", bus_factor(kind, rows[0].group_size)
        if name in metrics and factor is not None and len({row.group for row in rows}) == 1:
            num_bytes = sum(row.size_bytes for row in rows)
            yield Compared(name, metrics[name], factor * num_bytes / s.transfers_ms(kind) / 1e6)


def _power(window: OverlapReport, o: Steps, s: Steps) -> Iterator[Compared]:
    """Watts and joules by mode. A sensor's and a counter's samples decide, so the log's mean is the truth."""
    for mode, steps in ((Mode.OVERLAPPED, o), (Mode.SEQUENTIAL, s)):
        of_mode = None if window.power is None else window.power.of(mode)
        if of_mode is None or of_mode.mean_avg_w is None or of_mode.energy_per_step_j is None:
            continue
        joules = steps.between("joules")
        watts = joules / steps.step_ms * 1e3
        devices = len(steps.truths)
        for name, reported, true in (
            (f"power/{mode.value}_avg_w", of_mode.mean_avg_w, watts),
            (f"power/{mode.value}_energy_per_step_j", of_mode.energy_per_step_j, devices * joules),
        ):
            yield Compared(name, reported, true, WITHIN_SAMPLED)
        clock = 1980 * statistics.fmean(steps.means(lambda rank, n: rank[n].clock, timed=True))
        for name, mhz in (("sm_clock_mhz", of_mode.sm_clock_mhz), ("compute_sm_clock_mhz", of_mode.compute_clock_mhz)):
            if mhz is not None:
                yield Compared(f"gpu/{mode.value}_{name}", mhz, clock, WITHIN_SAMPLED)
        for name, counter in (("dram", "memory_s"), ("sm", "multiprocessors_s")):
            used = None if of_mode.parts is None else getattr(of_mode.parts, name)
            if used is not None:
                share = 1e3 * steps.between(counter) / steps.step_ms
                yield Compared(f"gpu/{mode.value}_{name}_fraction", used, share, WITHIN_SAMPLED)


def idle_ms(rank: Sequence[StepTruth], number: int, *, waiting: bool = False) -> float:
    """Time between a step's first kernel and its last one's end in which nothing ran and nothing was in flight.

    Args:
        rank: its steps.
        number: of the step.
        waiting: whether messages that wait for other ranks count as idle too.
    """
    near = [task for step in rank[number - 1 : number + 2] for task in step.kernels]
    busy = [(task.met if waiting and task.is_message else task.start, task.end) for task in near]
    first, last = rank[number].span
    return (last - first - length([(max(a, first), min(b, last)) for a, b in busy if a < last and b > first])) / 1e6
