"""The report of one window over all ranks: plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from overlap_callbacks.analysis.results.arrivals import Arrivals, SizedTransfer, SizeTransfer, are_plausible
from overlap_callbacks.analysis.results.catalogue import FAMILIES, FIGURES
from overlap_callbacks.analysis.results.environment import Finding, JobEnvironment
from overlap_callbacks.analysis.results.estimate import Estimate, Spread, stored_estimate
from overlap_callbacks.analysis.results.experts import ExpertDetails, ExpertLoads
from overlap_callbacks.analysis.results.exposure import Exposure
from overlap_callbacks.analysis.results.figure import Reported
from overlap_callbacks.analysis.results.kernel_times import (
    KernelTime,
    PairTime,
    SlowdownCause,
    SlowdownShares,
    StepTimeline,
)
from overlap_callbacks.analysis.results.messages import JobMessages, Traffic
from overlap_callbacks.analysis.results.power import JobPower, PowerTrace
from overlap_callbacks.analysis.results.race import RaceCheck
from overlap_callbacks.analysis.results.settled import Settled
from overlap_callbacks.analysis.results.step_parts import (
    REQUIRED_FIGURES,
    LateRank,
    StepParts,
    StepShare,
    bound_of,
    measured_parts,
    step_shares,
)
from overlap_callbacks.analysis.results.window import CollectiveTime, DimensionTime, MemoryPeak, RankWindow

# Limit of ranks listed one by one.
MAX_RANKS_NAMED = 64


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput of the job, by the time of its overlapped steps; None for what is unknown.

    Attributes:
        tokens_per_s, samples_per_s, flop_per_step: of the whole job; FLOP are model FLOP.
        flop_basis, peak_basis: their sources, in words; for the peak an address, or that it was given.
        mfu: model FLOP utilisation: ``flop_per_s_per_device`` as a fraction of the device's peak.
        precision: of the peak; empty if it was given without one.
    """

    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    flop_per_step: float | None = None
    flop_basis: str = ""
    flop_per_s_per_device: float | None = None
    mfu: float | None = None
    peak_flop_per_s: float | None = None
    peak_basis: str = ""
    precision: str = ""
    num_devices: int = 0


class StageBubble(msgspec.Struct, frozen=True):
    """How the ranks of one stage spent an overlapped step under the profiler; means over these ranks.

    Attributes:
        step_ms: the step: compute, communication and idle time, without counting overlap twice.
        bubble_ms: time when they were idle, or only messages ran that waited for their peer.
    """

    stage: int
    num_ranks: int
    step_ms: float
    bubble_ms: float

    @property
    def fraction(self) -> float:
        return self.bubble_ms / self.step_ms if self.step_ms > 0 else 0.0


class PipelineBubble(msgspec.Struct, frozen=True):
    """The bubble of a pipeline.

    Attributes:
        num_stages: stages, p.
        micro_batches: of a step, m, from the messages of the first stage; None if unclear.
        chunks: model chunks of a rank, v, if interleaved; else 1.
        stages: as measured; the first 64.
    """

    num_stages: int
    micro_batches: int | None
    chunks: int
    stages: tuple[StageBubble, ...]

    @property
    def is_valid(self) -> bool:
        return are_plausible(self.num_stages, self.chunks, self.micro_batches or 0) and all(
            [
                are_plausible(stage.stage, stage.num_ranks, stage.bubble_ms, stage.step_ms)
                and min(stage.num_ranks, stage.step_ms) > 0
                for stage in self.stages
            ]
        )

    @property
    def expected_fraction(self) -> float | None:
        """(p-1)/(p-1+vm), for a step without its gradients' communication; None if m is unknown."""
        if self.micro_batches is None or min(self.micro_batches, self.num_stages, self.chunks) < 1:
            return None
        waiting = self.num_stages - 1
        return waiting / (waiting + self.chunks * self.micro_batches)

    @property
    def fraction(self) -> float | None:
        """As measured, mean over the ranks; None without any."""
        step_ms = sum([stage.num_ranks * stage.step_ms for stage in self.stages])
        return sum([stage.num_ranks * stage.bubble_ms for stage in self.stages]) / step_ms if step_ms > 0 else None


class WindowReport(Reported, frozen=True, kw_only=True):
    """The fields of a report that do not depend on what overlapped steps are compared with.

    Attributes:
        complete: False where it was cut short.
        control: whether it was an A/A run: both sides as configured.
        backend, device: of the lowest rank that reported.
        valid: False if the comparison is invalid; ``problems`` says why.
        measurement_overhead: ``lost_ms`` as a fraction of the time from one window to the next; below zero where noise
            exceeds the cost. Its 95 % interval is None in records of earlier versions.
        lost_ms: time that training lost to the window and on the steps after it, the most of any rank; None where not
            known, and in records of earlier versions.
        power: over the devices of the ranks that reported; None where no rank reads any.
        memory: bounds of the highest memory peak of any rank, by mode; empty on CPU.
        quick: whether it is of a quick look, whose cost is outside the budget.
    """

    window: int
    first_step: int
    num_steps: int
    complete: bool
    control: bool
    world_size: int
    backend: str
    device: str
    valid: bool
    problems: tuple[str, ...]
    measurement_overhead: float | None = None
    measurement_overhead_ci_low: float | None = None
    measurement_overhead_ci_high: float | None = None
    lost_ms: float | None = None
    power: JobPower | None = None
    memory: tuple[MemoryPeak, ...] = ()
    quick: bool = False

    @property
    def counts(self) -> bool:
        return self.valid and self.complete

    @property
    def compared(self) -> bool:
        """Whether it compares the modes: not if it is invalid, nor if both sides ran as configured."""
        return self.valid and not self.control

    @property
    def cost(self) -> Estimate | None:
        """What the window cost, as a fraction of the time from one window to the next; None if unknown."""
        return stored_estimate(self, "measurement_overhead", self.num_steps)


if TYPE_CHECKING:
    _Figures = WindowReport
else:
    _Figures = WindowReport.with_fields(FIGURES, FAMILIES)


class OverlapReport(_Figures, frozen=True, kw_only=True):
    """One window, all ranks. Figures that were not measured are None, never zero or NaN.

    The figures (``FIGURES`` gives unit and meaning of each) are means over the ranks that reported, each with its
    confidence interval and number of steps. Records of earlier versions lack some of the fields.

    Attributes:
        ranks: the ranks that reported, or the lowest of many. ``num_ranks``, their number, is unset if all are listed.
        wall_ms: host time of the window, the longest over ranks.
        spread: extremes over the ranks, by figure.
        kernels: means over ranks, those that lose most time first.
        pairs: kernels during collectives and copies, and vice versa, means over ranks, the most expensive first.
        dimensions: communication by dimension of parallelism, means over the ranks that have it.
        pictures, power_trace: a profiled step of each mode, and power against time; of rank 0.
        collectives: of the lowest rank that reported; ``transfer_ms`` is the least over all ranks.
        power_verdict: what the compute slowdown is due to, by clocks and the device's counters.
        tokens_per_step: tokens of one step of the whole job; None if unknown.
        samples: windows of single ranks: all if few, else the lowest and the extremes of ``spread``.
        dimension_pairs: compute kernels during the communication of each dimension of parallelism, as ``pairs``.
        slowdown_shares: the compute slowdown divided among its causes; None if none is known.
        environment, messages: what ranks run on, and what they send; None if unchanged since the window before.
        findings: settings that cost performance or change what figures mean, the most serious first.
        lost_high_ms: upper end of the 95 % interval of ``lost_ms``.
        lower_bound: whether profiles may miss communication, so that it and residual overlap are lower bounds.
        experts, expert_details: how evenly tokens are spread over expert ranks, as means and step by step; None without
            all-to-alls that have split sizes.
        arrivals, transfers: which ranks came last to collectives of sequential steps, and how long these took by size;
            None and empty unless timed on several ranks.
        sized_transfers: how long they took by exact size and element type.
        race: whether a repeated step has the same gradients overlapped and sequential; None if none was repeated.
        settled: the settled difference between the modes, over the windows of this start of the job so far; None if the
            window does not count.
        left_out: counted steps of the first rank left out as far longer than their like: overlapped, sequential.
        exposure: which collectives are exposed in the profiled overlapped steps of all ranks; None without any.
    """

    ranks: tuple[int, ...]
    wall_ms: float
    spread: dict[str, Spread] = msgspec.field(default_factory=dict)
    kernels: tuple[KernelTime, ...] = ()
    pairs: tuple[PairTime, ...] = ()
    dimensions: tuple[DimensionTime, ...] = ()
    pictures: tuple[StepTimeline, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    power_trace: PowerTrace | None = None
    power_verdict: SlowdownCause | None = None
    tokens_per_step: int | None = None
    samples: tuple[RankWindow, ...] = ()
    dimension_pairs: tuple[PairTime, ...] = ()
    slowdown_shares: SlowdownShares | None = None
    environment: JobEnvironment | None = None
    findings: tuple[Finding, ...] = ()
    num_ranks: int | msgspec.UnsetType = msgspec.UNSET
    traffic: Traffic | None = None
    messages: JobMessages | None = None
    throughput: Throughput | None = None
    experts: ExpertLoads | None = None
    expert_details: ExpertDetails | None = None
    arrivals: Arrivals | None = None
    transfers: tuple[SizeTransfer, ...] = ()
    pipeline: PipelineBubble | None = None
    race: RaceCheck | None = None
    settled: Settled | None = None
    lost_high_ms: float | None = None
    left_out: tuple[int, int] = (0, 0)
    lower_bound: bool = False
    sized_transfers: tuple[SizedTransfer, ...] = ()
    exposure: Exposure | None = None

    @property
    def num_reporting(self) -> int:
        return len(self.ranks) if self.num_ranks is msgspec.UNSET else self.num_ranks

    @property
    def first_rank(self) -> int:
        """The rank of the timelines, collectives and power trace; 0 if a damaged record names none."""
        return self.ranks[0] if self.ranks else 0

    @property
    def verified(self) -> bool:
        """Whether a profile has shown the sequential steps' overlap; True for control runs, which have no such steps.

        False if the profile may miss communication. ``valid`` does not imply it: without a profile, nothing contradicts
        them.
        """
        # A property rather than a field, so that it is right for old records too.
        return self.control or (self.residual_overlap is not None and not self.lower_bound)

    def step_parts(self) -> tuple[StepParts, LateRank | None] | None:
        """Where the time of an overlapped step goes, and the rank that others wait for; None if not measured."""
        values = ((name, getattr(self, name)) for name in REQUIRED_FIGURES)
        figures = {name: value for name, value in values if value is not None}
        return measured_parts(figures, self.spread, compared=self.compared)

    @property
    def bound(self) -> str:
        """What bounds an overlapped step, by the name of a ``Bound``; empty if not measured."""
        found = self.step_parts()
        return "" if found is None else bound_of(found[0])[0].value

    @property
    def has_several_dimensions(self) -> bool:
        """Whether communication is of more than one dimension of parallelism."""
        during = {pair.concurrent_with for pair in self.dimension_pairs}
        return len({row.dimension for row in self.dimensions} | during) > 1

    def dimension_shares(self) -> tuple[StepShare, ...]:
        """How much of an overlapped step the communication of each dimension of parallelism takes, and the bubble."""
        parts = self.step_parts()
        return () if parts is None else step_shares(self.dimensions, parts[0], self.figures())
