"""Jobs on simulated devices, and the figures of their reports side by side with what the devices' log says.

``test_truth.py`` holds them to it; ``benchmarks/truth_simulated.py`` prints them all.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlap_callbacks import Mode
from overlap_callbacks.analysis.bus_bandwidth import bus_factor
from overlap_callbacks.analysis.results.kernel_times import ALONE
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.shares import CLOCK, MEMORY, SMS, WAVES
from overlap_callbacks.report import record
from tests.simulated_gpu import jobs
from tests.simulated_gpu.truth import StepTruth

# How far a time of the device may be from the log's, and a figure of samples.
WITHIN, WITHIN_SAMPLED = 0.01, 0.025
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
    def memory_bound(self) -> bool:
        """Whether compute and communication together use all of the memory's bandwidth."""
        return (
            float(self.parameters.get("compute_memory", 0)) + float(self.parameters.get("communication_memory", 0)) >= 1
        )


_SMALL = {"most_data_bytes": 100_000}
_MEGATRON = {"rules": None, "tflops": 17, "link_gbs": 4, **_SMALL}
# Long enough for a sensor of power.
_LONG_BLOCKS = {"repeats": 4, "steps_per_block": 12, "profiled_steps": 2, "power_interval_s": 0.02}
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
    "FSDP2": Case("fsdp2", parameters={"compute_slowdown": 1.3, "rules": "gemm=6000"}),
    "HSDP on 2 x 2 ranks": Case("hsdp", 4, parameters={"compute_slowdown": 1.3, "rules": "gemm=12000", **_SMALL}),
    "tensor parallel": Case("tensor", parameters={"compute_slowdown": 1.3, **_SMALL}),
    "ZeRO-2": Case("zero2", host_ahead=False, parameters={"compute_slowdown": 1.3}),
    "ZeRO-3": Case("zero3", host_ahead=False, parameters={"compute_slowdown": 1.3}),
    "Megatron-core": Case("megatron", host_ahead=False, parameters={"compute_slowdown": 1.3, **_MEGATRON}),
    "Megatron-core's pipeline": Case("megatron pipeline", host_ahead=False, parameters=_MEGATRON),
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


def run(case: Case, folder: Path) -> tuple[OverlapReport, Steps, list[Compared]]:
    """Train the job, and compare.

    Args:
        case: which.
        folder: for the record and the log.

    Returns:
        The report, what the devices did in sequential steps, and all figures beside their truth.
    """
    run_dir, truths, trained = jobs.train(case.kind, folder, case.ranks, case.window, **case.parameters)
    (window,) = record.read(run_dir).windows
    overlapped, sequential = both_modes(truths, trained)
    return window, sequential, list(compare(window, overlapped, sequential, case))


@dataclass(frozen=True)
class Compared:
    """A figure and its truth.

    Attributes:
        name: of the figure.
        reported: by the library.
        least, usual, most: least value of the log's steps, their median and their most. They are one number where the
            host is ahead of the device; on a busy machine it is late for single steps, and a figure, a mean over some
            of the steps, then lies between least and most.
        within: share by which it may be beyond them.
        slack: by which it may be beyond them besides, in the figure's unit.
    """

    name: str
    reported: float
    least: float
    usual: float
    most: float
    within: float = WITHIN
    slack: float = 0.0

    @property
    def holds(self) -> bool:
        below, above = (self.within * abs(bound) + self.slack for bound in (self.least, self.most))
        return self.least - below <= self.reported <= self.most + above

    @property
    def is_usual(self) -> bool:
        """Whether it is that of the median step, so that late steps had no part in it."""
        return abs(self.reported - self.usual) <= self.within * abs(self.usual) + self.slack

    @classmethod
    def exactly(cls, name: str, reported: float, truth: float, within: float = WITHIN) -> Compared:
        """A figure with one truth."""
        return cls(name, reported, truth, truth, truth, within)


class Steps:
    """What the devices did in the window's steps of one mode: of each step the mean over ranks.

    Args:
        mode: of the steps.
        truths: of each rank, step by step.
        modes: of each rank, step by step.
    """

    def __init__(self, mode: Mode, truths: Sequence[Sequence[StepTruth]], modes: Sequence[Sequence[Mode]]) -> None:
        self.truths = truths
        # The window's first step is recorded, which takes the host longer.
        self.numbers = [
            number for number in range(jobs.FIRST_STEP + 2, len(modes[0])) if {one[number] for one in modes} == {mode}
        ]
        # Steps that follow one of the same mode: what the other mode left behind ends in the first.
        alike = [number for number in self.numbers if {one[number - 1] for one in modes} == {mode}]
        self.pairs = [[(rank[number - 1], rank[number]) for rank in truths] for number in alike]

    def values(self, name: str) -> list[float]:
        """Of each step."""
        return [statistics.fmean(getattr(rank[number], name) for rank in self.truths) for number in self.numbers]

    def ranks(self, name: str) -> list[list[float]]:
        """Of each step of each rank."""
        return [[getattr(rank[number], name) for number in self.numbers] for rank in self.truths]

    def between(self, name: str) -> list[float]:
        """Of each step: how much more there was at its end than at that of the step before, of a running sum."""
        return [statistics.fmean(getattr(b, name) - getattr(a, name) for a, b in pair) for pair in self.pairs]

    @property
    def times_ms(self) -> list[float]:
        return [ns / 1e6 for ns in self.between("end")]

    def bubbles_ms(self, rank: int | None = None) -> list[float]:
        """Of each step, of one rank or the mean over them."""
        each = [[step.bubble_ms(after=before.end) for before, step in pair] for pair in self.pairs]
        return [statistics.fmean(of_step) if rank is None else of_step[rank] for of_step in each]

    @property
    def idle_ms(self) -> list[float]:
        return [statistics.fmean(step.idle_ms(after=before.end) for before, step in pair) for pair in self.pairs]


def both_modes(truths: Sequence[Sequence[StepTruth]], trained: Sequence[jobs.Trained]) -> tuple[Steps, Steps]:
    """Overlapped and sequential steps."""
    modes = [rank.modes for rank in trained]
    return Steps(Mode.OVERLAPPED, truths, modes), Steps(Mode.SEQUENTIAL, truths, modes)


def compare(window: OverlapReport, overlapped: Steps, sequential: Steps, case: Case) -> Iterator[Compared]:
    """Every figure that the log knows too.

    Args:
        window: the report.
        overlapped, sequential: what the devices did.
        case: the job.
    """
    o, s = overlapped, sequential
    slack_ms = 0.02
    for name, steps, truth in (
        ("compute_ms", o, "compute_ms"),
        ("compute_isolated_ms", s, "compute_ms"),
        ("compute_busy_ms", o, "compute_busy_ms"),
        ("compute_busy_isolated_ms", s, "compute_busy_ms"),
        ("comm_ms", o, "communication_ms"),
        ("comm_isolated_ms", s, "communication_ms"),
        ("hidden_comm_ms", o, "hidden_ms"),
        ("exposed_comm_ms", o, "exposed_ms"),
        ("waiting_ms", o, "waiting_ms"),
        ("waiting_isolated_ms", s, "waiting_ms"),
    ):
        if (figure := getattr(window, name)) is not None:
            yield _between(name, figure.value, steps.values(truth), slack_ms)
    ratios = [covered / all_ms for covered, all_ms in zip(o.values("covered_ms"), o.values("compute_ms"), strict=True)]
    yield _between("overlap_ratio", _value(window.overlap_ratio), ratios, 1e-3)
    yield _quotient("1 + compute_slowdown", window.compute_slowdown, o.values("compute_ms"), s.values("compute_ms"))
    if window.comm_slowdown is not None:
        yield _quotient("1 + comm_slowdown", window.comm_slowdown, o.values("transfer_ms"), s.values("transfer_ms"))
    slowest = [max(step) for step in zip(*s.ranks("compute_busy_ms"), strict=True)]
    yield _between("slowest_compute_ms", _value(window.slowest_compute_ms), slowest, slack_ms)
    if case.host_ahead:
        yield _between("idle_ms", _value(window.idle_ms), o.idle_ms, 0.05 * statistics.median(o.times_ms))
        yield from _times(window, o, s)
        yield from _bubble(window, o)
    yield from _contention(window, case)
    yield from _bus_bandwidth(window, s)
    yield from _power(window, o, s)


def _times(window: OverlapReport, o: Steps, s: Steps) -> Iterator[Compared]:
    for name, steps in (("e2e_overlapped_ms", o), ("e2e_sequential_ms", s)):
        yield _between(name, _value(getattr(window, name)), steps.times_ms)
    for mode, steps in ((Mode.OVERLAPPED, o), (Mode.SEQUENTIAL, s)):
        timed = [ms for rank in window.samples for block in rank.timed if block.arm is mode for ms in block.step_ms]
        median = statistics.median(steps.times_ms)
        yield Compared.exactly(f"median {mode.value} step", statistics.median(timed), median)
    step_ms, compute_ms, isolated_ms = (
        statistics.median(values) for values in (o.times_ms, o.values("compute_ms"), s.values("compute_ms"))
    )
    ideal_ms = step_ms - (compute_ms - isolated_ms)
    yield Compared.exactly("e2e_ideal_ms", _value(window.e2e_ideal_ms), ideal_ms)
    yield _quotient("1 + speedup_vs_sequential", window.speedup_vs_sequential, s.times_ms, o.times_ms)


def _bubble(window: OverlapReport, o: Steps) -> Iterator[Compared]:
    """Of each stage of a pipeline, as a share of its step, and the mean over the ranks in milliseconds."""
    if window.pipeline is None:
        return
    assert window.bubble_ms is not None
    yield _between("bubble_ms", window.bubble_ms.value, o.bubbles_ms())
    for stage, rank in zip(window.pipeline.stages, range(len(o.truths)), strict=True):
        lengths = [(b.end - a.end) / 1e6 for a, b in (pair[rank] for pair in o.pairs)]
        true = [ms / step for ms, step in zip(o.bubbles_ms(rank), lengths, strict=True)]
        yield _between(f"pipeline/stage_{stage.stage}_bubble_fraction", stage.fraction, true)


def _contention(window: OverlapReport, case: Case) -> Iterator[Compared]:
    """What the device was told: by how much compute is slower while communication is in flight, and the reverse."""
    takes_sms, capped = case.parameters.get("channels_take_sms"), case.parameters.get("power_cap_w", 700) < 700
    for pair in window.pairs:
        told = "communication_slowdown" if pair.communication else "compute_slowdown"
        factor = 1.0 if pair.beside == ALONE else float(case.parameters.get(told, 1.0))
        slowdown = pair.slowdown if pair.beside == ALONE else pair.slowdown_during
        # Of a kernel of some microseconds, a nanosecond of the profile's is a share; and it may run beside for less.
        if slowdown is not None and pair.time_ms > 0.1 and (pair.communication or not (takes_sms or capped)):
            yield Compared.exactly(f"1 + slowdown of {pair.victim} during {pair.beside}", 1 + slowdown, factor)
    shares = window.slowdown_shares
    causes = (SMS, WAVES) if takes_sms else (CLOCK,) if capped else (MEMORY,) if case.memory_bound else ()
    if shares is not None and window.compute_slowdown is not None and causes:
        found = sum(shares.of(cause) or 0.0 for cause in causes)
        if takes_sms or window.power_verdict is not None:
            yield Compared.exactly(
                f"share of {', '.join(causes)}", found, window.compute_slowdown.value, WITHIN_MODELLED
            )


def _bus_bandwidth(window: OverlapReport, s: Steps) -> Iterator[Compared]:
    """Of jobs with one kind of collective: its bytes over the log's time of transfers."""
    if {row.operator for row in window.collectives} != {"allreduce_"}:
        return
    num_bytes = sum(row.bytes_in for row in window.collectives)
    factor = bus_factor("all_reduce", window.collectives[0].group_size)
    assert factor is not None
    true = [factor * num_bytes / ms / 1e6 for ms in s.values("transfer_ms")]
    yield _between("comm/allreduce_busbw_gb_s", window.metrics()["comm/allreduce_busbw_gb_s"], true)


def _power(window: OverlapReport, o: Steps, s: Steps) -> Iterator[Compared]:
    """Watts and joules by mode. A sensor's and a counter's samples decide, so the log's mean is the truth."""
    for mode, steps in ((Mode.OVERLAPPED, o), (Mode.SEQUENTIAL, s)):
        of_mode = None if window.power is None else window.power.of(mode)
        if of_mode is None or of_mode.mean_avg_w is None or of_mode.energy_per_step_j is None:
            continue
        joules = statistics.median(steps.between("joules"))
        watts = joules / statistics.median(steps.times_ms) * 1e3
        devices = len(steps.truths)
        for name, reported, true in (
            (f"power/{mode.value}_avg_w", of_mode.mean_avg_w, watts),
            (f"power/{mode.value}_energy_per_step_j", of_mode.energy_per_step_j, devices * joules),
        ):
            yield Compared.exactly(name, reported, true, WITHIN_SAMPLED)
        clock = 1980 * statistics.fmean(steps.values("clock"))
        for name, mhz in (("sm_clock_mhz", of_mode.sm_clock_mhz), ("compute_sm_clock_mhz", of_mode.compute_clock_mhz)):
            if mhz is not None:
                yield Compared.exactly(f"device/{mode.value}_{name}", mhz, clock, WITHIN_SAMPLED)
        for name, counter in (("dram", "memory_s"), ("sm", "multiprocessors_s")):
            used = None if of_mode.parts is None else getattr(of_mode.parts, name)
            if used is not None:
                seconds = statistics.median(steps.between(counter))
                share = 1e3 * seconds / statistics.median(steps.times_ms)
                yield Compared.exactly(f"device/{mode.value}_{name}_fraction", used, share, WITHIN_SAMPLED)


def _between(name: str, reported: float, truth: Sequence[float], slack: float = 0.0) -> Compared:
    return Compared(name, reported, min(truth), statistics.median(truth), max(truth), slack=slack)


def _quotient(name: str, figure: Any, above: Sequence[float], below: Sequence[float]) -> Compared:
    usual = statistics.median(above) / statistics.median(below)
    return Compared(name, 1 + _value(figure), min(above) / max(below), usual, max(above) / min(below))


def _value(figure: Any) -> float:
    assert figure is not None
    return float(figure.value)
