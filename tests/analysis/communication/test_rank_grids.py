from __future__ import annotations

import numpy as np
import pytest

from overlap_callbacks.analysis.communication.rank_grids import grids_of, in_order, ranks_in, union


@pytest.mark.parametrize(
    ("ranks", "grids"),
    [
        ([], ()),
        ([3], ((3, ()),)),
        (range(8), ((0, ((1, 8),)),)),
        ([0, 1, 8, 9, 16, 17], ((0, ((1, 2), (8, 3))),)),
        ([r + 8 * d + 64 * p for p in range(4) for d in range(3) for r in range(2)], ((0, ((1, 2), (8, 3), (64, 4))),)),
        ([0, 1, 5], ((0, ((1, 2),)), (5, ()))),
    ],
)
def test_regular_sets_are_one_grid(ranks: list[int], grids: object) -> None:
    assert grids_of(ranks) == grids
    assert sorted(ranks) == ranks_in(grids_of(ranks)).tolist()


def test_the_order_of_a_group_is_kept() -> None:
    for ranks in ([0, 4, 1, 5], [7, 5, 3], [2, 0, 9, 9], [*range(0, 64, 8), *range(1, 65, 8)]):
        assert ranks_in(in_order(ranks)).tolist() == ranks


def test_any_set_comes_back_and_unions_do_not_depend_on_the_way() -> None:
    chance = np.random.default_rng(0)
    for _ in range(50):
        ranks = chance.choice(200, size=int(chance.integers(1, 60)), replace=False).tolist()
        assert ranks_in(grids_of(ranks)).tolist() == sorted(ranks)
        halves = [grids_of(ranks[::2]), grids_of(ranks[1::2])]
        assert union(halves) == union(halves[::-1]) == grids_of(ranks)
