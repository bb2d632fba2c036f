"""Sums of what ranks send do not depend on the tree, and stay small."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.communication.placement import host_numbers
from overlap_callbacks.analysis.communication.sums import MAX_ROWS, add_sums, job_messages, sums_of
from overlap_callbacks.analysis.results.messages import JobMessages, MessageGroup, RankMessages
from tests.analysis.communication.layouts import Layout, any_tree, row


def messages_of(layout: Layout) -> JobMessages:
    found = job_messages(layout.sums())
    assert found is not None
    return found


def counted(groups: tuple[MessageGroup, ...]) -> Counter[tuple[object, ...]]:
    sums: Counter[tuple[object, ...]] = Counter()
    for group in groups:
        key = group.operator, group.dimension, group.stage
        for size, number, total in group.sizes:
            sums[(*key, "number", size)] += number
            sums[(*key, "total", size)] += total
        sums[(*key, "messages")] += group.messages
        sums[(*key, "bytes")] += group.bytes
    return sums


@pytest.mark.parametrize("layout", [Layout(2, 3, 4), Layout(1, 1, 7), Layout(4, 2, 8, expert=True)])
def test_any_tree_gives_the_same_rows(layout: Layout) -> None:
    expected = messages_of(layout)
    for seed in range(3):
        assert job_messages(any_tree(layout, np.random.default_rng(seed))) == expected
    by_rank: Counter[tuple[object, ...]] = Counter()
    for rank in range(layout.world_size):
        by_rank += counted(layout.part(rank).groups)
    assert counted(expected.groups) == by_rank


def test_ranks_that_send_the_same_share_one_row_with_their_groups() -> None:
    groups = {
        (g.operator, g.dimension, g.stage): g for g in messages_of(Layout(8, 4, 16)).groups if g.operator != "send"
    }
    tensor = groups["allreduce_", "tensor", 0]
    assert (tensor.num_members, tensor.messages, tensor.group_size) == (128, 128 * 5, 8)
    assert (tensor.firsts, tensor.offsets) == (((0, ((8, 16),)),), ((0, ((1, 8),)),))
    assert groups["allreduce_", "tensor", 1].messages == 128 * 4
    data = groups["_allgather_base_", "data", 3]
    assert (data.firsts, data.offsets) == (((384, ((1, 8),)),), ((0, ((8, 16),)),))
    assert groups["allreduce_", "embedding", 3].firsts == groups["allreduce_", "embedding", 0].firsts


def test_sums_stay_exact_even_with_too_many_ranks_to_distinguish() -> None:
    """Every rank sends experts' tokens of its own size, on groups without any order."""
    chance = np.random.default_rng(1)
    pairs = chance.permutation(1600).reshape(800, 2).tolist()
    parts = [
        sums_of(rank, RankMessages((row("alltoall_base_", "expert", tuple(pair), 1, 10 + rank),)), f"h{rank}")
        for pair in pairs
        for rank in pair
    ]
    found = add_sums([add_sums(parts[at : at + 64]) for at in range(0, 1600, 64)])
    assert len(found.groups) <= MAX_ROWS
    assert sum(group.bytes for group in found.groups) == sum(10 + rank for rank in range(1600))
    assert sum(group.num_members for group in found.groups) == 1600
    assert not any(group.whole for group in found.groups)


def test_the_record_does_not_grow_with_the_ranks() -> None:
    sizes = {dp: len(msgspec.json.encode(messages_of(Layout(8, 4, dp)))) for dp in (8, 32, 128)}
    assert sizes[128] < 1.1 * sizes[8]  # the numbers have more digits
    assert sizes[128] < 20_000


def test_hosts_are_numbered_by_their_lowest_ranks_whatever_they_are_called() -> None:
    layout = Layout(2, 3, 4, ranks_per_host=4)
    assert host_numbers(messages_of(layout), 24).tolist() == layout.hosts().tolist()
    spread = add_sums([sums_of(rank, RankMessages(()), f"z{rank % 3}") for rank in range(9)])
    found = job_messages(spread)
    assert found is not None
    assert host_numbers(found, 10).tolist() == [0, 1, 2] * 3 + [-1]
