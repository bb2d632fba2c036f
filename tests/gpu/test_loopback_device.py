"""On one GPU: figures of real training against communication of known length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from overlap_callbacks import OverlapReport
from overlap_callbacks.experiments.loopback.device_link import available
from tests.distributed import run_alone
from tests.gpu import jobs
from tests.gpu.loopback import LoopJob, LoopSettings, open_job
from tests.gpu.loopback.by_hand import slowdown_by_hand, tolerance
from tests.gpu.loopback.runs import ONE_WINDOW, Keep, known_ms, train

RANKS_LOAD = ("tests.gpu.loopback.runs",)
LINK = LoopSettings("cuda", ctas=24, gb_s=4.0)
KINDS = ("ddp", "fsdp2", "zero3")
WINDOW = {**ONE_WINDOW, "repeats": 4, "steps_per_block": 2, "profiled_steps": 4}

pytestmark = pytest.mark.skipif(not available(), reason="there is no nvcc, and no compiled library")


@dataclass(frozen=True)
class Found:
    """What a run found.

    Attributes:
        report, control: of a window, and of one with both sides overlapped.
        known_ms: of the collectives of a step.
    """

    report: OverlapReport
    control: OverlapReport
    known_ms: float


def _window(loop: LoopJob, job: jobs.Job, **options: Any) -> OverlapReport:
    kept = Keep()
    with job.attach(sinks=[kept], **{**WINDOW, **options}) as monitor:
        train(loop, job, WINDOW["first_step"] + monitor.schedule.window_steps + 2, monitor)
    (report,) = kept.reports
    return report


def _run(kind: str) -> Found:
    with open_job(LINK) as loop, jobs.job(0, kind) as job:
        train(loop, job, 3)
        (step,) = train(loop, job, 1)
        known = known_ms(loop.issued[step.first : step.last])
        return Found(
            report=_window(loop, job),
            control=_window(loop, job, control=True),
            known_ms=known,
        )


@pytest.fixture(scope="module", params=KINDS)
def found(request: pytest.FixtureRequest) -> Found:
    jobs.need(request.param)
    run: Found = run_alone(_run, request.param, timeout_s=290)
    return run


def _value(estimate: Any) -> float:
    assert estimate is not None
    value: float = estimate.value
    return value


def test_the_residual_overlap_of_sequential_steps_is_below_two_percent(found: Found) -> None:
    assert found.report.valid, found.report.problems
    assert _value(found.report.residual_overlap) < 0.02
    assert _value(found.report.overlap_ratio) > 0.02


def test_the_time_of_communication_is_the_known_one(found: Found) -> None:
    assert _value(found.report.comm_isolated_ms) == pytest.approx(found.known_ms, rel=0.02)


def test_a_sequential_step_is_compute_and_then_communication(found: Found) -> None:
    report = found.report
    parts = _value(report.compute_busy_isolated_ms) + _value(report.comm_isolated_ms)
    assert _value(report.e2e_sequential_ms) == pytest.approx(parts, rel=0.02)


def test_a_control_finds_no_difference(found: Found) -> None:
    for estimate in (found.control.speedup_vs_sequential, found.control.compute_slowdown):
        assert estimate is not None
        assert estimate.ci_low is not None
        assert estimate.ci_high is not None
        # One interval of 95% in twenty misses zero; one of twice the width hardly ever does.
        margin = estimate.ci_high - estimate.ci_low
        assert estimate.ci_low - margin / 2 <= 0 <= estimate.ci_high + margin / 2


# -- the slowdown of matrix products


def _slowdowns(ctas: int) -> tuple[float, float]:
    """Figures of products during all-reduces: by hand, and as reported."""
    with open_job(replace(LINK, ctas=ctas)) as loop, jobs.job(0, "ddp") as job:
        train(loop, job, 3)
        by_hand = slowdown_by_hand(
            torch.randn(jobs.BATCH, jobs.WIDTH, device=loop.device),
            torch.zeros(2 * jobs.BUCKET_NUMBERS, device=loop.device),
        )
        report = _window(loop, job)
    (pair,) = [pair for pair in report.pairs if (pair.kernel_family, pair.concurrent_with) == ("gemm", "all_reduce")]
    assert pair.slowdown_during is not None  # by hand, all of each product runs beside all-reduces
    return by_hand, pair.slowdown_during


@pytest.mark.parametrize("ctas", [8, 24, 66])
def test_the_slowdown_of_products_is_the_one_measured_by_hand(ctas: int) -> None:
    by_hand, reported = run_alone(_slowdowns, ctas, timeout_s=200)
    assert reported == pytest.approx(by_hand, abs=tolerance(by_hand))
