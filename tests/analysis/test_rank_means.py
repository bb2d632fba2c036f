"""Tables over all ranks: transfer times of collectives, and compute during each dimension of parallelism."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.results.kernel_times import PairTime
from overlap_callbacks.analysis.results.window import CollectiveTime
from tests.analysis.test_aggregate import leaky_window, rank_window, report_of


def collective(isolated_ms=10.0, **changes) -> CollectiveTime:
    fields = {"operator": "allreduce_", "group": "dp (1)", "group_size": 2, "backend": "nccl", "messages": 4,
              "bytes_in": 4000, "bytes_out": 4000, "timed_bytes": 4000.0}  # fmt: skip
    return CollectiveTime(isolated_ms=isolated_ms, **{**fields, **changes})


def bandwidth(*rows_of_ranks) -> float | None:
    """In bytes per millisecond; the factor of an all-reduce on two ranks is 1."""
    found = report_of(*(rank_window(rank, collectives=rows) for rank, rows in enumerate(rows_of_ranks)))
    gb_s = found.metrics().get("comm/allreduce_busbw_gb_s")
    return None if gb_s is None else gb_s * 1e6


def test_bandwidth_is_of_the_bytes_that_were_timed_and_not_of_all():
    assert bandwidth([collective(timed_bytes=1000.0)]) == pytest.approx(1000 / 10)
    assert bandwidth([collective(isolated_ms=None, timed_bytes=None)]) is None


def test_bandwidth_is_over_the_least_time_of_any_rank_for_the_others_wait():
    found = report_of(rank_window(0, collectives=[collective(30.0)]), rank_window(1, collectives=[collective(20.0)]))
    (row,) = found.collectives
    assert (row.isolated_ms, row.transfer_ms) == (30.0, 20.0)
    assert bandwidth([collective(30.0)], [collective(20.0)]) == pytest.approx(4000 / 20)


def test_ranks_that_timed_another_part_or_are_of_another_group_do_not_shorten_a_transfer():
    part, other = collective(1.0, timed_bytes=500.0), collective(2.0, group="dp (2)")
    assert bandwidth([collective(30.0)], [part], [other]) == pytest.approx(4000 / 30)


def test_if_kernels_are_identified_their_time_and_all_bytes_count():
    # The time from issue to end has the host's launch in it, and only a part of the collectives were timed.
    first, last = collective(30.0, timed_bytes=1000.0, kernels_ms=25.0), collective(20.0, kernels_ms=16.0)
    assert bandwidth([first], [last]) == pytest.approx(4000 / 16)


def test_a_record_of_an_earlier_version_has_the_bandwidth_that_it_had():
    assert bandwidth([collective(8.0, timed_bytes=None)]) == pytest.approx(4000 / 8)


def test_collectives_are_logged_by_operator_over_all_groups():
    rows = (
        CollectiveTime("allreduce_", "dp (1)", 8, "nccl", messages=3, bytes_in=300, bytes_out=300, isolated_ms=1.0),
        CollectiveTime("allreduce_", "tp (2)", 2, "nccl", messages=2, bytes_in=50, bytes_out=50, isolated_ms=None),
        CollectiveTime("_allgather_base_", "dp (1)", 8, "nccl", messages=1, bytes_in=10, bytes_out=80, isolated_ms=0.5),
    )
    flat = report_of(rank_window(0, collectives=rows), rank_window(1)).metrics()
    assert {key: value for key, value in flat.items() if key.startswith("comm/")} == {
        "comm/allreduce_bytes": 350,
        "comm/allreduce_messages": 5,
        "comm/allgather_base_bytes": 10,
        "comm/allgather_base_messages": 1,
        # Of those groups whose time alone is known.
        "comm/allreduce_busbw_gb_s": pytest.approx(300 * 2 * 7 / 8 / 1e-3 / 1e9),
        "comm/allgather_base_busbw_gb_s": pytest.approx(80 * 7 / 8 / 0.5e-3 / 1e9),
    }


# -- dimensions


def test_compute_slowdown_is_logged_by_dimension_over_all_families_and_ranks():
    rows = [
        PairTime("gemm", False, "pipeline", 2.0, 5.0, 15.0, 10.0),
        PairTime("attention", False, "pipeline", 2.0, 5.0, 5.0, 5.0),
        PairTime("gemm", False, "data", 2.0, 5.0, 10.2, 10.0),
    ]
    found = report_of(rank_window(0, dimension_pairs=rows), rank_window(1, dimension_pairs=rows), rank_window(2))
    assert [(pair.kernel_family, pair.concurrent_with, pair.time_ms) for pair in found.dimension_pairs] == [
        ("gemm", "pipeline", 15.0), ("gemm", "data", 10.2), ("attention", "pipeline", 5.0),
    ]  # fmt: skip
    flat = found.metrics()
    assert flat["dimension/pipeline_compute_slowdown"] == pytest.approx(20 / 15 - 1)
    assert flat["dimension/data_compute_slowdown"] == pytest.approx(0.02)
    leaky = report_of(leaky_window(0.5, dimension_pairs=rows))
    assert not any(key.endswith("_compute_slowdown") for key in leaky.metrics() if key.startswith("dimension/"))
