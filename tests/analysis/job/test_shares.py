"""Live all-to-alls whose ranks have shares of different sizes: a small share does not wait for a large one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import RankWindow
from tests.analysis.job.windows import MODES, measured, report, values, values_in_any_order
from tests.columns import GEMM, P2P
from tests.issued import issue
from tests.samples import OV

MB = 1_000_000


def all_to_alls(
    times: Sequence[Sequence[float]], sizes: Sequence[int], factor: float = 1.0, number: int = 1
) -> list[RankWindow]:
    """What ranks measure of some all-to-alls in each step, of which each has a time and a share of some bytes.

    They take longer by a factor in overlapped steps, where half of each runs beside compute.
    """
    found = []
    for rank, (of_each, size) in enumerate(zip(times, sizes, strict=True)):
        rows = []
        for step, mode in enumerate(MODES):
            now, base = 20.0, 10_000.0 * step
            rows.append((GEMM, Kind.COMPUTE, step, base, base + now))
            for time in of_each * number:
                length = time * (factor if mode is OV else 1)
                rows.append((P2P, Kind.COMMUNICATION, step, base + now, base + now + length))
                start = now if mode is OV else now + length
                rows.append((GEMM, Kind.COMPUTE, step, base + start, base + start + length / 2))
                now += length * 2
        call = issue("alltoall_base_", "expert", size, bytes_out=size, group_size=len(times))
        issued = {step: [call] * len(of_each) * number for step in range(len(MODES))}
        found.append(measured(rank, rows, issued, dict.fromkeys(Mode, 500.0)))
    return found


@pytest.mark.parametrize(
    ("times", "sizes", "waited"),
    [
        ((2.0, 6.0), (10 * MB, 30 * MB), 0),  # the larger share takes longer
        ((2.0, 6.0), (30 * MB, 30 * MB), 4),  # equal shares: rank 1 comes early
        ((12.0, 6.0), (10 * MB, 30 * MB), 6),  # the smaller share comes early
        ((2.0, 11.0), (10 * MB, 30 * MB), 1),  # the larger one does; how early is not known, and that much is sure
        ((4.0, 4.0), (10 * MB, 30 * MB), 0),  # so short that the share does not matter
        ((0.5, 6.0), (100, 30 * MB), 0),
        ((2.0, 4.0, 6.0, 9.0), (10 * MB, 20 * MB, 30 * MB, 30 * MB), 0),  # of 21 ms, four times 6 are no waiting
        ((2.0, 6.0, 12.0), (10 * MB, 30 * MB, 30 * MB), 2),
    ],
)
@pytest.mark.parametrize("number", [1, 30])
def test_a_rank_with_a_smaller_share_does_not_wait_for_a_late_one(
    times: Sequence[float], sizes: Sequence[int], waited: float, number: int
) -> None:
    found = report(*all_to_alls([(time,) for time in times], sizes, number=number))
    value, (pair,) = values(found), [pair for pair in found.pairs if pair.kernel_family == "all_to_all"]
    assert value["waiting_ms"] == pytest.approx(number * waited / len(times), abs=1e-4)
    assert value["waiting_isolated_ms"] == pytest.approx(number * waited / len(times), abs=1e-4)
    assert pair.time_ms == pytest.approx(number * (sum(times) - waited) / len(times), rel=1e-5)
    assert found.comm_slowdown is not None
    assert found.comm_slowdown.value == pytest.approx(0.0, abs=1e-5)


def test_even_and_uneven_all_to_alls_do_not_pay_for_each_other() -> None:
    # Of the first, rank 0 waits; of the second nobody does, and the ranks take less than twice the largest share.
    value = values(report(*all_to_alls([(16.0, 2.0), (8.0, 6.0)], (10 * MB, 30 * MB))))
    assert value["waiting_ms"] == pytest.approx(8 / 2, rel=1e-5)


def test_slower_all_to_alls_are_slower_whatever_the_shares() -> None:
    found = report(*all_to_alls([(2.0,), (6.0,)], (10 * MB, 30 * MB), 1.25))
    assert found.comm_slowdown is not None
    assert found.comm_slowdown.value == pytest.approx(0.25, rel=1e-5)


def test_any_order_of_ranks_gives_the_same_waiting_for_all_to_alls() -> None:
    windows = all_to_alls([(2.0,), (9.0,), (12.0,)], (10 * MB, 30 * MB, 20 * MB))
    assert values_in_any_order(windows)["waiting_ms"] > 0
