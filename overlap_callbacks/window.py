"""An open window: the instruments of its steps, and what they measured.

The training thread only leaves marks here; ``measure`` turns them into figures later, on a thread of our own.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from overlap_callbacks import clocks
from overlap_callbacks.attribution import Calls, Side, match, pair_times
from overlap_callbacks.by_dimension import dimension_times, dimensions_of_rows
from overlap_callbacks.gate import Gate, StepLog
from overlap_callbacks.kernels import Indices, Kernels, KernelSums, kernel_times, profiled_block
from overlap_callbacks.metrics import MAX_KERNELS
from overlap_callbacks.native import NativeSwitch
from overlap_callbacks.order import IssueOrder
from overlap_callbacks.pictures import step_picture
from overlap_callbacks.profiling import Profile
from overlap_callbacks.samples import (
    CollectiveTime,
    DimensionTime,
    KernelTime,
    PairTime,
    ProfiledBlock,
    RankWindow,
    StepPicture,
    TimedBlock,
)
from overlap_callbacks.schedule import Mode, Part, Plan

# Longest that the measuring thread waits for the device to pass a mark.
_READY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class MeasuredStep:
    """The marks of one step that ran.

    Attributes:
        plan: what it was to do.
        start, end: its bounds.
        log: its collectives, where they were recorded.
        profile_index: its index in the profile, -1 outside.
        counted: whether it counts: planned to, and nothing spoilt it.
    """

    plan: Plan
    start: clocks.Mark
    end: clocks.Mark
    log: StepLog | None
    profile_index: int
    counted: bool


@dataclass(frozen=True)
class _ProfileFigures:
    """What the profiled part of a window gives; nothing, where there was no profile."""

    blocks: tuple[ProfiledBlock, ...] = ()
    kernels: tuple[KernelTime, ...] = ()
    pairs: tuple[PairTime, ...] = ()
    dimensions: tuple[DimensionTime, ...] = ()
    pictures: tuple[StepPicture, ...] = ()


class Window:
    """One window on one rank.

    Args:
        number: of the window.
        first_step: the step at which it opens.
        gate: registered.
        native: a form of the framework's own, which then takes the gate's place in sequential steps.
    """

    def __init__(self, number: int, first_step: int, gate: Gate, native: NativeSwitch) -> None:
        self.number = number
        self.first_step = first_step
        self.clock = clocks.StepClock()
        self.steps: list[MeasuredStep] = []
        self.problems: list[str] = []
        self.complete = False
        self.wall_ms = 0.0
        self.profile: Profile | None = None
        self.no_profile = ""  # why kernel times are missing
        self._gate = gate
        self._native = native
        self._opened_ns = clocks.now()
        self._plan: Plan | None = None
        self._start: clocks.Mark = 0
        self._spoilt = False
        self._recording = False
        self._suspended = False
        self._profiling_refused = False
        self._profiled = 0

    def begin_step(self, plan: Plan, checked: IssueOrder | None) -> None:
        """Start the step's instruments and set its mode.

        Args:
            plan: of the step.
            checked: the sequence that passed the order check; needed in sequential mode.
        """
        self._plan = plan
        self._spoilt = False
        self._suspended = False
        if plan.part is Part.PROFILED and self.profile is None and not self._profiling_refused:
            self._start_profile()
        sequential = plan.mode is Mode.SEQUENTIAL
        self._native.set(sequential)
        # On the host a profile alone does not tell when a collective was complete: see ``Profile.end_step``.
        watch = self.profile is not None and self.clock.compute_stream is None
        # Profiled steps are recorded too: the profile does not tell a kernel's process group.
        self._recording = sequential or plan.part is Part.RECORDED or self.profile is not None
        if self._recording:
            self._gate.begin_step(
                sequential=sequential and self._native.form is None,
                checked=checked.keys if checked is not None else (),
                single_group=checked.single_group if checked is not None else None,
                compute_stream=self.clock.compute_stream,
                watch=watch,
            )
        if self.profile is not None:
            self.profile.begin_step()
        self._start = self.clock.mark()

    def end_step(self) -> MeasuredStep:
        """Stop the step's instruments."""
        assert self._plan is not None
        end = self.clock.mark()
        index = -1
        log = self._gate.end_step() if self._recording else None
        if self.profile is not None:
            self.profile.end_step(quiet=log is not None and log.quiet)
            index = self._profiled
            self._profiled += 1
        counted = self._plan.counted and not self._spoilt and self._gate.stuck is None
        if log is not None and log.divergence is not None:
            counted = False
            self.note(f"a sequential step was left out: {log.divergence}")
        step = MeasuredStep(self._plan, self._start, end, log, index, counted)
        self.steps.append(step)
        self._plan = None
        return step

    def suspend(self) -> None:
        """Let something that is no part of training run within the step, unseen: the step then does not count."""
        self._spoilt = True
        self._suspended = self._recording
        if self._recording:
            self._gate.suspend()

    def resume(self) -> None:
        if self._suspended:
            self._suspended = False
            self._gate.resume()

    def note(self, problem: str) -> None:
        """Say in the report what went wrong, once."""
        if problem not in self.problems:
            self.problems.append(problem)

    def close(self, complete: bool) -> None:
        """Stop all instruments; nothing is measured from here on."""
        self._suspended = False  # a pause that ends later resumes nothing
        self._gate.stop()
        self.wall_ms = (clocks.now() - self._opened_ns) / 1e6
        self.complete = complete
        if self.profile is not None:
            if not self.profile.stop():
                self.profile = None
                self._miss_profile("another profiler was started in this process")
            self.wall_ms = (clocks.now() - self._opened_ns) / 1e6

    def _miss_profile(self, why: str) -> None:
        self.no_profile = f"kernel times are missing: {why}"
        self.note(self.no_profile)

    def _start_profile(self) -> None:
        if not Profile.available():
            self._profiling_refused = True
            self._miss_profile("another profiler was running in this process")
            return
        self.profile = Profile(on_cuda=self.clock.compute_stream is not None)
        self.profile.start()

    # -- on the measuring thread

    def measure_block(self, block: int, arm: Mode) -> TimedBlock | None:
        """The times of one timed block; None where none of its steps counted."""
        steps = [s for s in self.steps if s.counted and s.plan.part is Part.TIMED and s.plan.block == block]
        times = tuple(clocks.elapsed_ms(s.start, s.end) for s in steps if self._await_mark(s.end))
        return TimedBlock(arm, block, times) if times else None

    def measure(self, rank: int, backend: str) -> RankWindow:
        """All figures of the window, once it is closed. Waits for the device to pass the window's last mark."""
        profile = self._measure_profile(with_pictures=rank == 0)
        blocks = sorted({(s.plan.block, s.plan.arm) for s in self.steps if s.plan.part is Part.TIMED}, key=_by_block)
        timed = [block for number, arm in blocks if (block := self.measure_block(number, arm)) is not None]
        return RankWindow(
            rank=rank,
            window=self.number,
            first_step=self.first_step,
            num_steps=len(self.steps),
            complete=self.complete,
            backend=backend,
            device=self.clock.device,
            wall_ms=self.wall_ms,
            timed=tuple(timed),
            profiled=profile.blocks,
            kernels=profile.kernels,
            pairs=profile.pairs,
            dimensions=profile.dimensions,
            pictures=profile.pictures,
            collectives=self._measure_collectives(),
            problems=tuple(self.problems),
        )

    def _await_mark(self, mark: clocks.Mark) -> bool:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not clocks.is_ready(mark):
            if time.monotonic() > deadline:
                self.note(f"the device did not finish a step within {_READY_TIMEOUT_S:g} s: its time is missing")
                return False
            time.sleep(0.005)
        return True

    def _measure_profile(self, with_pictures: bool) -> _ProfileFigures:
        if self.profile is None:
            return _ProfileFigures()
        kernels: Kernels = self.profile.kernels()
        self.profile = None
        counted = [s for s in self.steps if s.profile_index >= 0 and s.counted]
        if not counted:
            return _ProfileFigures()
        by_block: dict[tuple[int, Mode], list[int]] = defaultdict(list)
        by_arm: dict[Mode, list[int]] = {Mode.OVERLAPPED: [], Mode.SEQUENTIAL: []}
        for step in counted:
            by_block[step.plan.block, step.plan.arm].append(step.profile_index)
            by_arm[step.plan.arm].append(step.profile_index)
        sums = KernelSums(kernels)
        blocks = tuple(
            profiled_block(arm, block, sums, indices)
            for (block, arm), indices in sorted(by_block.items(), key=lambda item: _by_block(item[0]))
        )
        overlapped, sequential = (np.array(by_arm[mode], dtype=np.int64) for mode in by_arm)
        drawn = [(indices[0], arm) for arm, indices in by_arm.items() if indices and with_pictures]
        return _ProfileFigures(
            blocks=blocks,
            kernels=kernel_times(kernels, overlapped, sequential, most=MAX_KERNELS),
            pairs=pair_times_of(kernels, overlapped, sequential),
            dimensions=self._measure_dimensions(kernels, by_arm),
            pictures=tuple(picture for step in drawn if (picture := step_picture(kernels, *step)) is not None),
        )

    def _measure_dimensions(self, kernels: Kernels, by_arm: dict[Mode, list[int]]) -> tuple[DimensionTime, ...]:
        issued = {s.profile_index: s.log.collectives for s in self.steps if s.profile_index >= 0 and s.log is not None}
        recorded = self._recorded()
        if recorded is None or not issued:
            return ()
        overlapped, sequential = by_arm.values()
        found = dimensions_of_rows(kernels, issued)
        return dimension_times(kernels, *found, overlapped, sequential, recorded.collectives)

    def _recorded(self) -> StepLog | None:
        return next((s.log for s in self.steps if s.plan.part is Part.RECORDED and s.log is not None), None)

    def _measure_collectives(self) -> tuple[CollectiveTime, ...]:
        """Counts and bytes from the recorded step, isolated times from the sequential timed steps."""
        recorded = self._recorded()
        if recorded is None:
            return ()
        timed = [s.log for s in self.steps if s.counted and s.plan.part is Part.TIMED and s.log is not None]
        isolated: dict[tuple[str, str], float] = defaultdict(float)
        for log in timed:
            for collective in log.own:
                start, end = collective.start, collective.end
                if start is not None and end is not None and self._await_mark(end):
                    isolated[collective.key] += clocks.elapsed_ms(start, end) / len(timed)
        rows: dict[tuple[str, str], list[int]] = {}
        groups = {}
        for collective in recorded.own:
            row = rows.setdefault(collective.key, [0, 0, 0])
            row[0] += 1
            row[1] += collective.bytes_in
            row[2] += collective.bytes_out
            groups[collective.key] = collective.group
        return tuple(
            CollectiveTime(
                operator=operator,
                group=groups[operator, name].label,
                group_size=len(groups[operator, name].ranks),
                dimension=groups[operator, name].dimension,
                backend=groups[operator, name].backend,
                messages=messages,
                bytes_in=bytes_in,
                bytes_out=bytes_out,
                isolated_ms=isolated.get((operator, name)),
            )
            for (operator, name), (messages, bytes_in, bytes_out) in rows.items()
        )


def pair_times_of(kernels: Kernels, overlapped: Indices, sequential: Indices) -> tuple[PairTime, ...]:
    """What kernels lose beside each other in the overlapped steps, against the same in the sequential ones."""
    if not len(overlapped) or not len(sequential):
        return ()
    calls = Calls.of(kernels)
    ov, seq = (Side(calls, np.isin(calls.step, steps), len(steps)) for steps in (overlapped, sequential))
    return pair_times(ov, seq, match(calls, ov.wanted, calls, seq.wanted).alone_ns)


def _by_block(block: tuple[int, Mode]) -> int:
    return block[0]
