"""Which windows are left out after a rank was not heard, so that waiting for it stays within the budget."""

from __future__ import annotations

import math

# Used where a run has no budget: windows then come less often as long as the rank is silent, and no more.
_NO_LIMIT = math.inf


class SilenceBackoff:
    """Leaves out so many windows after one that waited in vain that the wait is within ``max_overhead``.

    Each window in vain at least doubles the distance to the next. Windows are opened at multiples of a power of two:
    ranks that wait for different times, and so come to different powers, still meet at the multiples of the largest.

    Args:
        max_overhead: maximum fraction of training time that measuring may cost; None for no limit.

    Attributes:
        next_window: number of the first window that may be opened.
    """

    def __init__(self, max_overhead: float | None) -> None:
        self.next_window = 0
        self._max_overhead = max_overhead or _NO_LIMIT
        self._power = 0  # windows are opened at multiples of two to this power

    def not_heard(self, window: int, waited_s: float, interval_s: float) -> None:
        """A window waited in vain.

        Args:
            window: its number.
            waited_s: time that training stood still for it.
            interval_s: time from one window to the next without that wait.
        """
        paid_by = math.ceil(waited_s / (self._max_overhead * interval_s)) if interval_s > 0 else 1
        self._power = max(self._power + 1, math.ceil(math.log2(max(1, paid_by))))
        distance = 2**self._power
        self.next_window = math.ceil((window + max(1, paid_by)) / distance) * distance

    def all_heard(self) -> None:
        """All ranks came to a window: the next one may be opened."""
        self._power = 0

    def rewind(self) -> None:
        """The numbers of windows go back."""
        self.next_window = 0
