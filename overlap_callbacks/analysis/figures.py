"""All figures of a window over a set of ranks, as estimates with intervals.

The equations are in ``overlap_callbacks.analysis.equations``, the statistics in
``overlap_callbacks.analysis.statistics``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from overlap_callbacks.analysis.block_means import (
    block_means,
    profiled_blocks,
    ranks_with_most_blocks,
    timed_blocks,
)
from overlap_callbacks.analysis.equations import (
    attainable_step_ms,
    attained_fraction,
    ideal_step_ms,
    log_slowdown,
    overlap_ratio,
    sequential_step_ms,
)
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow
from overlap_callbacks.analysis.statistics import Sample, estimate


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
    bubble_ms: float
    log_step: float

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
            bubble_ms=math.nan if block.bubble_ms is None else block.bubble_ms,
            log_step=_log(block.step_ms or 0.0),
        )


def _log(value: float) -> float:
    # What was not measured has no logarithm. The figures that need it are undefined, and therefore absent.
    return math.log(value) if value > 0 else math.nan


def figures_of(windows: Sequence[RankWindow]) -> dict[str, Estimate]:
    """All figures over the given ranks; figures that were not measured are left out."""
    step_ov = _timed_sample(windows, Mode.OVERLAPPED)
    step_seq = _timed_sample(windows, Mode.SEQUENTIAL)
    prof_ov = _profiled_sample(windows, Mode.OVERLAPPED)
    prof_iso = _profiled_sample(windows, Mode.SEQUENTIAL)

    def ideal(step: _TimedMeans, ov: _ProfiledMeans, iso: _ProfiledMeans) -> float:
        return ideal_step_ms(math.exp(step.log_step), math.exp(ov.log_compute), math.exp(iso.log_compute))

    def model(step: _TimedMeans, ov: _ProfiledMeans, iso: _ProfiledMeans) -> float:
        return sequential_step_ms(ideal(step, ov, iso), float(ov.hidden_comm_ms))

    def attainable(iso: _ProfiledMeans) -> float:
        return attainable_step_ms(float(iso.compute_busy_ms), float(iso.comm_busy_ms))

    def attained(seq: _TimedMeans, step: _TimedMeans, iso: _ProfiledMeans) -> float:
        return attained_fraction(math.exp(seq.log_step), math.exp(step.log_step), attainable(iso))

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
        "attainable_ms": estimate(attainable, prof_iso),
        "attained_fraction": estimate(attained, step_seq, step_ov, prof_iso),
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
        "idle_isolated_ms": estimate(lambda iso: iso.idle_ms, prof_iso),
        "bubble_ms": estimate(lambda ov: ov.bubble_ms, prof_ov) if _sends(windows) else None,
        "residual_overlap": estimate(lambda iso: overlap_ratio(iso.covered_compute_ms, iso.compute_ms), prof_iso),
        "residual_comm_overlap": estimate(lambda iso: iso.hidden_comm_ms / iso.comm_busy_ms, prof_iso),
        "profiler_slowdown": estimate(
            lambda ov, step: log_slowdown(ov.log_step, step.log_step), prof_ov, step_ov, scale=math.expm1
        ),
        "profiler_slowdown_isolated": estimate(
            lambda iso, seq: log_slowdown(iso.log_step, seq.log_step), prof_iso, step_seq, scale=math.expm1
        ),
    }  # fmt: skip
    return {name: value for name, value in estimates.items() if value is not None}


def _timed_sample(windows: Sequence[RankWindow], arm: Mode) -> Sample:
    """Mean log step time of each timed block of one arm.

    The ranks of a job step together, so they are not independent evidence: each block is first averaged over the ranks.
    """
    num_steps: dict[int, int] = {}
    ranks: list[dict[int, _TimedMeans]] = []
    for window in ranks_with_most_blocks(windows, timed_blocks):
        blocks = [block for block in timed_blocks(window) if block.arm is arm]
        ranks.append({block.block: _TimedMeans(float(np.log(block.step_ms).mean())) for block in blocks})
        for block in blocks:
            num_steps[block.block] = max(num_steps.get(block.block, 0), len(block.step_ms))
    means = [_TimedMeans(*mean) for mean in block_means(ranks)]
    return Sample.of_rows(_TimedMeans, means, sum(num_steps.values()))


def _profiled_sample(windows: Sequence[RankWindow], arm: Mode) -> Sample:
    """The profiled blocks of one arm, each averaged over the ranks."""
    num_steps: dict[int, int] = {}
    ranks: list[dict[int, _ProfiledMeans]] = []
    for window in ranks_with_most_blocks(windows, profiled_blocks):
        blocks = [block for block in window.profiled if block.arm is arm]
        ranks.append({block.block: _ProfiledMeans.of(block) for block in blocks})
        for block in blocks:
            num_steps[block.block] = max(num_steps.get(block.block, 0), block.num_steps)
    means = [_ProfiledMeans(*mean) for mean in block_means(ranks)]
    return Sample.of_rows(_ProfiledMeans, means, sum(num_steps.values()))


def _sends(samples: Sequence[RankWindow]) -> bool:
    return any(block.p2p_ms for sample in samples for block in sample.profiled)
