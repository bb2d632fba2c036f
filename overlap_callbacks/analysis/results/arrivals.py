"""Plain data: which rank came last to collectives, how long the others waited, and how long transfers took."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

# In ``SizeTransfer.reach``: a group's ranks are on one host, on several, or on unknown hosts.
ONE_HOST, SEVERAL_HOSTS, UNKNOWN_HOSTS = "one host", "several hosts", ""


def came_alone(least: Any, next_least: Any, resolution: float) -> Any:
    """Whether one rank came last to a collective, and is charged with the others' waiting.

    The last rank has the least time, as it waits for nobody. If others took equally long, within the resolution of the
    times, they came together and nobody is charged. Numbers, or arrays of them.
    """
    return next_least - least > resolution


# Larger counts, milliseconds and bytes only occur in damaged or fabricated records.
_TOO_LARGE = 2**63


def are_plausible(*values: float) -> bool:
    """Whether these values can be counts, times or bytes."""
    return all([0 <= value < _TOO_LARGE for value in values])


class TimedCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A collective of a sequential step, on one rank.

    Attributes:
        step: index of the step in its window.
        number: index of the call among those of its operator and group in the step.
        size_bytes: bytes read or written, whichever is larger.
        time_us: from issue to end.
        dtype: of its elements, e.g. ``bfloat16``; empty if unknown.
    """

    step: int
    number: int
    size_bytes: int
    time_us: int
    dtype: str = ""


class TimedCalls(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Calls of one operator on one group, on one rank, by step and number.

    ``operator`` is the gate's name; all ranks of the group agree on its name and lowest rank.
    """

    operator: str
    group: str
    first_rank: int
    group_size: int
    dimension: str
    calls: tuple[TimedCall, ...]


class Lateness(msgspec.Struct, frozen=True, gc=False):
    """How often a rank, or the ranks of a host, came last to the collectives of one dimension of parallelism.

    Attributes:
        rank: global rank; -1 for a host.
        host: its number, by the order of lowest ranks; -1 if unknown.
        calls, times_last: timed collectives of the rank's group (of a host: of all groups), and those in which it was
            last.
        steps, steps_blamed: timed steps, summed over groups and operators, and those in which the others waited longest
            for it.
        chance: fraction of either expected by chance.
        waiting_ms: mean time the other ranks waited when it was last.
        lost_fraction: ``waiting_ms`` over the time of all these collectives, mean over the ranks.
    """

    rank: int
    host: int
    dimension: str
    calls: int
    times_last: int = msgspec.field(name="last")
    steps: int
    steps_blamed: int = msgspec.field(name="worst")
    chance: float
    waiting_ms: float
    lost_fraction: float

    @property
    def is_valid(self) -> bool:
        return (
            are_plausible(self.waiting_ms)
            and 0 <= self.times_last <= self.calls < _TOO_LARGE
            and 0 <= self.steps_blamed <= self.steps < _TOO_LARGE
            and min(self.calls, self.steps) > 0
            and 0 <= self.chance <= 1
            and 0 <= self.lost_fraction <= 1
        )


class DimensionWaiting(msgspec.Struct, frozen=True, gc=False):
    """Waiting and transfer in the timed collectives of one dimension, over all its groups.

    Attributes:
        transfer_ms: least time over the ranks of a collective; mean over the collectives.
        waiting_ms: time beyond that, mean over ranks and collectives.
    """

    dimension: str
    calls: int
    transfer_ms: float
    waiting_ms: float

    @property
    def is_valid(self) -> bool:
        return self.calls > 0 and are_plausible(self.calls, self.transfer_ms, self.waiting_ms)


class Arrivals(msgspec.Struct, frozen=True):
    """Who came last to the collectives of a window's ``num_steps`` sequential steps.

    ``ranks`` are those that others waited longest for; ``hosts`` is empty if unknown, or if there is only one.
    """

    num_steps: int
    dimensions: tuple[DimensionWaiting, ...]
    ranks: tuple[Lateness, ...] = ()
    hosts: tuple[Lateness, ...] = ()


def waiting_fraction(windows: Iterable[Arrivals | None]) -> float | None:
    """The fraction of collectives' time in which ranks waited for the last one; None if not timed."""
    rows = [row for arrivals in windows if arrivals is not None for row in arrivals.dimensions]
    rows = [row for row in rows if row.is_valid]
    waiting = math.fsum([row.calls * row.waiting_ms for row in rows])
    total = waiting + math.fsum([row.calls * row.transfer_ms for row in rows])
    return waiting / total if 0 < total < math.inf else None


class SizeTransfer(msgspec.Struct, frozen=True, gc=False):
    """Transfers of messages of about one size.

    Attributes:
        reach: ``ONE_HOST``, ``SEVERAL_HOSTS`` or ``UNKNOWN_HOSTS``.
        size: messages of 2**size bytes or more, and less than twice that.
        calls, bytes: collectives, and the sum of their sizes.
        transfer_ms: sum of the least times over their ranks.
    """

    operator: str
    dimension: str
    group_size: int
    reach: str
    size: int
    calls: int
    bytes: int
    transfer_ms: float

    @property
    def is_valid(self) -> bool:
        return (
            are_plausible(self.calls, self.bytes, self.transfer_ms, self.group_size)
            and min(self.calls, self.bytes, self.transfer_ms) > 0
            and -1 <= self.size <= 63
        )


class SizedTransfer(msgspec.Struct, frozen=True, gc=False):
    """Transfers of exactly one size and element type: the four largest of each operator and group.

    Attributes:
        dtype, size_bytes: as in ``TimedCall``.
        calls: collectives.
        transfer_ms: sum of the least times over their ranks.
    """

    operator: str
    dimension: str
    group_size: int
    dtype: str
    size_bytes: int
    calls: int
    transfer_ms: float


# The kind of collectives of which ranks may have shares of different sizes.
ALL_TO_ALL = "all_to_all"
# Times of a kind in a step.
MAX_BINS = 64


class ProfiledStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A profiled step that counts, by its number in the job; ``block`` is that of its block in the window."""

    number: int
    block: int
    sequential: bool


class CollectiveCalls(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The kernels of one kind of collective on one group, in order; if a step has many, neighbours are added up.

    Similar messages of two ranks form such a group too. Times and shares are arrays of shape (S, bins) and (S, bins,
    F), as bytes: 32-bit floats and 8-bit numbers.

    Attributes:
        calls: collectives in a step, in those that have any.
        steps: the S steps, all that count; the times of a step without any are 0.
        families: the F families of compute, and directions of copies, that ran beside any.
        hidden_us: the part of ``time_us`` beside these.
        shares: how the families share in that, of 255.
        alike: of messages, what those of other ranks of its stage share with them; empty of others.
        open_us: of messages, the part of ``time_us`` in which nothing else runs and that this rank alone cannot call
            waiting; else empty.
        sizes: of all-to-alls, the bytes of this rank's share, an array like ``time_us``; else empty.
        names: the ``name_code`` of what the calls of each bin are for, 0 if that differs or is not known.
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
    sizes: bytes = b""
    names: tuple[int, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether its arrays have valid shapes and times; it may come from another rank."""
        size = len(self.steps) * min(self.calls, MAX_BINS)
        return (
            self.calls > 0
            and len(self.shares) == size * len(self.families)
            and all([are_times(part, size) for part in (self.time_us, self.hidden_us, self.sizes or self.time_us)])
        )


def name_code(kind: str, name: str) -> int:
    """A short code of a collective's kind and name; 0 without a name."""
    return zlib.crc32(f"{kind} {name}".encode()) if name else 0


def are_times(content: bytes, number: int) -> bool:
    """Whether ``content`` is ``number`` times, as 32-bit floats."""
    if len(content) != 4 * number:
        return False
    times = np.frombuffer(content, np.float32)
    return bool(((times >= 0) & (times < np.inf)).all())
