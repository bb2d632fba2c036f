"""From the part of all ranks heard to the report: figures, validity, means over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from overlap_callbacks.analysis.communication.placement import host_numbers
from overlap_callbacks.analysis.communication.traffic import traffic_of
from overlap_callbacks.analysis.environment.job import pooled_environment
from overlap_callbacks.analysis.environment.lint import lint_job
from overlap_callbacks.analysis.environment.privacy import has_marks, host_numbers_of, numbered
from overlap_callbacks.analysis.experts import pooled_experts
from overlap_callbacks.analysis.exposure import reported
from overlap_callbacks.analysis.figures import figures_from
from overlap_callbacks.analysis.job.arrivals import reported_arrivals, reported_sizes, with_transfers
from overlap_callbacks.analysis.job.part import MAX_SAMPLES, SPREAD_OVER_RANKS, JobPart, unpacked, without_tables
from overlap_callbacks.analysis.job.stages import pipeline_bubble
from overlap_callbacks.analysis.job.tables import (
    ProfileTables,
    add_tables,
    mean_dimensions,
    mean_kernels,
    mean_loss,
    mean_pairs,
)
from overlap_callbacks.analysis.job.waiting import reported_waiting, transfers_of_dimensions, without_waiting
from overlap_callbacks.analysis.measuring_cost import LostTime
from overlap_callbacks.analysis.memory import job_peaks
from overlap_callbacks.analysis.power.cause import Explanation, explain
from overlap_callbacks.analysis.power.sums import pooled_power
from overlap_callbacks.analysis.rank_problems import bounded
from overlap_callbacks.analysis.results.environment import JobEnvironment
from overlap_callbacks.analysis.results.estimate import Estimate, Spread
from overlap_callbacks.analysis.results.power import JobPower
from overlap_callbacks.analysis.results.report import MAX_RANKS_NAMED, OverlapReport, Throughput
from overlap_callbacks.analysis.results.run import Workload
from overlap_callbacks.analysis.results.window import CollectiveTime, RankWindow
from overlap_callbacks.analysis.throughput import throughput_of
from overlap_callbacks.analysis.validity import escaped_communication, remarks, uncounted_modes, unlike_ranks

# A report keeps the lowest rank's sample whole; further samples of many ranks up to this, the rest without tables.
_MAX_SAMPLES_BYTES = 100_000


def report_of(
    part: JobPart,
    *,
    world_size: int,
    every_n_steps: int,
    control: bool = False,
    quick: bool = False,
    other_arm: bool = False,
    problems: Sequence[str] = (),
    tokens_per_step: int | None = None,
    work: Workload | None = None,
) -> OverlapReport:
    """Make the report of one window from what its ranks measured.

    Args:
        part: of all reporting ranks.
        world_size: number of ranks of the job.
        every_n_steps: steps from one window to the next, over which its cost is spread.
        control: whether the schedule was an A/A control.
        quick: whether the window is of a quick look.
        other_arm: whether another arm, whose steps overlap, replaces sequential steps.
        problems: met while the ranks' windows were gathered, in words.
        tokens_per_step: of the job; None if unknown.
        work: what else is known of the job's work; None for no figures of throughput.
    """
    num_ranks = part.ranks.count
    samples = [unpacked(content) for _, content in sorted(part.samples.items())]
    first = samples[0]
    figures = figures_from(part.figures)
    # Only of ranks that count: those without a profile, and those with enough of one.
    tables = add_tables([ProfileTables(), *[group.tables for group in part.figures.profiled.groups]])
    with_pairs = tables.num_ranks.get("pairs", 0)
    reasons, all_problems = _problems(
        part, figures, first.device, first.backend, world_size, control, other_arm, problems
    )
    power = _power(part, world_size)
    if power is not None:
        all_problems += power.problems
    valid = not reasons
    explained = (
        explain(figures, power, *mean_loss(tables.losses)) if valid and not (control or other_arm) else Explanation()
    )
    environment = None if part.environment is None else pooled_environment(part.environment, first.backend)
    if work is not None:
        work = msgspec.structs.replace(work, tokens_per_step=tokens_per_step)
    loads, expert_details = pooled_experts(part.experts)
    messages, traffic = traffic_of(part.messages, world_size)
    # Not by the world size, which may be any number in a damaged record.
    hosts = np.empty(0, dtype=np.int64) if messages is None else host_numbers(messages, world_size)
    arrivals, transfers = reported_arrivals(part.arrivals, hosts)
    waiting = reported_waiting(part.figures.waiting)
    cost = _cost(part, figures.get("e2e_overlapped_ms"), every_n_steps)
    overhead, overhead_low, overhead_high = _shares(cost, every_n_steps)
    num_more = sum(sentences.num_more for sentences in (part.doubts, part.let_pass, part.problems))
    report = OverlapReport(
        window=first.window,
        first_step=first.first_step,
        num_steps=part.num_steps,
        complete=part.all_complete,
        control=control,
        quick=quick,
        world_size=world_size,
        ranks=part.ranks.first(MAX_RANKS_NAMED),
        num_ranks=num_ranks if num_ranks > MAX_RANKS_NAMED else msgspec.UNSET,
        backend=first.backend,
        device=first.device,
        valid=valid,
        problems=bounded([*reasons, *all_problems], num_more=num_more, of_each=num_ranks <= MAX_SAMPLES),
        measurement_overhead=overhead,
        measurement_overhead_ci_low=overhead_low,
        measurement_overhead_ci_high=overhead_high,
        lost_ms=None if cost is None else cost.ms,
        lost_high_ms=None if cost is None else cost.high_ms,
        wall_ms=part.wall_ms,
        left_out=first.left_out,
        **figures,
        spread=_spread(part),
        kernels=mean_kernels(tables),
        pairs=without_waiting(mean_pairs(tables.pairs, with_pairs), waiting, with_pairs),
        dimension_pairs=mean_pairs(tables.dimension_pairs, tables.num_ranks.get("dimension_pairs", 0)),
        dimensions=transfers_of_dimensions(
            mean_dimensions(tables.dimensions), {row.dimension: row.num_ranks for row in tables.dimensions}, waiting
        ),
        pictures=first.pictures,
        exposure=reported(tables.exposure, waiting.names_us),
        collectives=with_transfers(first.collectives, part.transfers, waiting.transfers),
        power=power,
        power_trace=first.power_trace,
        power_verdict=explained.verdict,
        slowdown_shares=explained.shares,
        tokens_per_step=tokens_per_step,
        samples=_in_report(samples, num_ranks),
        environment=environment,
        findings=() if environment is None else lint_job(environment, part.traits),
        memory=job_peaks(part.memory),
        traffic=traffic,
        messages=messages,
        experts=loads,
        expert_details=expert_details,
        throughput=None if work is None else _throughput(work, figures, environment, first.device, world_size),
        arrivals=arrivals,
        transfers=transfers,
        sized_transfers=reported_sizes(part.arrivals),
        pipeline=pipeline_bubble(part.stages, messages, waiting.stages),
        race=part.race,
        lower_bound=part.lower_bound,
        settled=None,  # needs the run's other windows: SettledFit
    )
    return numbered(report, host_numbers_of(part.environment)) if has_marks(part.environment) else report


def _throughput(
    work: Workload, figures: Mapping[str, Estimate], environment: JobEnvironment | None, device: str, world_size: int
) -> Throughput | None:
    step = figures.get("e2e_overlapped_ms")
    num_devices = world_size
    if environment is not None:
        if any(difference.name == "device" for difference in environment.differing):
            device = ""
        if environment.num_devices is not None and environment.num_ranks == world_size:
            num_devices = environment.num_devices  # ranks may share them
    return throughput_of(work, None if step is None else step.value, device=device, num_devices=num_devices)


def _in_report(samples: Iterable[RankWindow], num_ranks: int) -> tuple[RankWindow, ...]:
    """The samples that a report keeps: all of few ranks, else as many as fit, by ascending rank."""
    # Drop what the report itself already has.
    first, *others = [
        msgspec.structs.replace(sample, pictures=(), power_trace=None, collectives=_as_recorded(sample.collectives))
        for sample in samples
    ]
    if num_ranks <= MAX_SAMPLES:
        return (first, *others)
    kept, left_bytes = [first], _MAX_SAMPLES_BYTES
    for sample in others:
        left_bytes -= len(msgspec.json.encode(sample))
        kept.append(sample if left_bytes >= 0 else without_tables(sample))
    return tuple(kept)


def _as_recorded(collectives: Iterable[CollectiveTime]) -> tuple[CollectiveTime, ...]:
    return tuple([msgspec.structs.replace(row, first_rank=msgspec.UNSET) for row in collectives])


def _spread(part: JobPart) -> dict[str, Spread]:
    return {
        name: Spread(low, high, int(low_rank), int(high_rank), math.sqrt(squares / (number - 1)))
        for name, (number, _, squares, low, low_rank, high, high_rank) in zip(
            SPREAD_OVER_RANKS, part.spread.columns, strict=True
        )
        if number > 1
    }


def _problems(
    part: JobPart,
    figures: Mapping[str, Estimate],
    device: str,
    backend: str,
    world_size: int,
    control: bool,
    other_arm: bool,
    problems: Sequence[str],
) -> tuple[list[str], list[str]]:
    """Why the window is invalid, and what else is missing or doubtful, in words."""
    num_ranks = part.ranks.count
    reasons = part.doubts.of_job(num_ranks)
    escaped = None if control or other_arm else escaped_communication(figures, device, backend)
    if escaped is not None:
        reasons.insert(0, escaped)
    let_pass = part.let_pass.of_job(num_ranks)
    if not part.checked:
        reasons += [f"{sentence}; no profile shows whether they ran during compute [OC324]" for sentence in let_pass]
    if part.any_complete and not part.all_complete:
        reasons.append("some ranks ended the window early: their steps ran in other modes than the rest's [OC325]")
    unlike = unlike_ranks(part.measured)
    if unlike is not None:
        reasons.append(unlike)
    uncounted = uncounted_modes(figures) if part.all_complete else None
    if uncounted is not None:
        reasons.append(uncounted)
    found = [*problems, *part.problems.of_job(num_ranks)]
    if part.checked:
        found += let_pass
    if num_ranks < world_size:
        found.append(f"{world_size - num_ranks} of {world_size} ranks were not heard [OC328]")
    for what, blocks in (("kernel times", part.figures.profiled), ("step times", part.figures.timed)):
        if blocks.left_out:
            found.append(
                f"{what} of {blocks.left_out.named()} are left out: half or more of the blocks of a mode are missing "
                "there [OC329]"
            )
    return reasons, found if other_arm else [*found, *remarks(figures, device)]


def _power(part: JobPart, world_size: int) -> JobPower | None:
    if not part.power.ranks:
        return None
    unread = part.power.unread
    power = pooled_power(part.power, whole=not unread and part.ranks.count == world_size)
    if unread:
        problem = f"power of {unread.named()} was not measured: there are no sums over all devices [OC412]"
        power = msgspec.structs.replace(power, problems=(*power.problems, problem))
    return power


def _cost(part: JobPart, step: Estimate | None, every_n_steps: int) -> LostTime | None:
    """The time that training lost to a window; None if unknown.

    All ranks train at the pace of the slowest, so the largest loss counts. A rank that does not know its loss is
    charged the window's time beyond what its steps (of time ``step``) would take overlapped, and the CPU time of the
    reporting thread.
    """
    if every_n_steps <= 0:  # in another writer's record
        return None
    costs = [] if part.lost is None else [part.lost]
    if part.extra_ms and step is not None and step.value > 0:
        # A window no longer than its steps does not offset the time after it.
        extra_ms = max(
            part.report_cpu_ms, *[time_ms - num_steps * step.value for num_steps, time_ms in part.extra_ms.items()]
        )
        costs.append(LostTime(extra_ms, None, None, step.value))
    return max(costs, key=lambda cost: cost.ms, default=None)


def _shares(cost: LostTime | None, every_n_steps: int) -> tuple[float | None, float | None, float | None]:
    """A window's cost and the ends of its interval, as fractions of the time from one window to the next."""
    if cost is None:
        return None, None, None
    between_ms = every_n_steps * cost.step_ms
    value, low, high = (None if ms is None else ms / between_ms for ms in (cost.ms, cost.low_ms, cost.high_ms))
    return value, low, high
