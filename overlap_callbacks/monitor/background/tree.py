"""The tree along which the ranks report to rank 0: a pure function of the rank.

A rank's number, written in base ``FAN_IN``, names its place: its parent is the rank whose last digit other than zero is
zero instead. So ranks 1 to 15 report to rank 0, ranks 17 to 31 to rank 16, and ranks 16, 32, ... to rank 0.

Only rank numbers and the size of the job go in, so all ranks know the same tree without talking. The launcher's
information about nodes is not used: it may be set on some ranks only, and ranks with different trees would wait for
each other in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap_callbacks.analysis.rank_set import Run, in_runs
from overlap_callbacks.monitor.background.store import Job

# Children that a rank has on each level, and one: rank 0 hears 15 on each level, so 45 of 4,096 ranks and 46 of 8,192.
# More would mean fewer levels and more work for rank 0; a leader that is lost takes at most 1/16 of the job's rows.
FAN_IN = 16

# Ranks whose edges a leaving rank looks at, beside its own: each of them is some calls of the store, and all ranks may
# leave at once. So in a large job it is half as many.
WATCHED = 4
_MANY_RANKS = 1024

# Maximum time by which a rank waits longer for its children than they wait for theirs.
_MAX_LEAD_S = 2.5


def num_watched(world_size: int) -> int:
    """Ranks whose edges a leaving rank looks at, beside its own."""
    return WATCHED if world_size <= _MANY_RANKS else WATCHED // 2


@dataclass(frozen=True)
class Tree:
    """The place of one rank.

    Attributes:
        rank: of this process.
        world_size: ranks of the job.
        fan_in: ranks that are put together at once, the leader included.
    """

    rank: int
    world_size: int
    fan_in: int = FAN_IN

    @classmethod
    def of(cls, job: Job) -> Tree:
        """The place of this process in its job."""
        return cls(job.rank, job.world_size, FAN_IN)

    @property
    def level(self) -> int:
        """How many levels of ranks are below this one: 0 for a rank without children, the most for rank 0."""
        level, width = 0, 1
        while width < self.world_size and self.rank % (width * self.fan_in) == 0:
            level, width = level + 1, width * self.fan_in
        return level

    @property
    def num_levels(self) -> int:
        """The level of rank 0."""
        return Tree(0, self.world_size, self.fan_in).level

    @property
    def parent(self) -> int | None:
        """The rank that this one reports to; None for rank 0."""
        if self.rank == 0:
            return None
        width: int = self.fan_in ** (self.level + 1)
        return self.rank - self.rank % width

    @property
    def children(self) -> tuple[int, ...]:
        """The ranks that report to this one."""
        widths = [self.fan_in**level for level in range(self.level)]
        ranks = [self.rank + place * width for width in widths for place in range(1, self.fan_in)]
        return tuple([rank for rank in ranks if rank < self.world_size])

    @property
    def members(self) -> range:
        """This rank and all below it."""
        return range(self.rank, min(self.rank + self.fan_in**self.level, self.world_size))

    @property
    def watched(self) -> tuple[int, ...]:
        """Ranks whose edge to their parent this one looks at when it leaves: their messages may be stale.

        They lie between this rank and the opposite one in the ring of all ranks, at distances that grow evenly: ranks
        that die together mostly follow each other, as those of a node do.
        """
        farthest, number = self.world_size / 2, num_watched(self.world_size)
        near = [round(farthest ** (place / (number - 1))) for place in range(number)]
        distances = [max(place + 1, distance) for place, distance in enumerate(near)]  # all different
        ranks = {(self.rank + distance) % self.world_size for distance in distances}
        return tuple(sorted(ranks - {0, self.rank, *self.children}))  # the edges of these it has, or they have none

    def members_without(self, runs: Sequence[Run]) -> tuple[int, ...]:
        """This rank and those below it, except the ranks in ``runs`` (joined)."""
        members = self.members
        if list(runs) == [(members.start, members.stop - 1)]:
            return ()  # the usual case, of any number of ranks
        others = set(in_runs(runs))
        return tuple([rank for rank in members if rank not in others])

    def patience_s(self, timeout_s: float) -> float:
        """How long this rank waits for its children, so that its message still reaches rank 0 within ``timeout_s``."""
        levels = max(1, self.num_levels)
        return timeout_s - (levels - self.level) * min(_MAX_LEAD_S, timeout_s / (2 * levels))
