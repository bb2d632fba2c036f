"""The figures of trace files: plain data, as shown and as written to JSON.

Figures that the file does not give are None, never zero or NaN.
"""

from __future__ import annotations

import msgspec

from overlap_callbacks.analysis.results.exposure import Exposure
from overlap_callbacks.analysis.results.kernel_times import KernelTime, PairTime, StepTimeline
from overlap_callbacks.traces.device_time import (
    CriticalPath,
    DeviceTime,
    HostCollective,
    HostLimit,
    StreamQueue,
    TopKernel,
    Utilisation,
)
from overlap_callbacks.traces.reductions import RepeatedReductions

SCHEMA_VERSION = 1


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Kernel times of one step, or of a whole file.

    Attributes:
        step: number of the ``ProfilerStep#``; None for the whole file.
        wall_ms: length of the step on the host; for a file, from its first kernel to its last, None without kernels.
        compute_ms, compute_busy_ms: sum of the compute kernels' times, and length of their union.
        comm_ms: time with communication in flight: the union of its kernels' intervals.
        comm_kernels_ms: sum of the communication kernels' times.
        hidden_comm_ms, exposed_comm_ms: the parts of ``comm_ms`` with and without compute.
        covered_compute_ms: the part of ``compute_ms`` with communication in flight.
        overlap_ratio: equation 2, covered_compute / compute; None without compute or communication.
        overlap_ratio_busy: the fraction of compute_busy with communication in flight.
        hidden_comm_fraction: hidden_comm / comm; None without communication.
        copy_ms: sum of the device's memory copies and fills.
        kernels: number of compute and communication kernels.
        cut: whether kernels are or may be missing; such steps are in no mean.
    """

    step: int | None
    wall_ms: float | None
    compute_ms: float
    compute_busy_ms: float
    comm_ms: float
    comm_kernels_ms: float
    hidden_comm_ms: float
    exposed_comm_ms: float
    covered_compute_ms: float
    overlap_ratio: float | None
    overlap_ratio_busy: float | None
    hidden_comm_fraction: float | None
    copy_ms: float
    kernels: int
    cut: bool = False


class CollectiveFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective on one process group, in the whole file.

    Attributes:
        collective: kind of collective, e.g. ``all_reduce``.
        group, description: name and description of the group; empty if unknown.
        group_size: number of ranks of the group; None if unknown.
        count: number of kernels; those of one all-to-all count as one.
        bytes: total size of the kernels of known size, as NCCL's tests count it; None without any.
        time_ms: sum of the kernels' times, including waiting for other ranks.
        hidden_ms: the part of ``time_ms`` during compute.
        algorithm_bandwidth_gb_s: bytes / time of the kernels of known size.
        bus_bandwidth_gb_s: the same, times NCCL's factor for the collective; None if the group's size is unknown.
    """

    collective: str
    group: str
    description: str
    group_size: int | None
    count: int
    bytes: int | None
    time_ms: float
    hidden_ms: float
    algorithm_bandwidth_gb_s: float | None
    bus_bandwidth_gb_s: float | None


class FamilyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One family of compute kernels, such as ``gemm``, in the whole file.

    Attributes:
        beside: milliseconds during each kind of collective.
    """

    family: str
    calls: int
    time_ms: float
    beside: dict[str, float]


class SlowdownEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate of the compute slowdown from one file alone: an association, not an experiment.

    It compares calls that communication covers for at least nine tenths of their time with calls of the same kernels
    that it covers for at most one tenth.

    Attributes:
        slowdown: weighted by time, as a fraction.
        method: what counts as the same kernel.
        kernels: number of distinct kernel names.
        calls_beside, calls_alone: number of calls during communication, and without.
        calls_left_out: number of calls during communication without a match.
        time_beside_ms: time of the calls during communication.
        families: the estimate of each family that has calls.
    """

    slowdown: float
    method: str
    kernels: int
    calls_beside: int
    calls_alone: int
    calls_left_out: int
    time_beside_ms: float
    families: dict[str, SlowdownEstimate] = {}


class SplitLoads(msgspec.Struct, frozen=True, kw_only=True):
    """How evenly all-to-alls with split sizes load the ranks of their group.

    Attributes:
        dimension: of parallelism that the group serves, by its description.
        senders: ranks of a group with files; what the others send is unknown.
        steps: number of steps; a file without steps counts as one.
        load_max_over_mean: largest over mean of the bytes that ranks receive in a step; mean over the steps.
        highest_rank: the rank that receives most; its index in the group if ranks are unknown.
    """

    dimension: str
    group_size: int
    senders: int
    steps: int
    load_max_over_mean: float
    highest_rank: int


class TraceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one device of one file.

    Attributes:
        rank, world_size: rank in the job and number of its ranks; None if unknown.
        device_name: empty if unknown.
        on_host: whether it is a CPU job, whose compute is the operators of the training thread.
        total: of the whole file.
        steps: of each step that has kernels.
        collectives, families: by kind and group, and of compute kernels; most time first.
        estimate: of the slowdown; None if no kernel ran both during communication and without.
        beside_copies: what kernels lose beside copies, and copies beside communication, in the whole file: an estimate
            too, of calls against the same calls alone. Only what rests on several calls and is beyond their noise.
        picture: timeline of the first step.
        problems: what is wrong or doubtful.
        warnings: those of ``problems`` to read before any figure.
        time: how the device spent the whole file, then each step.
        paths: critical path of each step; empty for CPU jobs.
        kernels: kernels and collectives, most time first; a hundred at most.
        queues: of each stream, most launches first; empty if the file has no launches.
        host_limit: whether the host keeps the device waiting; None if the file has no launches.
        utilisation: of the device over time; None without kernels.
        cycle: of the job's profiler, by its files' names; empty if there is only one.
        reductions: of gradients, if the file proves that they are reduced several times per optimizer step.
        on_host_collectives: that libraries of the host ran beside the device; in none of the figures above.
        recorded: what the profiler recorded besides, which makes launches longer: ``Python stacks``, ``shapes``,
            ``memory``.
        exposure: which collectives are exposed in the steps that are whole; None where none communicates.
    """

    file: str
    rank: int | None
    world_size: int | None
    device: int
    device_name: str
    on_host: bool
    total: StepFigures
    steps: tuple[StepFigures, ...]
    collectives: tuple[CollectiveFigures, ...]
    families: tuple[FamilyFigures, ...]
    estimate: SlowdownEstimate | None
    picture: StepTimeline | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    time: tuple[DeviceTime, ...] = ()
    paths: tuple[CriticalPath, ...] = ()
    kernels: tuple[TopKernel, ...] = ()
    queues: tuple[StreamQueue, ...] = ()
    host_limit: HostLimit | None = None
    utilisation: Utilisation | None = None
    cycle: str = ""
    reductions: RepeatedReductions | None = None
    on_host_collectives: tuple[HostCollective, ...] = ()
    recorded: tuple[str, ...] = ()
    beside_copies: tuple[PairTime, ...] = ()
    exposure: Exposure | None = None


class RankTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time that one rank spent in matched collectives.

    Attributes:
        rank: rank in the job; if unknown, a unique number.
        time_ms: time of its kernels.
        waiting_ms: the part of ``time_ms`` beyond each collective's shortest kernel: waiting for the last rank.
        last: number of collectives at which it alone arrived last, i.e. its kernel was the shortest.
        caused_ms: total time that the others waited at these.
    """

    rank: int
    device: int
    time_ms: float
    waiting_ms: float
    last: int
    caused_ms: float = 0.0


class CollectiveSkew(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective on one group, over the ranks with files.

    Attributes:
        count: number of collectives that were matched on all of these ranks.
        transfer_ms: sum of the shortest kernels: the time of the transfer.
        skew_ms: mean over ranks of the time spent waiting beyond that.
        cycle: of the job's profiler; empty where the files are of one.
    """

    collective: str
    group: str
    count: int
    transfer_ms: float
    skew_ms: float
    ranks: tuple[RankTime, ...]
    cycle: str = ""


class CollectiveSize(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives of one kind, group size and message size, over all files.

    Attributes:
        group_size: ranks of the group; None if unknown.
        bytes: size of one, as NCCL's tests count it.
        kernels: number of kernels, as in ``CollectiveFigures``.
        time_ms: mean time of a kernel, including waiting for other ranks.
        bus_bandwidth_gb_s: with that time; None if the size of the group is unknown.
        matched: number of collectives in several files.
        transfer_ms: mean over these of the shortest kernel, or of the largest share of an all-to-all: the time of
            the transfer. None without any.
        transfer_bandwidth_gb_s: bytes / ``transfer_ms``.
        transfer_bus_bandwidth_gb_s: the same as bus bandwidth; None if the size of the group is unknown.
    """

    collective: str
    group_size: int | None
    bytes: int
    kernels: int
    time_ms: float
    bus_bandwidth_gb_s: float | None
    matched: int
    transfer_ms: float | None
    transfer_bandwidth_gb_s: float | None
    transfer_bus_bandwidth_gb_s: float | None


class Analysis(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="trace_analysis"):
    """The result of ``overlap analyze``.

    Attributes:
        schema_version: version of this layout.
        traces: figures of each device of each file.
        skew: of collectives that several files share.
        problems: what is doubtful about the files together.
        warnings: those of ``problems`` to read before any figure.
        sizes: collectives of known size over all files, most time first; empty if they are of different jobs.
        one_job: whether the files look like ranks of one job.
        splits: loads by all-to-alls of all files' ranks; None without split sizes, or for files of different jobs.
        exposure: which collectives are exposed, over all steps and ranks; None if the files are of different jobs.
    """

    schema_version: int = SCHEMA_VERSION
    library_version: str
    traces: tuple[TraceFigures, ...]
    skew: tuple[CollectiveSkew, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    sizes: tuple[CollectiveSize, ...] = ()
    one_job: bool = True
    splits: SplitLoads | None = None
    exposure: Exposure | None = None


# Among the problems of a comparison that answers nothing.
NOTHING_COMMUNICATES = "neither file communicates; they differ by something else [OC771]"


class UnmatchedKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel with calls that the other file lacks: their number and time in each file."""

    name: str
    overlapped_calls: int
    sequential_calls: int
    overlapped_ms: float
    sequential_ms: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="trace_comparison"):
    """The result of ``overlap compare``: figures from the overlapped and the sequential file of one job.

    Two files are one observation per mode: there are no confidence intervals, and drift between them looks like an
    effect of overlap. The live monitor avoids both by alternating the modes.

    Attributes:
        schema_version: version of this layout.
        overlapped, sequential: the figures of each file.
        steps: number of steps that counted in each file.
        figures: per step, by the names of the live report.
        valid: False if the sequential file is not sequential, or the two are not of one job: if there are ``misfits``.
        matched_fraction: share of the compute time whose kernels the other file has too; the smaller of both files'.
        kernels: matched kernels, the largest loss first.
        pairs: families, collectives and copies during one another.
        unmatched: kernels with calls that the other file lacks.
        ranges: the matched compute by the module or range of the host around its launch, the largest loss first;
            ``(no range)`` for none. Empty where the overlapped file has no ranges.
        problems: what is wrong or doubtful, ``misfits`` first.
        misfits: why the files do not fit each other, so that the figures mean nothing.
    """

    schema_version: int = SCHEMA_VERSION
    library_version: str
    overlapped: TraceFigures
    sequential: TraceFigures
    steps: tuple[int, int]
    figures: dict[str, float]
    valid: bool
    matched_fraction: float
    kernels: tuple[KernelTime, ...]
    pairs: tuple[PairTime, ...]
    unmatched: tuple[UnmatchedKernel, ...]
    ranges: tuple[KernelTime, ...] = ()
    problems: tuple[str, ...]
    misfits: tuple[str, ...] = ()
