"""Without a GPU: figures of real training whose compute and communication take known times.

Both go by the clock, and what they take is known in the same steps, beside the library, from both sides: see
``Bounds``. So each figure has bounds of its own run that hold however busy the machine is, and that lie within a few
per mille of each other where it is not. ``test_loopback_device.py`` has the like on a GPU.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest

from overlap_callbacks import Mode, OverlapReport
from overlap_callbacks.analysis.design import design_of
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.analysis.results.window import ProfiledBlock
from overlap_callbacks.instruments.profiler import Profile
from overlap_callbacks.monitor.schedule import Part, Plan, Schedule
from tests.distributed import run_alone
from tests.gpu.loopback import Issued, LoopSettings, open_job
from tests.gpu.loopback.job import TimedLink
from tests.gpu.loopback.runs import ONE_WINDOW, Keep, Step, train
from tests.gpu.loopback.spinning import (
    BACKWARD_MS,
    FORWARD_MS,
    GB_S,
    LAYERS,
    Bounds,
    Range,
    SpinningJob,
    spinner,
)
from tests.gpu.machine import ON_CPU
from tests.margins import near
from tests.toggling import at_night

HAS_CPU_FORM = True
RANKS_LOAD = ("tests.gpu.loopback.runs",)
LINK = LoopSettings("cpu", gb_s=GB_S)
WINDOW = {**ONE_WINDOW, "repeats": 1, "steps_per_block": 2, "profiled_steps": 4, "every_n_steps": 32}
# Of an H100 with 132 SMs, of which communication takes some.
NUM_SMS, CTAS = 132, (8, 24, 66)
RUNS = [(kind, ctas) for kind in ("ddp", "fsdp2") for ctas in CTAS]

pytestmark = pytest.mark.skipif(not ON_CPU, reason="test_loopback_device.py has it on a GPU")


@dataclass(frozen=True)
class Found:
    """What a run found.

    Attributes:
        kind: of the job.
        factor: how many times as long compute takes during communication.
        report: of the window.
        plans: of each step; None outside the window.
        steps: which collectives each step issued.
        walls: when each step ran.
        ends: when each step's optimizer step ran.
        issued: all collectives.
        in_gloo: when the profiler saw collectives run, in the order in which they began.
        joined_ns: when the phantom joined each of them: it was not complete before.
        ended_ns: when each of them was seen to be complete.
        spins: all operators that spin, as they see it.
        calls: the same, as their callers see it.
        slowed: by how many milliseconds communication made each of them longer.
    """

    kind: str
    factor: float
    report: OverlapReport
    plans: list[Plan | None]
    steps: list[Step]
    walls: list[Range]
    ends: list[Range]
    issued: list[Issued]
    in_gloo: list[Range]
    joined_ns: list[int]
    ended_ns: list[int]
    spins: list[Range]
    calls: list[Range]
    slowed: list[float]

    def of(self, mode: Mode, part: Part = Part.PROFILED) -> list[int]:
        """The numbers of the steps from which the report's figures of a mode are."""
        plans = enumerate(self.plans)
        found = [number for number, p in plans if p is not None and p.counted and p.part is part and p.arm is mode]
        assert len(found) >= 4
        return found

    def timed_ms(self, mode: Mode) -> dict[int, float]:
        """The timed steps of a mode, by number. Few are left out, as far longer than the others on a busy machine."""
        timed = [block for block in self.report.samples[0].timed if block.mode is mode]
        found = {number: time_ms for block in timed for number, time_ms in zip(block.steps, block.step_ms, strict=True)}
        left_out = self.report.left_out[mode is Mode.SEQUENTIAL]
        assert len(found) == len(self.of(mode, Part.TIMED)) - left_out
        assert found.keys() <= {*self.of(mode, Part.TIMED)}
        return found

    def blocks(self, mode: Mode) -> list[tuple[int, ProfiledBlock]]:
        """The profiled steps of a mode: number, and what the library measured."""
        blocks = [block for block in self.report.samples[0].profiled if block.mode is mode]
        return list(zip(self.of(mode), blocks, strict=True))

    @property
    def spin(self) -> KernelTime:
        """The row of the operator in the report."""
        (row,) = [kernel for kernel in self.report.kernels if kernel.name == "loopback::spin"]
        return row

    def comm_ms(self, number: int) -> Bounds:
        """By hand: the collectives of a step. The phantom joins each before its end, and sees it end afterwards."""
        step = self.steps[number]
        least, most = self._in_flight(step)
        return _bounds(sum(flight.ms for flight in least), sum(flight.ms for flight in most))

    def _in_flight(self, step: Step) -> tuple[list[Range], list[Range]]:
        """When the collectives of a step were in flight, at least and at most.

        Gloo runs on a thread of its own, for which a busy machine may have no time at once: the profiler says when it
        begins and ends. It begins collectives in order, each perhaps after the next one was issued.
        """
        least, most, last_ns = [], [], 0
        for place in range(step.first, step.last):
            issued_ns, joined_ns = self.issued[place].issued_ns, self.joined_ns[place]
            after_ns = max(issued_ns - 1e6 * _CLOCKS_MS, last_ns + 1)
            ended_ns = self.ended_ns[place]
            runs = [run for run in self.in_gloo if after_ns <= run.start_ns <= ended_ns]
            run = runs[0] if runs else Range(issued_ns, ended_ns)
            last_ns = run.start_ns
            least.append(Range(min(max(issued_ns, run.start_ns), joined_ns), joined_ns))
            most.append(Range(issued_ns, max(run.end_ns, ended_ns)))
        return _apart(least), _apart(most)

    def spins_ms(self, number: int) -> Bounds:
        """By hand: the operators of a step, by the operator itself at least, and by its caller at most."""
        places = self._spins_of(number)
        spins, calls = ([ranges[place].ms for place in places] for ranges in (self.spins, self.calls))
        return _bounds(sum(spins), sum(calls))

    def slowed_ms(self, number: int) -> float:
        """By hand: by how much communication made the operators of a step longer."""
        return sum(self.slowed[place] for place in self._spins_of(number))

    def beside_ms(self, number: int) -> Bounds:
        """By hand: how long the operators of a step ran during its collectives."""
        places, (least, most) = self._spins_of(number), self._in_flight(self.steps[number])
        return _bounds(
            _shared_ms([self.spins[place] for place in places], least),
            _shared_ms([self.calls[place] for place in places], most),
        )

    def step_ms(self, number: int) -> Bounds:
        """By hand: the library's step, which begins and ends within the optimizer's steps."""
        before, end = self.ends[number - 1], self.ends[number]
        return _bounds((end.start_ns - self.walls[number].start_ns) / 1e6, (end.end_ns - before.start_ns) / 1e6)

    def span_ms(self, number: int) -> float:
        """By hand: at least so long it is from the first operator of a step to the end of its last one or collective.

        The step is longer: it begins and ends in Python, which takes as long as the machine lets it.
        """
        spins = [self.spins[place] for place in self._spins_of(number)]
        in_flight, _ = self._in_flight(self.steps[number])
        time_ms = (max(work.end_ns for work in (*spins, *in_flight)) - min(spin.start_ns for spin in spins)) / 1e6
        return _bounds(time_ms, time_ms).least_ms

    def _spins_of(self, number: int) -> list[int]:
        wall = self.walls[number]
        return [i for i, spin in enumerate(self.spins) if wall.start_ns <= spin.start_ns < wall.end_ns]

    def mean_spins_ms(self, mode: Mode) -> Bounds:
        """By hand: the operators of the profiled steps of a mode."""
        return _mean([self.spins_ms(number) for number in self.of(mode)])


# The profiler's clock and ours differ by so much: a mark lies at most so far off, and a second is so much longer.
_CLOCKS_MS, _CLOCKS = 0.1, 1e-3


def _bounds(least_ms: float, most_ms: float) -> Bounds:
    assert 0 <= least_ms <= most_ms
    return Bounds(least_ms * (1 - _CLOCKS) - _CLOCKS_MS, most_ms * (1 + _CLOCKS) + _CLOCKS_MS)


def _mean(steps: Sequence[Bounds]) -> Bounds:
    return Bounds(*[statistics.fmean(side) for side in zip(*steps, strict=True)])


def _apart(ranges: Sequence[Range]) -> list[Range]:
    """The same time in ranges that follow one another: Gloo has two threads, so collectives may overlap."""
    found, end_ns = [], 0
    for one in sorted(ranges):
        found.append(Range(max(one.start_ns, end_ns), max(one.end_ns, end_ns)))
        end_ns = found[-1].end_ns
    return found


def _shared_ms(first: Sequence[Range], second: Sequence[Range]) -> float:
    """How long the ranges of two kinds ran at the same time, those of the second kind one after another."""
    pairs = itertools.product(first, second)
    return sum(max(0, min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns)) for a, b in pairs) / 1e6


def _lies_within(value: float, least: float, most: float) -> bool:
    """Whether a value lies between two bounds. How near it came is kept."""
    return near(least, value) & near(value, most)


def _run(kind: str, ctas: int, options: dict[str, Any]) -> Found:
    kept, factor = Keep(), NUM_SMS / (NUM_SMS - ctas)
    placed: list[Schedule] = []
    in_gloo: list[Range] = []
    place, stop = Schedule.placed, Profile.stop

    def kept_place(schedule: Schedule, *args: Any, **named: Any) -> Schedule:
        placed.append(place(schedule, *args, **named))
        return placed[-1]

    def read_and_stop(profile: Profile, **options: Any) -> bool:
        session, since_ns = profile.session, time.time_ns() - time.perf_counter_ns()
        stopped = stop(profile, **options)
        events = session.profiler.kineto_results.events()  # type: ignore[union-attr]
        runs = [(event.start_ns() - since_ns, event.duration_ns()) for event in events if event.name()[:5] == "gloo:"]
        in_gloo.extend([Range(start_ns, start_ns + length_ns) for start_ns, length_ns in sorted(runs)])
        return stopped

    with (
        open_job(LINK) as loop,
        spinner(loop, factor) as spinning,
        mock.patch.object(Schedule, "placed", kept_place),
        mock.patch.object(Profile, "stop", read_and_stop),
    ):
        job = SpinningJob(kind)
        assert isinstance(loop.link, TimedLink)
        with job.attach(sinks=[kept], **{**WINDOW, **options}) as monitor:
            num_steps = monitor.schedule.first_step + monitor.schedule.every_n_steps - 1
            steps = train(loop, job, num_steps, monitor)
            monitor.close()
        (report,), (schedule,) = kept.reports, placed
        plans = [schedule.plan(number) for number in range(num_steps)]
        assert [step.mode for step in steps] == [Mode.OVERLAPPED if p is None else p.mode for p in plans]
        return Found(
            kind, factor, report, plans, steps, job.steps, job.ends, list(loop.issued), in_gloo,
            list(loop.link.joined_ns), list(loop.link.ended_ns), spinning.spins, list(spinning.calls),
            spinning.slowed_ms,
        )  # fmt: skip


# For each change one number of CTAs: they differ in how much slower compute is beside transfers. The simulated GPU has
# FSDP2 with exact times.
NIGHTLY = [("ddp", 8), ("ddp", 24), *[("fsdp2", ctas) for ctas in CTAS]]


@pytest.fixture(
    scope="module",
    params=[pytest.param(run, marks=pytest.mark.nightly if run in NIGHTLY else ()) for run in RUNS],
    ids=lambda run: f"{run[0]}, {run[1]} CTAs",
)
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


def test_the_overlap_ratio_is_the_known_one(found: Found) -> None:
    blocks = found.blocks(Mode.OVERLAPPED)
    known = [found.beside_ms(number) for number, _ in blocks]
    if found.kind == "fsdp2":  # whose collectives are synchronous on a CPU
        assert max(bounds.least_ms for bounds in known) <= 0
        return
    # The backward passes of all layers but the last run beside the reduction of the layer before.
    assert min(bounds.least_ms for bounds in known) > BACKWARD_MS
    else_ms = [block.compute_ms - found.spins_ms(number).least_ms for number, block in blocks]
    for (_, block), bounds, other_ms in zip(blocks, known, else_ms, strict=True):
        assert _lies_within(block.covered_compute_ms, bounds.least_ms, bounds.most_ms + other_ms)
    covered_ms, compute_ms = (
        statistics.fmean(times)
        for times in zip(*[(b.covered_compute_ms, b.compute_ms) for _, b in blocks], strict=True)
    )
    assert _value(found.report.overlap_ratio) == pytest.approx(covered_ms / compute_ms)


def test_the_time_of_communication_is_the_known_one(found: Found) -> None:
    blocks = found.blocks(Mode.SEQUENTIAL)
    for number, block in blocks:
        assert _lies_within(block.comm_busy_ms, *found.comm_ms(number))
    times_ms = [block.comm_busy_ms for _, block in blocks]
    assert _value(found.report.comm_isolated_ms) == pytest.approx(statistics.fmean(times_ms))


def test_the_time_of_compute_is_the_known_one(found: Found) -> None:
    for mode, reported_ms in ((Mode.SEQUENTIAL, found.spin.sequential_ms), (Mode.OVERLAPPED, found.spin.overlapped_ms)):
        assert _lies_within(reported_ms, *found.mean_spins_ms(mode))


def test_a_sequential_step_is_compute_and_then_communication(found: Found) -> None:
    for number, block in found.blocks(Mode.SEQUENTIAL):
        step, compute_ms, comm_ms = found.step_ms(number), found.spins_ms(number), found.comm_ms(number)
        parts_ms = block.compute_busy_ms + block.comm_busy_ms - block.hidden_comm_ms + block.idle_ms
        assert _lies_within(parts_ms, found.span_ms(number), step.most_ms)
        # One after the other: so what is idle is what neither of them took, and each has the rest at most.
        assert near(block.idle_ms, step.most_ms - compute_ms.least_ms - comm_ms.least_ms)
        assert _lies_within(block.compute_busy_ms, compute_ms.least_ms, step.most_ms - comm_ms.least_ms)


def test_the_time_of_a_sequential_step_is_the_known_one(found: Found) -> None:
    timed_ms = found.timed_ms(Mode.SEQUENTIAL)
    for number, time_ms in timed_ms.items():
        assert _lies_within(time_ms, *found.step_ms(number))
    assert min(timed_ms.values()) <= _value(found.report.e2e_sequential_ms) <= max(timed_ms.values())


def test_the_slowdown_is_the_one_measured_by_hand(found: Found) -> None:
    alone, beside = (found.mean_spins_ms(mode) for mode in (Mode.SEQUENTIAL, Mode.OVERLAPPED))
    assert found.spin.slowdown is not None
    assert _lies_within(1 + found.spin.slowdown, beside.least_ms / alone.most_ms, beside.most_ms / alone.least_ms)
    # Beside communication are the backward passes of all layers but the last, for most of their time.
    slowed = {mode: [found.slowed_ms(number) for number in found.of(mode)] for mode in Mode}
    assert max(slowed[Mode.SEQUENTIAL]) == 0
    if found.kind == "ddp":
        alone_ms = LAYERS * (FORWARD_MS + BACKWARD_MS)
        assert near(0.25 * (found.factor - 1) * alone_ms, min(slowed[Mode.OVERLAPPED]))
    # The step computes little else. On a busy machine that takes as long as others make it wait.
    compute_ms = {mode: [block.compute_ms for _, block in found.blocks(mode)] for mode in Mode}
    for mode in Mode:
        for number, reported_ms in zip(found.of(mode), compute_ms[mode], strict=True):
            assert _lies_within(reported_ms, found.spins_ms(number).least_ms, found.step_ms(number).most_ms)
    alone_ms, beside_ms = (statistics.fmean(compute_ms[mode]) for mode in (Mode.SEQUENTIAL, Mode.OVERLAPPED))
    assert _value(found.report.compute_slowdown) == pytest.approx(beside_ms / alone_ms - 1)


@pytest.mark.parametrize("kind", at_night(["ddp", "fsdp2"], ["fsdp2"]))
def test_a_control_finds_no_other_difference_than_the_clock_outside(kind: str) -> None:
    """How often its interval holds zero is a matter of chance: ``benchmarks/results`` has that."""
    control: Found = run_alone(_run, kind, 24, {"control": True, "repeats": 2, "every_n_steps": 42}, timeout_s=200)
    assert {step.mode for step in control.steps} == {Mode.OVERLAPPED}
    # A trend is taken out, so a block's weight in its mode's mean depends on its place.
    blocks = control.report.samples[0].timed
    places = [block.mode for block in blocks], [block.block for block in blocks], [len(block.steps) for block in blocks]
    design = design_of(*places, np.empty((len(blocks), 0)))
    known = [_mean([control.step_ms(number) for number in block.steps]) for block in blocks]
    alone, beside = (
        Bounds(*[sum(design.weights[own] * side) for side in np.array(known)[own].T])
        for own in (design.of_mode[[*Mode].index(mode)] for mode in (Mode.SEQUENTIAL, Mode.OVERLAPPED))
    )
    assert min(design.weights) > 0
    speedup = control.report.speedup_vs_sequential
    assert speedup is not None
    assert speedup.ci_low is not None
    assert speedup.ci_high is not None
    assert speedup.ci_low <= speedup.value <= speedup.ci_high
    assert _lies_within(1 + speedup.value, alone.least_ms / beside.most_ms, alone.most_ms / beside.least_ms)
