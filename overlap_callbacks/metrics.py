"""From the samples of all ranks to the report of a window: equations 1 to 5 and what follows from them.

Equations are those of "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning"
(arXiv 2507.03114), section IV-D. ``T_comp`` is the sum of a step's compute kernel times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from overlap_callbacks.bandwidth import bus_factor
from overlap_callbacks.estimates import Estimate, Sample, estimate
from overlap_callbacks.names import collective_of
from overlap_callbacks.power.metrics import power_metrics
from overlap_callbacks.power.pooled import PooledPower, pool
from overlap_callbacks.power.trace import PowerTrace
from overlap_callbacks.power.verdict import Verdict, attribute
from overlap_callbacks.samples import (
    CollectiveTime,
    DimensionTime,
    KernelTime,
    PairTime,
    ProfiledBlock,
    RankWindow,
    StepPicture,
)
from overlap_callbacks.schedule import Mode

# Overlap that is left in sequential steps, above which the two modes are not what they are taken for. Gloo's host
# threads hand over within scheduler latency, so a little always remains there.
RESIDUAL_LIMIT = 0.02
RESIDUAL_LIMIT_GLOO = 0.05

# Kernels that a report keeps, by time: enough for the tables, and bounded for the wire and the record.
MAX_KERNELS = 50


class Figure(NamedTuple):
    """A headline figure.

    Attributes:
        name: the field of the report; ``overlap/`` and the name is the metric's key.
        unit: ``ms`` or ``fraction``.
        meaning: its definition.
        compares: whether it rests on sequential steps, and so means nothing in an invalid window.
    """

    name: str
    unit: str
    meaning: str
    compares: bool = False

    @property
    def key(self) -> str:
        return f"overlap/{self.name}"


FIGURES = (
    Figure("compute_slowdown", "fraction", "eq. 1: (T_comp,ov - T_comp,iso) / T_comp,iso", compares=True),
    Figure("overlap_ratio", "fraction", "eq. 2: compute time during which communication is in flight / T_comp,ov"),
    Figure("e2e_overlapped_ms", "ms", "eq. 3: step time, overlapped, measured"),
    Figure("e2e_ideal_ms", "ms", "eq. 4: e2e_overlapped - (T_comp,ov - T_comp,iso)", compares=True),
    Figure("e2e_sequential_model_ms", "ms", "eq. 5: e2e_ideal + hidden communication time", compares=True),
    Figure("e2e_sequential_ms", "ms", "step time, sequential, measured", compares=True),
    Figure("speedup_vs_sequential", "fraction", "e2e_sequential / e2e_overlapped - 1", compares=True),
    Figure("gap_to_ideal", "fraction", "e2e_overlapped / e2e_ideal - 1", compares=True),
    Figure(
        "sequential_model_error",
        "fraction",
        "e2e_sequential_model / e2e_sequential - 1: checks the model",
        compares=True,
    ),
    Figure("compute_ms", "ms", "T_comp,ov: sum of compute kernel times of an overlapped step"),
    Figure("compute_isolated_ms", "ms", "T_comp,iso: the same of a sequential step", compares=True),
    Figure("compute_busy_ms", "ms", "union of the compute kernels' intervals, overlapped step"),
    Figure("compute_busy_isolated_ms", "ms", "the same of a sequential step", compares=True),
    Figure("comm_ms", "ms", "time in which communication is in flight in an overlapped step: hidden + exposed"),
    Figure("comm_isolated_ms", "ms", "the same in a sequential step", compares=True),
    Figure("hidden_comm_ms", "ms", "communication time beside compute, overlapped step"),
    Figure("exposed_comm_ms", "ms", "communication time without compute, overlapped step"),
    Figure("hidden_comm_fraction", "fraction", "hidden_comm / comm: the overlap efficiency"),
    Figure(
        "comm_slowdown",
        "fraction",
        "sum of communication kernel times, overlapped over sequential, less one",
        compares=True,
    ),
    Figure("comm_ratio", "fraction", "comm / e2e_overlapped"),
    Figure("p2p_ms", "ms", "time in which sends and receives are in flight, overlapped step"),
    Figure("idle_ms", "ms", "time without compute and communication, overlapped step: of a pipeline, its bubble"),
    Figure("residual_overlap", "fraction", "eq. 2 in sequential steps: must be near zero"),
)

_COMPARES = frozenset(figure.name for figure in FIGURES if figure.compares)


class Spread(msgspec.Struct, frozen=True):
    """One figure over the ranks.

    Attributes:
        low, high: the smallest and largest of the ranks' values.
        low_rank, high_rank: the ranks that have them.
        std: standard deviation over ranks; None for one rank.
    """

    low: float
    high: float
    low_rank: int
    high_rank: int
    std: float | None


class OverlapReport(msgspec.Struct, frozen=True, kw_only=True):
    """One window, all ranks. A figure that was not measured is None, never zero and never NaN.

    The figures (``FIGURES`` gives unit and meaning of each) are means over the ranks heard; each carries its confidence
    interval and number of steps.

    Attributes:
        window, first_step, num_steps: which window.
        complete: False where it was cut short.
        control: an A/A run: both sides overlapped.
        world_size: ranks of the job.
        ranks: the ranks that the report speaks for.
        backend, device: of the lowest rank heard.
        valid: False where the sequential steps were not sequential; ``problems`` says why.
        problems: what is missing or doubtful, in words.
        measurement_overhead: extra time that the window cost, as a fraction of the time from one window to the next.
        wall_ms: host time of the window, the longest over ranks.
        spread: by figure, over the ranks.
        kernels: means over ranks, those that lose most time first.
        pairs: kernel families beside collectives and the other way round, means over ranks, the dearest first.
        dimensions: communication by dimension of parallelism, means over the ranks that have it.
        pictures: a profiled step of each mode, of rank 0.
        collectives: of the lowest rank heard.
        power: over the devices of the ranks heard; None where no rank reads any.
        power_trace: power against time, of rank 0's device.
        power_verdict: what the compute slowdown is due to, as far as clocks and the device's counters tell.
        tokens_per_step: that one step of the job trains on; None where not known.
        samples: what each rank measured.
    """

    window: int
    first_step: int
    num_steps: int
    complete: bool
    control: bool
    world_size: int
    ranks: tuple[int, ...]
    backend: str
    device: str
    valid: bool
    problems: tuple[str, ...]
    measurement_overhead: float | None
    wall_ms: float
    compute_slowdown: Estimate | None = None
    overlap_ratio: Estimate | None = None
    e2e_overlapped_ms: Estimate | None = None
    e2e_ideal_ms: Estimate | None = None
    e2e_sequential_model_ms: Estimate | None = None
    e2e_sequential_ms: Estimate | None = None
    speedup_vs_sequential: Estimate | None = None
    gap_to_ideal: Estimate | None = None
    sequential_model_error: Estimate | None = None
    compute_ms: Estimate | None = None
    compute_isolated_ms: Estimate | None = None
    compute_busy_ms: Estimate | None = None
    compute_busy_isolated_ms: Estimate | None = None
    comm_ms: Estimate | None = None
    comm_isolated_ms: Estimate | None = None
    hidden_comm_ms: Estimate | None = None
    exposed_comm_ms: Estimate | None = None
    hidden_comm_fraction: Estimate | None = None
    comm_slowdown: Estimate | None = None
    comm_ratio: Estimate | None = None
    p2p_ms: Estimate | None = None
    idle_ms: Estimate | None = None
    residual_overlap: Estimate | None = None
    spread: dict[str, Spread] = {}
    kernels: tuple[KernelTime, ...] = ()
    pairs: tuple[PairTime, ...] = ()
    dimensions: tuple[DimensionTime, ...] = ()
    pictures: tuple[StepPicture, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    power: PooledPower | None = None
    power_trace: PowerTrace | None = None
    power_verdict: Verdict | None = None
    tokens_per_step: int | None = None
    samples: tuple[RankWindow, ...] = ()

    def figures(self) -> dict[str, Estimate]:
        """The figures that were measured, by name, in the order of ``FIGURES``."""
        found = ((figure.name, getattr(self, figure.name)) for figure in FIGURES)
        return {name: value for name, value in found if value is not None}

    def metrics(self) -> dict[str, float]:
        """The report as flat metrics, under the names that every sink uses; absent figures have no key.

        An invalid window gives no figure that rests on its sequential steps.
        """
        flat: dict[str, float] = {}
        for name, value in self.figures().items():
            if not self.valid and name in _COMPARES:
                continue
            flat[f"overlap/{name}"] = value.value
            if value.ci_low is not None and value.ci_high is not None:
                flat[f"overlap/{name}_ci_low"] = value.ci_low
                flat[f"overlap/{name}_ci_high"] = value.ci_high
        for name, spread in self.spread.items():
            if not self.valid and name in _COMPARES:
                continue
            flat[f"overlap/{name}_rank_low"] = spread.low
            flat[f"overlap/{name}_rank_high"] = spread.high
        if self.measurement_overhead is not None:
            flat["overlap/measurement_overhead"] = self.measurement_overhead
        flat["overlap/ranks_heard"] = len(self.ranks)
        flat["overlap/valid"] = float(self.valid)
        flat["overlap/complete"] = float(self.complete)
        flat["overlap/control"] = float(self.control)
        totals = self._traffic_metrics()
        power = power_metrics(self.power, self.power_verdict, tokens_per_step=self.tokens_per_step, valid=self.valid)
        return {**flat, **totals, **self._dimension_metrics(), **power}

    def _traffic_metrics(self) -> dict[str, float]:
        """Bytes and messages of each collective, and its bus bandwidth alone, in sequential steps."""
        flat: dict[str, float] = {}
        sent: dict[str, tuple[float, float]] = {}  # bytes over a link, and the time they took
        for row in self.collectives:
            key = f"comm/{row.operator.strip('_').replace('.', '_')}"
            for suffix, amount in (("bytes", row.bytes_in), ("messages", row.messages)):
                flat[f"{key}_{suffix}"] = flat.get(f"{key}_{suffix}", 0) + amount
            factor = bus_factor(collective_of(row.operator), row.group_size)
            if self.valid and factor and row.isolated_ms:
                size, time_ms = sent.get(key, (0.0, 0.0))
                # The size of a gather is that of its result, of a reduce-scatter that of its input.
                sent[key] = (size + factor * max(row.bytes_in, row.bytes_out), time_ms + row.isolated_ms)
        return {**flat, **{f"{key}_busbw_gb_s": size / time_ms / 1e6 for key, (size, time_ms) in sent.items()}}

    def _dimension_metrics(self) -> dict[str, float]:
        flat: dict[str, float] = {}
        for row in self.dimensions:
            key = f"dimension/{row.dimension.replace('+', '_')}"
            flat[f"{key}_comm_ms"] = row.comm_ms
            flat[f"{key}_exposed_ms"] = row.exposed_ms
            flat[f"{key}_bytes"] = row.bytes_in
            if self.valid and row.slowdown is not None:
                flat[f"{key}_comm_slowdown"] = row.slowdown
        return flat


def report(
    windows: Iterable[RankWindow],
    *,
    world_size: int,
    every_n_steps: int,
    control: bool = False,
    problems: Sequence[str] = (),
    tokens_per_step: int | None = None,
) -> OverlapReport:
    """Make the report of one window from what its ranks measured.

    Args:
        windows: one entry for each rank that was heard, at least one.
        world_size: ranks of the job.
        every_n_steps: steps from one window to the next, over which the window's cost is spread.
        control: whether the schedule was an A/A control.
        problems: found while the ranks' reports were gathered.
        tokens_per_step: that one step of the job trains on.
    """
    samples = tuple(sorted(windows, key=lambda window: window.rank))
    first = samples[0]
    figures = _figures(samples)
    all_problems = [*problems, *_problems(samples)]
    if len(samples) < world_size:
        all_problems.append(f"{world_size - len(samples)} of {world_size} ranks were not heard")
    limit = RESIDUAL_LIMIT_GLOO if first.device == "cpu" or first.backend == "gloo" else RESIDUAL_LIMIT
    valid = _is_valid(figures, limit, control, all_problems)
    if len({sample.complete for sample in samples}) > 1:
        valid = False
        all_problems.append("some ranks ended the window early: their steps ran in other modes than the rest's")
    power = _power(samples, world_size)
    if power is not None:
        all_problems += power.problems
    return OverlapReport(
        window=first.window,
        first_step=first.first_step,
        num_steps=max(sample.num_steps for sample in samples),
        complete=all(sample.complete for sample in samples),
        control=control,
        world_size=world_size,
        ranks=tuple(sample.rank for sample in samples),
        backend=first.backend,
        device=first.device,
        valid=valid,
        problems=tuple(dict.fromkeys(all_problems)),
        measurement_overhead=_overhead(samples, figures.get("e2e_overlapped_ms"), every_n_steps),
        wall_ms=max(sample.wall_ms for sample in samples),
        **figures,
        spread=_spread(samples),
        kernels=_mean_kernels(samples),
        pairs=_mean_pairs(samples),
        dimensions=_mean_dimensions(samples),
        pictures=first.pictures,
        collectives=first.collectives,
        power=power,
        power_trace=first.power_trace,
        power_verdict=_power_verdict(power, figures) if valid and not control else None,
        tokens_per_step=tokens_per_step,
        # The pictures and the trace stand in the report itself, once.
        samples=tuple(msgspec.structs.replace(sample, pictures=(), power_trace=None) for sample in samples),
    )


def _power(samples: Sequence[RankWindow], world_size: int) -> PooledPower | None:
    if not any(sample.power for sample in samples):
        return None
    without = [sample.rank for sample in samples if not (sample.power or sample.power_elsewhere)]
    found = pool({sample.rank: sample.power for sample in samples}, whole=not without and len(samples) == world_size)
    if without:
        said = f"power of {name_ranks(without)} was not measured: there are no sums over all devices"
        found = msgspec.structs.replace(found, problems=(*found.problems, said))
    return found


def _power_verdict(power: PooledPower | None, figures: dict[str, Estimate]) -> Verdict | None:
    slowdown = figures.get("compute_slowdown")
    if power is None or slowdown is None:
        return None
    return attribute(slowdown.value, power.of(Mode.OVERLAPPED), power.of(Mode.SEQUENTIAL))


def _problems(samples: Sequence[RankWindow]) -> list[str]:
    """The ranks' problems, each once, with its ranks unless all have it."""
    ranks: dict[str, list[int]] = {}
    for sample in samples:
        for problem in dict.fromkeys(sample.problems):
            ranks.setdefault(problem, []).append(sample.rank)
    return [
        problem if len(found) == len(samples) else f"{name_ranks(found)}: {problem}" for problem, found in ranks.items()
    ]


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks for people, e.g. ``ranks 0, 3``."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _is_valid(figures: dict[str, Estimate], limit: float, control: bool, problems: list[str]) -> bool:
    residual = figures.get("residual_overlap")
    if residual is None or control or residual.value <= limit:
        return True
    problems.append(
        f"residual overlap {residual.value:.3f} in sequential steps is above {limit}: some communication escaped "
        f"the gate (CUDA graphs, symmetric memory, another thread, coalesced collectives), so the comparison does not "
        f"hold"
    )
    return False


# Columns of a profiled block's sample.
_LOG_COMPUTE, _COMPUTE, _COMPUTE_BUSY, _LOG_COMM, _COMM_BUSY, _HIDDEN, _COVERED, _P2P, _IDLE = range(9)
_PROFILE_COLUMNS = 9


def _figures(samples: Sequence[RankWindow]) -> dict[str, Estimate]:
    """All figures of the ranks given, those that were not measured left out."""
    step_ov = _timed_sample(samples, Mode.OVERLAPPED)
    step_seq = _timed_sample(samples, Mode.SEQUENTIAL)
    prof_ov = _profiled_sample(samples, Mode.OVERLAPPED)
    prof_iso = _profiled_sample(samples, Mode.SEQUENTIAL)

    def ideal(step: Any, ov: Any, iso: Any) -> float:  # eq. 4
        return math.exp(step[0]) - math.exp(ov[_LOG_COMPUTE]) + math.exp(iso[_LOG_COMPUTE])

    def model(step: Any, ov: Any, iso: Any) -> float:  # eq. 5
        return ideal(step, ov, iso) + float(ov[_HIDDEN])

    found = {
        "compute_slowdown": estimate(
            lambda ov, iso: ov[_LOG_COMPUTE] - iso[_LOG_COMPUTE], prof_ov, prof_iso, scale=math.expm1
        ),
        "overlap_ratio": estimate(lambda ov: ov[_COVERED] / ov[_COMPUTE], prof_ov),
        "e2e_overlapped_ms": estimate(lambda step: step[0], step_ov, scale=math.exp),
        "e2e_ideal_ms": estimate(ideal, step_ov, prof_ov, prof_iso),
        "e2e_sequential_model_ms": estimate(model, step_ov, prof_ov, prof_iso),
        "e2e_sequential_ms": estimate(lambda step: step[0], step_seq, scale=math.exp),
        "speedup_vs_sequential": estimate(lambda seq, ov: seq[0] - ov[0], step_seq, step_ov, scale=math.expm1),
        "gap_to_ideal": estimate(
            lambda step, ov, iso: step[0] - math.log(ideal(step, ov, iso)),
            step_ov, prof_ov, prof_iso, scale=math.expm1,
        ),
        "sequential_model_error": estimate(
            lambda step, ov, iso, seq: math.log(model(step, ov, iso)) - seq[0],
            step_ov, prof_ov, prof_iso, step_seq, scale=math.expm1,
        ),
        "compute_ms": estimate(lambda ov: ov[_LOG_COMPUTE], prof_ov, scale=math.exp),
        "compute_isolated_ms": estimate(lambda iso: iso[_LOG_COMPUTE], prof_iso, scale=math.exp),
        "compute_busy_ms": estimate(lambda ov: ov[_COMPUTE_BUSY], prof_ov),
        "compute_busy_isolated_ms": estimate(lambda iso: iso[_COMPUTE_BUSY], prof_iso),
        "comm_ms": estimate(lambda ov: ov[_COMM_BUSY], prof_ov),
        "comm_isolated_ms": estimate(lambda iso: iso[_COMM_BUSY], prof_iso),
        "hidden_comm_ms": estimate(lambda ov: ov[_HIDDEN], prof_ov),
        "exposed_comm_ms": estimate(lambda ov: ov[_COMM_BUSY] - ov[_HIDDEN], prof_ov),
        "hidden_comm_fraction": estimate(lambda ov: ov[_HIDDEN] / ov[_COMM_BUSY], prof_ov),
        "comm_slowdown": estimate(
            lambda ov, iso: ov[_LOG_COMM] - iso[_LOG_COMM], prof_ov, prof_iso, scale=math.expm1
        ),
        "comm_ratio": estimate(lambda ov, step: ov[_COMM_BUSY] / math.exp(step[0]), prof_ov, step_ov),
        "p2p_ms": estimate(lambda ov: ov[_P2P], prof_ov) if _sends(samples) else None,
        "idle_ms": estimate(lambda ov: ov[_IDLE], prof_ov),
        "residual_overlap": estimate(lambda iso: iso[_COVERED] / iso[_COMPUTE], prof_iso),
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def _timed_sample(samples: Sequence[RankWindow], arm: Mode) -> Sample:
    """Mean log step time of each timed block of one arm: shape (blocks, 1).

    The ranks of a job step together, so they are no independent evidence: each block is first averaged over the ranks.
    """
    by_block: dict[int, list[float]] = {}
    num_steps: dict[int, int] = {}
    for sample in samples:
        for block in sample.timed:
            if block.arm is arm and block.step_ms and min(block.step_ms) > 0:
                by_block.setdefault(block.block, []).append(float(np.log(block.step_ms).mean()))
                num_steps[block.block] = max(num_steps.get(block.block, 0), len(block.step_ms))
    means = [[float(np.mean(by_block[block]))] for block in sorted(by_block)]
    return Sample(np.array(means, dtype=np.float64).reshape(-1, 1), sum(num_steps.values()))


def _profiled_sample(samples: Sequence[RankWindow], arm: Mode) -> Sample:
    """The profiled blocks of one arm, averaged over the ranks: shape (blocks, columns)."""
    by_block: dict[int, list[list[float]]] = {}
    num_steps: dict[int, int] = {}
    for sample in samples:
        for block in sample.profiled:
            if block.arm is arm:
                by_block.setdefault(block.block, []).append(_row(block))
                num_steps[block.block] = max(num_steps.get(block.block, 0), block.num_steps)
    rows = [np.mean(by_block[block], axis=0) for block in sorted(by_block)]
    return Sample(np.array(rows, dtype=np.float64).reshape(-1, _PROFILE_COLUMNS), sum(num_steps.values()))


def _row(block: ProfiledBlock) -> list[float]:
    return [
        _log(block.compute_ms),
        block.compute_ms,
        block.compute_busy_ms,
        _log(block.comm_ms),
        block.comm_busy_ms,
        block.hidden_comm_ms,
        block.covered_compute_ms,
        block.p2p_ms,
        block.idle_ms,
    ]


def _sends(samples: Sequence[RankWindow]) -> bool:
    return any(block.p2p_ms for sample in samples for block in sample.profiled)


def _log(value: float) -> float:
    # Without any compute or communication the figures that need its logarithm are undefined, hence absent.
    return math.log(value) if value > 0 else math.nan


def _overhead(samples: Sequence[RankWindow], step: Estimate | None, every_n_steps: int) -> float | None:
    """Extra time of the window, over what its steps would have taken overlapped, per time between windows."""
    if step is None or step.value <= 0:
        return None
    extra_ms = max(sample.wall_ms - sample.num_steps * step.value for sample in samples)
    return max(0.0, extra_ms) / (every_n_steps * step.value)


_SPREAD_OVER_RANKS = ("compute_slowdown", "e2e_overlapped_ms", "e2e_sequential_ms", "exposed_comm_ms")


def _spread(samples: Sequence[RankWindow]) -> dict[str, Spread]:
    if len(samples) < 2:
        return {}
    alone = {sample.rank: _figures([sample]) for sample in samples}
    spread = {}
    for name in _SPREAD_OVER_RANKS:
        values = {rank: figures[name].value for rank, figures in alone.items() if name in figures}
        if len(values) >= 2:
            low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
            std = float(np.std(list(values.values()), ddof=1))
            spread[name] = Spread(values[low], values[high], low, high, std)
    return spread


def _mean_kernels(samples: Sequence[RankWindow]) -> tuple[KernelTime, ...]:
    """The kernels' means over the ranks, those that lose most time first."""
    rows: dict[tuple[str, bool], list[KernelTime]] = {}
    for sample in samples:
        for kernel in sample.kernels:
            rows.setdefault((kernel.name, kernel.communication), []).append(kernel)
    ranks = sum(bool(sample.kernels) for sample in samples)

    def mean(found: list[KernelTime], field: str) -> float:
        return sum(float(getattr(kernel, field)) for kernel in found) / ranks

    fields = ("overlapped_calls", "sequential_calls", "overlapped_ms", "sequential_ms")
    kernels = [KernelTime(*key, *(mean(found, field) for field in fields)) for key, found in rows.items()]
    kernels.sort(key=lambda kernel: kernel.lost_ms, reverse=True)
    return tuple(kernels)


def _mean_pairs(samples: Sequence[RankWindow]) -> tuple[PairTime, ...]:
    """The pairs' means over the ranks, the dearest first."""
    rows: dict[tuple[str, bool, str], list[PairTime]] = {}
    for sample in samples:
        for pair in sample.pairs:
            rows.setdefault((pair.victim, pair.communication, pair.beside), []).append(pair)
    ranks = sum(bool(sample.pairs) for sample in samples)

    def mean(values: list[float]) -> float:
        return sum(values) / ranks

    pairs = [
        PairTime(*key, *(mean([getattr(pair, field) for pair in found]) for field in _PAIR_FIELDS))
        for key, found in rows.items()
    ]
    return tuple(sorted(pairs, key=lambda pair: (-pair.lost_ms, -pair.time_ms)))


_PAIR_FIELDS = ("calls", "beside_ms", "time_ms", "alone_ms")


def _mean_dimensions(samples: Sequence[RankWindow]) -> tuple[DimensionTime, ...]:
    """Each dimension's mean over the ranks that have it: in a pipeline of data-parallel stages not all have all."""
    rows: dict[str, list[DimensionTime]] = {}
    for sample in samples:
        for row in sample.dimensions:
            rows.setdefault(row.dimension, []).append(row)

    def mean(found: list[DimensionTime], field: str) -> float:
        return sum(float(getattr(row, field)) for row in found) / len(found)

    times = [
        DimensionTime(
            dimension=name,
            messages=round(mean(found, "messages")),
            bytes_in=round(mean(found, "bytes_in")),
            comm_ms=mean(found, "comm_ms"),
            exposed_ms=mean(found, "exposed_ms"),
            kernels_ms=mean(found, "kernels_ms"),
            kernels_isolated_ms=mean(found, "kernels_isolated_ms"),
        )
        for name, found in rows.items()
    ]
    return tuple(sorted(times, key=lambda row: -row.comm_ms))
