"""Who comes last over the windows of a run, and how sure that is."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.results.arrivals import Arrivals, DimensionWaiting, Lateness, waiting_fraction
from overlap_callbacks.analysis.stragglers import stragglers, wilson


def window(*ranks: Lateness, steps: int = 8) -> Arrivals:
    return Arrivals(steps, (DimensionWaiting("data", 32, 3.0, 1.0),), ranks)


def late(rank: int, worst: int, lost: float = 0.2, steps: int = 8) -> Lateness:
    """A rank that comes last to one of the four collectives of these steps, and never else."""
    return Lateness(rank, 0, "data", 4 * steps, worst, steps, worst, 0.25, 2.0, lost)


def test_the_interval_is_the_one_of_the_textbook() -> None:
    # Newcombe (1998), table I: 15 of 148.
    assert wilson(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(0.5, 0) == (0.0, 1.0)


def test_windows_are_pooled_and_more_of_them_make_it_sure() -> None:
    (one,) = stragglers([window(late(3, 7))])
    assert (one.share, one.last_share, one.sure) == (7 / 8, 7 / 32, True)
    (doubtful,) = stragglers([window(late(3, 4))])
    assert not doubtful.sure
    (sure,) = stragglers([window(late(3, 4))] * 20)
    assert (sure.sure, sure.windows, sure.all_windows, sure.calls) == (True, 20, 20, 640)
    assert sure.waiting_ms == pytest.approx(2.0)


def test_a_rank_that_a_window_does_not_list_was_not_last_in_it() -> None:
    (row,) = stragglers([window(late(3, 8)), window(late(5, 1, lost=0.001)), None])
    assert (row.rank, row.share, row.windows, row.all_windows) == (3, 0.5, 1, 2)
    assert row.lost_fraction == pytest.approx(0.1)


def test_ranks_that_cost_little_or_are_last_by_chance_are_not_listed() -> None:
    assert stragglers([window(late(1, 8, lost=0.001), late(2, 2))]) == []


def test_rows_that_cannot_be_are_passed_over() -> None:
    broken = [late(1, 40), late(2, -1), late(3, 1, lost=float("nan")), late(4, 0, steps=0)]
    assert stragglers([window(*broken)]) == []
    (twice,) = stragglers([window(late(1, 8), late(1, 8))])
    assert twice.share == 1.0
    assert waiting_fraction([window(), None]) == pytest.approx(0.25)
    assert waiting_fraction([None]) is None
    nothing = Arrivals(8, (DimensionWaiting("data", 3, float("nan"), 1.0), DimensionWaiting("data", 0, 1.0, 1.0)))
    assert waiting_fraction([nothing]) is None
