from __future__ import annotations

import pytest

from overlap_callbacks.analysis.communication.rows import ring_steps, wire_factor


@pytest.mark.parametrize(
    ("operator", "group_size", "factor"),
    [
        ("allreduce_", 4, 1.5),  # 2 * 3/4
        ("allreduce_coalesced_", 2, 1.0),  # 2 * 1/2
        ("_allgather_base_", 4, 0.75),
        ("allgather_into_tensor_coalesced_", 4, 0.75),
        ("_reduce_scatter_base_", 8, 0.875),
        ("alltoall_base_", 2, 0.5),
        ("broadcast_", 4, 1.0),
        ("send", 2, 1.0),
        ("recv_", 8, 1.0),
        ("allreduce_", 1, 0.0),  # a group of one rank issues calls and sends nothing
        ("barrier", 4, 1.0),
        ("allreduce_", 0, 1.0),  # group unknown
    ],
)
def test_what_passes_the_link(operator: str, group_size: int, factor: float) -> None:
    assert wire_factor(operator, group_size) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("operator", "group_size", "steps"),
    [
        ("allreduce_", 4, 6),  # 2 * 3
        ("_allgather_base_", 4, 3),
        ("_reduce_scatter_base_", 8, 7),
        ("alltoall_base_", 2, 1),
        ("broadcast_", 4, 1),
        ("send", 2, 1),
        ("allreduce_", 1, 0),
        ("allreduce_", 0, 1),  # group unknown
    ],
)
def test_how_often_a_ring_sends_one_after_the_other(operator: str, group_size: int, steps: int) -> None:
    assert ring_steps(operator, group_size) == steps
