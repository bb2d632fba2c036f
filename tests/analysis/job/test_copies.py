"""Copies beside the collectives of several ranks: the transfer's loss goes to what ran beside the last rank's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from overlap_callbacks.analysis.job.report import OverlapReport
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import RankWindow
from tests.analysis.job import windows
from tests.analysis.job.windows import MODES, measured
from tests.columns import GEMM, REDUCE
from tests.issued import issue

C, M, Y = Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY
TO_HOST, FROM_HOST = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"
# Name, kind, start and end in ms of the rows of a step.
Rows = Sequence[tuple[str, Kind, float, float]]


def window(rank: int, of_step: Callable[[bool], Rows], ranks: int = 2) -> RankWindow:
    rows: list[Any] = [
        (name, kind, number, 100 * number + start, 100 * number + end)
        for number, mode in enumerate(MODES)
        for name, kind, start, end in of_step(mode is Mode.SEQUENTIAL)
    ]
    issued = {step: [issue("allreduce_", "data", group_size=ranks)] for step in range(len(MODES))}
    return measured(rank, rows, issued, dict.fromkeys(Mode, 90.0))


def report(*of_ranks: Callable[[bool], Rows]) -> OverlapReport:
    return windows.report(*[window(rank, of_step) for rank, of_step in enumerate(of_ranks)])


def rows(found: OverlapReport) -> dict[tuple[str, str], Any]:
    return {
        (pair.kernel_family, pair.concurrent_with): pytest.approx(
            (pair.calls, pair.concurrent_ms, pair.time_ms, pair.alone_ms), rel=0.005
        )
        for pair in found.pairs
    }


def offloads(sequential: bool) -> Rows:
    """The all-reduce takes 5 ms alone and 10 beside a copy, which takes 6 ms alone and 10 beside it."""
    if sequential:
        return [(GEMM, C, 1, 5), (REDUCE, M, 10, 15), (TO_HOST, Y, 20, 26)]
    return [(GEMM, C, 1, 5), (REDUCE, M, 10, 20), (TO_HOST, Y, 10, 20)]


def early(sequential: bool) -> Rows:
    """The same all-reduce on a rank that comes 3 ms earlier and copies nothing."""
    return [(GEMM, C, 1, 5), (REDUCE, M, 7, 15 if sequential else 20)]


def test_a_transfer_that_takes_twice_as_long_beside_copies() -> None:
    found = report(offloads, offloads)
    assert found.valid
    assert rows(found) == {
        ("all_reduce", "copies to the host"): (1, 10, 10, 5),
        ("copies to the host", "communication"): (1, 10, 10, 6),
        ("gemm", "(nothing)"): (1, 0, 4, 4),
    }
    (pair,) = [pair for pair in found.pairs if pair.kernel_family == "all_reduce"]
    assert pair.slowdown == pytest.approx(1.0, rel=0.005)


def test_of_ranks_the_copies_of_the_last_to_come_count_and_not_the_waiting_of_the_others() -> None:
    found = rows(report(early, offloads))
    assert found["all_reduce", "copies to the host"] == (1, 10, 10, 5)
    assert found["copies to the host", "communication"] == (0.5, 5, 5, 3)  # a mean over both ranks


def test_copies_beside_a_collective_in_both_modes_explain_no_loss() -> None:
    def prefetches(sequential: bool) -> Rows:
        """The next batch is loaded beside the all-reduce in both modes; compute makes it slower."""
        if sequential:
            return [(GEMM, C, 30, 35), (REDUCE, M, 10, 16), (FROM_HOST, Y, 11, 15)]
        return [(GEMM, C, 10, 15), (REDUCE, M, 10, 18), (FROM_HOST, Y, 11, 15.04)]

    found = rows(report(prefetches, prefetches))
    assert found["all_reduce", "gemm"] == (1, 5, 8, 6)
    assert ("all_reduce", "copies from the host") not in found


def test_copies_all_through_a_collective_in_both_modes_explain_no_loss_however_long_it_takes() -> None:
    def offloads_on(sequential: bool) -> Rows:
        if sequential:
            return [(GEMM, C, 30, 35), (REDUCE, M, 10, 16), (TO_HOST, Y, 9, 17)]
        return [(GEMM, C, 10, 18), (REDUCE, M, 10, 20), (TO_HOST, Y, 9, 21)]

    found = rows(report(offloads_on, offloads_on))
    assert found["all_reduce", "gemm"] == (1, 8, 10, 6)
    assert ("all_reduce", "copies to the host") not in found


def test_beside_compute_and_copies_a_loss_is_shared_and_that_of_a_dimension_too() -> None:
    def both(sequential: bool) -> Rows:
        if sequential:
            return [(GEMM, C, 30, 37), (REDUCE, M, 10, 16), (FROM_HOST, Y, 50, 53)]
        return [(GEMM, C, 10, 18), (REDUCE, M, 10, 20), (FROM_HOST, Y, 15, 19)]

    report_ = report(both, both)
    found = rows(report_)
    # 10 ms, of which 8 beside compute and 4 beside the copy: 9 in all.
    assert found["all_reduce", "gemm"] == (1, 9 * 8 / 12, 10 * 8 / 12, 6 * 8 / 12)
    assert found["all_reduce", "copies from the host"] == (1, 9 * 4 / 12, 10 * 4 / 12, 6 * 4 / 12)
    # The product: 8 ms beside the all-reduce, 3 beside the copy.
    assert found["gemm", "all_reduce"] == (1, 8 * 8 / 11, 8 * 8 / 11, 7 * 8 / 11)
    (of_dimension,) = report_.dimension_pairs
    assert (of_dimension.time_ms, of_dimension.alone_ms) == pytest.approx((8 * 8 / 11, 7 * 8 / 11))
