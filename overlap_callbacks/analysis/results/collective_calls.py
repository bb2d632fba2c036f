"""The kernels of single collectives on one rank, from which rank 0 tells waiting from transfer: plain data."""

from __future__ import annotations

import msgspec
import numpy as np

# Times of a kind in a step.
MAX_BINS = 24


class ProfiledStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A profiled step that counts.

    Attributes:
        number: of the step in the job.
        block: number of its block in the window.
        sequential: whether its block counts as sequential.
    """

    number: int
    block: int
    sequential: bool


class CollectiveCalls(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The kernels of one kind of collective on one group, in order. Of many in a step, neighbours are added up.

    Messages of two ranks that are alike are such a group too.

    Attributes:
        kind: e.g. ``all_reduce``.
        group: name of the group, the same on its ranks.
        first_rank: lowest rank of the group.
        group_size: its ranks.
        calls: collectives in a step, in those that have any.
        steps: the S steps, all that count; the times of a step without any are 0.
        families: the F families of compute that ran beside any.
        time_us: time of the kernels; 32-bit floats, shape (S, bins).
        hidden_us: the part of it beside compute; the same shape.
        shares: how the families share in that, of 255; 8-bit numbers, shape (S, bins, F).
        dimension: of parallelism that the group serves.
        alike: of messages, what those of other ranks of its stage share with them; empty of others.
        open_us: of messages, the part of ``time_us`` in which nothing else runs and that this rank alone cannot call
            waiting; the same shape; else empty.
    """

    kind: str
    group: str
    first_rank: int
    group_size: int
    calls: int
    steps: tuple[ProfiledStep, ...]
    families: tuple[str, ...]
    time_us: bytes
    hidden_us: bytes
    shares: bytes
    dimension: str = ""
    alike: str = ""
    open_us: bytes = b""

    @property
    def sound(self) -> bool:
        """Whether its arrays have their shapes and hold times; another rank may have sent it."""
        size = len(self.steps) * min(self.calls, MAX_BINS)
        return (
            self.calls > 0
            and len(self.shares) == size * len(self.families)
            and all([are_times(part, size) for part in (self.time_us, self.hidden_us)])
        )


def are_times(content: bytes, number: int) -> bool:
    """Whether it is so many times, as 32-bit floats."""
    if len(content) != 4 * number:
        return False
    times = np.frombuffer(content, np.float32)
    return bool(((times >= 0) & (times < np.inf)).all())
