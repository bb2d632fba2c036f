"""What a record tells of single ranks is what they sent."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.communication.recorded import rows_of
from overlap_callbacks.analysis.communication.rows import MessageRow, wire_factor
from overlap_callbacks.analysis.communication.sums import job_messages
from tests.analysis.communication.layouts import Layout


@pytest.mark.parametrize("layout", [Layout(2, 3, 4), Layout(2, 2, 2, expert=True)])
def test_each_rank_has_its_rows_back(layout: Layout) -> None:
    messages = job_messages(layout.sums())
    assert messages is not None
    for rank in range(layout.world_size):
        expected = []
        for row in layout.messages(rank).rows:
            peer = next((other for other in row.ranks if other != rank), -1) if row.dimension == "pipeline" else -1
            wire_bytes = wire_factor(row.operator, row.group_size) * row.bytes
            expected.append(
                MessageRow(rank, row.dimension, row.operator, row.messages, row.bytes // row.messages, row.bytes,
                           wire_bytes, row.group_size, peer)
            )  # fmt: skip
        assert sorted(rows_of(messages, rank), key=str) == sorted(expected, key=str)
    assert rows_of(messages, layout.world_size) == ()
