"""From a device's energy counter, which wraps and is reset, to joules that only grow."""

from __future__ import annotations

# Counters are not all as wide as the type that the library returns: this width is tried where none is stated.
_NARROW = 2**32


class EnergyCounter:
    """Joules since the first read.

    Args:
        tick_j: joules per count.
        counts: after how many counts the counter is back at zero; None where the device does not say.
    """

    def __init__(self, tick_j: float, counts: int | None = None) -> None:
        self._tick_j = tick_j
        self._counts = counts
        self._last: int | None = None
        self._total = 0  # in counts: whole numbers add up without error, for years

    def read(self, value: int) -> float | None:
        """Joules since the first read; None where the counter went back without having wrapped.

        Then it was reset (a driver that was loaded again), or is at fault (some run backwards), and what was used since
        the last read is not known.
        """
        last, self._last = self._last, value
        if last is None:
            return 0.0
        used = value - last
        if used < 0:
            counts = self._counts if self._counts is not None else _width(last, value)
            if counts is None or used + counts < 0:
                return None
            used += counts
        self._total += used
        return self._total * self._tick_j


def _width(last: int, value: int) -> int | None:
    """The width at which a counter of unknown width wrapped: it stood close below, and now stands close above zero."""
    margin = _NARROW // 16
    return _NARROW if _NARROW - margin <= last < _NARROW and value < margin else None
