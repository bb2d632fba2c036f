"""A figure over the ranks: extremes with their ranks, and the moments from which its standard deviation follows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from overlap_callbacks.analysis.results.estimate import Spread


class Moments(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One figure over ranks.

    Attributes:
        count: ranks that have it.
        mean: over them.
        squares: sum of the squared distances from the mean.
        low, high: the smallest and the largest.
        low_rank, high_rank: the lowest ranks that have them.
    """

    count: int
    mean: float
    squares: float
    low: float
    low_rank: int
    high: float
    high_rank: int

    @classmethod
    def of(cls, rank: int, value: float) -> Moments:
        """One rank's figure."""
        return cls(1, value, 0.0, value, rank, value, rank)

    def spread(self) -> Spread | None:
        """The spread over ranks; None of a single rank."""
        if self.count < 2:
            return None
        std = math.sqrt(self.squares / (self.count - 1))
        return Spread(self.low, self.high, self.low_rank, self.high_rank, std)


def add_moments(parts: Iterable[Mapping[str, Moments]]) -> dict[str, Moments]:
    """The figures over the ranks of all parts."""
    by_name: dict[str, list[Moments]] = {}
    for part in parts:
        for name, moments in part.items():
            by_name.setdefault(name, []).append(moments)
    return {name: _add(moments) for name, moments in sorted(by_name.items())}


def _add(parts: Sequence[Moments]) -> Moments:
    """Sums about the common mean, of any number of parts.

    Source, for two parts: T. F. Chan, G. H. Golub, R. J. LeVeque, "Algorithms for Computing the Sample Variance" (The
    American Statistician 37, 1983), equation 2.1.
    """
    count = sum(part.count for part in parts)
    # About one of the means: so nothing is lost where they are large and differ little.
    shift = parts[0].mean
    mean = shift + math.fsum(part.count * (part.mean - shift) for part in parts) / count
    squares = math.fsum(part.squares + part.count * (part.mean - mean) ** 2 for part in parts)
    low, low_rank = min((part.low, part.low_rank) for part in parts)
    high, high_rank = min((-part.high, part.high_rank) for part in parts)
    return Moments(count, mean, squares, low, low_rank, -high, high_rank)
