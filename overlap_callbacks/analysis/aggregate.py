"""Aggregates what all ranks measured in one window into an ``OverlapReport``: figures, validity, means over ranks.

The figures are in ``overlap_callbacks.analysis.figures``, what makes a window invalid in
``overlap_callbacks.analysis.validity``, the means of tables in ``overlap_callbacks.analysis.rank_means``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from overlap_callbacks.analysis import memory
from overlap_callbacks.analysis.block_means import ranks_left_out, with_whole_tables
from overlap_callbacks.analysis.contention.shares import Explanation, explain
from overlap_callbacks.analysis.environment.job import job_environment
from overlap_callbacks.analysis.environment.lint import lint
from overlap_callbacks.analysis.figures import figures_of
from overlap_callbacks.analysis.formatting import name_ranks
from overlap_callbacks.analysis.power.job import pool
from overlap_callbacks.analysis.rank_means import (
    mean_dimensions,
    mean_kernels,
    mean_pairs,
    with_transfers,
)
from overlap_callbacks.analysis.rank_problems import bounded, by_rank
from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.estimate import Estimate, Spread
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import JobPower
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow, TimedBlock
from overlap_callbacks.analysis.validity import escaped_communication, remarks, uncounted_modes, unlike_ranks

# Kernels that a report keeps, those with the most time. Enough for the tables; messages and record stay bounded.
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
        windows: one entry for each rank that reported, at least one.
        world_size: number of ranks of the job.
        every_n_steps: steps from one window to the next. The window's cost is spread over them.
        control: whether the schedule was an A/A control.
        problems: problems met while the ranks' windows were gathered, in words.
        tokens_per_step: tokens that one step of the job trains on; None if unknown.
    """
    samples = tuple(sorted(windows, key=lambda window: window.rank))
    first = samples[0]
    figures = figures_of(samples)
    # Why the window is not valid comes first: the number of problems is bounded.
    reasons = by_rank(samples, lambda sample: sample.doubts)
    escaped = None if control else escaped_communication(figures, first.device, first.backend)
    if escaped is not None:
        reasons.insert(0, escaped)
    is_checked = any(block.arm is Mode.SEQUENTIAL for sample in samples for block in sample.profiled)
    let_pass = by_rank(samples, lambda sample: sample.let_pass)
    if not is_checked:
        reasons += [f"{sentence}; no profile shows whether they ran beside compute" for sentence in let_pass]
    if len({sample.complete for sample in samples}) > 1:
        reasons.append("some ranks ended the window early: their steps ran in other modes than the rest's")
    unlike = unlike_ranks(samples)
    if unlike is not None:
        reasons.append(unlike)
    uncounted = uncounted_modes(figures) if all(sample.complete for sample in samples) else None
    if uncounted is not None:
        reasons.append(uncounted)
    valid = not reasons
    all_problems = [*reasons, *problems, *by_rank(samples, lambda sample: sample.problems)]
    if is_checked:
        all_problems += let_pass
    if len(samples) < world_size:
        all_problems.append(f"{world_size - len(samples)} of {world_size} ranks were not heard")
    all_problems += ranks_left_out(samples)
    all_problems += remarks(figures, first.device)
    profiled = with_whole_tables(samples)
    environment = job_environment(samples)
    power = _power(samples, world_size)
    if power is not None:
        all_problems += power.problems
    explained = explain(figures, power, profiled) if valid and not control else Explanation()
    return OverlapReport(
        window=first.window,
        first_step=first.first_step,
        num_steps=max(sample.num_steps for sample in samples),
        complete=all(sample.complete for sample in samples),
        control=control,
        world_size=world_size,
        ranks=tuple([sample.rank for sample in samples]),
        backend=first.backend,
        device=first.device,
        valid=valid,
        problems=bounded(all_problems),
        measurement_overhead=_overhead(samples, figures.get("e2e_overlapped_ms"), every_n_steps),
        wall_ms=max(sample.wall_ms for sample in samples),
        **figures,
        spread=_spread(samples),
        kernels=mean_kernels(profiled),
        pairs=mean_pairs(profiled, lambda sample: sample.pairs),
        dimension_pairs=mean_pairs(profiled, lambda sample: sample.dimension_pairs),
        dimensions=mean_dimensions(profiled),
        pictures=first.pictures,
        collectives=with_transfers(first.collectives, samples),
        power=power,
        power_trace=first.power_trace,
        power_verdict=explained.verdict,
        slowdown_shares=explained.shares,
        tokens_per_step=tokens_per_step,
        # What stands in the report itself need not be there twice.
        samples=tuple(
            [msgspec.structs.replace(sample, pictures=(), power_trace=None, environment=None) for sample in samples]
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


def _overhead(samples: Sequence[RankWindow], step: Estimate | None, every_n_steps: int) -> float | None:
    """What a window cost, as a fraction of the time between windows.

    That is its time beyond what its steps would take overlapped, and the CPU time of the reporting thread after it. How
    much of the latter the job loses is not known; at most all of it, where the two contend for Python's lock or a core.

    Args:
        samples: the ranks' windows.
        step: time of an overlapped step.
        every_n_steps: steps from one window to the next.
    """
    if step is None or step.value <= 0:
        return None
    extra_ms = max(
        max(0.0, sample.wall_ms - sample.num_steps * step.value) + sample.report_cpu_ms for sample in samples
    )
    return extra_ms / (every_n_steps * step.value)


_SPREAD_OVER_RANKS = ("compute_slowdown", "e2e_overlapped_ms", "e2e_sequential_ms", "exposed_comm_ms")


def _spread(samples: Sequence[RankWindow]) -> dict[str, Spread]:
    if len(samples) < 2:
        return {}
    by_rank = {sample.rank: figures_of([sample]) for sample in samples}
    spread = {}
    for name in _SPREAD_OVER_RANKS:
        values = {rank: figures[name].value for rank, figures in by_rank.items() if name in figures}
        if len(values) >= 2:
            low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
            std = float(np.std(list(values.values()), ddof=1))
            spread[name] = Spread(values[low], values[high], low, high, std)
    return spread


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
