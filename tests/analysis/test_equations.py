from __future__ import annotations

import math

import pytest

from overlap_callbacks.analysis import equations
from overlap_callbacks.analysis.equations import ring_steps, size_of, wire_factor
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.window import CollectiveTime
from tests.samples import window_report

# One step by hand: 100 ms, of which 66 ms are compute (60 ms alone) and 30 ms communication, 20 ms of it hidden behind
# 22 ms of compute.


def test_equation_1_is_the_slowdown_of_the_compute_kernels() -> None:
    assert equations.slowdown(66.0, 60.0) == pytest.approx(0.1)
    assert equations.slowdown(60.0, 60.0) == 0


def test_equation_2_is_the_share_of_compute_during_communication() -> None:
    assert equations.overlap_ratio(22.0, 66.0) == pytest.approx(1 / 3)


def test_equations_4_and_5_remove_the_slowdown_and_add_hidden_communication() -> None:
    ideal_ms = equations.ideal_step_ms(100.0, 66.0, 60.0)
    assert ideal_ms == 94
    assert equations.sequential_step_ms(ideal_ms, 20.0) == 114


def test_perfect_overlap_takes_as_long_as_the_longer_of_compute_and_communication() -> None:
    assert equations.attainable_step_ms(60.0, 30.0) == 60
    assert equations.attainable_step_ms(60.0, 80.0) == 80


def test_the_share_attained_is_that_of_the_way_from_a_sequential_step_to_the_attainable_one() -> None:
    assert equations.attained_fraction(120.0, 100.0, 80.0) == pytest.approx(0.5)
    assert equations.attained_fraction(120.0, 80.0, 80.0) == 1
    assert equations.attained_fraction(120.0, 130.0, 80.0) == pytest.approx(-0.25)


@pytest.mark.parametrize("attainable_ms", [114.1, 120.0, 500.0, math.nan])
def test_of_next_to_nothing_no_share_is_attained(attainable_ms: float) -> None:
    assert math.isnan(equations.attained_fraction(120.0, 100.0, attainable_ms))


def test_bus_bandwidth_is_that_of_nccl_tests_in_sequential_steps():
    rows = (
        CollectiveTime("allreduce_", "world", 4, "nccl", 2, 4_000_000, 4_000_000, 2.0),
        CollectiveTime("_allgather_base_", "dp", 4, "nccl", 1, 1_000_000, 4_000_000, 1.0),
        CollectiveTime("barrier", "world", 4, "nccl", 1, 0, 0, 1.0),
        CollectiveTime("broadcast_", "world", 4, "nccl", 1, 8, 8, None),
    )
    metrics = window_report(collectives=rows).metrics()
    # 4 MB times 2 (n - 1) / n in 2 ms, and 4 MB times (n - 1) / n in 1 ms.
    assert metrics["comm/allreduce_busbw_gb_s"] == pytest.approx(4e6 * 1.5 / 2e-3 / 1e9)
    assert metrics["comm/allgather_base_busbw_gb_s"] == pytest.approx(4e6 * 0.75 / 1e-3 / 1e9)
    assert not any(key.endswith("busbw_gb_s") and ("barrier" in key or "broadcast" in key) for key in metrics)


@pytest.mark.parametrize("on_rank", [(100, 400), (100, 0)])
def test_a_gather_has_one_size_on_all_ranks(on_rank):
    """The root, of four ranks, reads its part and writes all; the others read theirs and write nothing."""
    assert size_of("gather", 4, *on_rank) == 400
    assert size_of("scatter", 4, *reversed(on_rank)) == 400
    assert size_of("all_gather", 4, 100, 400) == 400


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
    assert wire_factor(collective_of(operator), group_size) == pytest.approx(factor)


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
    assert ring_steps(collective_of(operator), group_size) == steps
