"""Times of kernels and pairs of kernels: results that windows and traces share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from overlap_callbacks.analysis.results.mode import Mode

# In ``PairTime.concurrent_with``: the kernel has no counterpart in the other mode.
UNMATCHED = "(not matched)"

# The kernel ran alone in overlapped steps too.
ALONE = "(nothing)"

# The row of kernels without their own row.
OTHER_KERNELS = "(other kernels)"


class KernelTime(msgspec.Struct, frozen=True):
    """One compute or communication kernel (on CPU, operator) in both modes; calls and time are per step.

    ``num_blocks`` are the thread blocks of its largest launch; 0 if unknown, and on CPU.
    """

    name: str
    communication: bool
    overlapped_calls: float
    sequential_calls: float
    overlapped_ms: float
    sequential_ms: float
    num_blocks: int = 0

    @property
    def lost_ms(self) -> float:
        """Milliseconds per step that overlap adds to this kernel."""
        return self.overlapped_ms - self.sequential_ms

    @property
    def slowdown(self) -> float | None:
        """Time per call, overlapped over sequential, less one; None unless it ran in both modes."""
        if not (self.overlapped_calls and self.sequential_calls and self.sequential_ms):
            return None
        per_call = self.overlapped_ms / self.overlapped_calls
        return per_call / (self.sequential_ms / self.sequential_calls) - 1


class PairTime(msgspec.Struct, frozen=True):
    """How much one kind of kernels slows down while another kind runs concurrently, per step.

    A kernel that overlaps several kinds counts towards each by its share of time, so losses add up over the rows.

    Attributes:
        kernel_family: family of the compute kernels (``gemm``, ...), kind of the collectives, or direction of copies.
        communication: whether these are no compute kernels, but collectives or copies.
        concurrent_with: what ran at the same time: a kind of collective, a family, or a direction of copies; of copies,
            compute or communication; ``ALONE`` or ``UNMATCHED``.
        calls: kernels per step that ran at the same time at all.
        concurrent_ms: time per step during which both ran, by share where several ran at once.
        time_ms: the kernels' own time per step, by share.
        alone_ms: time of the same kernels in sequential steps.
    """

    kernel_family: str = msgspec.field(name="victim")
    communication: bool
    concurrent_with: str = msgspec.field(name="beside")
    calls: float
    concurrent_ms: float = msgspec.field(name="beside_ms")
    time_ms: float
    alone_ms: float

    @property
    def lost_ms(self) -> float:
        return self.time_ms - self.alone_ms

    @property
    def slowdown(self) -> float | None:
        """Fraction by which the kernels took longer than alone; None unless they ran in both modes."""
        return self.time_ms / self.alone_ms - 1 if self.alone_ms > 0 and self.concurrent_with != UNMATCHED else None

    @property
    def slowdown_during(self) -> float | None:
        """Fraction by which the kernels are slower while both run; None if nothing ran at the same time.

        ``slowdown`` covers whole calls, which may have run alone in part, but all loss is during ``concurrent_ms``.
        """
        alone_ms = self.concurrent_ms - self.lost_ms
        if self.concurrent_with in (ALONE, UNMATCHED) or not self.concurrent_ms > 0 or not alone_ms > 0:
            return None
        return self.lost_ms / alone_ms


# No step is longer; damaged records may claim more, which is dropped.
_LONGEST_STEP_MS = 1e9


class NamedSlice(NamedTuple):
    """One kernel of a step, by the index of its name; see ``StepDetail.slices``."""

    name: int
    communicates: bool
    lane: int
    start_ms: float
    length_ms: float
    size_bytes: int


class StepDetail(msgspec.Struct, frozen=True):
    """The longest kernels of one profiled step, one by one, for a timeline to zoom into.

    Attributes:
        communication: whether the kernels of each of ``names`` communicate.
        slices: each kernel, in order of its start: index of its name, number of its stream or thread in the order of
            their first appearance, start and length in milliseconds, and size in bytes of its collective, 0 where it
            has none or it is not known. The size is the larger of what the collective reads and writes.
        left_out, left_out_ms: kernels that are too short to be among them, and their time.
        start_ns: when the device began the step, on the rank's ``time.perf_counter_ns``; None if unknown.
    """

    names: tuple[str, ...]
    communication: tuple[bool, ...]
    slices: tuple[tuple[int, int, float, float, int], ...]
    left_out: int = 0
    left_out_ms: float = 0.0
    start_ns: int | None = None

    @property
    def named_slices(self) -> Iterator[NamedSlice]:
        """The kernels, except those with invalid names or times in damaged records."""
        names = min(len(self.names), len(self.communication))
        for name, lane, start_ms, length_ms, size_bytes in self.slices:
            possible = abs(start_ms) <= _LONGEST_STEP_MS and 0 <= length_ms <= _LONGEST_STEP_MS
            if possible and 0 <= name < names:
                yield NamedSlice(name, self.communication[name], lane, start_ms, length_ms, size_bytes)


class CallTimes(msgspec.Struct, frozen=True, array_like=True):
    """How long a call of a kernel (on CPU, operator) took, over the profiled steps of a mode on one rank."""

    name: str
    communication: bool
    calls: int
    min_ms: float
    median_ms: float
    max_ms: float


class StepTimeline(msgspec.Struct, frozen=True):
    """When compute ran and communication was in flight in one profiled step, for charts.

    Times are in milliseconds from the step's start. Intervals are disjoint, ascending, and bounded in number by closing
    the smallest gaps.

    Attributes:
        step_ms: its length, profiler included.
        compute, communication: intervals, as (start, end).
        closed_compute_ms, closed_communication_ms: total of the gaps that were closed.
        detail: its kernels one by one; None in older records.
        call_times: of each kernel, over all profiled steps of the mode; the most time first.
    """

    mode: Mode = msgspec.field(name="arm")
    step_ms: float
    compute: tuple[tuple[float, float], ...]
    communication: tuple[tuple[float, float], ...]
    closed_compute_ms: float
    closed_communication_ms: float
    detail: StepDetail | None = None
    call_times: tuple[CallTimes, ...] = ()


# Values of ``SlowdownShare.cause``.
CLOCK = "lower clock"
SMS = "SMs taken"
WAVES = "waves"
MEMORY = "memory bandwidth"
UNEXPLAINED = "unexplained"


class SlowdownShare(msgspec.Struct, frozen=True):
    """The part of a slowdown due to one cause, as a fraction of the compute kernels' sequential time.

    ``basis`` is its evidence, in words.
    """

    cause: str
    fraction: float
    basis: str


class SlowdownShares(msgspec.Struct, frozen=True):
    """The compute slowdown, as a fraction, divided among its causes; ``shares`` add up to it.

    Causes without any data are part of the unexplained rest. ``notes`` say which shares are neither measured nor
    modelled.
    """

    slowdown: float
    shares: tuple[SlowdownShare, ...]
    notes: tuple[str, ...] = ()

    def of(self, cause: str) -> float | None:
        return next((share.fraction for share in self.shares if share.cause == cause), None)


class SlowdownCause(msgspec.Struct, frozen=True):
    """The cause of a slowdown, and the evidence, in words (``analysis/power/cause.py``).

    Attributes:
        from_clock: the most of it that the lower clock explains, as a fraction of the sequential time; None where the
            clocks are not known. Negative if the clock was higher in overlapped steps.
        contention: the least that remains, as a fraction: (1 + slowdown) = (1 + from_clock) * (1 + contention).
        clock_share: share of the slowdown that the clock explains, by logarithms; between 0 and 1.
    """

    verdict: str
    evidence: tuple[str, ...]
    slowdown: float
    from_clock: float | None = None
    contention: float | None = None
    clock_share: float | None = None


RAN_ALONE = "ran alone, unexplained"
# Labels for the values in records.
_BESIDE = {ALONE: RAN_ALONE, UNMATCHED: "in one mode alone"}


def beside_in_words(beside: str) -> str:
    """A label: the family or dimension itself, or a phrase for kernels that ran alone or have no counterpart."""
    return _BESIDE.get(beside, beside)
