"""Which collectives are exposed, by size and by place in the step: plain data, of profiles and of trace files."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

# In ``ExposedCollective.place``: of collectives of files without steps it is not known.
FIRST, MIDDLE, LAST, NOWHERE = "first", "middle", "last", ""


class ExposedCollective(msgspec.Struct, frozen=True):
    """The collectives of one kind, group, size and place in the step, over all profiled steps and ranks.

    Where several are in flight at once, the time counts for the one that began first: so the times of all rows add up
    to the communication of the steps.

    Attributes:
        collective: kind of collective, e.g. ``all_reduce``.
        dimension: of parallelism; of a file, the description of the group. Empty if unknown.
        group_size: ranks of the group; None if unknown.
        place: ``FIRST``, ``MIDDLE``, ``LAST`` or ``NOWHERE``.
        least_bytes, most_bytes: sizes of one of them; None if unknown.
        calls: number of their kernels.
        exposed_ms, hidden_ms: their time in flight without compute, and with it.
        exposed_steps: steps in which they are exposed for at least a tenth as long as in the step where they are most.
            A window whose steps have on average less than a tenth of those of another window adds none.
        beyond: share of a step's compute before those that come first, or after those that come last; weighted by
            exposed time.
        worst_rank, worst_ms: the rank on which they are exposed most, and for how long.
        name: of what they are for, in ``Exposure.names``.
        waiting_ms: there, their kernels' time without the transfers', exposed or not; None if unknown.
        path_ms: there, their time on the steps' critical paths; None if unknown.
        queued_ms: exposed time that they answer for, their own or of those that queue behind them; adds up to the
            exposed time too. None in records that lack it.
        blocking: the slope of the step time over a delay of them (``analysis/causal.py``), if they hold the step up; 0
            if they have slack; None if that is not known.
    """

    collective: str
    dimension: str
    group_size: int | None
    place: str
    least_bytes: int | None
    most_bytes: int | None
    calls: int
    exposed_ms: float
    hidden_ms: float
    exposed_steps: int
    beyond: float
    worst_rank: int
    worst_ms: float
    name: str = ""
    waiting_ms: float | None = None
    path_ms: float | None = None
    queued_ms: float | None = None
    blocking: float | None = None

    @property
    def held_ms(self) -> float:
        """What they hold steps up by, without waiting for the last rank: what comes first by name.

        Their time as far as the step follows a delay of it, or the exposed time that they answer for.
        """
        if self.blocking is not None:
            held_ms = max(0.0, min(1.0, self.blocking)) * (self.exposed_ms + self.hidden_ms)
        else:
            held_ms = self.exposed_ms if self.queued_ms is None else self.queued_ms
        return held_ms - min(self.waiting_ms or 0.0, held_ms)


class Exposure(msgspec.Struct, frozen=True):
    """Exposed and hidden communication over steps and ranks.

    Attributes:
        num_steps, num_ranks: numbers of the steps (0 of files without steps) and of the ranks.
        rows: by kind, group, size and place, the most exposed first.
        places: the same, whatever the size.
        names: by kind, group and what they are for, as the framework knows it; without places. Those with most
            ``held_ms`` first.
    """

    num_steps: int
    num_ranks: int
    rows: tuple[ExposedCollective, ...]
    places: tuple[ExposedCollective, ...] = ()
    names: tuple[ExposedCollective, ...] = ()

    @property
    def exposed_ms(self) -> float:
        return sum([row.exposed_ms for row in self.rows])


# -- as ranks send it to each other

# In ``ExposedSum.size``: the size is not known, or there are so many that they share a row.
UNKNOWN_SIZE, SEVERAL = -1, -2


class Label(NamedTuple):
    """What is told of collectives, as in ``ExposedCollective``; a size of 0 if it is not known."""

    collective: str
    dimension: str
    group_size: int


class ExposedSum(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row of ``Exposure``, as sums over steps and ranks; times in nanoseconds.

    Attributes:
        size: of one, ``UNKNOWN_SIZE`` or ``SEVERAL``.
        beyond_ns: ``ExposedCollective.beyond`` times the exposed time.
        by_step: exposed time of each step that has any, by its number.
        by_rank: exposed time of the ranks that have most.
        path_ns: on the steps' critical paths.
        queued_ns: as ``ExposedCollective.queued_ms``.
    """

    collective: str
    dimension: str
    group_size: int
    place: str
    size: int
    least_bytes: int
    most_bytes: int
    calls: int
    exposed_ns: float
    hidden_ns: float
    beyond_ns: float
    by_step: dict[int, float]
    by_rank: dict[int, float] = {}
    path_ns: float = 0.0
    queued_ns: float = 0.0


class ExposureSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The collectives of the ``steps``, by their numbers, on some ranks. In ``names`` a row's place is its name.

    ``paths``: ranks whose steps have critical paths.
    """

    steps: tuple[int, ...] = ()
    num_ranks: int = 0
    rows: tuple[ExposedSum, ...] = ()
    names: tuple[ExposedSum, ...] = ()
    paths: int = 0
