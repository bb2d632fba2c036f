"""The highest memory use in steps of each mode, as far as it is known, and its metrics: plain data."""

from __future__ import annotations

import msgspec

from overlap_callbacks.analysis.results.mode import Mode


class MemoryPeak(msgspec.Struct, frozen=True):
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


# Of torch's allocator, the highest over the ranks.
_MEMORY_PEAK = "peak_bytes"
_MEMORY_PEAK_LIMIT = "peak_at_most_bytes"


def memory_peak_key(mode: Mode) -> str:
    """The key of a mode's memory peak."""
    return f"memory/{mode.value}_{_MEMORY_PEAK}"


def memory_peak_limit_key(mode: Mode) -> str:
    """The key of the upper bound of a mode's memory peak."""
    return f"memory/{mode.value}_{_MEMORY_PEAK_LIMIT}"


def memory_units() -> dict[str, str]:
    """Unit of each metric of memory, by key."""
    return dict.fromkeys([key(mode) for mode in Mode for key in (memory_peak_key, memory_peak_limit_key)], "bytes")


def memory_meanings() -> dict[str, str]:
    """Meaning of each metric of memory, by key."""
    peak, limit = "highest memory that tensors hold on any rank", "what the memory peak is at most"
    return {
        **{memory_peak_key(mode): f"{peak}, {mode.value} steps" for mode in Mode},
        **{memory_peak_limit_key(mode): f"{limit}, {mode.value} steps" for mode in Mode},
    }
