from __future__ import annotations

import msgspec

from overlap_callbacks.analysis.results.estimate import Estimate, Spread
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import CollectiveTime, RankWindow
from tests.analysis.test_aggregate import full_window, report_of


def test_a_report_survives_json():
    rows = (CollectiveTime("allreduce_", "dp (1)", 8, "nccl", 3, 300, 300, None),)
    kernel = KernelTime("gemm", False, 4, 4, 30, 28)
    found = report_of(
        full_window(0, collectives=rows, kernels=(kernel,), problems=("hot",)), full_window(1), world_size=3
    )
    assert isinstance(found.spread["compute_slowdown"], Spread)
    assert isinstance(found.compute_slowdown, Estimate)
    assert msgspec.json.decode(msgspec.json.encode(found), type=OverlapReport) == found


def test_a_rank_s_window_survives_json():
    window = full_window()
    assert msgspec.json.decode(msgspec.json.encode(window), type=RankWindow) == window
