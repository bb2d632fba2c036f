"""Which ranks and hosts come last to collectives, over a run's windows, and how certain that is. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.formatting import PLAIN, Style
from overlap_callbacks.analysis.results.arrivals import Arrivals, Lateness
from overlap_callbacks.analysis.sums import grouped

# Minimum share of collective time lost to waiting for a rank that is worth reporting.
_LEAST_LOST = 0.01
_MAX_LISTED = 8
# More steps than any window has.
_MANY = 10**6
_NORMAL_95 = 1.959964


class Straggler(NamedTuple):
    """A rank or a host that others wait for in the collectives of one dimension of parallelism.

    Attributes:
        rank: global rank; -1 for a host.
        host: its number; -1 if unknown.
        calls, last: collectives timed, and those in which it came last.
        share, low, high: share of steps in which the others waited longest for it, with its 95 % interval.
        chance: the share expected by chance.
        windows, all_windows: windows in which it is among the last, and all windows with data.
        waiting_ms: mean waiting of the others when it was last.
        lost_fraction: that waiting as a share of these collectives' time.
    """

    rank: int
    host: int
    dimension: str
    calls: int
    last: int
    share: float
    low: float
    high: float
    chance: float
    windows: int
    all_windows: int
    waiting_ms: float
    lost_fraction: float

    @property
    def last_share(self) -> float:
        return self.last / self.calls if self.calls else 0.0

    @property
    def sure(self) -> bool:
        return self.low > self.chance

    @property
    def name(self) -> str:
        return f"rank {self.rank}" if self.rank >= 0 else f"host {self.host}"

    def how_sure(self, style: Style = PLAIN) -> str:
        """How often the others wait longest for it, with the interval, as the end of a sentence."""
        share, chance = style.percent(self.share, decimals=0), style.percent(self.chance, decimals=0)
        words = f"in {share} of steps the others wait for it longest (95% interval {self.interval(style)}, by chance "
        return f"{words}{chance}){'' if self.sure else ': inconclusive'}"

    def interval(self, style: Style = PLAIN) -> str:
        low, high = style.percent(self.low, decimals=0), style.percent(self.high, decimals=0)
        return f"{low.removesuffix('%')} to {high}"


def stragglers(windows: Iterable[Arrivals | None], *, hosts: bool = False) -> list[Straggler]:
    """The ranks, or hosts, that others wait longest for in a run's windows, worst first.

    A window keeps only some ranks. A rank that is not among them counts as never last.
    """
    known = [arrivals for arrivals in windows if arrivals is not None and 0 < arrivals.num_steps < _MANY]
    late = [row for arrivals in known for row in (arrivals.hosts if hosts else arrivals.ranks) if row.is_valid]
    rows = grouped(late, lambda row: (row.rank, row.host, row.dimension))
    num_steps = sum([arrivals.num_steps for arrivals in known])
    found = [_straggler(of_windows, len(known), num_steps) for of_windows in rows.values()]
    found = [row for row in found if row.lost_fraction >= _LEAST_LOST and row.share > row.chance]
    found.sort(key=lambda row: (-row.lost_fraction, row.rank, row.host, row.dimension))
    return found[:_MAX_LISTED]


def _straggler(rows: Sequence[Lateness], all_windows: int, num_steps: int) -> Straggler:
    # Windows that do not list it have timed about the same number.
    calls = round(sum([row.calls for row in rows]) * all_windows / len(rows))
    steps = round(sum([row.steps for row in rows]) * all_windows / len(rows))
    last = sum([row.times_last for row in rows])
    share = min(
        1.0, sum([row.steps_blamed for row in rows]) / max(1, steps)
    )  # all rows, if a window lists a rank twice
    low, high = wilson(share, min(steps, num_steps))
    first = rows[0]
    return Straggler(
        first.rank,
        first.host,
        first.dimension,
        calls,
        last,
        share,
        low,
        high,
        first.chance,
        len(rows),
        all_windows,
        math.fsum([row.times_last * row.waiting_ms for row in rows]) / last if last else 0.0,
        math.fsum([row.lost_fraction for row in rows]) / all_windows,
    )


def wilson(share: float, number: int) -> tuple[float, float]:
    """The 95 % interval of a share of ``number`` independent cases.

    The collectives of a step are not independent: a rank that is slow in a step may be last in all of them, or in the
    first one only, after which all start together. So steps are the cases, not collectives.

    Source: E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical Inference" (JASA 22, 1927).
    """
    if number < 1:
        return 0.0, 1.0
    z2 = _NORMAL_95**2 / number
    middle = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(share * (1 - share) * z2 + z2 * z2 / 4) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)
