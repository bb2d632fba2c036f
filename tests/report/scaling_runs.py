"""Records of one job at several sizes, and with several settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from overlap_callbacks.analysis.results.run import Workload
from overlap_callbacks.analysis.results.window import CollectiveTime, TimedBlock
from overlap_callbacks.sinks import JsonlSink
from tests.environments import gpu_rank
from tests.report.runs import OV, rank_window, run_info
from tests.samples import aggregate_windows


def write_sized(folder: Path, ranks: int, step_ms: float = 400.0, **work: Any) -> Path:
    """A run of so many ranks whose overlapped steps take about so long; tokens grow with the ranks.

    Its one kind of collective has 80 MB a step on a ring of all ranks, whose transfer takes 10 ms.
    """
    factor = step_ms / 412.0
    tokens = work.pop("tokens_per_step", 4096 * ranks)
    workload = Workload(tokens_per_step=tokens, **work)
    sink = JsonlSink(folder)
    sink.open(run_info(world_size=ranks, workload=workload, environment=gpu_rank()))
    for number in range(3):
        windows = []
        for rank in range(min(ranks, 2)):
            one = rank_window(number, rank)
            timed = tuple(
                TimedBlock(b.mode, b.block, tuple(ms * (factor if b.mode is OV else 1.0) for ms in b.step_ms))
                for b in one.timed
            )
            row = CollectiveTime(
                "allreduce_", "dp", ranks, "nccl", 4, 80_000_000, 80_000_000, 12.0, "data", 80_000_000.0, 10.0, 10.0
            )
            windows.append(msgspec.structs.replace(one, timed=timed, collectives=(row,), environment=gpu_rank(rank)))
        report = aggregate_windows(windows, world_size=ranks, every_n_steps=500, tokens_per_step=tokens, work=workload)
        sink.log(report)
    sink.close()
    return folder
