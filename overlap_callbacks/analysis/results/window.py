"""What one rank measured in one window: plain data, as it is sent between ranks and written to the record."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.bus_bandwidth import size_of
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.arrivals import CollectiveCalls, TimedCalls
from overlap_callbacks.analysis.results.environment import RankEnvironment
from overlap_callbacks.analysis.results.experts import RankExperts
from overlap_callbacks.analysis.results.kernel_times import (
    KernelTime,
    PairTime,
    StepTimeline,
)
from overlap_callbacks.analysis.results.messages import RankMessages
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import DevicePower, PowerTrace
from overlap_callbacks.analysis.results.race import RaceCheck
from overlap_callbacks.analysis.results.settled import StepSeries


class MemoryPeak(msgspec.Struct, frozen=True, gc=False):
    """Bounds of the highest memory that tensors held at any time in the steps of one mode.

    Attributes:
        mode: side of the comparison on which the steps count.
        at_least_bytes: it was at least so high.
        at_most_bytes: it was at most so high; None if unknown.
    """

    mode: Mode
    at_least_bytes: int
    at_most_bytes: int | None

    @property
    def peak_bytes(self) -> int | None:
        """The peak, where the bounds leave one value; else None."""
        return self.at_most_bytes if self.at_most_bytes == self.at_least_bytes else None


class Rhythm(msgspec.Struct, frozen=True):
    """Steps that recur and take longer than the others.

    Attributes:
        period: steps from one to the next.
        phase: step n is one of them if ``n % period == phase``.
        extra_ms: how much longer they take than a usual step; below zero if they take less.
        step_ms: a usual step.
    """

    period: int
    phase: int
    extra_ms: float
    step_ms: float

    def hits(self, steps: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these steps are hits; shape (number of steps,)."""
        return np.equal(np.asarray(steps, dtype=np.int64) % self.period, self.phase)


class TimedBlock(msgspec.Struct, frozen=True):
    """The counted steps of one unprofiled block.

    Attributes:
        mode: side of the comparison on which the block counts.
        block: number of the block in its window.
        step_ms: the time of each counted step.
        steps: the number of each of them; empty in records of earlier versions.
        kinds: the kind of each of them, 0 the commonest in the window; empty if all are of one kind. Steps are of one
            kind if they issue the same sequence of collectives.
    """

    mode: Mode = msgspec.field(name="arm")
    block: int
    step_ms: tuple[float, ...]
    steps: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()


class ProfiledBlock(msgspec.Struct, frozen=True):
    """Kernel times of one profiled block, per counted step.

    Attributes:
        mode, block: as in ``TimedBlock``.
        num_steps: counted steps.
        compute_ms: sum of the compute kernels' times.
        compute_busy_ms: length of the union of their intervals.
        comm_ms: sum of the communication kernels' times.
        comm_busy_ms: length of the union of their intervals.
        hidden_comm_ms: the part of ``comm_busy_ms`` in which compute ran too.
        covered_compute_ms: the part of ``compute_ms`` in which communication was in flight.
        copy_ms: sum of the device's memory copies and fills.
        p2p_ms: the part of ``comm_busy_ms`` in which sends and receives were in flight.
        idle_ms: time in which the rank neither computed nor communicated.
        step_ms: the time of a step under the profiler; None where it is not known.
        bubble_ms: ``idle_ms``, and the time for which nothing but receives was in flight that waited for their sender;
            None where that cannot be told.
        steps, kinds: as in ``TimedBlock``.
    """

    mode: Mode = msgspec.field(name="arm")
    block: int
    num_steps: int
    compute_ms: float
    compute_busy_ms: float
    comm_ms: float
    comm_busy_ms: float
    hidden_comm_ms: float
    covered_compute_ms: float
    copy_ms: float
    p2p_ms: float = 0.0
    idle_ms: float = 0.0
    step_ms: float | None = None
    bubble_ms: float | None = None
    steps: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()


class CollectiveTime(msgspec.Struct, frozen=True):
    """One kind of collective on one group, per step.

    Attributes:
        operator: the ``c10d`` operator.
        group: the group's name, after its description if it has one.
        group_size: its ranks.
        backend: e.g. ``nccl``.
        messages: collectives per step.
        bytes_in, bytes_out: bytes per step, of the tensors read and written on a rank.
        isolated_ms: time per step in sequential mode, from issue to end; None where it was not serialised.
        dimension: dimension of parallelism that the group serves.
        timed_bytes: bytes per step of those that ``isolated_ms`` times, the larger of those read and written; None
            where it was not serialised. Collectives that a coalescing block holds, for example, are not timed.
        kernels_ms: time per sequential step of its kernels; None where a profile cannot tell them from others.
        transfer_ms: time per sequential step of the transfer: the least over the ranks, for a rank that comes earlier
            waits for the last. Of its kernels where ``kernels_ms`` is known, else from issue to end. None on a single
            rank's window.
        first_rank: lowest rank of the group, between ranks; not in the record, and unset if unknown.
    """

    operator: str
    group: str
    group_size: int
    backend: str
    messages: int
    bytes_in: int
    bytes_out: int
    isolated_ms: float | None
    dimension: str = ""
    timed_bytes: float | None = None
    kernels_ms: float | None = None
    transfer_ms: float | None = None
    first_rank: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def size_bytes(self) -> int:
        """Bytes per step, by nccl-tests' count: of a gather those of its result, of a reduce-scatter of its input."""
        return int(size_of(collective_of(self.operator), self.group_size, self.bytes_in, self.bytes_out))

    @property
    def transfer(self) -> tuple[float, float] | None:
        """Bytes per step, and the time in milliseconds that they took alone; None where that is not known.

        A record of an earlier version has neither ``timed_bytes`` nor ``transfer_ms``.
        """
        if self.transfer_ms is not None:
            size = self.size_bytes if self.kernels_ms is not None else self.timed_bytes
            return None if not size else (size, self.transfer_ms)
        if self.isolated_ms is None:
            return None
        return (self.size_bytes if self.timed_bytes is None else self.timed_bytes), self.isolated_ms


class DimensionTime(msgspec.Struct, frozen=True):
    """The communication of one dimension of parallelism, per step.

    Attributes:
        dimension: ``data``, ``tensor``, ``pipeline``, ...
        messages: collectives, sends and receives.
        bytes_in: bytes of the tensors read.
        comm_ms: time in which it is in flight in an overlapped step.
        exposed_ms: the part of it without compute.
        kernels_ms, kernels_isolated_ms: sum of its kernels' times in an overlapped and in a sequential step; in a
            report without waiting for the last rank, where the ranks' kernels could all be compared.
    """

    dimension: str
    messages: int
    bytes_in: int
    comm_ms: float
    exposed_ms: float
    kernels_ms: float
    kernels_isolated_ms: float

    @property
    def slowdown(self) -> float | None:
        """How much longer its kernels took overlapped, as a fraction; None where they did not run in both modes.

        Of a pipeline it is None: what messages take without waiting is not known well enough.
        """
        if not (self.kernels_ms and self.kernels_isolated_ms) or self.dimension == "pipeline":
            return None
        return self.kernels_ms / self.kernels_isolated_ms - 1


class SmLoss(msgspec.Struct, frozen=True):
    """What compute kernels should lose to the SMs that communication holds, modelled from their grids; per step.

    Attributes:
        num_sms: SMs of the device.
        sms_held: SMs that communication kernels hold while compute runs beside them, mean over that time.
        concurrent_ms: time of compute kernels beside communication.
        modelled_ms: the part of it that the model covers: of kernels whose launch is known, in both modes.
        from_sms_ms: predicted extra time since fewer blocks run at a time.
        from_waves_ms: predicted extra time since a wave is needed beyond that.
    """

    num_sms: int
    sms_held: float
    concurrent_ms: float = msgspec.field(name="beside_ms")
    modelled_ms: float
    from_sms_ms: float
    from_waves_ms: float


class RankWindow(msgspec.Struct, frozen=True):
    """Everything that one rank measured in one window.

    Attributes:
        rank: global rank.
        window: number of the window.
        first_step: its first step.
        num_steps: steps from its first to the last that ran.
        complete: False where the window was cut short.
        backend: backend of the default group; empty without one.
        device: name of the device.
        wall_ms: host time from the window's first step to its last, instruments included.
        timed, profiled: its blocks.
        kernels: the kernels with the most time.
        pairs: what each family of kernels loses beside each kind of collective, and vice versa.
        dimensions: communication by dimension of parallelism.
        pictures: a profiled step of each mode; of rank 0 only.
        collectives: the collectives of the recorded step.
        power: of the devices that this rank reads; empty if it reads none.
        power_trace: power against time, of rank 0 only.
        power_elsewhere: whether another rank of the node reads this one's device.
        problems: why parts of the window do not count or are missing, in words.
        doubts: why its sequential steps, or its profile, cannot be trusted, in words. One is enough to make the window
            invalid.
        num_sms: SMs (of AMD, compute units) of the device; 0 if unknown, and on CPU.
        dimension_pairs: what each family of compute kernels loses beside the communication of each dimension of
            parallelism; kernels that ran beside none are not in it.
        sm_loss: what its compute kernels should lose to the SMs that communication holds; None where launches or limits
            of the device are not known.
        environment: what the rank runs on; None in a record, which has ``OverlapReport.environment``.
        memory: bounds of its memory peak in each mode; empty on CPU.
        report_cpu_ms: CPU time that the reporting thread took to read and measure the window, while the steps after it
            ran.
        let_pass: what its sequential steps let pass, in words. The window is invalid if no rank has a profile of
            sequential steps, which would show whether that ran beside compute.
        terms: digest of what all ranks must have alike (the schedule, the form of sequential mode, the first step);
            empty in a record of an earlier version.
        lost_ms: time that training lost to the window and on the steps after it, until they were back to normal, and
            what it lost to the window before after that one's report; None if not known. It may be below zero by
            chance.
        usual_step_ms: of an overlapped step of the window, the time to the next one included. In a window that was cut
            short, and in records of earlier versions, of the steps before it; 0 if ``lost_ms`` is not known.
        lost_low_ms, lost_high_ms: 95 % interval of ``lost_ms``; None where there is none.
        messages: what it sends in the recorded step; None in a record, which has ``OverlapReport.messages``.
        experts: how evenly its tokens were spread; None in a record, which has ``OverlapReport.experts``.
        arrivals: how long some of its collectives took in sequential steps; empty in a record, which has
            ``OverlapReport.arrivals``.
        lower_bound: whether there may be more communication than its profile shows.
        calls: the kernels of its collectives in profiled steps; empty in a record.
        race: what a repeated step showed; None without one, and in a record, which has ``OverlapReport.race``.
        rhythms: those that rank 0 knew when it planned the window; the same on every rank.
        left_out: counted steps that were left out because they took far longer than others of their mode: overlapped,
            sequential.
        series: its steps outside the profile in order, for the settled difference; of rank 0 only.
    """

    rank: int
    window: int
    first_step: int
    num_steps: int
    complete: bool
    backend: str
    device: str
    wall_ms: float
    timed: tuple[TimedBlock, ...] = ()
    profiled: tuple[ProfiledBlock, ...] = ()
    kernels: tuple[KernelTime, ...] = ()
    pairs: tuple[PairTime, ...] = ()
    dimensions: tuple[DimensionTime, ...] = ()
    pictures: tuple[StepTimeline, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    power: tuple[DevicePower, ...] = ()
    power_trace: PowerTrace | None = None
    power_elsewhere: bool = False
    problems: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    num_sms: int = 0
    dimension_pairs: tuple[PairTime, ...] = ()
    sm_loss: SmLoss | None = None
    environment: RankEnvironment | None = None
    memory: tuple[MemoryPeak, ...] = ()
    report_cpu_ms: float = 0.0
    let_pass: tuple[str, ...] = ()
    terms: str = ""
    lost_ms: float | None = None
    usual_step_ms: float = 0.0
    messages: RankMessages | None = None
    experts: RankExperts | None = None
    arrivals: tuple[TimedCalls, ...] = ()
    race: RaceCheck | None = None
    rhythms: tuple[Rhythm, ...] = ()
    left_out: tuple[int, int] = (0, 0)
    series: StepSeries | None = None
    lost_low_ms: float | None = None
    lost_high_ms: float | None = None
    calls: tuple[CollectiveCalls, ...] = ()
    lower_bound: bool = False
