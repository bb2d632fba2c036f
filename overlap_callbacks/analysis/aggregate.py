"""From the samples of all ranks to the report of a window: equations 1 to 5 and what follows from them.

Equations are those of "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning"
(arXiv 2507.03114), section IV-D. ``T_comp`` is the sum of a step's compute kernel times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

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

# Kernels that a report keeps, by time: enough for the tables, and bounded for the wire and the record.
MAX_KERNELS = 50


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
    limit = residual_limit(first.device, first.backend)
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


def _power(samples: Sequence[RankWindow], world_size: int) -> JobPower | None:
    if not any(sample.power for sample in samples):
        return None
    without = [sample.rank for sample in samples if not (sample.power or sample.power_elsewhere)]
    found = pool({sample.rank: sample.power for sample in samples}, whole=not without and len(samples) == world_size)
    if without:
        said = f"power of {name_ranks(without)} was not measured: there are no sums over all devices"
        found = msgspec.structs.replace(found, problems=(*found.problems, said))
    return found


def _power_verdict(power: JobPower | None, figures: dict[str, Estimate]) -> SlowdownCause | None:
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


def drop_incomparable_figures(window: OverlapReport, order: str) -> OverlapReport:
    """A window that was cut, without the figures that its blocks do not bear.

    Within less than one balanced group drift is not cancelled, so what compares the modes is left out; and so are all
    figures of a profile that did not get so far.

    Args:
        window: that was cut.
        order: of its blocks, e.g. ``OSSO``.
    """
    sample = window.samples[0]
    missing = []
    if not has_whole_group(sample.timed, order):
        missing += [figure.name for figure in FIGURES if figure.unit != "ms"]
    if not has_whole_group(sample.profiled, order):
        missing += [figure.name for figure in FIGURES if figure.name not in _TIMED]
    return msgspec.structs.replace(window, **dict.fromkeys(missing))


# The figures that need no profile.
_TIMED = frozenset({"e2e_overlapped_ms", "e2e_sequential_ms", "speedup_vs_sequential"})


def has_whole_group(blocks: Iterable[TimedBlock | ProfiledBlock], order: str) -> bool:
    """Whether all blocks of one repetition of the schedule's order are there."""
    length = len(order)
    groups = Counter(block.block // length for block in blocks)
    return any(count == length for count in groups.values())
