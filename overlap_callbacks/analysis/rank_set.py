"""A set of ranks in bounded space: how many there are, and the lowest of them as ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from overlap_callbacks.analysis.formatting import name_ranks, ranges_in_words

# Ranges that are kept. ``ranges_in_words`` shows fewer, and ``name_ranks`` names fewer ranks. The 64 ranks that one
# leader hears have no more.
MAX_RANGES = 32
# Of more ranks than this, ``name_ranks`` says that there are more.
_NAMED = 9


class RankSet(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Ranks: their number, which is exact, and the lowest.

    Attributes:
        count: number of ranks.
        ranges: the lowest ranks as (first, last), ascending, not adjacent.
    """

    count: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, *ranks: int) -> RankSet:
        """These ranks."""
        return union([cls(1, ((rank, rank),)) for rank in ranks])

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def lowest(self) -> int:
        """The lowest rank."""
        return self.ranges[0][0]

    @property
    def is_whole(self) -> bool:
        """Whether the ranges hold every rank of the set."""
        return sum(last - first + 1 for first, last in self.ranges) == self.count

    def cut(self, max_ranges: int) -> RankSet:
        """The same with fewer ranges at most."""
        return self if len(self.ranges) <= max_ranges else RankSet(self.count, self.ranges[:max_ranges])

    def first(self, number: int) -> tuple[int, ...]:
        """The lowest ranks, as many as asked for, or as are known."""
        ranks: list[int] = []
        for first, last in self.ranges:
            ranks += range(first, min(last + 1, first + number - len(ranks)))
        return tuple(ranks)

    def named(self) -> str:
        """E.g. ``ranks 0, 3``; of many the first."""
        return name_ranks(self.first(_NAMED))

    def in_words(self) -> str:
        """E.g. ``0-4, 7``, with a dash; of many ranges the first."""
        return ranges_in_words(self.ranges, more=not self.is_whole)


def union(sets: Sequence[RankSet]) -> RankSet:
    """The ranks of all sets, no two of which have a rank in common."""
    sets = [ranks for ranks in sets if ranks.count]
    if len(sets) <= 1:
        return sets[0] if sets else RankSet()
    # Beyond the last range of a set that is not whole, ranks of it are missing here.
    known_to = min((ranks.ranges[-1][1] for ranks in sets if not ranks.is_whole), default=None)
    merged: list[list[int]] = []
    for first, last in sorted(one for ranks in sets for one in ranks.ranges):
        if known_to is not None and first > known_to:
            break
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(last, merged[-1][1])
        elif len(merged) == MAX_RANGES:
            break
        else:
            merged.append([first, last])
    kept = tuple([(first, last) for first, last in merged])
    return RankSet(sum(ranks.count for ranks in sets), kept)


def union_of(sets: Iterable[RankSet]) -> RankSet:
    """As ``union``, of any iterable."""
    return union(list(sets))
