"""A window's marks: what the training thread records about each measured step.

Everything here runs on the training thread and only records. Once a window has closed, ``background/measurement.py``
computes its figures on another thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from overlap_callbacks.analysis.causal import LEVELS
from overlap_callbacks.analysis.results.arm import ComparedArm
from overlap_callbacks.analysis.results.causal import DelayedSet
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.race import RaceCheck
from overlap_callbacks.analysis.results.window import Rhythm
from overlap_callbacks.gate.arms import BaseArm, Sequential
from overlap_callbacks.gate.collectives import Collective
from overlap_callbacks.gate.delays import CallKey
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import ExpectedSequence, StepLog
from overlap_callbacks.gate.switches import SwitchState
from overlap_callbacks.instruments import clocks, device
from overlap_callbacks.instruments.device import MemoryReader, RawReading
from overlap_callbacks.instruments.other_profilers import serves_a_daemon
from overlap_callbacks.instruments.power.meter import PowerMeter
from overlap_callbacks.instruments.profiler import FIRST_STEPS, Profile, record_bound, threads_hold_buffers
from overlap_callbacks.monitor.schedule import Part, Plan
from overlap_callbacks.monitor.window_cost import WindowCost


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    plan: Plan
    start: clocks.Mark
    end: clocks.Mark
    log: StepLog
    # Index in the profile; -1 outside. Warm-up steps of CPU jobs stay outside if no collective was ever in flight at a
    # step's end: their operators would only make the profile more expensive.
    profile_index: int = -1
    counted: bool = True  # it was planned to count, and nothing spoilt it
    spoilt: bool = False
    skipped: str = ""  # why it trained nothing; empty if it trained
    memory: tuple[RawReading, RawReading] | None = None  # allocator counters at its start and end
    kind: int = 0  # kind of a counted step, set once its window has closed; 0 is the most common
    number: int = -1  # step number in the job
    ms: float | None = None  # step time, set once its window has closed and the device has passed its end


@dataclass(frozen=True)
class SampledStep:
    """A step between windows with its all-to-alls that have split sizes."""

    step: int
    calls: tuple[Collective, ...]


@dataclass(kw_only=True, eq=False)
class MeasuredWindow:
    """All marks of a window. It does not change after it has closed, so another thread may read it."""

    number: int
    first_step: int
    clock: clocks.StepClock
    meter: PowerMeter | None = None  # None if power is not measured
    compared_with: ComparedArm | None = None  # None for sequential steps
    tried: str = ""  # the arm that the window tries in one step; empty if the window is measured
    delayed: DelayedSet | None = None  # what the window delays, if it is a causal one
    delayed_keys: Mapping[CallKey, str] = field(default_factory=dict)  # of that, this rank's, with their names
    opened_ns: int = 0
    steps: list[MeasuredStep] = field(default_factory=list)  # the steps that ran, in order
    problems: list[str] = field(default_factory=list)
    complete: bool = False  # all steps of the schedule ran
    wall_ms: float = 0.0  # host time from opening to end
    profile: Profile | None = None  # stopped; None if no step was profiled
    missing_profile: str = ""  # why kernel times are missing; empty if they are not
    config_digest: str = ""  # of what must be the same on all ranks; see ``WindowConfig``
    cost: WindowCost | None = None  # None if the steps around it are not observed
    sampled: tuple[SampledStep, ...] = ()  # sampled steps since the previous window
    quick: bool = False  # one of those back to back, whose cost is outside the budget
    chunks: int = 1  # model chunks of an interleaved pipeline on this rank; 1 without one, or if unknown
    race: RaceCheck | None = None  # result of repeating a step after the window
    rhythms: tuple[Rhythm, ...] = ()  # of the job, as known to rank 0 when it planned the window

    def note(self, problem: str) -> None:
        """Add a problem to the report, once."""
        if problem not in self.problems:
            self.problems.append(problem)


# Prefix of step names in the user's own profiles.
PREFIX = "overlap_callbacks: "


class StepRanges:
    """Names the steps of windows in the user's own profiles, by ranges of ``record_function`` and of NVTX.

    NVTX ranges are started and ended, not pushed and popped: a step need not nest with the job's ranges.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._nvtx: Any = device.ranges() if enabled else None
        self._function: torch.profiler.record_function | None = None
        self._nvtx_range: Any = None

    def begin(self, plan: Plan, step: int) -> None:
        if not self._enabled:
            return
        self.end()
        name = range_name(plan, step)
        self._function = torch.profiler.record_function(name)
        self._function.__enter__()
        if self._nvtx is not None:
            try:
                self._nvtx_range = self._nvtx.range_start(name)
            except RuntimeError:  # this build of torch lacks NVTX
                self._nvtx = None

    def end(self) -> None:
        """End the step's range, also if the step is abandoned; does nothing if none is open."""
        function, self._function = self._function, None
        if function is not None:
            function.__exit__(None, None, None)
        opened, self._nvtx_range = self._nvtx_range, None
        if opened is not None and self._nvtx is not None:
            self._nvtx.range_end(opened)


def range_name(plan: Plan, step: int) -> str:
    """Name of a step, e.g. ``overlap_callbacks: sequential step 41 of window 0, timed``."""
    side = "other arm's" if plan.turned and plan.mode is not Mode.SEQUENTIAL else plan.mode.value
    warm_up = ", warm-up" if not plan.counted and plan.block >= 0 else ""
    return f"{PREFIX}{side} step {step} of window {plan.window}, {plan.part.value}{warm_up}"


class Window(MeasuredWindow):
    """A window on one rank while it is open: the instruments of its steps. The gate is registered.

    ``switch`` is turned by the window's arm, and makes steps sequential instead of the gate. ``ranges``, if given, name
    its steps in the user's profiles.
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
        super().__init__(
            number=number,
            first_step=first_step,
            clock=clocks.StepClock(),
            meter=meter,
            opened_ns=clocks.now(),
        )
        self.compare_with(arm or Sequential())
        self._gate = gate
        self._switch = switch
        self._ranges = StepRanges(enabled=False) if ranges is None else ranges
        self._profile: Profile | None = None  # the running profile
        self._all_quiet: bool | None = None  # whether all profiled steps so far were quiet; None before the first
        self._unseen = False  # the last step left collectives in flight that the profile lacks
        self._memory = MemoryReader(self.clock.compute_stream)
        self._memory_before: RawReading | None = None
        if meter is not None:
            meter.begin(self.clock.poll)
        # Of the open step:
        self._plan: Plan | None = None
        self._start: clocks.Mark = 0
        self._paused = False  # within a pause
        self._was_paused = False
        self._skipped = ""

    def compare_with(self, arm: BaseArm) -> None:
        """Set the window's arm, before its first step that depends on it."""
        if not isinstance(arm, Sequential):
            self.compared_with = arm.facts

    @property
    def age_s(self) -> float:
        """Host time since the window opened."""
        return (clocks.now() - self.opened_ns) / 1e9

    @property
    def on_device(self) -> bool:
        """Whether steps are timed on a device."""
        return self.clock.compute_stream is not None

    # -- a step

    def begin_step(self, plan: Plan, granted: ExpectedSequence | None) -> None:
        """Start the step's instruments and set its mode. Sequential mode needs ``granted``, from the order check."""
        self._plan = plan
        self._ranges.begin(plan, self.first_step + plan.offset)
        self._paused = self._was_paused = False
        self._skipped = ""
        may_profile = self._profile is None and self.profile is None and not self.missing_profile
        if plan.part is Part.PROFILED and may_profile:
            self._start_profile()
        self._memory_before = self._memory.read()  # outside the step's marks
        sequential = plan.mode is Mode.SEQUENTIAL
        self._switch.turn(on=sequential or plan.turned)
        # On the host the profile alone does not show when a collective was complete; see ``Profile.end_step``.
        watch = self._profile is not None and self.clock.compute_stream is None
        # Every step of a window is recorded, so that the gate's cost on the host is the same in both modes, and
        # cancels.
        self._gate.begin_step(
            sequential=sequential and self._switch.form is None,
            expected=granted,
            compute_stream=self.clock.compute_stream,
            watch=watch,
            named=plan.part is Part.RECORDED,
            delays_ms=self._delays_ms(plan),
        )
        if self._profile is not None:
            self._profile.begin_step(record=plan.counted or not self._all_quiet)
        self._start = self.clock.mark()

    def _delays_ms(self, plan: Plan) -> dict[CallKey, float] | None:
        if self.delayed is None or plan.part is not Part.DELAYED:
            return None
        delay_ms = self.delayed.delay_ms * plan.level / (LEVELS - 1)
        return dict.fromkeys(self.delayed_keys, delay_ms)

    def end_step(self) -> MeasuredStep:
        """Stop the step's instruments and keep its marks."""
        assert self._plan is not None
        end = self.clock.mark()
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
                    "end the process [OC345]"
                )
                self._stop_profile()
        spoilt = self._is_spoilt(log) or unseen
        if unseen:
            self.note("a profiled step was left out: the step before it had left collectives in flight [OC346]")
        if self._plan.part is Part.LONG:  # hundreds of steps, of which only the times are needed
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
        self.steps.append(step)
        self._plan = None
        self._ranges.end()
        return step

    def _is_spoilt(self, log: StepLog) -> bool:
        """Whether the step that just ended is unlike others of its mode; adds what was odd to the report."""
        assert self._plan is not None
        if self._skipped:
            return True
        if log.compiled:
            self.note("a step in which torch.compile compiled was left out [OC347]")
        elif log.captured:
            self.note("a step in which a CUDA graph was captured was left out [OC348]")
        elif log.divergence is not None:
            self.note(f"a sequential step was left out: {log.divergence} [OC349]")
        odd = log.compiled or log.captured or log.divergence is not None
        if odd or self._was_paused or self._gate.stuck is not None:
            return True
        for group in log.foreign if self._plan.counted else ():
            self.note(
                f"collectives on group {group!r} passed the gate unseen during measured steps (another thread's, or "
                f"those of an operator itself); they are neither recorded nor serialised [OC350]"
            )
        return False

    def skip_step(self, reason: str) -> None:
        """The open step trains nothing, so it does not count."""
        self._skipped = reason

    def pause(self) -> None:
        """Ignore collectives that are not part of training, within the step. The step then does not count."""
        self._paused = self._was_paused = True
        self._gate.suspend()

    def resume(self) -> None:
        """End the pause. Does nothing if the step was abandoned meanwhile."""
        if self._paused:
            self._paused = False
            self._gate.resume()

    def steps_of(self, block: int) -> tuple[MeasuredStep, ...]:
        """The counted steps of a timed block."""
        return tuple([s for s in self.steps if s.counted and s.plan.part is Part.TIMED and s.plan.block == block])

    # -- the end

    def close(self, complete: bool) -> None:
        """Stop all instruments; nothing is recorded after this."""
        self._paused = False  # resume() after this does nothing
        self._ranges.end()
        self._gate.stop()
        self._end_meter()
        self._stop_profile(wait=complete)
        self.complete = complete and self._gate.stuck is None  # a device's streams may be released late
        self.wall_ms = (clocks.now() - self.opened_ns) / 1e6  # stopping the profiler is part of the cost

    def discard(self) -> None:
        """Stop all instruments after an error: torch crashes if the interpreter ends while its profiler runs."""
        self._paused = False
        for stop in (self._ranges.end, self._gate.stop, self._end_meter, lambda: self._stop_profile(wait=False)):
            with contextlib.suppress(Exception):
                stop()

    def _end_meter(self) -> None:
        if self.meter is not None:
            self.meter.end()

    def _start_profile(self) -> None:
        if serves_a_daemon():
            self._miss_profile(
                "Kineto takes requests from a daemon (KINETO_USE_DAEMON), whose traces ours would empty [OC351]"
            )
            return
        stream = self.clock.compute_stream
        if stream is not None and not device.is_profiled(stream.device):
            self._miss_profile(
                f"the library does not read profiles of devices of type {stream.device.type!r} yet [OC352]"
            )
            return
        if self.on_device and record_bound.steps < FIRST_STEPS:
            self._miss_profile(
                "its steps launch so many kernels that a profile could reach Kineto's limit, which can end the process "
                "with this build of torch [OC353]"
            )
            return
        if not Profile.available():
            self._miss_profile("another profiler was running in this process [OC354]")
            return
        try:
            profile = Profile(on_cuda=stream is not None)
            profile.start()
        except Exception as error:  # builds of torch without CUPTI raise AssertionError; Kineto raises RuntimeError
            self._miss_profile(f"torch's profiler could not start ({type(error).__name__}: {error}) [OC356]")
            return
        self._profile = profile

    def _stop_profile(self, *, wait: bool = True) -> None:
        """Stop a running profile, and keep it if it is usable. ``wait`` as in ``Profile.stop``."""
        profile = self._profile
        if profile is None:
            return
        try:
            stopped = profile.stop(wait=wait)
        except Exception as error:
            self._profile = None
            self._miss_profile(f"torch's profiler failed ({type(error).__name__}: {error}) [OC357]")
            return
        self._profile = None  # only now: if a signal handler raises in ``stop``, ``discard`` must stop it again
        if not stopped:
            self._miss_profile("another profiler was started in this process [OC355]")
            return
        if not profile.truncated:
            self.profile = profile
            return
        why = ""
        if threads_hold_buffers(torch.version.cuda):
            why = (
                "; on CUDA 13 and later, many process groups may do that to the first profile of a job, and to no other"
            )
        self._miss_profile(f"the profiler's buffers were full before the last profiled step had ended{why} [OC358]")

    def _miss_profile(self, why: str) -> None:
        self.missing_profile = f"kernel times are missing: {why}"
        self.note(self.missing_profile)
