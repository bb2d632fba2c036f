"""Real training in one process, over a link of known speed: reports against known values.

On a GPU the collectives are kernels; without one they are Gloo's, and the times that the machine cannot keep are left
out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from overlap_callbacks import Mode, OverlapReport
from overlap_callbacks.experiments.loopback.device_link import available
from tests.distributed import run_alone
from tests.gpu import jobs
from tests.gpu.loopback import Issued, LoopSettings, open_job
from tests.gpu.loopback.job import TimedLink
from tests.gpu.loopback.runs import ONE_WINDOW, Keep, Step, beside_communication, known_ms, raw_kernels, train
from tests.gpu.machine import ON_CPU
from tests.toggling import at_night

HAS_CPU_FORM = True
RANKS_LOAD = ("tests.gpu.loopback.runs",)
KINDS = ("ddp", "fsdp2", "zero3")
# Slow enough for communication to outlast what a busy machine adds.
LINK = LoopSettings("cpu", gb_s=0.01) if ON_CPU else LoopSettings("cuda", ctas=24, gb_s=4.0)
# Of the first steps: DDP makes its buckets anew, ZeRO-3 learns the order of its parameters.
SETTLED = 3

pytestmark = pytest.mark.skipif(not (ON_CPU or available()), reason="there is no nvcc, and no compiled library")


@dataclass(frozen=True)
class Found:
    """What a run found.

    Attributes:
        absent, attached: digests of weights and losses, without the library and with it.
        reports: of the one window.
        steps: of the run with the library.
        issued: its collectives.
        joined_ns: when the phantom joined each of them; empty on a GPU.
        beside: microseconds in which each compute kernel ran beside communication, in steps of each mode.
    """

    absent: str
    attached: str
    reports: list[OverlapReport]
    steps: list[Step]
    issued: list[Issued]
    joined_ns: list[int]
    beside: dict[Mode, dict[str, float]]

    def of(self, mode: Mode) -> list[Step]:
        return [step for step in self.steps[SETTLED:] if step.mode is mode]


def _run(kind: str) -> Found:
    kept = Keep()
    with open_job(LINK) as loop:
        with jobs.job(0, kind) as job, job.attach(sinks=[kept], **ONE_WINDOW) as monitor:
            num_steps = ONE_WINDOW["first_step"] + monitor.schedule.window_steps + 2
            before = len(loop.issued)
            steps = train(loop, job, num_steps, monitor)
            monitor.close()
            attached = job.digest()
        issued, link = list(loop.issued), loop.link
        joined_ns = list(link.joined_ns) if isinstance(link, TimedLink) else []
        assert before < len(issued)
        with jobs.job(0, kind) as job:
            train(loop, job, num_steps)
            absent = job.digest()
            beside = {mode: beside_communication(raw_kernels(loop, job, mode)) for mode in Mode}
    return Found(absent, attached, kept.reports, steps, issued, joined_ns, beside)


# Without a GPU the simulated one has these jobs with exact times; here one of them stays.
NIGHTLY = ("fsdp2", "zero3") if ON_CPU else ()


@pytest.fixture(scope="module", params=at_night(KINDS, NIGHTLY))
def found(request: pytest.FixtureRequest) -> Found:
    jobs.need(request.param)
    run: Found = run_alone(_run, request.param, timeout_s=240)
    return run


def test_one_process_makes_a_complete_and_valid_report_of_two_ranks(found: Found) -> None:
    (report,) = found.reports
    assert report.complete, report.problems
    assert report.valid, report.problems
    assert report.ranks == (0, 1)
    assert report.e2e_overlapped_ms is not None
    assert report.e2e_sequential_ms is not None
    assert report.comm_isolated_ms is not None
    assert report.compute_slowdown is not None


def test_the_residual_overlap_of_sequential_steps_is_below_two_percent(found: Found) -> None:
    (report,) = found.reports
    assert report.residual_overlap is not None
    assert report.residual_overlap.value < 0.02


def test_weights_and_losses_are_bit_identical_to_a_run_without_the_library(found: Found) -> None:
    assert found.attached == found.absent


def test_every_collective_is_seen_with_its_bytes(found: Found) -> None:
    (report,) = found.reports
    step = found.steps[-1]
    collectives = found.issued[step.first : step.last]
    issued = Counter(collective.operator for collective in collectives)
    seen: Counter[str] = Counter()
    for row in report.collectives:
        seen[row.operator] += row.messages
    assert seen == issued
    num_bytes = sum(max(row.bytes_in, row.bytes_out) for row in report.collectives)
    assert num_bytes == sum(collective.num_bytes for collective in collectives)


def test_no_compute_kernel_overlaps_communication_in_sequential_steps(found: Found) -> None:
    assert found.beside[Mode.SEQUENTIAL] == {}
    asynchronous = any(collective.asynchronous for collective in found.issued[found.steps[-1].first :])
    if asynchronous or not ON_CPU:  # Gloo's synchronous collectives hold up the host in every mode
        assert found.beside[Mode.OVERLAPPED] != {}


def test_a_collective_of_a_sequential_step_is_over_before_the_next_begins(found: Found) -> None:
    if not found.joined_ns:
        pytest.skip("on a GPU the profile tells, in the test above")
    assert len(found.joined_ns) >= len(found.issued)
    sequential = found.of(Mode.SEQUENTIAL)
    assert sequential
    for step in sequential:
        assert step.last > step.first
        for index in range(step.first, step.last - 1):
            assert found.joined_ns[index] <= found.issued[index + 1].issued_ns


def test_collectives_of_overlapped_steps_are_in_flight_together_with_the_work_between_them(found: Found) -> None:
    asynchronous = [c for step in found.of(Mode.OVERLAPPED) for c in found.issued[step.first : step.last]]
    if not found.joined_ns or not any(c.asynchronous for c in asynchronous):
        pytest.skip("FSDP2 issues synchronous collectives, which on a CPU end where they are issued")
    assert any(
        found.joined_ns[index] > found.issued[index + 1].issued_ns
        for step in found.of(Mode.OVERLAPPED)
        for index in range(step.first, step.last - 1)
    )


def test_a_sequential_step_takes_the_known_time_of_its_communication_at_least(found: Found) -> None:
    (report,) = found.reports
    step = found.steps[-1]
    known = known_ms(found.issued[step.first : step.last])
    assert known > 0
    for rank in report.samples:
        sequential = [time for block in rank.timed if block.mode is Mode.SEQUENTIAL for time in block.step_ms]
        assert sequential
        assert min(sequential) >= known
    assert report.comm_isolated_ms is not None
    if found.joined_ns:  # Gloo's thread may begin late: by its own times, test_loopback_known.py holds them to bounds
        return
    assert report.comm_isolated_ms.value >= 0.98 * known
    isolated_ms = [row.isolated_ms for row in report.collectives]
    assert sum(time for time in isolated_ms if time is not None) >= 0.98 * known


# -- a window with both sides overlapped


def _control(kind: str) -> OverlapReport:
    kept = Keep()
    options = {**ONE_WINDOW, "repeats": 4, "control": True}
    with open_job(LINK) as loop, jobs.job(0, kind) as job, job.attach(sinks=[kept], **options) as monitor:
        train(loop, job, options["first_step"] + monitor.schedule.window_steps + 2, monitor)
        monitor.close()
    (report,) = kept.reports
    return report


@pytest.mark.skipif(not ON_CPU, reason="test_loopback_device.py has it on a GPU")
@pytest.mark.parametrize("kind", at_night(KINDS, KINDS))  # for each change test_loopback_known.py has one
def test_a_control_finds_no_difference(kind: str) -> None:
    jobs.need(kind)
    report: OverlapReport = run_alone(_control, kind, timeout_s=240)
    assert report.complete, report.problems
    estimate = report.speedup_vs_sequential
    assert estimate is not None
    assert estimate.ci_low is not None
    assert estimate.ci_high is not None
    # One interval of 95% in twenty misses zero; one of twice the width hardly ever does.
    margin = estimate.ci_high - estimate.ci_low
    assert estimate.ci_low - margin / 2 <= 0 <= estimate.ci_high + margin / 2
