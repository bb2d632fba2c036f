from __future__ import annotations

import dataclasses

import numpy as np

from overlap_callbacks.analysis.kernels.beside import beside_communication
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
    assert beside_communication(profile(*rows), [0, 1]) == (
        "in sequential steps 6 ms of compute ran beside communication on stream 13, which the gate does not order: "
        "expert (4 ms), add (2 ms)"
    )
    assert beside_communication(profile(*rows), [1]).startswith("in sequential steps 6 ms ")
    assert beside_communication(profile(*rows), []) == ""


def test_communication_that_escaped_the_gate_is_named_where_the_step_s_own_compute_ran_beside_it() -> None:
    rows = [("gemm", C, 7, 0, 0.0, 50.0), ("void nvshmem_put", M, 30, 0, 10.0, 15.0), (NCCL, M, 20, 0, 60.0, 70.0)]
    assert beside_communication(profile(*rows), [0]) == (
        "in sequential steps 5 ms of compute ran beside communication that the gate did not order: "
        "void nvshmem_put (5 ms)"
    )


def test_overlap_in_overlapped_steps_and_what_is_within_the_uncertainty_is_not_mentioned() -> None:
    rows = [("gemm", C, 7, 0, 0.0, 50.0), (NCCL, M, 20, 0, 10.0, 50.0), ("gemm", C, 7, 1, 100.0, 150.0)]
    assert beside_communication(profile(*rows, (NCCL, M, 20, 1, 150.0, 160.0)), [1]) == ""
    assert beside_communication(profile(*rows, (NCCL, M, 20, 1, 149.91, 160.0)), [1]) == ""
    assert beside_communication(profile(*rows, (NCCL, M, 20, 1, 149.0, 160.0)), [1]) != ""


def test_the_text_is_bounded() -> None:
    rows = [("kernel " + "x" * 500 + str(i), C, i, 0, 0.0, 10.0) for i in range(20)]
    text = beside_communication(profile(*rows, (NCCL, M, 99, 0, 0.0, 10.0)), [0])
    assert len(text) < 500
    assert "streams 1, 2, 3 and 16 more" in text
    assert text.endswith(" and 16 more")
