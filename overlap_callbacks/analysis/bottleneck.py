"""What bounds the steps of a run, in words: with the evidence, and with what to try."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.dimension_rules import UNKNOWN, WORLD
from overlap_callbacks.analysis.formatting import PLAIN, Style, listed
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.kernel_times import CLOCK, SlowdownShares
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.step_parts import Bound, LateRank, StepParts, bound_of, mean_parts, times_ms
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.analysis.stragglers import Straggler, stragglers

DOCS = "docs/bottlenecks.md"
# Contention that is worth advice, as a share of the step.
_MUCH_CONTENTION = 0.03
# Messages of data parallelism below this size are short of bandwidth on most links, and above the other one they begin
# late: DDP's own bucket has 25 MB.
_SHORT_MESSAGE_BYTES = 4e6
_LONG_MESSAGE_BYTES = 100e6
_MOST_NAMED = 3


class Advice(NamedTuple):
    """What to try and why, as sentences; ``topic`` is the section of the docs."""

    topic: str
    what: str
    why: str

    @property
    def link(self) -> str:
        return f"{DOCS}#{self.topic}"


# What to try where nothing of the job decides it; ``lost`` is the time that bounds a step.
_IDLE = "The device is idle for {lost} a step."
_WAITING = "Stages are idle or wait for {lost} a step."
_FASTER = "Make compute itself faster: lower precision, fused kernels, torch.compile."
_UNUSED = "With DDP, leave find_unused_parameters off, and static_graph on where it holds."
_AGAINST = {
    Bound.COMPUTE: (
        Advice("faster-compute", _FASTER, "Communication is hidden or short, so less of it would save little."),
    ),
    Bound.LAUNCH: (
        Advice("cuda-graphs", "Launch less: torch.compile, CUDA graphs, fused optimizers.", _IDLE),
        Advice("micro-batch", "Give each launch more to do: a larger micro-batch.", _IDLE),
        Advice("find-unused-parameters", _UNUSED, "It walks the whole graph on the host in each step."),
    ),
    Bound.BUBBLE: (
        Advice("micro-batches", "Use more micro-batches in a step.", f"{_WAITING} The share falls as (p-1)/(p-1+m)."),
        Advice("interleaving", "Interleave: several model chunks on each stage.", _WAITING),
    ),
}


def _advice(found: Bottleneck, detailed: OverlapReport, shares: SlowdownShares | None) -> Iterator[Advice]:
    """What to try, the most promising first."""
    contention = list(_against_contention(found.parts, detailed.backend, shares))
    if found.bound is Bound.COMMUNICATION:
        yield from _against_communication(detailed)
    elif found.bound is Bound.STRAGGLER:
        yield from _against_straggler(found)
    elif found.bound is not Bound.COMPUTE or not contention:
        lost = PLAIN.quantity(times_ms(found.parts)[found.bound], "ms")
        yield from [advice._replace(why=advice.why.format(lost=lost)) for advice in _AGAINST[found.bound]]
    yield from contention


def _against_contention(parts: StepParts, backend: str, shares: SlowdownShares | None) -> Iterator[Advice]:
    if parts.contention_ms < _MUCH_CONTENTION * parts.total_ms:
        return
    lost = f"Compute loses {PLAIN.quantity(parts.contention_ms, 'ms')} a step beside communication."
    if shares is not None and (shares.of(CLOCK) or 0.0) > shares.slowdown / 2 > 0:
        what = "Raise the power cap, or cool better: the clock is lower with overlap."
        yield Advice("power-cap", what, f"{lost} The lower clock explains most of it.")
    if backend == "nccl":
        what = "Give NCCL fewer SMs: lower NCCL_MAX_CTAS, and watch the bus bandwidth."
        yield Advice("ctas", what, f"{lost} NCCL's kernels hold SMs meanwhile.")
    elif backend == "gloo":
        yield Advice("ctas", "Leave Gloo's threads cores of their own: fewer threads for torch's operators.", lost)


def _against_communication(detailed: OverlapReport) -> Iterator[Advice]:
    exposed = max(detailed.dimensions, key=lambda row: row.exposed_ms, default=None)
    # Of the group of all ranks nobody knows what it serves.
    name = exposed.dimension if exposed is not None and exposed.dimension not in (WORLD, UNKNOWN) else ""
    most = f"Most of the exposed communication is {name}-parallel." if name else ""
    if "tensor" in name or "expert" in name or "context" in name:
        yield Advice("mapping", f"Keep each {name}-parallel group within a node, on its fastest links.", most)
        return
    kinds = {collective_of(row.operator) for row in detailed.collectives}
    if "all_gather" in kinds and "reduce_scatter" in kinds:
        what = "Prefetch parameters earlier: one more layer ahead in FSDP, a larger prefetch bucket in ZeRO-3."
        yield Advice("prefetch", what, most or "Parameters are gathered in the step, and compute waits for them.")
    rows = [row for row in detailed.collectives if row.messages and collective_of(row.operator) in _REDUCTIONS]
    messages = sum(row.messages for row in rows)
    if messages:
        mean_bytes = sum(row.size_bytes for row in rows) / messages
        size = f"A reduction has {mean_bytes / 1e6:.2f} MB on average"
        if mean_bytes < _SHORT_MESSAGE_BYTES and messages > 1:
            yield Advice("buckets", "Raise the bucket size.", f"{size}: short messages do not fill a link.")
        elif mean_bytes > _LONG_MESSAGE_BYTES or messages == 1:
            because = f"{size}: a long message begins late in the backward pass."
            yield Advice("buckets", "Lower the bucket size.", because)
    what = "Send less: accumulate gradients over more micro-batches, or reduce them in 16 bits."
    yield Advice("fewer-bytes", what, most or "What compute does not hide, a step waits for.")


_REDUCTIONS = ("all_reduce", "reduce_scatter")


def _against_straggler(found: Bottleneck) -> Iterator[Advice]:
    late, sure = found.late, [row for row in found.stragglers if row.sure]
    hosts, ranks = ([row for row in sure if (row.rank < 0) is host] for host in (True, False))
    if hosts:
        what = f"Look at {_listed(hosts)} first: clocks, temperature, network, other programs."
        yield Advice("straggler", what, f"Of its ranks one comes last: {hosts[0].how_sure()}.")
    if late is not None and late.busy:
        what = f"Look at rank {late.rank}: its clock, its temperature, its share of the work."
        because = "It computes for longer than the other ranks."
    elif late is not None:
        what = f"Look at the host of rank {late.rank}: its data loader, its CPUs, other programs."
        because = "It is idle for longer than the other ranks."
    elif ranks:
        what = f"Look at {_listed(ranks)}: clock, temperature, share of the work, data loader."
        because = f"Of {ranks[0].name}: {ranks[0].how_sure()}."
    else:
        what = "Measure more windows, to find out which rank comes last."
        because = "It differs between windows, and no rank comes last more often than by chance for certain."
    yield Advice("straggler", what, because)


def _listed(rows: Sequence[Straggler]) -> str:
    return listed([row.name for row in rows[:_MOST_NAMED]])


class Bottleneck(NamedTuple):
    """What bounds the steps of a run, and what takes nearly as much; None if nothing does.

    Attributes:
        late: the rank for which others wait; None if there is none.
        stragglers: ranks, and then hosts, that come last to collectives of sequential steps, the worst of each first.
        advice: what to try, the most promising first.
    """

    bound: Bound
    runner_up: Bound | None
    parts: StepParts
    late: LateRank | None
    stragglers: tuple[Straggler, ...]
    advice: tuple[Advice, ...] = ()

    def sentence(self, style: Style = PLAIN) -> str:
        """The verdict with its evidence, in one sentence or two."""
        # A twelfth of a step may bound it: compute is what there is to hide communication, so it is no loss by itself.
        times = times_ms(self.parts)
        most = ", the most after compute" if times[self.bound] < times[Bound.COMPUTE] else ""
        words = f"Steps are {self.bound.value}-bound: {_evidence(self.bound, self.parts, self.late, style)}{most}."
        if self.runner_up is not None:
            words += f" Nearly as much: {_evidence(self.runner_up, self.parts, self.late, style)}."
        if Bound.STRAGGLER in (self.bound, self.runner_up):
            words += _who_is_late(self.stragglers, style)
        return words


def bottleneck_of(
    windows: Sequence[OverlapReport], speedup: Estimate | None = None, detailed: OverlapReport | None = None
) -> Bottleneck | None:
    """What bounds the steps of these windows, which count; None where no profile shows it.

    Args:
        windows: those that count.
        speedup: of overlap over sequential steps, over all of them.
        detailed: one of them with its collectives, on which advice rests; None to take the last that has any.
    """
    measured = [(window, found) for window in windows if (found := window.step_parts()) is not None]
    if not measured:
        return None
    parts = mean_parts([parts for _, (parts, _) in measured])
    late = _late([late for _, (_, late) in measured])
    bound, runner_up = bound_of(parts)
    arrivals = [window.arrivals for window, _ in measured if window.valid]
    late_ones = (*stragglers(arrivals), *stragglers(arrivals, hosts=True))
    if detailed is None:
        detailed = next((window for window, _ in reversed(measured) if window.collectives), measured[-1][0])
    divided = [window.slowdown_shares for window, _ in measured if window.slowdown_shares is not None]
    bottleneck = Bottleneck(bound, runner_up, parts, late, late_ones)
    advice = list(_advice(bottleneck, detailed, divided[-1] if divided else None))
    if speedup is not None and speedup.ci_high is not None and speedup.ci_high < 0:
        because = "Sequential steps are shorter here, with their whole 95% interval."
        advice.insert(0, Advice("overlap-off", "Switch overlap off.", because))
    return bottleneck._replace(advice=tuple(advice))


def run_bottleneck(summary: RunSummary, detailed: OverlapReport | None = None) -> Bottleneck | None:
    """What bounds the steps of a run; None of a control, and where no profile shows it. See ``bottleneck_of``."""
    if summary.control:
        return None
    return bottleneck_of(summary.valid_windows, summary.pooled().get("speedup_vs_sequential"), detailed)


def _late(of_windows: Sequence[LateRank | None]) -> LateRank | None:
    """The rank that was late in more than half of the windows, with its mean over those; None if no rank was."""
    ranks = Counter(late.rank for late in of_windows if late is not None)
    rank, times = max(ranks.items(), key=lambda item: item[1], default=(0, 0))
    if 2 * times <= len(of_windows):
        return None
    alike = [late for late in of_windows if late is not None and late.rank == rank]
    waiting_ms = sum(late.waiting_ms for late in alike) / times
    return LateRank(rank, waiting_ms, busy=2 * sum(late.busy for late in alike) > times)


def _who_is_late(of_run: Sequence[Straggler], style: Style) -> str:
    """The worst rank and the worst host of sequential steps, and how sure that is, as sentences."""
    worst = [next((row for row in of_run if (row.rank < 0) is host), None) for host in (False, True)]
    return "".join([f" {row.name.capitalize()}: {row.how_sure(style)}." for row in worst if row is not None])


_EVIDENCE = {
    Bound.COMPUTE: "compute takes {share}",
    Bound.COMMUNICATION: "communication that no compute hides takes {share}",
    Bound.BUBBLE: "the bubble of the pipeline takes {share}",
    Bound.LAUNCH: "neither compute nor communication runs for {share}",
    Bound.STRAGGLER: "ranks wait for {last}, for {share}",
}


def _evidence(bound: Bound, parts: StepParts, late: LateRank | None, style: Style) -> str:
    total_ms, ms = parts.total_ms, times_ms(parts)[bound]
    times = f"({style.quantity(ms, 'ms')} of {style.quantity(total_ms, 'ms')})"
    share = f"{style.percent(ms / total_ms)} of a profiled step {times}"
    last = "the last rank" if late is None else f"rank {late.rank}, the last one"
    words = _EVIDENCE[bound].format(share=share, last=last)
    if bound is Bound.COMPUTE and parts.contention_ms > 0:
        words += f", {style.quantity(parts.contention_ms, 'ms')} of it lost to contention"
    return words
