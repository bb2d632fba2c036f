"""Hand-made samples: a window as one rank would have measured it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from overlap_callbacks.analysis.job.part import merge, part_of
from overlap_callbacks.analysis.job.report import report_of
from overlap_callbacks.analysis.results.kernel_times import KernelTime, PairTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import (
    CollectiveTime,
    DimensionTime,
    ProfiledBlock,
    RankWindow,
    TimedBlock,
)

OV, SEQ = Mode.OVERLAPPED, Mode.SEQUENTIAL
OSSO = (OV, SEQ, SEQ, OV)


def window(rank: int = 0, **changes: Any) -> RankWindow:
    """A window of 16 timed and 8 profiled blocks: 100 ms overlapped, 120 ms sequential, 10 % compute slowdown."""
    timed = tuple(
        TimedBlock(arm, block, (100.0 + block % 3, 100.5) if arm is OV else (120.0 + block % 3, 120.5))
        for block, arm in enumerate(OSSO * 4)
    )
    profiled = tuple(
        ProfiledBlock(
            mode=arm,
            block=block,
            num_steps=1,
            compute_ms=(66.0 if arm is OV else 60.0) + 0.1 * block,
            compute_busy_ms=60.0,
            comm_ms=30.0 if arm is OV else 25.0,
            comm_busy_ms=28.0 if arm is OV else 25.0,
            hidden_comm_ms=20.0 if arm is OV else 0.0,
            covered_compute_ms=22.0 if arm is OV else 0.0,
            copy_ms=0.0,
            p2p_ms=0.2,
            idle_ms=5.0,
        )
        for block, arm in enumerate(OSSO * 2)
    )
    fields: dict[str, Any] = {
        "rank": rank,
        "window": 0,
        "first_step": 20,
        "num_steps": 65,
        "complete": True,
        "backend": "gloo",
        "device": "cpu",
        "wall_ms": 7500.0,
        "timed": timed,
        "profiled": profiled,
        "kernels": (
            KernelTime("aten::mm", False, 10, 10, 33.0, 30.0),
            KernelTime("<b>aten::add</b>", False, 4, 4, 2.0, 2.0),
        ),
        "pairs": (
            PairTime("gemm", False, "all_reduce", 10.0, 20.0, 33.0, 30.0),
            PairTime("all_reduce", True, "gemm", 13.0, 20.0, 30.0, 25.0),
        ),
        "dimensions": (
            DimensionTime("data", 12, 900, 25.0, 6.0, 27.0, 22.5),
            DimensionTime("tensor", 1, 100, 3.0, 2.0, 3.0, 2.5),
        ),
        "collectives": (CollectiveTime("allreduce_", "world", 2, "gloo", 13, 1000, 1000, 25.0),),
    }
    return RankWindow(**{**fields, **changes})


def aggregate_windows(windows: Iterable[RankWindow], **options: Any) -> OverlapReport:
    """The report of a window, from what each of its ranks measured; the options are those of ``report_of``."""
    return report_of(merge([part_of(window) for window in windows]), **options)


def window_report(**changes: Any) -> OverlapReport:
    """The report of such a window on two ranks."""
    windows = [window(rank, **changes) for rank in (0, 1)]
    return aggregate_windows(windows, world_size=2, every_n_steps=500)
