"""Means over ranks that lack some blocks: they compare the same ranks in both modes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.figures import figures_of
from overlap_callbacks.analysis.job.blocks import Block, add_modes, block_sums
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import RankWindow, TimedBlock
from tests.analysis.test_aggregate import full_window, profiled, report_of

OV, SEQ = Mode.OVERLAPPED, Mode.SEQUENTIAL
ORDER = [OV, SEQ, SEQ, OV] * 2


def block_means(ranks):
    """The mean over ranks of each overlapped block, from the quantities of each rank's blocks by the block's number."""
    parts = [
        block_sums(number, [Block(OV, block, 1, row, (0.0,)) for block, row in blocks.items()])
        for number, blocks in enumerate(ranks)
    ]
    return [row[:-2] for row in add_modes([part.groups[0].modes[0] for part in parts]).rows()]


def rank(number: int, compute_ms: float, without: tuple[int, ...] = (), slowdown: float = 0.0) -> RankWindow:
    """A rank whose compute takes that long in each profiled block of sequential steps."""
    blocks = tuple(
        profiled(arm, block, compute=compute_ms * (1 + slowdown * (arm is OV)), busy=compute_ms, comm=20, comm_busy=20)
        for block, arm in enumerate(ORDER)
        if block not in without
    )
    return full_window(number, profiled=blocks)


def test_a_block_missing_on_one_of_several_different_ranks_makes_no_slowdown() -> None:
    whole, lacking = (report_of(rank(0, 100.0, without), rank(1, 200.0)) for without in ((), (7,)))
    assert lacking.compute_slowdown.value == pytest.approx(0.0, abs=1e-9)
    for name in ("compute_ms", "compute_isolated_ms", "compute_busy_ms", "e2e_ideal_ms"):
        assert getattr(lacking, name).value == pytest.approx(getattr(whole, name).value), name
    assert lacking.compute_slowdown.ci_low is not None


def test_a_rank_is_taken_to_be_in_the_blocks_that_it_lacks_as_in_its_others() -> None:
    """So the mean over ranks is that of their own means, which the tables of kernels add up to as well."""
    slower = tuple(
        msgspec.structs.replace(b, compute_ms=1.2 * b.compute_ms) if b.block == 7 else b
        for b in rank(1, 200.0).profiled
    )
    found = report_of(rank(0, 100.0, without=(7,)), full_window(1, profiled=slower))
    assert found.compute_ms.value == pytest.approx((100 + 200 * 1.05) / 2)
    assert found.compute_slowdown.value == pytest.approx((100 + 200 * 1.05) / (100 + 200) - 1)


def test_a_rank_that_lacks_half_the_blocks_of_a_mode_is_left_out_of_both_with_a_note() -> None:
    found = report_of(rank(0, 100.0, without=(0, 7), slowdown=0.5), rank(1, 200.0, slowdown=0.1))
    assert found.compute_slowdown.value == pytest.approx(0.1)
    assert found.compute_isolated_ms.value == pytest.approx(200)
    assert "kernel times of rank 0 are left out: half or more of the blocks of a mode are missing there [OC329]" in (
        found.problems
    )


def test_tables_of_kernels_are_of_the_same_ranks() -> None:
    """Rank 0 has no sequential step: there its kernel took no time."""
    table = (KernelTime("gemm", False, 4, 4, 200.0, 200.0),)
    without = tuple(block for block, arm in enumerate(ORDER) if arm is SEQ)
    lost = msgspec.structs.replace(rank(0, 100.0, without), kernels=(KernelTime("gemm", False, 4, 0, 100.0, 0.0),))
    found = report_of(lost, msgspec.structs.replace(rank(1, 200.0), kernels=table))
    assert [kernel.lost_ms for kernel in found.kernels] == [0.0]


def test_a_timed_block_missing_on_one_of_several_different_ranks_makes_no_speedup() -> None:
    def timed(number: int, step_ms: float, without: tuple[int, ...] = ()) -> RankWindow:
        blocks = tuple(TimedBlock(arm, n, (step_ms,)) for n, arm in enumerate(ORDER) if n not in without)
        return full_window(number, timed=blocks)

    found: OverlapReport = report_of(timed(0, 100.0, (3,)), timed(1, 200.0))
    assert found.speedup_vs_sequential.value == pytest.approx(0.0, abs=1e-9)


def test_quantities_that_a_rank_does_not_know_stay_unknown_and_no_others() -> None:
    means = block_means([{0: (1.0, float("nan")), 1: (3.0, 5.0)}, {0: (2.0, 5.0), 1: (4.0, 5.0), 2: (6.0, 5.0)}])
    assert [mean[0] for mean in means] == pytest.approx([1.5, 3.5, 4.0])
    assert all(np.isnan(mean[1]) for mean in means)
    assert block_means([]) == block_means([{}, {}]) == []


def test_many_ranks_that_each_lack_another_block_keep_their_mean_and_interval() -> None:
    chance, hits, windows = np.random.default_rng(3), 0, 40
    for _ in range(windows):
        drift = chance.normal(0, 0.01, size=len(ORDER))
        ranks = []
        for number in range(6):
            whole = rank(number, 100.0 + 10 * number, without=(int(chance.integers(8)),), slowdown=0.05)
            ranks.append(
                msgspec.structs.replace(
                    whole,
                    profiled=tuple(
                        msgspec.structs.replace(
                            b, compute_ms=b.compute_ms * float(np.exp(drift[b.block] + chance.normal(0, 0.01)))
                        )
                        for b in whole.profiled
                    ),
                )
            )
        slowdown = figures_of(ranks)["compute_slowdown"]
        hits += slowdown.ci_low <= 0.05 <= slowdown.ci_high
    assert hits >= 0.85 * windows
