"""Two mechanisms that share nothing, the gate and a framework's own parts, measure the same sequential step."""

from __future__ import annotations

from typing import Any

import pytest

from overlap_callbacks import OverlapReport, Sink
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import pool
from tests.distributed import run_ranks
from tests.gpu import jobs
from tests.gpu.machine import backend, need_nccl
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU
from tests.toggling import at_night

TRIED_ON_CPU = True
WINDOW: dict[str, Any] = {
    "spread": False,
    "every_n_steps": 100,
    "first_step": 2,
    "repeats": 2,
    "steps_per_block": 2,
    "warmup_steps": 1,
    "profiled_steps": 0,
    "max_overhead": None,
    "strict": True,
}
# Windows of the two alternate, so that a drift of the machine affects both equally. The simulated GPU does not drift.
TURNS = ("gate", "native", "native", "gate") * (1 if ON_SIMULATED_GPU else 2)


class _Keep(Sink):
    def __init__(self) -> None:
        self.reports: list[OverlapReport] = []

    def log(self, report: OverlapReport) -> None:
        self.reports.append(report)


def _measure_both(rank: int, kind: str) -> dict[str, Estimate | None]:
    """The sequential step time by each form; on rank 0."""
    kept = {form: _Keep() for form in TURNS}
    with jobs.job(rank, kind) as job:
        for form in TURNS:
            with job.attach(sequential=form, sinks=[kept[form]], **WINDOW) as monitor:
                for _ in range(4 + monitor.schedule.window_steps):
                    job.forward_backward()
                    job.update()
    if rank:
        return {}
    return {form: pool([report.e2e_sequential_ms for report in sink.reports]) for form, sink in kept.items()}


@pytest.mark.parametrize("kind", at_night(["ddp", "fsdp2"], ["fsdp2"]))
def test_gate_and_native_form_agree_on_the_sequential_step_time(kind: str) -> None:
    need_nccl()
    jobs.need(kind)
    found, _ = run_ranks(_measure_both, 2, kind, backend=backend(), timeout_s=240)
    for estimate in found.values():
        assert estimate is not None
        assert estimate.ci_low is not None
        assert estimate.ci_high is not None
    # On the simulated GPU steps take the same time to the nanosecond, so the intervals have no width.
    more = 1.005 if ON_SIMULATED_GPU else 1.0
    assert found["gate"].ci_low <= more * found["native"].ci_high
    assert found["native"].ci_low <= more * found["gate"].ci_high
