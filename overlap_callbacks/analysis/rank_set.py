"""Sets of ranks: as runs of consecutive ranks, and in bounded space as their number and the lowest runs."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from overlap_callbacks.analysis.formatting import name_ranks, ranges_in_words

# First and last of consecutive ranks.
Run = tuple[int, int]
# Maximum runs of a set. ``ranges_in_words`` shows fewer, and ``name_ranks`` names fewer ranks. The 64 ranks below one
# leader need no more.
MAX_RUNS = 32
# For more ranks than this, ``name_ranks`` only says that there are more.
_NAMED = 9


def joined(runs: Iterable[Run]) -> list[Run]:
    """Disjoint runs in order, with adjacent ones joined."""
    found: list[Run] = []
    for first, last in sorted(runs):
        if found and found[-1][1] + 1 == first:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return found


def in_runs(runs: Iterable[Run]) -> list[int]:
    return [rank for first, last in runs for rank in range(first, last + 1)]


class RankSet(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Ranks: their exact number, and runs of the lowest, ascending, not adjacent."""

    count: int = 0
    runs: tuple[Run, ...] = ()

    @classmethod
    def of(cls, *runs: Run) -> RankSet:
        return cls(sum(last - first + 1 for first, last in runs), tuple(joined(runs)[:MAX_RUNS]))

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def lowest(self) -> int:
        return self.runs[0][0]

    @property
    def is_whole(self) -> bool:
        """Whether the runs contain every rank of the set."""
        return sum(last - first + 1 for first, last in self.runs) == self.count

    def cut(self, max_runs: int) -> RankSet:
        """The same set with at most ``max_runs`` runs."""
        return self if len(self.runs) <= max_runs else RankSet(self.count, self.runs[:max_runs])

    def first(self, number: int) -> tuple[int, ...]:
        """The lowest ranks, up to ``number`` or as many as are known."""
        ranks: list[int] = []
        for first, last in self.runs:
            ranks += range(first, min(last + 1, first + number - len(ranks)))
        return tuple(ranks)

    def named(self) -> str:
        """E.g. ``ranks 0, 3``; only the first if there are many."""
        return name_ranks(self.first(_NAMED))

    def in_words(self) -> str:
        """E.g. ``0-4, 7``, with a dash; only the first runs if there are many."""
        return ranges_in_words(self.runs, more=not self.is_whole)


def union(sets: Iterable[RankSet]) -> RankSet:
    """The ranks of all sets, which are disjoint."""
    sets = [ranks for ranks in sets if ranks.count]
    # After the last run of an incomplete set, its further ranks are missing here.
    cut = [ranks.runs[-1][1] for ranks in sets if not ranks.is_whole]
    runs = joined([run for ranks in sets for run in ranks.runs if not cut or run[0] <= min(cut)])
    return RankSet(sum(ranks.count for ranks in sets), tuple(runs[:MAX_RUNS]))
