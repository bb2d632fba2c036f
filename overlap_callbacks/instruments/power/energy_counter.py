"""Turns a device's energy counter, which wraps and may be reset, into joules that only grow."""

from __future__ import annotations

# Some counters are narrower than the type that the library returns. If no width is stated, this one is tried.
_NARROW = 2**32


class EnergyCounter:
    """Joules since the first read.

    Args:
        tick_j: joules per count.
        counts: number of counts after which the counter wraps to zero; None if the device does not tell.
    """

    def __init__(self, tick_j: float, counts: int | None = None) -> None:
        self._tick_j = tick_j
        self._counts = counts
        self._last: int | None = None
        self._total = 0  # in counts: whole numbers add up without rounding errors

    def read(self, value: int) -> float | None:
        """Joules since the first read; None if the counter went back without having wrapped.

        Then it was reset (e.g. the driver was reloaded) or is faulty (some run backwards), so the energy used since the
        last read is unknown.
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
    """The width at which a counter of unknown width wrapped: it was close to that width, and is now close to zero."""
    margin = _NARROW // 16
    return _NARROW if _NARROW - margin <= last < _NARROW and value < margin else None
