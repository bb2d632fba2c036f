"""The memory peak of each mode, from readings of the allocator at the bounds of steps.

The allocator keeps the highest value of each of its counters since the last reset. It belongs to the user, who reads
and resets it, so nothing here resets it. For a step with readings before (b) and after (a) it follows:

- The peak rose, peak(a) > peak(b): the new value was reached within the step, so the step's peak is peak(a), exactly.
- It stayed, peak(a) = peak(b): the step's peak is at most peak(a), and at least what was allocated at either reading.
- The user reset it within the step: the step's peak is at least peak(a), and nothing bounds it from above. A reset is
  noticed because it lowers the peaks of all counters at once, of which the allocator has some dozens: a step that
  raises all of them above their former peaks is not expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import MemoryPeak


class AllocatorReading(NamedTuple):
    """The counters of the allocator at one time.

    Attributes:
        allocated_bytes: that tensors hold.
        peak_bytes: highest ``allocated_bytes`` since the last reset.
        peaks: the peaks of all counters, in an order that does not change.
    """

    allocated_bytes: int
    peak_bytes: int
    peaks: tuple[int, ...] = ()


class SteppedMemory(NamedTuple):
    """A step's readings.

    Attributes:
        mode: side of the comparison on which the step counts.
        before, after: the allocator when the step began and when it ended.
    """

    mode: Mode
    before: AllocatorReading
    after: AllocatorReading


def peak_of_step(before: AllocatorReading, after: AllocatorReading) -> tuple[int, int | None]:
    """Bounds of a step's peak in bytes, lower and upper; the upper is None if unknown."""
    at_least = max(before.allocated_bytes, after.allocated_bytes)
    was_reset = after.peak_bytes < before.peak_bytes or any(
        a < b for a, b in zip(after.peaks, before.peaks, strict=False)
    )
    if was_reset:
        return max(at_least, after.peak_bytes), None
    if after.peak_bytes > before.peak_bytes:
        return after.peak_bytes, after.peak_bytes
    return at_least, after.peak_bytes


def peaks_by_mode(steps: Iterable[SteppedMemory]) -> tuple[MemoryPeak, ...]:
    """Bounds of the highest peak over the steps of each mode that has any."""
    bounds: dict[Mode, list[tuple[int, int | None]]] = {}
    for step in steps:
        bounds.setdefault(step.mode, []).append(peak_of_step(step.before, step.after))
    return tuple([_highest(mode, bounds[mode]) for mode in Mode if mode in bounds])


class PeakSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The peaks of one mode on some ranks.

    Attributes:
        num_ranks: ranks that have readings of the mode.
        at_least_bytes: the highest lower bound.
        at_most_bytes: the highest upper bound; None if a rank has none.
    """

    num_ranks: int
    at_least_bytes: int
    at_most_bytes: int | None


class MemorySums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The peaks of ranks.

    Attributes:
        num_ranks: ranks that have readings.
        modes: their peaks, by the mode's value.
    """

    num_ranks: int = 0
    modes: dict[str, PeakSums] = {}


def memory_of(peaks: Sequence[MemoryPeak]) -> MemorySums:
    """The peaks of one rank."""
    if not peaks:
        return MemorySums()
    return MemorySums(1, {peak.mode.value: PeakSums(1, peak.at_least_bytes, peak.at_most_bytes) for peak in peaks})


def add_memory(parts: Iterable[MemorySums]) -> MemorySums:
    """The peaks of the ranks of all parts."""
    modes: dict[str, list[PeakSums]] = {}
    num_ranks = 0
    for part in parts:
        num_ranks += part.num_ranks
        for mode, peaks in part.modes.items():
            modes.setdefault(mode, []).append(peaks)
    return MemorySums(num_ranks, {mode: _highest_of(of_mode) for mode, of_mode in modes.items()})


def _highest_of(parts: Sequence[PeakSums]) -> PeakSums:
    upper = [part.at_most_bytes for part in parts if part.at_most_bytes is not None]
    return PeakSums(
        sum(part.num_ranks for part in parts),
        max(part.at_least_bytes for part in parts),
        max(upper) if len(upper) == len(parts) else None,
    )


def pooled_memory(sums: MemorySums) -> tuple[MemoryPeak, ...]:
    """Bounds of the highest peak of any rank, by mode, over the ranks that have readings.

    Where one of these has none of a mode, its peak there may be the highest: so nothing bounds that mode from above.
    """
    found = []
    for mode in Mode:
        peaks = sums.modes.get(mode.value)
        if peaks is not None:
            at_most = peaks.at_most_bytes if peaks.num_ranks == sums.num_ranks else None
            found.append(MemoryPeak(mode, peaks.at_least_bytes, at_most))
    return tuple(found)


def pool(ranks: Iterable[Sequence[MemoryPeak]]) -> tuple[MemoryPeak, ...]:
    """As ``pooled_memory``, from the peaks of each rank."""
    return pooled_memory(add_memory([memory_of(peaks) for peaks in ranks]))


def _highest(mode: Mode, bounds: Sequence[tuple[int, int | None]]) -> MemoryPeak:
    upper = [at_most for _, at_most in bounds if at_most is not None]
    at_most = max(upper) if len(upper) == len(bounds) else None
    return MemoryPeak(mode, max(at_least for at_least, _ in bounds), at_most)
