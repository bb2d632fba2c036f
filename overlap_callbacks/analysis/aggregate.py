"""Aggregates what all ranks measured in one window into an ``OverlapReport``: figures, intervals, means over ranks.

The equations are in ``overlap_callbacks.analysis.equations``. Every figure is an estimate with an interval, see
``overlap_callbacks.analysis.statistics``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from overlap_callbacks.analysis import memory
from overlap_callbacks.analysis.environment.job import job_environment
from overlap_callbacks.analysis.environment.lint import lint
from overlap_callbacks.analysis.equations import ideal_step_ms, log_slowdown, overlap_ratio, sequential_step_ms
from overlap_callbacks.analysis.formatting import name_ranks
from overlap_callbacks.analysis.power.cause import attribute
from overlap_callbacks.analysis.power.job import pool
from overlap_callbacks.analysis.results.catalogue import FIGURES, residual_limit
from overlap_callbacks.analysis.results.estimate import Estimate, Spread
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import JobPower, SlowdownCause
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import (
    DimensionTime,
    KernelTime,
    PairTime,
    ProfiledBlock,
    RankWindow,
    TimedBlock,
)
from overlap_callbacks.analysis.statistics import Sample, estimate

# Kernels that a report keeps, those with the most time. Enough for the tables; messages and record stay bounded.
MAX_KERNELS = 50

_Row = TypeVar("_Row")
_Key = TypeVar("_Key", bound=Hashable)


def aggregate_windows(
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
        windows: one entry for each rank that reported, at least one.
        world_size: number of ranks of the job.
        every_n_steps: steps from one window to the next. The window's cost is spread over them.
        control: whether the schedule was an A/A control.
        problems: problems met while the ranks' windows were gathered, in words.
        tokens_per_step: tokens that one step of the job trains on; None if unknown.
    """
    samples = tuple(sorted(windows, key=lambda window: window.rank))
    first = samples[0]
    figures = _figures(samples)
    all_problems = [*problems, *_by_rank(samples, lambda sample: sample.problems)]
    if len(samples) < world_size:
        all_problems.append(f"{world_size - len(samples)} of {world_size} ranks were not heard")
    limit = residual_limit(first.device, first.backend)
    escaped = None if control else _escaped_communication(figures.get("residual_overlap"), limit)
    valid = escaped is None
    if escaped is not None:
        all_problems.append(escaped)
    doubts = _by_rank(samples, lambda sample: sample.doubts)
    if doubts:
        valid = False
        all_problems += doubts
    if len({sample.complete for sample in samples}) > 1:
        valid = False
        all_problems.append("some ranks ended the window early: their steps ran in other modes than the rest's")
    environment = job_environment(samples)
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
        # What stands in the report itself need not be there twice.
        samples=tuple(
            msgspec.structs.replace(sample, pictures=(), power_trace=None, environment=None) for sample in samples
        ),
        environment=environment,
        findings=lint(environment, samples),
        memory=memory.pool(sample.memory for sample in samples),
    )


def _power(samples: Sequence[RankWindow], world_size: int) -> JobPower | None:
    if not any(sample.power for sample in samples):
        return None
    without = [sample.rank for sample in samples if not (sample.power or sample.power_elsewhere)]
    power = pool({sample.rank: sample.power for sample in samples}, whole=not without and len(samples) == world_size)
    if without:
        problem = f"power of {name_ranks(without)} was not measured: there are no sums over all devices"
        power = msgspec.structs.replace(power, problems=(*power.problems, problem))
    return power


def _power_verdict(power: JobPower | None, figures: dict[str, Estimate]) -> SlowdownCause | None:
    slowdown = figures.get("compute_slowdown")
    if power is None or slowdown is None:
        return None
    return attribute(slowdown.value, power.of(Mode.OVERLAPPED), power.of(Mode.SEQUENTIAL))


def _by_rank(samples: Sequence[RankWindow], problems_of: Callable[[RankWindow], Sequence[str]]) -> list[str]:
    """The ranks' problems, each once, and the ranks that have it unless all do."""
    ranks_of: dict[str, list[int]] = {}
    for sample in samples:
        for problem in dict.fromkeys(problems_of(sample)):
            ranks_of.setdefault(problem, []).append(sample.rank)
    return [
        problem if len(ranks) == len(samples) else f"{name_ranks(ranks)}: {problem}"
        for problem, ranks in ranks_of.items()
    ]


def _escaped_communication(residual: Estimate | None, limit: float) -> str | None:
    """Why the sequential steps were not sequential, in words; None if they were."""
    if residual is None or residual.value <= limit:
        return None
    return (
        f"residual overlap {residual.value:.3f} in sequential steps is above {limit}: some communication escaped "
        f"the gate (CUDA graphs, symmetric memory, another thread, coalesced collectives), so the comparison does not "
        f"hold"
    )


class _TimedMeans(NamedTuple):
    """The measured means of a timed block."""

    log_step: float


class _ProfiledMeans(NamedTuple):
    """The measured means of a profiled block, per step.

    The times whose ratio between the modes is a figure are there as logarithms too: the interval of a ratio is
    symmetric on that scale.
    """

    log_compute: float
    compute_ms: float
    compute_busy_ms: float
    log_comm: float
    comm_busy_ms: float
    hidden_comm_ms: float
    covered_compute_ms: float
    p2p_ms: float
    idle_ms: float

    @classmethod
    def of(cls, block: ProfiledBlock) -> _ProfiledMeans:
        """The means of one block on one rank."""
        return cls(
            log_compute=_log(block.compute_ms),
            compute_ms=block.compute_ms,
            compute_busy_ms=block.compute_busy_ms,
            log_comm=_log(block.comm_ms),
            comm_busy_ms=block.comm_busy_ms,
            hidden_comm_ms=block.hidden_comm_ms,
            covered_compute_ms=block.covered_compute_ms,
            p2p_ms=block.p2p_ms,
            idle_ms=block.idle_ms,
        )


def _log(value: float) -> float:
    # Without any compute or communication, the figures that need its logarithm are undefined and therefore absent.
    return math.log(value) if value > 0 else math.nan


def _figures(windows: Sequence[RankWindow]) -> dict[str, Estimate]:
    """All figures over the given ranks; figures that were not measured are left out."""
    step_ov = _timed_sample(windows, Mode.OVERLAPPED)
    step_seq = _timed_sample(windows, Mode.SEQUENTIAL)
    prof_ov = _profiled_sample(windows, Mode.OVERLAPPED)
    prof_iso = _profiled_sample(windows, Mode.SEQUENTIAL)

    def ideal(step: _TimedMeans, ov: _ProfiledMeans, iso: _ProfiledMeans) -> float:
        return ideal_step_ms(math.exp(step.log_step), math.exp(ov.log_compute), math.exp(iso.log_compute))

    def model(step: _TimedMeans, ov: _ProfiledMeans, iso: _ProfiledMeans) -> float:
        return sequential_step_ms(ideal(step, ov, iso), float(ov.hidden_comm_ms))

    estimates = {
        "compute_slowdown": estimate(
            lambda ov, iso: log_slowdown(ov.log_compute, iso.log_compute), prof_ov, prof_iso, scale=math.expm1
        ),
        "overlap_ratio": estimate(lambda ov: overlap_ratio(ov.covered_compute_ms, ov.compute_ms), prof_ov),
        "e2e_overlapped_ms": estimate(lambda step: step.log_step, step_ov, scale=math.exp),
        "e2e_ideal_ms": estimate(ideal, step_ov, prof_ov, prof_iso),
        "e2e_sequential_model_ms": estimate(model, step_ov, prof_ov, prof_iso),
        "e2e_sequential_ms": estimate(lambda step: step.log_step, step_seq, scale=math.exp),
        "speedup_vs_sequential": estimate(
            lambda seq, ov: seq.log_step - ov.log_step, step_seq, step_ov, scale=math.expm1
        ),
        "gap_to_ideal": estimate(
            lambda step, ov, iso: step.log_step - math.log(ideal(step, ov, iso)),
            step_ov, prof_ov, prof_iso, scale=math.expm1,
        ),
        "sequential_model_error": estimate(
            lambda step, ov, iso, seq: math.log(model(step, ov, iso)) - seq.log_step,
            step_ov, prof_ov, prof_iso, step_seq, scale=math.expm1,
        ),
        "compute_ms": estimate(lambda ov: ov.log_compute, prof_ov, scale=math.exp),
        "compute_isolated_ms": estimate(lambda iso: iso.log_compute, prof_iso, scale=math.exp),
        "compute_busy_ms": estimate(lambda ov: ov.compute_busy_ms, prof_ov),
        "compute_busy_isolated_ms": estimate(lambda iso: iso.compute_busy_ms, prof_iso),
        "comm_ms": estimate(lambda ov: ov.comm_busy_ms, prof_ov),
        "comm_isolated_ms": estimate(lambda iso: iso.comm_busy_ms, prof_iso),
        "hidden_comm_ms": estimate(lambda ov: ov.hidden_comm_ms, prof_ov),
        "exposed_comm_ms": estimate(lambda ov: ov.comm_busy_ms - ov.hidden_comm_ms, prof_ov),
        "hidden_comm_fraction": estimate(lambda ov: ov.hidden_comm_ms / ov.comm_busy_ms, prof_ov),
        "comm_slowdown": estimate(
            lambda ov, iso: log_slowdown(ov.log_comm, iso.log_comm), prof_ov, prof_iso, scale=math.expm1
        ),
        "comm_ratio": estimate(lambda ov, step: ov.comm_busy_ms / math.exp(step.log_step), prof_ov, step_ov),
        "p2p_ms": estimate(lambda ov: ov.p2p_ms, prof_ov) if _sends(windows) else None,
        "idle_ms": estimate(lambda ov: ov.idle_ms, prof_ov),
        "residual_overlap": estimate(lambda iso: overlap_ratio(iso.covered_compute_ms, iso.compute_ms), prof_iso),
    }  # fmt: skip
    return {name: value for name, value in estimates.items() if value is not None}


def _timed_sample(windows: Sequence[RankWindow], arm: Mode) -> Sample:
    """Mean log step time of each timed block of one arm.

    The ranks of a job step together, so they are not independent evidence: each block is first averaged over the ranks.
    """
    by_block: dict[int, list[float]] = {}
    num_steps: dict[int, int] = {}
    for window in windows:
        for block in window.timed:
            if block.arm is arm and block.step_ms and min(block.step_ms) > 0:
                by_block.setdefault(block.block, []).append(float(np.log(block.step_ms).mean()))
                num_steps[block.block] = max(num_steps.get(block.block, 0), len(block.step_ms))
    means = [_TimedMeans(log_step=float(np.mean(by_block[block]))) for block in sorted(by_block)]
    return Sample.of_rows(_TimedMeans, means, sum(num_steps.values()))


def _profiled_sample(windows: Sequence[RankWindow], arm: Mode) -> Sample:
    """The profiled blocks of one arm, each averaged over the ranks."""
    by_block: dict[int, list[_ProfiledMeans]] = {}
    num_steps: dict[int, int] = {}
    for window in windows:
        for block in window.profiled:
            if block.arm is arm:
                by_block.setdefault(block.block, []).append(_ProfiledMeans.of(block))
                num_steps[block.block] = max(num_steps.get(block.block, 0), block.num_steps)
    means = [_ProfiledMeans(*np.mean(by_block[block], axis=0)) for block in sorted(by_block)]
    return Sample.of_rows(_ProfiledMeans, means, sum(num_steps.values()))


def _sends(samples: Sequence[RankWindow]) -> bool:
    return any(block.p2p_ms for sample in samples for block in sample.profiled)


def _overhead(samples: Sequence[RankWindow], step: Estimate | None, every_n_steps: int) -> float | None:
    """Extra time of the window, beyond what its steps would take overlapped, as a fraction of the time between windows.

    Args:
        samples: the ranks' windows.
        step: time of an overlapped step.
        every_n_steps: steps from one window to the next.
    """
    if step is None or step.value <= 0:
        return None
    extra_ms = max(sample.wall_ms - sample.num_steps * step.value for sample in samples)
    return max(0.0, extra_ms) / (every_n_steps * step.value)


_SPREAD_OVER_RANKS = ("compute_slowdown", "e2e_overlapped_ms", "e2e_sequential_ms", "exposed_comm_ms")


def _spread(samples: Sequence[RankWindow]) -> dict[str, Spread]:
    if len(samples) < 2:
        return {}
    by_rank = {sample.rank: _figures([sample]) for sample in samples}
    spread = {}
    for name in _SPREAD_OVER_RANKS:
        values = {rank: figures[name].value for rank, figures in by_rank.items() if name in figures}
        if len(values) >= 2:
            low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
            std = float(np.std(list(values.values()), ddof=1))
            spread[name] = Spread(values[low], values[high], low, high, std)
    return spread


def _mean_kernels(windows: Sequence[RankWindow]) -> tuple[KernelTime, ...]:
    """Means over the ranks that have kernels; those that lose most time first."""
    means = mean_by(
        (kernel for window in windows for kernel in window.kernels),
        key=lambda kernel: (kernel.name, kernel.communication),
        fields=("overlapped_calls", "sequential_calls", "overlapped_ms", "sequential_ms"),
        count=sum(bool(window.kernels) for window in windows),
    )
    kernels = (KernelTime(*key, **values) for key, values in means.items())
    return tuple(sorted(kernels, key=lambda kernel: -kernel.lost_ms))


def _mean_pairs(windows: Sequence[RankWindow]) -> tuple[PairTime, ...]:
    """Means over the ranks that have pairs; those that lose most time first."""
    means = mean_by(
        (pair for window in windows for pair in window.pairs),
        key=lambda pair: (pair.victim, pair.communication, pair.beside),
        fields=("calls", "beside_ms", "time_ms", "alone_ms"),
        count=sum(bool(window.pairs) for window in windows),
    )
    pairs = (PairTime(*key, **values) for key, values in means.items())
    return tuple(sorted(pairs, key=lambda pair: (-pair.lost_ms, -pair.time_ms)))


def _mean_dimensions(windows: Sequence[RankWindow]) -> tuple[DimensionTime, ...]:
    """Each dimension's mean over the ranks that have it: in a pipeline of data-parallel stages, not all have all."""
    means = mean_by(
        (row for window in windows for row in window.dimensions),
        key=lambda row: row.dimension,
        fields=("messages", "bytes_in", "comm_ms", "exposed_ms", "kernels_ms", "kernels_isolated_ms"),
    )
    times = (
        DimensionTime(
            dimension=dimension,
            **{**values, "messages": round(values["messages"]), "bytes_in": round(values["bytes_in"])},
        )
        for dimension, values in means.items()
    )
    return tuple(sorted(times, key=lambda row: -row.comm_ms))


def mean_by(
    rows: Iterable[_Row], key: Callable[[_Row], _Key], fields: Sequence[str], count: int | None = None
) -> dict[_Key, dict[str, Any]]:
    """Means of some fields over all rows that have the same key.

    Args:
        rows: the rows of all ranks.
        key: tells which rows belong together.
        fields: names of the fields, all of them numbers.
        count: what each sum is divided by: ranks, also those that lack the row. None for the number of rows of the key.

    Returns:
        The means by key and field, in the order in which the keys first appear.
    """
    by_key: dict[_Key, list[_Row]] = {}
    for row in rows:
        by_key.setdefault(key(row), []).append(row)
    return {
        value: {
            field: sum(float(getattr(row, field)) for row in of_key) / (len(of_key) if count is None else count)
            for field in fields
        }
        for value, of_key in by_key.items()
    }


def drop_incomparable_figures(window: OverlapReport, order: str) -> OverlapReport:
    """The report of a window that was cut short, without the figures that too few of its blocks support.

    Drift is cancelled only within a whole balanced group of blocks. Without one, the figures that compare the modes are
    dropped; without a profiled one, all figures of the profile are.

    Args:
        window: the report of a window that was cut short.
        order: order of its blocks, e.g. ``OSSO``.
    """
    sample = window.samples[0]
    dropped = []
    if not has_whole_group(sample.timed, order):
        dropped += [figure.name for figure in FIGURES if figure.unit != "ms"]
    if not has_whole_group(sample.profiled, order):
        dropped += [figure.name for figure in FIGURES if figure.name not in _TIMED]
    return msgspec.structs.replace(window, **dict.fromkeys(dropped))


# The figures that need no profile.
_TIMED = frozenset({"e2e_overlapped_ms", "e2e_sequential_ms", "speedup_vs_sequential"})


def has_whole_group(blocks: Iterable[TimedBlock | ProfiledBlock], order: str) -> bool:
    """Whether the blocks hold at least one whole repetition of the schedule's order, e.g. ``OSSO``."""
    length = len(order)
    groups = Counter(block.block // length for block in blocks)
    return any(count == length for count in groups.values())
