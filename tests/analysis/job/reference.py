"""The reference: the report of a window from what all ranks measured, all at once.

So it was computed before samples were added level by level, and so it is easy to check.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from overlap_callbacks.analysis.formatting import name_ranks
from overlap_callbacks.analysis.power.cause import Explanation, explain
from overlap_callbacks.analysis.rank_problems import bounded
from overlap_callbacks.analysis.results.estimate import Estimate, Spread
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import JobPower
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import MemoryPeak, RankWindow, SmLoss
from overlap_callbacks.analysis.validity import escaped_communication, remarks, uncounted_modes
from tests.analysis.job.reference_environment import job_environment
from tests.analysis.job.reference_figures import figures_of, ranks_left_out, with_whole_tables
from tests.analysis.job.reference_parts import by_rank, mean_dimensions, mean_kernels, mean_pairs, pool, with_transfers
from tests.environments import lint


def reference_report(
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
    is_checked = any(block.mode is Mode.SEQUENTIAL for sample in samples for block in sample.profiled)
    let_pass = by_rank(samples, lambda sample: sample.let_pass)
    if not is_checked:
        reasons += [f"{sentence}; no profile shows whether they ran during compute [OC324]" for sentence in let_pass]
    if len({sample.complete for sample in samples}) > 1:
        reasons.append("some ranks ended the window early: their steps ran in other modes than the rest's [OC325]")
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
        all_problems.append(f"{world_size - len(samples)} of {world_size} ranks were not heard [OC328]")
    all_problems += ranks_left_out(samples)
    all_problems += remarks(figures, first.device)
    profiled = with_whole_tables(samples)
    environment = job_environment(samples)
    cost = _cost(samples, figures.get("e2e_overlapped_ms"), every_n_steps)
    power = _power(samples, world_size)
    if power is not None:
        all_problems += power.problems
    explained = explain(figures, power, *_losses(profiled)) if valid and not control else Explanation()
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
        measurement_overhead=None if cost is None else cost[1],
        lost_ms=None if cost is None else cost[0],
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
        # Drop what the report itself already has.
        samples=tuple(
            [msgspec.structs.replace(sample, pictures=(), power_trace=None, environment=None) for sample in samples]
        ),
        environment=environment,
        findings=lint(environment, samples),
        memory=pool_memory(sample.memory for sample in samples),
    )


def _power(samples: Sequence[RankWindow], world_size: int) -> JobPower | None:
    if not any(sample.power for sample in samples):
        return None
    without = [sample.rank for sample in samples if not (sample.power or sample.power_elsewhere)]
    power = pool({sample.rank: sample.power for sample in samples}, whole=not without and len(samples) == world_size)
    if without:
        problem = f"power of {name_ranks(without)} was not measured: there are no sums over all devices [OC412]"
        power = msgspec.structs.replace(power, problems=(*power.problems, problem))
    return power


def _cost(samples: Sequence[RankWindow], step: Estimate | None, every_n_steps: int) -> tuple[float, float] | None:
    """The time in ms that training lost to a window, and its fraction of the time between windows; None if not known.

    Each rank has measured the time from the window's opening until steps were back to normal, beyond what steps usually
    take. All ranks train at the pace of the slowest, so each has waited for the others: the most of any rank is told.

    A rank that does not know it (windows follow each other, or the first has too few steps before it) is taken to have
    lost the window's time beyond what its steps would take overlapped, and the CPU time of the reporting thread.

    Args:
        samples: the ranks' windows.
        step: time of an overlapped step.
        every_n_steps: steps from one window to the next.
    """
    costs = []
    for sample in samples:
        if sample.lost_ms is not None:
            costs.append((sample.lost_ms, sample.usual_step_ms))
        elif step is not None and sample.complete:
            extra_ms = max(0.0, sample.wall_ms - sample.num_steps * step.value)
            costs.append((extra_ms + sample.report_cpu_ms, step.value))
    costs = [(lost_ms, step_ms) for lost_ms, step_ms in costs if step_ms > 0]
    if not costs:
        return None
    lost_ms, step_ms = max(costs, key=lambda cost: cost[0])
    return lost_ms, lost_ms / (every_n_steps * step_ms)


_SPREAD_OVER_RANKS = (
    "compute_slowdown", "e2e_overlapped_ms", "e2e_sequential_ms", "exposed_comm_ms", "compute_busy_ms", "idle_ms",
)  # fmt: skip


def _spread(samples: Sequence[RankWindow]) -> dict[str, Spread]:
    if len(samples) < 2:
        return {}
    by_rank = {sample.rank: figures_of([sample]) for sample in samples}
    spread = {}
    for name in _SPREAD_OVER_RANKS:
        values = {r: float(f"{found[name].value:.12g}") for r, found in by_rank.items() if name in found}
        if len(values) >= 2:
            low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
            std = float(np.std(list(values.values()), ddof=1))
            spread[name] = Spread(values[low], values[high], low, high, std)
    return spread


def _losses(samples: Sequence[RankWindow]) -> tuple[list[SmLoss], float | None]:
    """The model's result of each rank that has one, and the mean sequential compute of these ranks in milliseconds.

    A rank whose compute never runs beside communication has no result, and loses nothing. Without it, the loss of the
    others would count as that of all.
    """
    losses, compute_ms = [], []
    for sample in samples:
        alone_ms = [block.compute_ms for block in sample.profiled if block.mode is Mode.SEQUENTIAL]
        overlapped = [block for block in sample.profiled if block.mode is Mode.OVERLAPPED]
        loses_nothing = bool(overlapped) and not any(block.covered_compute_ms for block in overlapped)
        loss = sample.sm_loss or (SmLoss(sample.num_sms, 0.0, 0.0, 0.0, 0.0, 0.0) if loses_nothing else None)
        if alone_ms and loss is not None:
            losses.append(loss)
            compute_ms.append(statistics.fmean(alone_ms))
    if not any(loss.modelled_ms for loss in losses):
        return [], None
    return losses, statistics.fmean(compute_ms)


def unlike_ranks(samples: Sequence[RankWindow]) -> str | None:
    """Which ranks measured something else than the first, in words; None if all measured the same."""
    first = samples[0]
    others = [
        sample.rank
        for sample in samples
        if (sample.terms, sample.window, sample.first_step) != (first.terms, first.window, first.first_step)
    ]
    if not others:
        return None
    return (
        f"{name_ranks(others)} measured something else than rank {first.rank}: the schedule, the form of sequential "
        f"mode or the first step differs, so means over the ranks say nothing [OC326]"
    )


def pool_memory(ranks: Iterable[Sequence[MemoryPeak]]) -> tuple[MemoryPeak, ...]:
    """Bounds of the highest peak of any rank, by mode, over the ranks that have readings.

    Where one of these has none of a mode, its peak there may be the highest: so nothing bounds that mode from above.
    """
    bounds: dict[Mode, list[tuple[int, int | None]]] = {}
    read = [peaks for peaks in ranks if peaks]
    for peaks in read:
        for peak in peaks:
            bounds.setdefault(peak.mode, []).append((peak.at_least_bytes, peak.at_most_bytes))
    for of_mode in bounds.values():
        if len(of_mode) < len(read):
            of_mode.append((0, None))
    return tuple([_highest(mode, bounds[mode]) for mode in Mode if mode in bounds])


def _highest(mode: Mode, bounds: Sequence[tuple[int, int | None]]) -> MemoryPeak:
    upper = [at_most for _, at_most in bounds if at_most is not None]
    at_most = max(upper) if len(upper) == len(bounds) else None
    return MemoryPeak(mode, max(at_least for at_least, _ in bounds), at_most)
