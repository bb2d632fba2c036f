"""The race check on two ranks: a job whose waits are right is not accused."""

from __future__ import annotations

from typing import Any

import pytest

from overlap_callbacks import OverlapReport, Sink
from overlap_callbacks.analysis.results.race import RaceVerdict
from tests.distributed import run_ranks
from tests.gpu import jobs
from tests.gpu.machine import backend, need_nccl

TRIED_ON_CPU = True
WINDOW: dict[str, Any] = {
    "spread": False,
    "every_n_steps": 100,
    "first_step": 4,
    "repeats": 1,
    "steps_per_block": 1,
    "warmup_steps": 0,
    "profiled_steps": 0,
    "max_overhead": None,
    "strict": True,
}


class _Keep(Sink):
    def __init__(self) -> None:
        self.reports: list[OverlapReport] = []

    def log(self, report: OverlapReport) -> None:
        self.reports.append(report)


def _check(rank: int, kind: str) -> list[tuple[RaceVerdict, int, str]]:
    """Verdict, number of gradients and reason of each window; on rank 0."""
    kept = _Keep()
    with jobs.job(rank, kind) as job:
        options = {**WINDOW, "sinks": [kept], "check_gradients": True, "repeat_step": job.forward_backward}
        with job.attach(**options) as monitor:
            for _ in range(4 + monitor.schedule.first_step + monitor.schedule.window_steps):
                job.forward_backward()
                job.update()
    races = [report.race for report in kept.reports]
    return [(race.verdict, race.num_gradients, race.reason) for race in races if race is not None]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_job_without_a_race_is_not_accused(kind: str) -> None:
    need_nccl()
    jobs.need(kind)
    ((verdict, num_gradients, reason),) = run_ranks(_check, 2, kind, backend=backend(), timeout_s=240)[0]
    assert (verdict, reason) == (RaceVerdict.EQUAL, "")
    assert num_gradients == 2 * jobs.LAYERS
