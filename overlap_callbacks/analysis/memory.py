"""The memory peak of each mode, from readings of the allocator at the bounds of steps.

The allocator keeps the highest value of each of its counters since the last reset. The user reads and resets it, so
nothing here does. For a step with readings before (b) and after (a):

- The peak rose, peak(a) > peak(b): the new value was reached within the step, so the step's peak is peak(a), exactly.
- It stayed, peak(a) = peak(b): the step's peak is at most peak(a), and at least what was allocated at either reading.
- The user reset it within the step: the step's peak is at least peak(a), and nothing bounds it from above. A reset is
  noticed because it lowers the peaks of all counters at once, of which the allocator has some dozens: a step that
  raises all of them above their former peaks is not expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import MemoryPeak
from overlap_callbacks.analysis.sums import table_sum

# Marks a rank without a reading of a mode.
_NO_READING = -1


class AllocatorReading(NamedTuple):
    """Bytes that tensors hold at one time, their peak since the last reset, and the peaks of all counters, in order."""

    allocated_bytes: int
    peak_bytes: int
    peaks: tuple[int, ...] = ()


class SteppedMemory(NamedTuple):
    """The allocator at the start and end of a step; ``mode`` is the side of the comparison that the step counts for."""

    mode: Mode
    before: AllocatorReading
    after: AllocatorReading


def peak_of_step(before: AllocatorReading, after: AllocatorReading) -> tuple[int, int | None]:
    """Lower and upper bound of a step's peak in bytes; the upper is None if unknown."""
    at_least = max(before.allocated_bytes, after.allocated_bytes)
    was_reset = after.peak_bytes < before.peak_bytes or any(
        a < b for a, b in zip(after.peaks, before.peaks, strict=False)
    )
    if was_reset:
        return max(at_least, after.peak_bytes), None
    if after.peak_bytes > before.peak_bytes:
        return after.peak_bytes, after.peak_bytes
    return at_least, after.peak_bytes


add_peaks = table_sum(
    MemoryPeak, 1, at_least_bytes=max, at_most_bytes=lambda bounds: None if None in bounds else max(bounds),
    order=lambda peak: list(Mode).index(peak.mode),
)  # fmt: skip


def peaks_by_mode(steps: Iterable[SteppedMemory]) -> tuple[MemoryPeak, ...]:
    """Bounds of the highest peak over the steps of each mode that has any."""
    return add_peaks([[MemoryPeak(step.mode, *peak_of_step(step.before, step.after))] for step in steps])


def peaks_of(peaks: Sequence[MemoryPeak]) -> tuple[MemoryPeak, ...]:
    """One rank's peaks, to be merged with others': includes a mode without a reading, if the rank has any reading.

    Its peak in that mode may be the highest of all, so nothing bounds the mode from above.
    """
    unknown = [MemoryPeak(mode, _NO_READING, None) for mode in Mode if peaks]
    return add_peaks([peaks, [peak for peak in unknown if all(peak.mode is not known.mode for known in peaks)]])


def job_peaks(peaks: Sequence[MemoryPeak]) -> tuple[MemoryPeak, ...]:
    """The highest peak of any rank, by mode, over the ranks that have readings."""
    return tuple([peak for peak in peaks if peak.at_least_bytes != _NO_READING])
