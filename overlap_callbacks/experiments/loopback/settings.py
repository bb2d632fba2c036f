"""What the phantom's link is like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoopSettings:
    """A link to the phantom.

    Attributes:
        device: ``cuda`` (the current device) or ``cpu``.
        ctas: thread blocks that the kernel of a collective has. Each takes so much shared memory that the large tiles
            of matrix products find no place beside it, so about as many SMs are gone for those.
        gb_s: bandwidth of the link in 10^9 bytes a second; ``math.inf`` for collectives that do not wait.
    """

    device: str = "cuda"
    ctas: int = 24
    gb_s: float = 40.0

    def length_ns(self, num_bytes: int) -> int:
        """How long a collective of ``num_bytes`` takes at least."""
        return int(num_bytes / self.gb_s)  # bytes / (10^9 bytes / s) is nanoseconds
