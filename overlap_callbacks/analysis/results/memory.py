"""The highest memory use in steps of each mode, as far as it is known: plain data."""

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
