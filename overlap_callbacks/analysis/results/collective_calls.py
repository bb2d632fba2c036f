"""The kernels of single collectives on one rank, from which rank 0 tells waiting from transfer: plain data."""

from __future__ import annotations

import msgspec


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

    Attributes:
        kind: e.g. ``all_reduce``.
        group: name of the group, the same on its ranks.
        first_rank: lowest rank of the group.
        group_size: its ranks.
        calls: collectives in a step.
        steps: the S steps.
        families: the F families of compute that ran beside any.
        time_us: time of the kernels; 32-bit floats, shape (S, bins).
        hidden_us: the part of it beside compute; the same shape.
        shares: how the families share in that, of 255; 8-bit numbers, shape (S, bins, F).
        dimension: of parallelism that the group serves.
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
