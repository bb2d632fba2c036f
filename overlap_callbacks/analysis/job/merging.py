"""From what one rank measured to a part, and from parts to one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from overlap_callbacks.analysis.communication.sums import add_sums, sums_of
from overlap_callbacks.analysis.environment.lint import add_traits, traits_of
from overlap_callbacks.analysis.environment.sums import add_environments, environment_of, host_of
from overlap_callbacks.analysis.experts import add_experts
from overlap_callbacks.analysis.experts import sums_of as expert_sums
from overlap_callbacks.analysis.figures import FigureSums, add_figure_sums, figure_sums, spread_figures
from overlap_callbacks.analysis.job.arrivals import add_arrivals, arrivals_of
from overlap_callbacks.analysis.job.part import JobPart
from overlap_callbacks.analysis.job.samples import chosen, packed
from overlap_callbacks.analysis.job.sentences import add_sentences, sentences_of
from overlap_callbacks.analysis.job.spread import Moments, add_moments
from overlap_callbacks.analysis.job.stages import add_stages, stages_of
from overlap_callbacks.analysis.job.tables import ProfileTables, add_tables, bounded_kernels, tables_of
from overlap_callbacks.analysis.job.transfers import add_transfers, transfers_of
from overlap_callbacks.analysis.measuring_cost import LostTime
from overlap_callbacks.analysis.memory import add_memory, memory_of
from overlap_callbacks.analysis.power.sums import add_power, power_of
from overlap_callbacks.analysis.race import add_checks
from overlap_callbacks.analysis.rank_set import RankSet, union
from overlap_callbacks.analysis.results.messages import NO_STAGE
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import RankWindow
from overlap_callbacks.analysis.validity import Measured, add_measured

# Entries of ``JobPart.extra_ms``: nearly all ranks run as many steps.
_MAX_EXTRA = 32


def part_of(window: RankWindow) -> JobPart:
    """What one rank measured, as a part."""
    rank = window.rank
    own = RankSet.of(rank)
    figures = figure_sums(window, tables_of(window))
    environment = window.environment
    # Of a window that was cut short, its length and the number of its steps tell nothing.
    is_told = window.lost_ms is not None or not window.complete
    lost = (
        None
        if window.lost_ms is None or window.usual_step_ms <= 0
        else LostTime(window.lost_ms, window.lost_low_ms, window.lost_high_ms, window.usual_step_ms)
    )
    host = "" if environment is None else host_of(environment)
    return JobPart(
        ranks=own,
        measured=(Measured(window.terms, window.window, window.first_step, own),),
        num_steps=window.num_steps,
        any_complete=window.complete,
        all_complete=window.complete,
        wall_ms=window.wall_ms,
        extra_ms=() if is_told else ((window.num_steps, window.wall_ms + window.report_cpu_ms),),
        report_cpu_ms=0.0 if is_told else window.report_cpu_ms,
        lost=lost,
        checked=any(block.mode is Mode.SEQUENTIAL for block in window.profiled),
        figures=figures,
        spread={name: Moments.of(rank, value) for name, value in spread_figures(figures).items()},
        doubts=sentences_of(rank, window.doubts),
        let_pass=sentences_of(rank, window.let_pass),
        problems=sentences_of(rank, window.problems),
        transfers=transfers_of(window.collectives),
        power=power_of(rank, window.power, elsewhere=window.power_elsewhere),
        memory=memory_of(window.memory),
        environment=None if environment is None else environment_of(rank, environment),
        traits=traits_of(window),
        samples={rank: packed(window)},
        experts=expert_sums(rank, window.experts),
        messages=sums_of(rank, window.messages, host),
        arrivals=arrivals_of(
            rank, window.arrivals, host, NO_STAGE if window.messages is None else window.messages.stage
        ),
        stages=stages_of(window),
        race=window.race,
        lower_bound=window.lower_bound,
    )


def merge(parts: Sequence[JobPart]) -> JobPart:
    """The parts as one: it speaks for the ranks of all.

    Args:
        parts: at least one; no rank is in two of them. Their order does not matter.
    """
    parts = sorted(parts, key=lambda part: part.ranks.lowest)
    if len(parts) == 1:
        return parts[0]
    ranks = union([part.ranks for part in parts])
    spread = add_moments([part.spread for part in parts])
    environments = [part.environment for part in parts if part.environment is not None]
    samples = {rank: content for part in parts for rank, content in part.samples.items()}
    return JobPart(
        ranks=ranks,
        measured=add_measured([part.measured for part in parts]),
        num_steps=max(part.num_steps for part in parts),
        any_complete=any(part.any_complete for part in parts),
        all_complete=all(part.all_complete for part in parts),
        wall_ms=max(part.wall_ms for part in parts),
        extra_ms=_longest([extra for part in parts for extra in part.extra_ms]),
        report_cpu_ms=max(part.report_cpu_ms for part in parts),
        lost=max([part.lost for part in parts if part.lost is not None], key=lambda lost: lost.ms, default=None),
        checked=any(part.checked for part in parts),
        figures=_add_figures([part.figures for part in parts]),
        spread=spread,
        doubts=add_sentences([part.doubts for part in parts]),
        let_pass=add_sentences([part.let_pass for part in parts]),
        problems=add_sentences([part.problems for part in parts]),
        transfers=add_transfers([part.transfers for part in parts], ranks.lowest),
        power=add_power([part.power for part in parts]),
        memory=add_memory([part.memory for part in parts]),
        environment=add_environments(environments) if environments else None,
        traits=add_traits([part.traits for part in parts]),
        samples=chosen(samples, ranks.count, ranks.lowest, spread),
        messages=add_sums([part.messages for part in parts]),
        experts=add_experts([part.experts for part in parts]),
        arrivals=add_arrivals([part.arrivals for part in parts]),
        stages=add_stages([part.stages for part in parts]),
        race=add_checks([part.race for part in parts]),
        lower_bound=any(part.lower_bound for part in parts),
    )


def _add_figures(parts: Sequence[FigureSums[ProfileTables]]) -> FigureSums[ProfileTables]:
    return bounded_kernels(add_figure_sums(parts, add_tables))


def _longest(extra_ms: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Those that may be the longest beyond their steps: not where fewer steps took no less."""
    kept: list[tuple[int, float]] = []
    for num_steps, time_ms in sorted(extra_ms, key=lambda extra: (extra[0], -extra[1])):
        if not kept or time_ms > kept[-1][1]:
            kept.append((num_steps, time_ms))
    return tuple(kept[-_MAX_EXTRA:])
