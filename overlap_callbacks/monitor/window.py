"""A window's marks: what the training thread records of each measured step.

Everything here runs on the training thread and only records. ``close`` turns the open window into a ``ClosedWindow``,
from which ``background/measurement.py`` computes figures on another thread.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch

from overlap_callbacks.analysis.results.arm import ComparedArm
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.race import RaceCheck
from overlap_callbacks.analysis.results.window import Rhythm
from overlap_callbacks.gate.arms import BaseArm, Sequential
from overlap_callbacks.gate.collectives import Collective
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import ExpectedSequence, StepLog
from overlap_callbacks.gate.switch import SwitchState
from overlap_callbacks.instruments import clocks, device
from overlap_callbacks.instruments.device import MemoryReader, RawReading
from overlap_callbacks.instruments.other_profilers import serves_a_daemon
from overlap_callbacks.instruments.power.meter import PowerMeter
from overlap_callbacks.instruments.profiler import FIRST_STEPS, Profile, record_bound, threads_hold_buffers
from overlap_callbacks.monitor.schedule import Part, Plan
from overlap_callbacks.monitor.step_ranges import StepRanges
from overlap_callbacks.monitor.window_cost import WindowCost


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The marks of one step that ran.

    Attributes:
        plan: what the step was to do.
        start, end: its bounds.
        log: its collectives.
        profile_index: its index in the profile; -1 outside the profile. Warm-up steps of CPU jobs are outside, if all
            steps have ended with nothing in flight: their operators would only make the profile dearer.
        counted: whether it counts: it was planned to, and nothing spoilt it.
        spoilt: whether something did.
        skipped: why it trained nothing; empty if it did.
        kind: of a counted step, once its window has closed: 0 the commonest.
        memory: the allocator's counters when it began and when it ended; None where there are none.
        number: of the step in the job.
    """

    plan: Plan
    start: clocks.Mark
    end: clocks.Mark
    log: StepLog
    profile_index: int = -1
    counted: bool = True
    spoilt: bool = False
    skipped: str = ""
    memory: tuple[RawReading, RawReading] | None = None
    kind: int = 0
    number: int = -1


@dataclass(frozen=True)
class SampledStep:
    """A step between windows.

    Attributes:
        step: its number.
        calls: its all-to-alls that have split sizes.
    """

    step: int
    calls: tuple[Collective, ...]


@dataclass(frozen=True, kw_only=True)
class FinishedBlock:
    """A timed block whose steps have all ended, while its window goes on.

    Attributes:
        window: number of the window.
        first_step: the step at which the window opened.
        compared_with: the window's arm; None for sequential steps.
        block: number of the block.
        arm: the side of the comparison on which it counts.
        steps: its steps that count.
    """

    window: int
    first_step: int
    compared_with: ComparedArm | None = None
    block: int
    arm: Mode
    steps: tuple[MeasuredStep, ...]


@dataclass(frozen=True, kw_only=True)
class ClosedWindow:
    """All marks of a window. Nothing changes in it any more, so that another thread may read it.

    Attributes:
        number: of the window.
        first_step: the step at which it opened.
        steps: those that ran, in order.
        complete: whether all steps of the schedule ran.
        problems: what went wrong, in words.
        opened_ns: host time at which it opened.
        wall_ms: host time from its opening to its end.
        clock: which made the marks.
        meter: of power; None if power is not measured.
        profile: a session that has been stopped; None if no step was profiled.
        missing_profile: why kernel times are missing, in words; empty if they are not.
        terms: digest of what all ranks must be set up alike for, see ``WindowTerms``.
        cost: what the window costs training; None if nobody looks at the steps around it.
        sampled: steps since the window before whose all-to-alls were recorded.
        compared_with: its arm; None for sequential steps.
        chunks: model chunks of an interleaved pipeline on this rank; 1 without, or if nobody tells.
        race: what a repeated step showed after the window; None without one.
        rhythms: of the job, as rank 0 knew them when it planned the window.
    """

    number: int
    first_step: int
    steps: tuple[MeasuredStep, ...]
    complete: bool
    problems: tuple[str, ...]
    opened_ns: int
    wall_ms: float
    clock: clocks.StepClock
    meter: PowerMeter | None
    profile: Profile | None
    missing_profile: str
    terms: str = ""
    cost: WindowCost | None = None
    sampled: tuple[SampledStep, ...] = ()
    compared_with: ComparedArm | None = None
    chunks: int = 1
    race: RaceCheck | None = None
    rhythms: tuple[Rhythm, ...] = ()


class Window:
    """An open window on one rank.

    Args:
        number: of the window.
        first_step: the step at which it opens.
        gate: registered.
        switch: what the window's arm turns. If there is anything, it makes sequential steps sequential, and the gate
            does not.
        meter: of power; None if power is not measured.
        arm: what the job as configured is compared with.
        ranges: name its steps in other profiles; None for none.

    Attributes:
        compared_with: the same, for the record; None for sequential steps.
        sampled: steps since the window before whose all-to-alls were recorded.
        rhythms: of the job, as rank 0 knew them when it planned the window.
    """

    def __init__(
        self,
        number: int,
        first_step: int,
        gate: Gate,
        switch: SwitchState,
        meter: PowerMeter | None = None,
        *,
        arm: BaseArm | None = None,
        ranges: StepRanges | None = None,
    ) -> None:
        self.number = number
        self.first_step = first_step
        self.sampled: tuple[SampledStep, ...] = ()
        self.rhythms: tuple[Rhythm, ...] = ()
        arm = arm or Sequential()
        self.compared_with = (
            None if isinstance(arm, Sequential) else ComparedArm(arm.name, arm.equal_results, arm.sequential)
        )
        self._gate = gate
        self._switch = switch
        self._meter = meter
        self._ranges = StepRanges(enabled=False) if ranges is None else ranges
        self._clock = clocks.StepClock()
        self._steps: list[MeasuredStep] = []
        self._problems: list[str] = []
        self._profile: Profile | None = None
        self._full_profile: Profile | None = None  # ended before the window, to stay below Kineto's limit
        self._missing_profile = ""
        self._all_quiet: bool | None = None  # profiled steps so far; None before the first
        self._unseen = False  # the step that ended last left collectives in flight which the profile has not
        self._memory = MemoryReader.of(self._clock.compute_stream)
        self._memory_before: RawReading | None = None
        self._opened_ns = clocks.now()
        if meter is not None:
            meter.begin(self._clock.poll)
        # Of the open step:
        self._plan: Plan | None = None
        self._start: clocks.Mark = 0
        self._paused = False  # within a pause now
        self._was_paused = False
        self._skipped = ""

    @property
    def age_s(self) -> float:
        """Host time since the window opened."""
        return (clocks.now() - self._opened_ns) / 1e9

    @property
    def on_device(self) -> bool:
        """Whether steps are timed on a device."""
        return self._clock.compute_stream is not None

    def note(self, problem: str) -> None:
        """Have the report say what went wrong, once."""
        if problem not in self._problems:
            self._problems.append(problem)

    # -- a step

    def begin_step(self, plan: Plan, granted: ExpectedSequence | None) -> None:
        """Start the step's instruments and set its mode.

        Args:
            plan: of the step.
            granted: what passed the order check; needed in sequential mode.
        """
        self._plan = plan
        self._ranges.begin(plan, self.first_step + plan.offset)
        self._paused = self._was_paused = False
        self._skipped = ""
        may_profile = self._profile is None and self._full_profile is None and not self._missing_profile
        if plan.part is Part.PROFILED and may_profile:
            self._start_profile()
        self._memory_before = self._memory.read()  # outside the step's marks
        sequential = plan.mode is Mode.SEQUENTIAL
        self._switch.turn(on=sequential or plan.turned)
        # On the host a profile alone does not show when a collective was complete: see ``Profile.end_step``.
        watch = self._profile is not None and self._clock.compute_stream is None
        # Every step of a window is recorded: what the gate costs the host is then the same in both modes, and cancels.
        self._gate.begin_step(
            sequential=sequential and self._switch.form is None,
            expected=granted,
            compute_stream=self._clock.compute_stream,
            watch=watch,
        )
        if self._profile is not None:
            self._profile.begin_step(record=plan.counted or not self._all_quiet)
        self._start = self._clock.mark()

    def end_step(self) -> MeasuredStep:
        """Stop the step's instruments and keep its marks."""
        assert self._plan is not None
        end = self._clock.mark()
        log = self._gate.end_step()
        before, after = self._memory_before, self._memory.read()
        profile_index, unseen = -1, self._unseen
        if self._profile is not None:
            profile_index = self._profile.end_step(quiet=log.quiet)
            self._unseen = profile_index < 0 and not log.quiet
            self._all_quiet = log.quiet and self._all_quiet is not False
            if self._profile.is_full and not self._plan.last:
                self.note(
                    "the profile was ended early: with this build of torch, a profile that reaches Kineto's limit can "
                    "end the process"
                )
                self._full_profile, self._profile = self._stop_profile(), None
        self._note_oddities(log)
        if unseen:
            self.note("a profiled step was left out: the step before it had left collectives in flight")
        spoilt = not self._is_unspoilt(log) or unseen
        if self._plan.part is Part.LONG:  # hundreds of steps, of which the times are wanted and no more
            log = replace(log, collectives=())
        step = MeasuredStep(
            plan=self._plan,
            start=self._start,
            end=end,
            log=log,
            profile_index=profile_index,
            counted=self._plan.counted and not spoilt,
            spoilt=spoilt,
            skipped=self._skipped,
            number=self.first_step + self._plan.offset,
            memory=None if before is None or after is None else (before, after),
        )
        self._steps.append(step)
        self._plan = None
        self._ranges.end()
        return step

    def _is_unspoilt(self, log: StepLog) -> bool:
        """Whether the step that just ended is like the others of its mode."""
        skipped, stuck = bool(self._skipped), self._gate.stuck is not None
        odd = log.compiled or log.captured or log.divergence is not None
        return not (skipped or odd or self._was_paused or stuck)

    def _note_oddities(self, log: StepLog) -> None:
        """Have the report say why the step that just ended does not count, or what else was odd about it."""
        assert self._plan is not None
        if self._skipped:
            return
        if log.compiled:
            self.note("a step in which torch.compile compiled was left out")
        elif log.captured:
            self.note("a step in which a CUDA graph was captured was left out")
        elif log.divergence is not None:
            self.note(f"a sequential step was left out: {log.divergence}")
        elif self._plan.counted and self._is_unspoilt(log):
            for group in log.foreign:
                self.note(
                    f"collectives on group {group!r} passed the gate unseen during measured steps (another thread's, "
                    f"or those of an operator itself); they are neither recorded nor serialised"
                )

    def skip_step(self, reason: str) -> None:
        """The open step trains nothing: it does not count."""
        self._skipped = reason

    def pause(self) -> None:
        """Let collectives that are no part of training pass unseen within the step. The step then does not count."""
        self._paused = self._was_paused = True
        self._gate.suspend()

    def resume(self) -> None:
        """End the pause. Does nothing if the step was given up meanwhile."""
        if self._paused:
            self._paused = False
            self._gate.resume()

    def steps_of(self, block: int) -> tuple[MeasuredStep, ...]:
        """The steps of a timed block that count."""
        return tuple([s for s in self._steps if s.counted and s.plan.part is Part.TIMED and s.plan.block == block])

    # -- the end

    def close(self, complete: bool) -> ClosedWindow:
        """Stop all instruments; nothing is recorded from here on.

        Args:
            complete: whether all steps of the schedule ran.
        """
        self._paused = False  # a pause that ends later resumes nothing
        self._ranges.end()
        self._gate.stop()
        self._end_meter()
        profile = self._full_profile or self._stop_profile()
        return ClosedWindow(
            number=self.number,
            first_step=self.first_step,
            steps=tuple(self._steps),
            complete=complete,
            problems=tuple(self._problems),
            opened_ns=self._opened_ns,
            wall_ms=(clocks.now() - self._opened_ns) / 1e6,  # what stopping the profiler takes is part of the cost
            clock=self._clock,
            meter=self._meter,
            profile=profile,
            missing_profile=self._missing_profile,
            sampled=self.sampled,
            rhythms=self.rhythms,
            compared_with=self.compared_with,
        )

    def discard(self) -> None:
        """Stop all instruments after an error of ours, whichever of them it was: nothing is kept.

        torch crashes when the interpreter ends while its profiler still runs.
        """
        self._paused = False
        for stop in (self._ranges.end, self._gate.stop, self._end_meter, self._stop_profile):
            with contextlib.suppress(Exception):
                stop()

    def _end_meter(self) -> None:
        if self._meter is not None:
            self._meter.end()

    def _start_profile(self) -> None:
        if serves_a_daemon():
            self._miss_profile("Kineto takes requests from a daemon (KINETO_USE_DAEMON), whose traces ours would empty")
            return
        stream = self._clock.compute_stream
        if stream is not None and not device.is_profiled(stream.device):
            self._miss_profile(f"the library does not read profiles of devices of type {stream.device.type!r} yet")
            return
        if self.on_device and record_bound.steps < FIRST_STEPS:
            self._miss_profile(
                "its steps launch so many kernels that a profile could reach Kineto's limit, which can end the process "
                "with this build of torch"
            )
            return
        if not Profile.available():
            self._miss_profile("another profiler was running in this process")
            return
        try:
            profile = Profile(on_cuda=stream is not None)
            profile.start()
        except Exception as error:  # builds of torch without CUPTI raise AssertionError; Kineto raises RuntimeError
            self._miss_profile(f"torch's profiler could not start ({type(error).__name__}: {error})")
            return
        self._profile = profile

    def _stop_profile(self) -> Profile | None:
        """Stop the profile. Returns None if there is none, or if it is of no use."""
        profile = self._profile
        if profile is None:
            return None
        try:
            if not profile.stop():
                self._miss_profile("another profiler was started in this process")
                return None
        except Exception as error:
            self._miss_profile(f"torch's profiler failed ({type(error).__name__}: {error})")
            return None
        if profile.truncated:
            if threads_hold_buffers(torch.version.cuda):
                self._miss_profile(
                    "the profiler's buffers were full before the last profiled step had ended; on CUDA 13 and later, "
                    "many process groups may do that to the first profile of a job, and to no other"
                )
            else:
                self._miss_profile("the profiler's buffers were full before the last profiled step had ended")
            return None
        return profile

    def _miss_profile(self, why: str) -> None:
        self._missing_profile = f"kernel times are missing: {why}"
        self.note(self._missing_profile)
