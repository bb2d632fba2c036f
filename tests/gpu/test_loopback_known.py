"""Without a GPU: figures of real training whose compute and communication take known times.

Both go by the clock, and what they take is measured in the same steps, beside the library. So the bounds hold on a busy
machine too: both see the same delays. ``test_loopback_device.py`` has the like on a GPU.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import pytest

from overlap_callbacks import Mode, OverlapReport
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.analysis.results.window import ProfiledBlock
from overlap_callbacks.experiments.loopback.host_link import HostLink
from overlap_callbacks.monitor.schedule import Part, Plan
from tests.distributed import run_alone
from tests.gpu.loopback import Issued, LoopSettings, open_job
from tests.gpu.loopback.runs import ONE_WINDOW, Keep, Step, train
from tests.gpu.loopback.spinning import GB_S, Range, SpinningJob, spinner
from tests.gpu.machine import ON_CPU
from tests.toggling import at_night

HAS_CPU_FORM = True
RANKS_LOAD = ("tests.gpu.loopback.runs",)
LINK = LoopSettings("cpu", gb_s=GB_S)
WINDOW = {**ONE_WINDOW, "repeats": 1, "steps_per_block": 2, "profiled_steps": 4}
# Of an H100 with 132 SMs, of which communication takes some.
NUM_SMS, CTAS = 132, (8, 24, 66)
RUNS = [(kind, ctas) for kind in ("ddp", "fsdp2") for ctas in CTAS]

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not ON_CPU, reason="test_loopback_device.py has it on a GPU"),
]


@dataclass(frozen=True)
class Found:
    """What a run found.

    Attributes:
        kind: of the job.
        factor: how many times as long compute takes beside communication.
        report: of the window.
        plans: of each step; None outside the window.
        steps: which collectives each step issued.
        walls: when each step ran.
        issued: all collectives.
        ended_ns: when each of them was complete.
        spins: all operators that spin.
    """

    kind: str
    factor: float
    report: OverlapReport
    plans: list[Plan | None]
    steps: list[Step]
    walls: list[Range]
    issued: list[Issued]
    ended_ns: list[int]
    spins: list[Range]

    def of(self, mode: Mode, part: Part = Part.PROFILED) -> list[int]:
        """The numbers of the steps from which the report's figures of a mode are."""
        plans = enumerate(self.plans)
        found = [number for number, p in plans if p is not None and p.counted and p.part is part and p.mode is mode]
        assert len(found) >= 4
        return found

    def blocks(self, mode: Mode) -> list[tuple[int, ProfiledBlock]]:
        """The profiled steps of a mode: number, and what the library measured."""
        blocks = [block for block in self.report.samples[0].profiled if block.arm is mode]
        return list(zip(self.of(mode), blocks, strict=True))

    @property
    def spin(self) -> KernelTime:
        """The row of the operator in the report."""
        (row,) = [kernel for kernel in self.report.kernels if kernel.name == "loopback::spin"]
        return row

    def comm_ms(self, number: int) -> float:
        """By hand: the collectives of a step, each from its issue to its end."""
        step = self.steps[number]
        return sum((self.ended_ns[i] - self.issued[i].issued_ns) / 1e6 for i in range(step.first, step.last))

    def compute_ms(self, number: int) -> float:
        """By hand: the operators of a step."""
        wall = self.walls[number]
        return sum(spin.ms for spin in self.spins if wall.start_ns <= spin.start_ns < wall.end_ns)

    def mean_compute_ms(self, mode: Mode) -> float:
        """By hand: the operators of the profiled steps of a mode."""
        return statistics.fmean([self.compute_ms(number) for number in self.of(mode)])


def _run(kind: str, ctas: int, options: dict[str, Any]) -> Found:
    kept, factor = Keep(), NUM_SMS / (NUM_SMS - ctas)
    with open_job(LINK) as loop, spinner(loop, factor) as spinning:
        job = SpinningJob(kind)
        assert isinstance(loop.link, HostLink)
        with job.attach(sinks=[kept], **{**WINDOW, **options}) as monitor:
            schedule = monitor.schedule
            num_steps = schedule.first_step + schedule.window_steps + 1
            steps = train(loop, job, num_steps, monitor)
            monitor.close()
        (report,) = kept.reports
        plans = [schedule.plan(number) for number in range(num_steps)]
        assert [step.mode for step in steps] == [Mode.OVERLAPPED if p is None else p.mode for p in plans]
        return Found(
            kind, factor, report, plans, steps, job.steps, list(loop.issued), list(loop.link.ended_ns), spinning.spins
        )


# For each change one number of CTAs for each kind of job: they differ in how much slower compute is beside transfers.
NIGHTLY = [("ddp", 8), ("ddp", 24), ("fsdp2", 8), ("fsdp2", 66)]


@pytest.fixture(scope="module", params=at_night(RUNS, NIGHTLY), ids=lambda run: f"{run[0]}, {run[1]} CTAs")
def found(request: pytest.FixtureRequest) -> Found:
    kind, ctas = request.param
    run: Found = run_alone(_run, kind, ctas, {}, timeout_s=200)
    return run


def _value(estimate: Any) -> float:
    assert estimate is not None
    value: float = estimate.value
    return value


def test_the_residual_overlap_of_sequential_steps_is_below_two_percent(found: Found) -> None:
    assert found.report.valid, found.report.problems
    assert _value(found.report.residual_overlap) < 0.02
    if found.kind == "ddp":  # FSDP2's collectives are synchronous on a CPU
        assert _value(found.report.overlap_ratio) > 0.3


def test_the_time_of_communication_is_the_known_one(found: Found) -> None:
    blocks = found.blocks(Mode.SEQUENTIAL)
    ratios = [block.comm_busy_ms / found.comm_ms(number) for number, block in blocks]
    if found.kind == "ddp":
        assert statistics.median(ratios) == pytest.approx(1, abs=0.02)
    # Gloo copies the result of a reduce-scatter after its range, for as long as a busy machine makes it wait. So of
    # FSDP2 the time lies between the link's and the one by hand.
    times_ms = [block.comm_busy_ms for _, block in blocks]
    assert min(times_ms) <= _value(found.report.comm_isolated_ms) <= max(times_ms)
    for number, block in blocks:
        step = found.steps[number]
        asked_ms = sum(issued.length_ns for issued in found.issued[step.first : step.last]) / 1e6
        assert 0.98 * asked_ms <= block.comm_busy_ms <= 1.02 * found.comm_ms(number)


def test_the_time_of_compute_is_the_known_one(found: Found) -> None:
    for mode, reported_ms in ((Mode.SEQUENTIAL, found.spin.sequential_ms), (Mode.OVERLAPPED, found.spin.overlapped_ms)):
        assert reported_ms == pytest.approx(found.mean_compute_ms(mode), rel=0.02)


def test_a_sequential_step_is_compute_and_then_communication(found: Found) -> None:
    # FSDP2 spends some 3 % of such a step in Python, outside of all operators, when the machine is busy: idle time.
    idle = [block.idle_ms / found.walls[number].ms for number, block in found.blocks(Mode.SEQUENTIAL)]
    assert statistics.median(idle) < (0.1 if found.kind == "fsdp2" else 0.05)
    ratios = [
        (block.compute_busy_ms + block.comm_busy_ms + (block.idle_ms if found.kind == "fsdp2" else 0))
        / found.walls[number].ms
        for number, block in found.blocks(Mode.SEQUENTIAL)
    ]
    assert statistics.median(ratios) == pytest.approx(1, abs=0.02)


def test_the_time_of_a_sequential_step_is_the_known_one(found: Found) -> None:
    timed_ms = [
        time_ms for block in found.report.samples[0].timed if block.arm is Mode.SEQUENTIAL for time_ms in block.step_ms
    ]
    walls_ms = [found.walls[number].ms for number in found.of(Mode.SEQUENTIAL, Part.TIMED)]
    ratios = [time_ms / wall_ms for time_ms, wall_ms in zip(timed_ms, walls_ms, strict=True)]
    assert statistics.median(ratios) == pytest.approx(1, abs=0.02)
    assert min(timed_ms) <= _value(found.report.e2e_sequential_ms) <= max(timed_ms)


def test_the_slowdown_is_the_one_measured_by_hand(found: Found) -> None:
    alone_ms, beside_ms = (found.mean_compute_ms(mode) for mode in (Mode.SEQUENTIAL, Mode.OVERLAPPED))
    by_hand = beside_ms / alone_ms - 1
    assert found.spin.slowdown == pytest.approx(by_hand, abs=0.02)
    if found.kind == "ddp":
        # Beside communication are the backward passes of all layers but the last, for most of their time. On a busy
        # machine single operators take longer; the shortest of both modes are held against each other.
        shortest = {mode: min(found.compute_ms(number) for number in found.of(mode)) for mode in Mode}
        assert shortest[Mode.OVERLAPPED] / shortest[Mode.SEQUENTIAL] - 1 > 0.25 * (found.factor - 1)
    # The step computes little else. On a busy machine that takes as long as others make it wait.
    compute_ms = {mode: statistics.fmean([b.compute_ms for _, b in found.blocks(mode)]) for mode in Mode}
    else_ms = max(compute_ms[Mode.SEQUENTIAL] - alone_ms, compute_ms[Mode.OVERLAPPED] - beside_ms)
    assert _value(found.report.compute_slowdown) == pytest.approx(by_hand, abs=0.02 + max(0.0, else_ms) / alone_ms)


@pytest.mark.parametrize("kind", at_night(["ddp", "fsdp2"], ["fsdp2"]))
def test_a_control_finds_no_difference(kind: str) -> None:
    control: Found = run_alone(_run, kind, 24, {"control": True, "repeats": 2}, timeout_s=200)
    for estimate in (control.report.speedup_vs_sequential, control.report.compute_slowdown):
        assert estimate is not None
        assert estimate.ci_low is not None
        assert estimate.ci_high is not None
        # One interval of 95% in twenty misses zero; one of twice the width hardly ever does.
        margin = estimate.ci_high - estimate.ci_low
        holds_zero = estimate.ci_low - margin / 2 <= 0 <= estimate.ci_high + margin / 2
        assert holds_zero or abs(estimate.value) < 0.01  # intervals may be narrower than the clock is exact
