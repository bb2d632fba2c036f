"""Records of a mixture of experts whose loads are known."""

from __future__ import annotations

from pathlib import Path

import msgspec

from overlap_callbacks.analysis.experts import rank_experts
from overlap_callbacks.analysis.job.part import merge, part_of
from overlap_callbacks.analysis.job.report import report_of
from overlap_callbacks.sinks import JsonlSink
from tests.analysis.test_experts import call
from tests.report.runs import rank_window, run_info


def write_experts(folder: Path, windows: int = 4, ranks: int = 4, every: int = 100) -> Path:
    """A run in which the first expert rank's share grows from window to window; sampled every so many steps."""
    sink = JsonlSink(folder)
    sink.open(run_info(world_size=ranks))
    for number in range(windows):
        first = 20 + 500 * number
        parts = []
        for rank in range(ranks):
            steps = []
            for step in [*range(first - 400, first, every), *range(first, first + 8)]:
                if step < 20:
                    continue
                sent = tuple(1000 + (step if other == 0 else 37 * other) for other in range(ranks))
                received = tuple(1000 + (step if rank == 0 else 37 * rank) for _ in range(ranks))
                steps.append((step, step >= first, [call(sent, received)]))
            own = rank_experts(rank, -1, steps)
            parts.append(part_of(msgspec.structs.replace(rank_window(number, rank), experts=own)))
        sink.log(report_of(merge(parts), world_size=ranks, every_n_steps=500))
    sink.close()
    return folder
