"""Records of jobs whose ranks send what a layout says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from overlap_callbacks.analysis.job.part import merge, part_of
from overlap_callbacks.analysis.job.report import report_of
from overlap_callbacks.analysis.results.arrivals import (
    ONE_HOST,
    SEVERAL_HOSTS,
    Arrivals,
    DimensionWaiting,
    Lateness,
    SizedTransfer,
    SizeTransfer,
)
from overlap_callbacks.analysis.results.messages import NO_STAGE, JobMessages, MessageGroup
from overlap_callbacks.analysis.results.report import OverlapReport, PipelineBubble, StageBubble
from overlap_callbacks.sinks import JsonlSink
from tests.analysis.communication.layouts import Layout
from tests.environments import gpu_rank
from tests.report.runs import run_info
from tests.samples import window


def with_communication(report: OverlapReport) -> OverlapReport:
    """The same with a rank and a host that come last, transfers of three sizes, and a pipeline."""
    late = Lateness(1, 0, "data", 32, 20, 8, 7, 0.5, 2.0, 0.2)
    host = Lateness(-1, 1, "data", 64, 30, 16, 14, 0.5, 1.5, 0.1)
    return msgspec.structs.replace(
        report,
        arrivals=Arrivals(8, (DimensionWaiting("data", 64, 3.0, 1.0),), (late,), (host,)),
        transfers=tuple(
            [
                SizeTransfer("allreduce_", "data", 2, reach, size, 16, 16 << size, 16 * (0.02 + (1 << size) / 2e8))
                for size, reach in ((12, ONE_HOST), (20, ONE_HOST), (25, SEVERAL_HOSTS))
            ]
        ),
        pipeline=PipelineBubble(2, 4, 1, (StageBubble(0, 1, 100.0, 20.0), StageBubble(1, 1, 100.0, 15.0))),
    )


def with_sizes(report: OverlapReport) -> OverlapReport:
    """The same with the messages of two ranks, and the times of one size of them."""
    pair = (0, ((1, 2),))
    group = MessageGroup(
        "allreduce_", "data", NO_STAGE, 2, 2, 1, 4096, 4096, ((12, 1, 4096),), (pair,), ((0, ()),), (pair,)
    )
    return msgspec.structs.replace(
        report,
        messages=JobMessages((group,), (pair,)),
        sized_transfers=(SizedTransfer("allreduce_", "data", 2, "float32", 4096, 16, 8.0),),
    )


def report_with(layout: Layout, **changes: Any) -> OverlapReport:
    """The report of a window of such a job."""
    base = window(0, backend="nccl", **changes)
    parts = [
        part_of(
            msgspec.structs.replace(
                base,
                rank=rank,
                environment=gpu_rank(rank, per_host=layout.ranks_per_host),
                messages=layout.messages(rank),
            )
        )
        for rank in range(layout.world_size)
    ]
    return with_communication(report_of(merge(parts), world_size=layout.world_size, every_n_steps=500))


def write_run(folder: Path, layout: Layout, windows: int = 1) -> Path:
    """A record of such a job; windows after the first say that messages are as before."""
    sink = JsonlSink(folder)
    sink.open(run_info(world_size=layout.world_size))
    for number in range(windows):
        report = report_with(layout, window=number, first_step=20 + 500 * number)
        sink.log(report if number == 0 else msgspec.structs.replace(report, messages=None, environment=None))
    sink.close()
    return folder
