"""All figures of a window over a set of ranks, as estimates with intervals.

The equations are in ``overlap_callbacks.analysis.equations``, the statistics in
``overlap_callbacks.analysis.statistics``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from overlap_callbacks.analysis.block_means import ArmSums, BlockSums, block_sums, merge_blocks
from overlap_callbacks.analysis.equations import (
    attainable_step_ms,
    attained_fraction,
    ideal_step_ms,
    log_slowdown,
    overlap_ratio,
    sequential_step_ms,
)
from overlap_callbacks.analysis.results.catalogue import figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow
from overlap_callbacks.analysis.statistics import MIN_BLOCKS, Interval, Sample, interval_of

Tables = TypeVar("Tables")
_Columns = TypeVar("_Columns", bound=tuple[float, ...])

# The figures that ranks are compared by.
SPREAD_OVER_RANKS = ("compute_slowdown", "e2e_overlapped_ms", "e2e_sequential_ms", "exposed_comm_ms")
# Groups of ranks that a part keeps apart, by the number of their blocks.
MAX_GROUPS = 4
# More blocks than any window has.
NO_INTERVAL = 2**31


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


class FigureSums(msgspec.Struct, Generic[Tables], frozen=True, array_like=True, gc=False):
    """What the figures over some ranks are computed from: sums, which can be added.

    Attributes:
        timed, profiled: sums over the ranks' blocks.
        sends: whether any rank sends to single others.
    """

    timed: BlockSums[None]
    profiled: BlockSums[Tables]
    sends: bool


def figure_sums(window: RankWindow, tables: Tables) -> FigureSums[Tables]:
    """The sums of one rank.

    Args:
        window: what it measured.
        tables: what counts only if its profile does.
    """
    # The ranks of a job step together, so they are not independent evidence: each block is averaged over the ranks.
    timed = [
        (block.arm, block.block, len(block.step_ms), (float(np.log(block.step_ms).mean()),))
        for block in window.timed
        if block.step_ms and min(block.step_ms) > 0
    ]
    profiled = [(block.arm, block.block, block.num_steps, _ProfiledMeans.of(block)) for block in window.profiled]
    return FigureSums(
        block_sums(window.rank, timed, None),
        block_sums(window.rank, profiled, tables),
        any(block.p2p_ms for block in window.profiled),
    )


def add_figure_sums(
    parts: Sequence[FigureSums[Tables]], add_tables: Callable[[Sequence[Tables]], Tables]
) -> FigureSums[Tables]:
    """The sums over the ranks of all parts.

    Args:
        parts: of distinct ranks.
        add_tables: adds up the tables of several groups of ranks.
    """
    return FigureSums(
        merge_blocks([part.timed for part in parts], lambda tables: None, MAX_GROUPS),
        merge_blocks([part.profiled for part in parts], add_tables, MAX_GROUPS),
        any(part.sends for part in parts),
    )


def figures_of(windows: Sequence[RankWindow]) -> dict[str, Estimate]:
    """All figures over the given ranks; figures that were not measured are left out."""
    sums = add_figure_sums([figure_sums(window, None) for window in windows], lambda tables: None)
    return {name: interval.estimate() for name, interval in intervals_from(sums).items()}


def spread_figures(sums: FigureSums[Tables]) -> dict[str, float]:
    """The figures that ranks are compared by, of one rank; without intervals, which take longer."""
    return {name: figure.estimate().value for name, figure in _figures(sums, SPREAD_OVER_RANKS, NO_INTERVAL).items()}


def intervals_from(sums: FigureSums[Tables]) -> dict[str, Interval]:
    """All figures over the ranks of these sums; figures that were not measured are left out."""
    return _figures(sums, None, MIN_BLOCKS)


def _figures(sums: FigureSums[Tables], names: Collection[str] | None, min_blocks: int) -> dict[str, Interval]:
    step_ov, step_seq, prof_ov, prof_iso = samples_of(sums)

    def estimate(
        combine: Callable[..., float], *samples: Sample, scale: Callable[[float], float] = float
    ) -> Interval | None:
        return interval_of(combine, *samples, scale=scale, min_blocks=min_blocks)

    def ideal(step: _TimedMeans, ov: _ProfiledMeans, iso: _ProfiledMeans) -> float:
        return ideal_step_ms(math.exp(step.log_step), math.exp(ov.log_compute), math.exp(iso.log_compute))

    def model(step: _TimedMeans, ov: _ProfiledMeans, iso: _ProfiledMeans) -> float:
        return sequential_step_ms(ideal(step, ov, iso), float(ov.hidden_comm_ms))

    def possible(step_ms: float) -> float:
        # Sums over streams can exceed the step: what is left of it then is no time.
        return step_ms if step_ms > 0 else math.nan

    def comm_ratio(ov: _ProfiledMeans) -> float:
        exposed_ms = ov.comm_busy_ms - ov.hidden_comm_ms
        return float(ov.comm_busy_ms / (ov.compute_busy_ms + exposed_ms + ov.idle_ms))

    def attainable(iso: _ProfiledMeans) -> float:
        return attainable_step_ms(float(iso.compute_busy_ms), float(iso.comm_busy_ms))

    def attained(seq: _TimedMeans, step: _TimedMeans, iso: _ProfiledMeans) -> float:
        return attained_fraction(math.exp(seq.log_step), math.exp(step.log_step), attainable(iso))

    figures: dict[str, Callable[[], Interval | None]] = {
        "compute_slowdown": lambda: estimate(
            lambda ov, iso: log_slowdown(ov.log_compute, iso.log_compute), prof_ov, prof_iso, scale=math.expm1
        ),
        "overlap_ratio": lambda: estimate(lambda ov: overlap_ratio(ov.covered_compute_ms, ov.compute_ms), prof_ov),
        "e2e_overlapped_ms": lambda: estimate(lambda step: step.log_step, step_ov, scale=math.exp),
        "e2e_ideal_ms": lambda: estimate(lambda *means: possible(ideal(*means)), step_ov, prof_ov, prof_iso),
        "e2e_sequential_model_ms": lambda: estimate(lambda *means: possible(model(*means)), step_ov, prof_ov, prof_iso),
        "e2e_sequential_ms": lambda: estimate(lambda step: step.log_step, step_seq, scale=math.exp),
        "speedup_vs_sequential": lambda: estimate(
            lambda seq, ov: seq.log_step - ov.log_step, step_seq, step_ov, scale=math.expm1
        ),
        "attainable_ms": lambda: estimate(attainable, prof_iso),
        "attained_fraction": lambda: estimate(attained, step_seq, step_ov, prof_iso),
        "gap_to_ideal": lambda: estimate(
            lambda step, ov, iso: step.log_step - math.log(ideal(step, ov, iso)),
            step_ov, prof_ov, prof_iso, scale=math.expm1,
        ),
        "sequential_model_error": lambda: estimate(
            lambda step, ov, iso, seq: math.log(model(step, ov, iso)) - seq.log_step,
            step_ov, prof_ov, prof_iso, step_seq, scale=math.expm1,
        ),
        "compute_ms": lambda: estimate(lambda ov: ov.log_compute, prof_ov, scale=math.exp),
        "compute_isolated_ms": lambda: estimate(lambda iso: iso.log_compute, prof_iso, scale=math.exp),
        "compute_busy_ms": lambda: estimate(lambda ov: ov.compute_busy_ms, prof_ov),
        "compute_busy_isolated_ms": lambda: estimate(lambda iso: iso.compute_busy_ms, prof_iso),
        "comm_ms": lambda: estimate(lambda ov: ov.comm_busy_ms, prof_ov),
        "comm_isolated_ms": lambda: estimate(lambda iso: iso.comm_busy_ms, prof_iso),
        "hidden_comm_ms": lambda: estimate(lambda ov: ov.hidden_comm_ms, prof_ov),
        "exposed_comm_ms": lambda: estimate(lambda ov: ov.comm_busy_ms - ov.hidden_comm_ms, prof_ov),
        "hidden_comm_fraction": lambda: estimate(lambda ov: ov.hidden_comm_ms / ov.comm_busy_ms, prof_ov),
        "comm_slowdown": lambda: estimate(
            lambda ov, iso: log_slowdown(ov.log_comm, iso.log_comm), prof_ov, prof_iso, scale=math.expm1
        ),
        "comm_ratio": lambda: estimate(comm_ratio, prof_ov),
        "p2p_ms": lambda: estimate(lambda ov: ov.p2p_ms, prof_ov) if sums.sends else None,
        "idle_ms": lambda: estimate(lambda ov: ov.idle_ms, prof_ov),
        "idle_isolated_ms": lambda: estimate(lambda iso: iso.idle_ms, prof_iso),
        "bubble_ms": lambda: estimate(lambda ov: ov.bubble_ms, prof_ov) if sums.sends else None,
        "residual_overlap": lambda: estimate(
            lambda iso: overlap_ratio(iso.covered_compute_ms, iso.compute_ms), prof_iso
        ),
        "residual_comm_overlap": lambda: estimate(lambda iso: iso.hidden_comm_ms / iso.comm_busy_ms, prof_iso),
        "profiler_slowdown": lambda: estimate(
            lambda ov, step: log_slowdown(ov.log_step, step.log_step), prof_ov, step_ov, scale=math.expm1
        ),
        "profiler_slowdown_isolated": lambda: estimate(
            lambda iso, seq: log_slowdown(iso.log_step, seq.log_step), prof_iso, step_seq, scale=math.expm1
        ),
    }  # fmt: skip
    found = {name: figure() for name, figure in figures.items() if names is None or name in names}
    return {
        name: dataclasses.replace(value, bounds=figure_named(name).bounds)
        for name, value in found.items()
        if value is not None
    }


def samples_of(sums: FigureSums[Tables]) -> tuple[Sample, Sample, Sample, Sample]:
    """The timed blocks of overlapped and of sequential steps, then the profiled ones, each averaged over the ranks."""
    modes = (Mode.OVERLAPPED, Mode.SEQUENTIAL)
    timed = [_sample(_TimedMeans, sums.timed.of(mode)) for mode in modes]
    profiled = [_sample(_ProfiledMeans, sums.profiled.of(mode)) for mode in modes]
    return timed[0], timed[1], profiled[0], profiled[1]


def _sample(columns: type[_Columns], sums: ArmSums) -> Sample:
    """The blocks of one mode, each averaged over the ranks."""
    rows = [columns(*mean) for mean in sums.means()]
    return Sample.of_rows(columns, rows, sum(sums.num_steps))
