"""Another order of the dimensions on the same hosts."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.communication.placement import (
    Dimension,
    MappingError,
    layout_of,
    order_of,
    parse_order,
    placed,
)
from overlap_callbacks.analysis.communication.sums import add_sums, job_messages, sums_of
from overlap_callbacks.analysis.communication.traffic import dimension_totals
from overlap_callbacks.analysis.results.messages import JobMessages, RankMessages
from tests.analysis.communication.layouts import ACTIVATION, SHARD, Layout, row


def messages_of(layout: Layout) -> JobMessages:
    found = job_messages(layout.sums())
    assert found is not None
    return found


def test_a_job_shows_its_layout() -> None:
    found = layout_of(messages_of(Layout(2, 4, 3)), 24)
    assert found == (Dimension("tensor", 1, 2), Dimension("data", 2, 3), Dimension("pipeline", 6, 4))
    assert order_of([dimension.name for dimension in found]) == "tp-dp-pp"
    of_pairs = layout_of(messages_of(Layout(2, 2, 2)), 8)
    assert [dimension.name for dimension in of_pairs] == ["tensor", "data", "pipeline"]


def test_data_groups_that_hold_context_are_divided() -> None:
    """Gradients are reduced over data and context at once: ranks 0, 2, 4, 6, of which 0 and 2 share a sequence."""
    parts = []
    for rank in range(8):
        t, c, d = rank % 2, rank // 2 % 2, rank // 4
        rows = (
            row("allreduce_", "tensor", (rank - t, rank - t + 1), 1, 8),
            row("alltoall_base_", "context", tuple(t + 2 * other + 4 * d for other in range(2)), 1, 8),
            row("allreduce_", "data", tuple(range(t, 8, 2)), 1, 8),
        )
        assert c in (0, 1)
        parts.append(sums_of(rank, RankMessages(rows), "host"))
    found = job_messages(add_sums(parts))
    assert found is not None
    assert [dimension.name for dimension in layout_of(found, 8)] == ["tensor", "context", "data"]


def test_the_bytes_that_cross_hosts_are_those_of_the_other_order() -> None:
    """Two hosts of four ranks. As run, pipelines cross hosts; with data outermost, gradients do."""
    layout = Layout(2, 2, 2, ranks_per_host=4)
    messages = messages_of(layout)
    dimensions = layout_of(messages, 8)
    hosts = layout.hosts()
    order = parse_order("tp-pp-dp", dimensions)
    assert order == ("tensor", "pipeline", "data")
    slots = placed(dimensions, order)
    # Rank 2 is the second of data, which is outermost now: at 4. Rank 4 is the second stage: at 2.
    assert slots.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    crossing = {row.dimension: row.between_hosts_bytes for row in dimension_totals(messages, hosts[slots])[0]}
    # Four data groups, one in each host: each of its two ranks sends half of 2 * 2 messages of 2 shards.
    assert crossing["data"] == 4 * 2 * (4 * 2 * SHARD) / 2
    assert crossing["pipeline"] == crossing["tensor"] == 0
    as_run = {row.dimension: row.between_hosts_bytes for row in dimension_totals(messages, hosts)[0]}
    assert (as_run["data"], as_run["pipeline"]) == (0, 24 * ACTIVATION)


def test_the_same_order_changes_nothing() -> None:
    dimensions = layout_of(messages_of(Layout(2, 4, 3)), 24)
    assert placed(dimensions, parse_order("tp-cp-dp-pp", dimensions)).tolist() == list(range(24))


@pytest.mark.parametrize("text", ["tp-pp", "tp-dp-pp-tp", "tp-dp-xx-pp", "", "tp,dp,pp"])
def test_a_wrong_order_is_named(text: str) -> None:
    dimensions = layout_of(messages_of(Layout(2, 2, 2)), 8)
    with pytest.raises(MappingError, match=r"the job has tensor \(2\), data \(2\), pipeline \(2\); got"):
        parse_order(text, dimensions)


def test_a_job_without_a_layout_says_so() -> None:
    messages = job_messages(
        add_sums([sums_of(r, RankMessages((row("allreduce_", "data", (0, 1, 3), 1, 8),)), "") for r in (0, 1, 3)])
    )
    assert messages is not None
    with pytest.raises(MappingError, match="do not show a layout of its 4 ranks"):
        layout_of(messages, 4)
