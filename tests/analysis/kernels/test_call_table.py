from __future__ import annotations

from typing import Any

import numpy as np

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.call_table import Calls
from overlap_callbacks.analysis.kernels.table import Kind
from tests.columns import EPOCH_NS, GEMM, MS, REDUCE, columns

C, M, Y = Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY


def ms(nanoseconds: Any) -> list[float]:
    return [ns / MS for ns in nanoseconds.tolist()]


def at(start: float, end: float) -> Intervals:
    return Intervals(np.array([round(start * MS) + EPOCH_NS]), np.array([round(end * MS) + EPOCH_NS]))


def test_on_a_device_each_row_is_a_call() -> None:
    calls = Calls.of(columns([(GEMM, C, 0, 0, 2), (REDUCE, M, 1, 1, 4), (GEMM, C, -1, 3, 3)]))
    assert len(calls) == 3
    assert ms(calls.duration_ns) == [2, 3, 0]
    assert calls.step.tolist() == [0, 1, -1]
    assert calls.kind.tolist() == [C, M, C]


def test_on_cpu_the_pieces_of_a_call_are_one_call_of_their_sum() -> None:
    # aten::linear runs, calls aten::mm, goes on; and is called once more.
    rows = [("aten::linear", C, 0, 0, 1), ("aten::mm", C, 0, 1, 4), ("aten::linear", C, 0, 4, 6, 0),
            ("aten::linear", C, 0, 7, 8)]  # fmt: skip
    calls = Calls.of(columns(rows))
    assert ms(calls.duration_ns) == [3, 3, 1]
    assert calls.row.tolist() == [0, 1, 3]
    assert calls.call.tolist() == [0, 1, 0, 2]
    assert ms(calls.covered_ns(at(0.5, 4.5))) == [0.5 + 0.5, 3, 0]


def test_no_kernels_are_no_calls() -> None:
    calls = Calls.of(columns([]))
    assert len(calls) == 0
    assert calls.covered_ns(at(0, 1)).tolist() == []
