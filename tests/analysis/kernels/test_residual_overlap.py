from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from overlap_callbacks.analysis.kernels.cross_check import residual_overlap
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from tests.columns import columns

C, M = Kind.COMPUTE, Kind.COMMUNICATION


def profile(*rows: tuple[str, Kind, int, int, float, float]) -> KernelTable:
    """From rows of name, kind, stream, step, start and end in ms."""
    table = columns([(name, kind, step, start, end) for name, kind, _, step, start, end in rows])
    return dataclasses.replace(table, lane=np.array([row[2] for row in rows]))


NCCL = "ncclDevKernel_AllReduce"


def test_compute_on_a_second_stream_is_named_with_its_stream_and_its_kernels() -> None:
    step = [
        ("gemm", C, 7, 0.0, 50.0),
        (NCCL, M, 20, 50.0, 60.0),
        ("expert", C, 13, 51.0, 55.0),
        ("add", C, 13, 58.0, 61.0),
    ]
    rows = [(name, kind, lane, n, 100 * n + a, 100 * n + b) for n in (0, 1) for name, kind, lane, a, b in step]
    assert residual_overlap(profile(*rows), [0, 1], {}) == (
        "in sequential steps compute ran during communication, 6 ms on stream 13 (90 % of its compute): "
        "expert (4 ms), add (2 ms) [OC377]"
    )
    assert residual_overlap(profile(*rows), [1], {}).startswith("in sequential steps compute ran")
    assert residual_overlap(profile(*rows), [], {}) == ""


@pytest.mark.parametrize("unseen", [{}, {"void nvshmem_put": 2.0}], ids=["none unseen", "unseen elsewhere"])
def test_the_second_stream_is_named_though_it_computes_longer_than_the_model_s_own(unseen: dict[str, float]) -> None:
    rows = [("gemm", C, 7, 0, 0.0, 40.0), (NCCL, M, 20, 0, 40.0, 130.0), ("expert", C, 13, 0, 40.0, 130.0),
            ("void nvshmem_put", M, 30, 0, 140.0, 145.0)]  # fmt: skip
    assert residual_overlap(profile(*rows), [0], unseen) == (
        "in sequential steps compute ran during communication, 90 ms on stream 13 (100 % of its compute): "
        "expert (90 ms) [OC377]"
    )


def test_each_stream_with_such_compute_is_named_the_one_with_most_of_it_first() -> None:
    rows = [("gemm", C, 7, 0, 0.0, 42.0), (NCCL, M, 20, 0, 40.0, 60.0), ("expert", C, 13, 0, 45.0, 55.0)]
    assert residual_overlap(profile(*rows), [0], {}) == (
        "in sequential steps compute ran during communication, 10 ms on stream 13 (100 % of its compute): "
        "expert (10 ms); 2 ms on stream 7 (5 % of its compute): gemm (2 ms) [OC377]"
    )


def test_compute_of_fsdp2_after_a_reduce_scatter_is_named_only_if_it_overlapped_the_next_collective() -> None:
    # FSDP2 reduces gradients on a stream of its own, and divides and casts them there.
    scatter = ("ncclDevKernel_ReduceScatter", M, 24, 0, 50.0, 60.0)
    gather = ("ncclDevKernel_AllGather", M, 20, 0, 65.0, 70.0)
    ordered = [("gemm", C, 7, 0, 0.0, 50.0), scatter, ("post_reduce", C, 24, 0, 60.0, 65.0), gather]
    assert residual_overlap(profile(*ordered), [0], {}) == ""
    beside = [*ordered[:2], ("post_reduce", C, 24, 0, 60.0, 68.0), gather]
    assert residual_overlap(profile(*beside), [0], {}) == (
        "in sequential steps compute ran during communication, 3 ms on stream 24 (40 % of its compute): "
        "post_reduce (3 ms) [OC377]"
    )


def test_communication_that_escaped_the_gate_is_named_if_the_only_stream_overlapped_it() -> None:
    rows = [("gemm", C, 7, 0, 0.0, 50.0), ("void nvshmem_put", M, 30, 0, 10.0, 15.0), (NCCL, M, 20, 0, 60.0, 70.0)]
    stream = "in sequential steps compute ran during communication, 5 ms on stream 7 (10 % of its compute): gemm (5 ms)"
    assert residual_overlap(profile(*rows), [0], {"void nvshmem_put": 1.0}) == (
        f"{stream}; the gate did not see this communication: void nvshmem_put (5 ms) [OC377]"
    )
    # The gate saw it: then it is not said to have escaped.
    assert residual_overlap(profile(*rows), [0], {}) == f"{stream} [OC377]"


def test_kernels_named_like_collectives_are_blamed_only_if_they_can_be_all_that_overlapped() -> None:
    rows = [("gemm", C, 7, 0, 0.0, 50.0), (NCCL, M, 30, 0, 10.0, 15.0), (NCCL, M, 20, 0, 60.0, 70.0)]
    second = ("expert", C, 13, 0, 60.0, 65.0)
    assert "did not see this communication" in residual_overlap(profile(*rows), [0], {NCCL: 1.0})
    assert "did not see this communication" not in residual_overlap(profile(*rows, second), [0], {NCCL: 1.0})


def test_overlap_in_overlapped_steps_or_within_the_uncertainty_is_not_mentioned() -> None:
    rows = [("gemm", C, 7, 0, 0.0, 50.0), (NCCL, M, 20, 0, 10.0, 50.0), ("gemm", C, 7, 1, 100.0, 150.0)]
    assert residual_overlap(profile(*rows, (NCCL, M, 20, 1, 150.0, 160.0)), [1], {}) == ""
    assert residual_overlap(profile(*rows, (NCCL, M, 20, 1, 149.91, 160.0)), [1], {}) == ""
    assert residual_overlap(profile(*rows, (NCCL, M, 20, 1, 149.0, 160.0)), [1], {}) != ""


def test_the_text_is_bounded() -> None:
    rows = [("kernel " + "x" * 500 + str(i), C, 1 + i % 19, 0, 0.0, 10.0) for i in range(95)]
    text = residual_overlap(profile(*rows, (NCCL, M, 99, 0, 0.0, 10.0)), [0], {})
    assert len(text) < 1200
    assert text.count(" and 2 more") == 3
    assert text.endswith("; and on 16 more streams [OC377]")
