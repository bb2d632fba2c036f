"""Plain data: what one rank measured in one window, as sent between ranks and recorded."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.equations import size_of
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.arrivals import CollectiveCalls, TimedCalls
from overlap_callbacks.analysis.results.environment import RankEnvironment
from overlap_callbacks.analysis.results.experts import RankExperts
from overlap_callbacks.analysis.results.exposure import ExposureSums
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
    """Bounds of the most memory that tensors held at any time in the steps of one mode; None for no bound."""

    mode: Mode
    at_least_bytes: int
    at_most_bytes: int | None

    @property
    def peak_bytes(self) -> int | None:
        """The peak, if the bounds agree; else None."""
        return self.at_most_bytes if self.at_most_bytes == self.at_least_bytes else None


class Rhythm(msgspec.Struct, frozen=True):
    """Recurring longer steps, due to logging, say, or waiting for a loader's worker.

    Step n is one if ``n % period == phase``. They take ``extra_ms`` more than a usual step of ``step_ms``.
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
        block: its number in the window.
        step_ms, steps: time and number of each step; earlier versions recorded no numbers.
        kinds: kind of each, 0 the most frequent in the window; empty if there is one kind. Steps of one kind issue the
            same sequence of collectives.
    """

    mode: Mode = msgspec.field(name="arm")
    block: int
    step_ms: tuple[float, ...]
    steps: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()


class ProfiledBlock(msgspec.Struct, frozen=True):
    """Kernel times of one profiled block, per counted step; ``TimedBlock`` has the same fields besides.

    Attributes:
        compute_ms, comm_ms: sums of the compute and of the communication kernels' times.
        compute_busy_ms, comm_busy_ms: lengths of the unions of their intervals.
        hidden_comm_ms: part of ``comm_busy_ms`` during which compute ran.
        covered_compute_ms: part of ``compute_ms`` during which communication was in flight.
        copy_ms: sum of the device's memory copies and fills.
        p2p_ms: part of ``comm_busy_ms`` during which sends and receives were in flight.
        idle_ms: time with neither compute nor communication.
        exposed_on_host_ms: part of ``idle_ms`` when the host waited for its own communication; only with a device.
        step_ms: time of a step under the profiler; None if unknown.
        bubble_ms: ``idle_ms`` plus the time with nothing in flight but receives that wait for their sender; None if
            unknown.
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
    exposed_on_host_ms: float = 0.0


class CollectiveTime(msgspec.Struct, frozen=True):
    """One kind of collective, by its ``c10d`` operator, on one group, per step.

    Attributes:
        bytes_in, bytes_out: of the tensors read and written on a rank.
        isolated_ms: time in sequential mode, from issue to end; None if not serialised.
        timed_bytes: bytes that ``isolated_ms`` covers, the larger of read and written; None if not serialised.
            Coalesced collectives, for example, are not timed.
        kernels_ms: time of its kernels per sequential step; None if not identified in a profile.
        transfer_ms: transfer time per sequential step: the least over the ranks, since earlier ranks wait for the last.
            Of its kernels if ``kernels_ms`` is known, else from issue to end. None in a single rank's window.
        first_rank: lowest rank of the group; unset if unknown, and in the record.
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
        """Bytes per step as in nccl-tests: of the result of a gather, or the input of a reduce-scatter."""
        return int(size_of(collective_of(self.operator), self.group_size, self.bytes_in, self.bytes_out))

    @property
    def transfer(self) -> tuple[float, float] | None:
        """Bytes per step and their time alone in milliseconds; None if unknown, as in records of earlier versions."""
        if self.transfer_ms is not None:
            size = self.size_bytes if self.kernels_ms is not None else self.timed_bytes
            return None if not size else (size, self.transfer_ms)
        if self.isolated_ms is None:
            return None
        return (self.size_bytes if self.timed_bytes is None else self.timed_bytes), self.isolated_ms


class DimensionTime(msgspec.Struct, frozen=True):
    """The communication (collectives, sends, receives) of one dimension of parallelism, per step.

    Attributes:
        bytes_in: bytes of the tensors read.
        comm_ms, exposed_ms: time in flight in an overlapped step, and the part without compute.
        kernels_ms, kernels_isolated_ms: sums of its kernels' times in an overlapped and a sequential step. In a report,
            without waiting for the last rank if the kernels of all ranks could be compared.
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
        """Fraction by which its kernels took longer overlapped; None unless they ran in both modes.

        None for a pipeline, as its messages' time without waiting is unknown.
        """
        if not (self.kernels_ms and self.kernels_isolated_ms) or self.dimension == "pipeline":
            return None
        return self.kernels_ms / self.kernels_isolated_ms - 1


class SmLoss(msgspec.Struct, frozen=True):
    """Predicted loss of compute kernels to the SMs that communication holds, from their grids; per step.

    Attributes:
        sms_held: mean SMs that communication kernels hold while compute runs at the same time.
        concurrent_ms: time of compute kernels during communication.
        modelled_ms: the part of it with a known launch in both modes.
        from_sms_ms, from_waves_ms: predicted extra time because fewer blocks run at a time, and for further waves.
    """

    num_sms: int
    sms_held: float
    concurrent_ms: float = msgspec.field(name="beside_ms")
    modelled_ms: float
    from_sms_ms: float
    from_waves_ms: float


class RankWindow(msgspec.Struct, frozen=True):
    """Everything that one rank measured in one window.

    A report holds ``environment``, ``messages``, ``experts``, ``arrivals``, ``calls``, ``race`` and ``exposure`` for
    the whole job; the samples in a record lack them.

    Attributes:
        backend, device: of the default group (empty without one), and the device's name.
        wall_ms: host time from the first step to the last, instruments included.
        kernels: the kernels with the most time.
        pairs: loss of each kernel family during each kind of collective, and vice versa.
        pictures, power_trace, series: a profiled step of each mode, power against time, the unprofiled steps in order;
            on rank 0 only.
        collectives: those of the recorded step.
        power_elsewhere: whether another rank of the node reads this rank's device.
        problems: why parts of the window are missing or do not count.
        doubts: why its sequential steps or profile cannot be trusted; any makes it invalid.
        num_sms: SMs (AMD: compute units) of the device; 0 if unknown, and on CPU.
        dimension_pairs: what compute families lose during the communication of each dimension; without kernels that ran
            alone.
        sm_loss: None unless launches and device limits are known.
        memory: bounds of its memory peak in each mode; empty on CPU.
        report_cpu_ms: CPU time of the reporting thread for this window, while later steps ran.
        let_pass: what its sequential steps did not serialise. The window is invalid if no rank has a profile of
            sequential steps, which would show whether that overlapped compute.
        terms: digest of the terms that all ranks must share (schedule, form of sequential mode, first step), if known.
        lost_ms: training time lost to the window and to slower steps after it, and to the report of the window before;
            None if unknown. Noise may make it negative. Its 95 % interval is None if there is none.
        usual_step_ms: time of an overlapped step, up to the start of the next; of the steps before the window if it was
            cut short, and in records of earlier versions; 0 if ``lost_ms`` is unknown.
        arrivals: times of some of its collectives in sequential steps.
        calls: kernels of its collectives in profiled steps.
        lower_bound: whether there may be more communication than its profile shows.
        exposure: which of its collectives are exposed in the profiled overlapped steps.
        rhythms: those that rank 0 knew when it planned the window; the same on every rank.
        left_out: counted steps left out as far longer than others of their mode: overlapped, sequential.
        num_streams: streams of the device on which a profiled step ran kernels; 0 if unknown, and on CPU.
        same_order: whether steps with the arm issued the collectives of those as configured, in the same order; None if
            no arm was turned.
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
    num_streams: int = 0
    same_order: bool | None = None
    calls: tuple[CollectiveCalls, ...] = ()
    lower_bound: bool = False
    exposure: ExposureSums = ExposureSums()
