"""What is found in trace files: plain data, as it is shown, written to JSON and read by the report page.

A figure that cannot be known from the file is None, never zero and never NaN.
"""

from __future__ import annotations

import msgspec

from overlap_callbacks.analysis.results.window import KernelTime, PairTime, StepTimeline

SCHEMA_VERSION = 1


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Kernel times of one step, or of a whole file.

    Attributes:
        step: number of the ``ProfilerStep#``; None for the whole file.
        wall_ms: the step's length on the host; of a whole file from its first kernel to its last. None without kernels.
        compute_ms: sum of the compute kernels' times.
        compute_busy_ms: length of the union of their intervals.
        comm_ms: time in which communication is in flight: the union of its kernels' intervals.
        comm_kernels_ms: sum of the communication kernels' times.
        hidden_comm_ms: the part of ``comm_ms`` in which compute ran too.
        exposed_comm_ms: the rest of it.
        covered_compute_ms: the part of ``compute_ms`` in which communication was in flight.
        overlap_ratio: equation 2, covered_compute / compute; None without compute or without communication.
        overlap_ratio_busy: the same of the union: the part of compute_busy in which communication was in flight.
        hidden_comm_fraction: hidden_comm / comm; None without communication of the step's own.
        copy_ms: sum of the device's copies and fills.
        kernels: compute and communication kernels.
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


class CollectiveFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective on one process group, in the whole file.

    Attributes:
        collective: ``all_reduce``, ...
        group, description: name and description of the group; empty where the file does not tell.
        group_size: ranks of the group, None where unknown.
        count: its kernels.
        bytes: of those kernels whose size is known, as NCCL's tests count it; None where none is.
        time_ms: sum of the kernels' times, waiting for other ranks included.
        hidden_ms: the part of ``time_ms`` beside compute.
        algorithm_bandwidth_gb_s: bytes / time of the kernels whose size is known.
        bus_bandwidth_gb_s: the same times NCCL's factor for the collective; None where the group's size is unknown.
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
    """One family of compute kernels, in the whole file.

    Attributes:
        family: ``gemm``, ...
        calls: its kernels.
        time_ms: sum of their times.
        beside: time beside each kind of collective, ms.
    """

    family: str
    calls: int
    time_ms: float
    beside: dict[str, float]


class SlowdownEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate of the compute slowdown from one file alone: an association, no experiment.

    The same kernels where communication covered at least nine tenths of them, and where it covered at most one tenth.

    Attributes:
        slowdown: time-weighted, as a fraction.
        method: what counts as the same kernel.
        kernels: distinct names.
        calls_beside, calls_alone: sample sizes.
        calls_left_out: calls beside communication of which none is found alone.
        time_beside_ms: time of the covered calls.
        families: the same by family, where there are any calls.
    """

    slowdown: float
    method: str
    kernels: int
    calls_beside: int
    calls_alone: int
    calls_left_out: int
    time_beside_ms: float
    families: dict[str, SlowdownEstimate] = {}


class TraceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One device of one file.

    Attributes:
        file: its path.
        rank, world_size: of the job, where the file tells.
        device: number of the device; its name is empty where the file does not tell.
        on_host: a CPU job: operators of the training thread are its compute.
        total: the whole file.
        steps: each step that has kernels.
        collectives: by kind and group, those that take most time first.
        families: of compute kernels, those that take most time first.
        estimate: of the slowdown; None where no kernel is found both beside communication and alone.
        picture: of the first step.
        problems: what is wrong or doubtful, in words.
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


class RankTime(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank spent in matched collectives.

    Attributes:
        rank: of the job; a free number where the file does not tell.
        device: the number of its device.
        time_ms: its kernels' time.
        waiting_ms: the part of it beyond the shortest kernel of each collective: waiting for the last rank.
        last: of how many collectives it was the last to come (its kernel was the shortest).
    """

    rank: int
    device: int
    time_ms: float
    waiting_ms: float
    last: int


class CollectiveSkew(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective on one group, over the ranks whose files were given.

    Attributes:
        collective, group: as in ``CollectiveFigures``.
        count: collectives that were matched on all of these ranks.
        transfer_ms: sum of the shortest kernels: the time of the transfer.
        skew_ms: mean over ranks of the time waited beyond it.
        ranks: by rank.
    """

    collective: str
    group: str
    count: int
    transfer_ms: float
    skew_ms: float
    ranks: tuple[RankTime, ...]


class Analysis(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="trace_analysis"):
    """What ``overlap analyze`` found.

    Attributes:
        schema_version: of this layout.
        library_version: that wrote it.
        traces: by file and device.
        skew: of the collectives that several files share.
        problems: with the files taken together.
    """

    schema_version: int = SCHEMA_VERSION
    library_version: str
    traces: tuple[TraceFigures, ...]
    skew: tuple[CollectiveSkew, ...]
    problems: tuple[str, ...]


class UnmatchedKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that the other file has not.

    Attributes:
        name: of the kernel.
        overlapped_calls, sequential_calls: unmatched calls in each file.
        overlapped_ms, sequential_ms: their time in each file.
    """

    name: str
    overlapped_calls: int
    sequential_calls: int
    overlapped_ms: float
    sequential_ms: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="trace_comparison"):
    """What ``overlap compare`` found: the figures of the overlapped and the sequential file of one job.

    Two files are one observation of each mode: there are no confidence intervals, and drift between the two cannot be
    told from overlap. The live monitor alternates the modes, and has both.

    Attributes:
        schema_version: of this layout.
        library_version: that wrote it.
        overlapped, sequential: the files' own figures.
        steps: steps that counted, of each file.
        figures: per step, by the names of the live report.
        valid: False where the sequential file is not sequential, or the two are not of one job.
        matched_fraction: share of the compute time whose kernels the other file has too, of the file with less.
        kernels: matched kernels, those that lose most time first.
        pairs: families beside collectives and the other way round.
        unmatched: kernels that the other file has not.
        problems: what is wrong or doubtful, in words.
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
    problems: tuple[str, ...]
