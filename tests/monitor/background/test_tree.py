"""The ranks' tree: every rank knows its place without talking, and no rank hears many."""

from __future__ import annotations

from collections import Counter

import pytest

from overlap_callbacks.analysis.rank_set import in_runs, joined
from overlap_callbacks.monitor.background.tree import FAN_IN, Tree, num_watched

SIZES = [(2, 16), (7, 2), (16, 16), (17, 16), (100, 4), (257, 16), (4096, 16), (8192, 16), (5000, 64)]


@pytest.mark.parametrize(("world_size", "fan_in"), SIZES)
def test_each_rank_is_heard_once_and_all_of_it_ends_at_rank_0(world_size: int, fan_in: int) -> None:
    trees = [Tree(rank, world_size, fan_in) for rank in range(world_size)]
    heard = sorted(child for tree in trees for child in tree.children)
    assert heard == list(range(1, world_size))
    for tree in trees:
        assert all(trees[child].parent == tree.rank for child in tree.children)
        assert all(trees[child].level < tree.level for child in tree.children)
        assert sorted([tree.rank, *[rank for child in tree.children for rank in trees[child].members]]) == list(
            tree.members
        )
    assert trees[0].parent is None
    assert list(trees[0].members) == list(range(world_size))


@pytest.mark.parametrize(("world_size", "fan_in"), SIZES)
def test_no_rank_hears_more_than_its_fan_in_on_a_level(world_size: int, fan_in: int) -> None:
    for rank in range(world_size):
        tree = Tree(rank, world_size, fan_in)
        levels = [Tree(child, world_size, fan_in).level for child in tree.children]
        assert all(levels.count(level) < fan_in for level in set(levels))


def test_twice_the_ranks_are_hardly_more_work_for_rank_0() -> None:
    assert [len(Tree(0, ranks, FAN_IN).children) for ranks in (8, 4096, 8192)] == [7, 45, 46]


@pytest.mark.parametrize(("world_size", "fan_in"), SIZES)
@pytest.mark.parametrize("timeout_s", [0.3, 30.0])
def test_a_parent_waits_longer_than_its_children_and_rank_0_for_the_timeout(
    world_size: int, fan_in: int, timeout_s: float
) -> None:
    assert Tree(0, world_size, fan_in).patience_s(timeout_s) == timeout_s
    for rank in range(world_size):
        tree = Tree(rank, world_size, fan_in)
        assert tree.patience_s(timeout_s) >= timeout_s / 2
        for child in tree.children:
            assert Tree(child, world_size, fan_in).patience_s(timeout_s) < tree.patience_s(timeout_s)


def test_runs_of_ranks_are_joined_in_any_order() -> None:
    assert joined([(4, 6), (0, 0), (1, 2), (8, 8)]) == [(0, 2), (4, 6), (8, 8)]
    assert in_runs([(0, 2), (8, 8)]) == [0, 1, 2, 8]


@pytest.mark.parametrize("num_ranks", [*range(3, 40), 100, 257, 1030])
def test_of_up_to_half_of_the_job_dying_in_a_row_each_rank_is_watched_by_a_survivor(num_ranks: int) -> None:
    watchers: dict[int, set[int]] = {rank: set() for rank in range(num_ranks)}
    for rank in range(num_ranks):
        tree = Tree(rank, num_ranks)
        for other in (*tree.watched, *tree.children):  # of its children a rank takes everything away
            watchers[other].add(rank)
    num_dead = num_ranks // 2
    for first in range(num_ranks):
        dead = {(first + place) % num_ranks for place in range(num_dead)}
        assert not any(watchers[rank] <= dead for rank in dead - {0})


@pytest.mark.parametrize(("world_size", "fan_in"), SIZES)
def test_a_rank_watches_few_others_and_each_but_rank_0_is_watched_by_as_many(world_size: int, fan_in: int) -> None:
    trees = [Tree(rank, world_size, fan_in) for rank in range(world_size)]
    assert all(len(tree.watched) <= num_watched(world_size) for tree in trees)
    assert all({0, tree.rank}.isdisjoint(tree.watched) for tree in trees)
    looked_at = Counter(other for tree in trees for other in {*tree.watched, *tree.children})
    assert looked_at.keys() == set(range(1, world_size))
    assert min(looked_at.values()) >= min(num_watched(world_size), world_size - 1)
