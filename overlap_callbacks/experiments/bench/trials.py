"""Times products and transfers, alone and beside each other: what every kind of device has in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

Call = Callable[[], object]


class Range(NamedTuple):
    """Something that began and ended, in nanoseconds of one clock."""

    start_ns: int
    end_ns: int

    @property
    def ms(self) -> float:
        """Its length."""
        return (self.end_ns - self.start_ns) / 1e6


class Trial(NamedTuple):
    """What ran once.

    Attributes:
        calls: of the products, one after another.
        transfers: one after another, without a pause.
    """

    calls: tuple[Range, ...]
    transfers: tuple[Range, ...]

    @property
    def transfers_ms(self) -> float:
        """From the beginning of the first transfer to the end of the last one."""
        return Range(self.transfers[0].start_ns, self.transfers[-1].end_ns).ms

    def begun_beside(self) -> list[Range]:
        """The calls that began in the first half of the transfers' time.

        Which calls count is told by their beginnings. Told by their ends, long ones would be left out more often than
        short ones, because it is a long one that is cut off by the end of the transfers.
        """
        first, last = self.transfers[0].start_ns, self.transfers[-1].end_ns
        return [call for call in self.calls if first <= call.start_ns < (first + last) / 2]

    def covered(self) -> list[Range]:
        """Those of them that ended while transfers were in flight: all, unless a call takes half of that time."""
        return [call for call in self.begun_beside() if call.end_ns <= self.transfers[-1].end_ns]


class Trials(Protocol):
    """Runs trials on one kind of device."""

    def compute(self, call: Call, count: int) -> Sequence[Range]:
        """Calls alone."""

    def transfer(self, transfer: Call, count: int) -> Sequence[Range]:
        """Transfers alone."""

    def both(self, call: Call, transfer: Call, calls: int, transfers: int) -> Trial:
        """Transfers with calls beside them, more calls than there is time for beside the transfers.

        Args:
            call: issues or does the products that are timed together.
            transfer: issues or does a transfer.
            calls: how many calls take about as long as the transfers. A host that sees when the transfers are done may
                take another number.
            transfers: how many.
        """
