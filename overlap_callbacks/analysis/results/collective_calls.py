"""The kernels of single collectives on one rank, from which rank 0 tells waiting from transfer: plain data."""

from __future__ import annotations

import msgspec
import numpy as np


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
        group_size: its ranks; 1 for messages that cannot be compared with the other side's.
        calls: collectives in a step.
        steps: the S steps.
        families: the F families of compute that ran beside any.
        time_us: time of the kernels; 32-bit floats, shape (S, bins).
        hidden_us: the part of it beside compute; the same shape.
        shares: how the families share in that, of 255; 8-bit numbers, shape (S, bins, F).
        dimension: of parallelism that the group serves.
        open_us: of messages, the part of ``time_us`` in which nothing else runs and that this rank alone cannot call
            waiting; the same shape.
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
    open_us: bytes = b""

    @property
    def sound(self) -> bool:
        """Whether its arrays have their shapes and hold times; another rank may have sent it."""
        times = [np.frombuffer(part[: len(part) // 4 * 4], np.float32) for part in (self.time_us, self.hidden_us)]
        if self.open_us:
            times.append(np.frombuffer(self.open_us[: len(self.open_us) // 4 * 4], np.float32))
        num_bytes = len(self.time_us)
        return (
            len(self.steps) > 0
            and num_bytes > 0
            and num_bytes % (4 * len(self.steps)) == 0
            and {len(self.hidden_us), len(self.open_us) or num_bytes} == {num_bytes}
            and len(self.shares) == num_bytes // 4 * len(self.families)
            and all([bool((np.isfinite(part) & (part >= 0)).all()) for part in times])
        )
