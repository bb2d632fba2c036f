"""The compute slowdown divided among its causes: plain data, as it is written to the record."""

from __future__ import annotations

import msgspec

# What ``SlowdownShare.cause`` may be.
CLOCK = "lower clock"
SMS = "SMs taken"
WAVES = "waves"
MEMORY = "memory bandwidth"
UNEXPLAINED = "unexplained"


class SlowdownShare(msgspec.Struct, frozen=True):
    """The part of a slowdown that one cause has.

    Attributes:
        cause: ``CLOCK``, ``SMS``, ....
        fraction: of the sequential time of the compute kernels, as the slowdown itself is.
        basis: what it rests on, in words.
    """

    cause: str
    fraction: float
    basis: str


class SlowdownShares(msgspec.Struct, frozen=True):
    """The compute slowdown, divided among its causes.

    Attributes:
        slowdown: of the compute kernels, as a fraction.
        shares: add up to ``slowdown``; causes of which nothing is known are part of what is unexplained.
        notes: where a share is not what was measured or modelled, in words.
    """

    slowdown: float
    shares: tuple[SlowdownShare, ...]
    notes: tuple[str, ...] = ()

    def of(self, cause: str) -> float | None:
        """The share of a cause, as a fraction of the sequential time; None where it has none."""
        return next((share.fraction for share in self.shares if share.cause == cause), None)
