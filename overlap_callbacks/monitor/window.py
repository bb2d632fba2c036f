"""An open window: the instruments of its steps, and what they measured.

The training thread only leaves marks here; ``measure`` turns them into figures later, on a thread of our own.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from overlap_callbacks.analysis.aggregate import MAX_KERNELS
from overlap_callbacks.analysis.kernels.attribution import pair_times_of
from overlap_callbacks.analysis.kernels.by_dimension import dimension_times, dimensions_of_rows
from overlap_callbacks.analysis.kernels.table import KernelSums, KernelTable, kernel_times, profiled_block
from overlap_callbacks.analysis.kernels.timeline import step_timeline
from overlap_callbacks.analysis.power.segments import Segment
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import (
    CollectiveTime,
    DimensionTime,
    KernelTime,
    PairTime,
    ProfiledBlock,
    RankWindow,
    StepTimeline,
    TimedBlock,
)
from overlap_callbacks.gate.deadlock import CollectiveSequence
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.native import SwitchState
from overlap_callbacks.gate.step_log import ExpectedSequence, StepLog
from overlap_callbacks.instruments import clocks
from overlap_callbacks.instruments.power.meter import MeasuredPower, PowerMeter
from overlap_callbacks.instruments.profiler import Profile
from overlap_callbacks.monitor.schedule import Part, Plan, Schedule

# Stretches of communication that a trace of power keeps of each step: sensors tell no more than some anyway.
_MOST_IN_TRACE = 60
# Share of the usual number of collectives by which a step may differ and still be like the others.
_ODD = 0.25
# Longest that the measuring thread waits for the device to pass a mark.
_READY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class MeasuredStep:
    """The marks of one step that ran.

    Attributes:
        plan: what it was to do.
        start, end: its bounds.
        log: its collectives.
        profile_index: its index in the profile, -1 outside.
        counted: whether it counts: planned to, and nothing spoilt it.
        skipped: why it trained nothing; empty where it did.
    """

    plan: Plan
    start: clocks.Mark
    end: clocks.Mark
    log: StepLog
    profile_index: int
    counted: bool
    skipped: str = ""


@dataclass(frozen=True)
class _ProfileFigures:
    """What the profiled part of a window gives; nothing, where there was no profile."""

    blocks: tuple[ProfiledBlock, ...] = ()
    kernels: tuple[KernelTime, ...] = ()
    pairs: tuple[PairTime, ...] = ()
    dimensions: tuple[DimensionTime, ...] = ()
    pictures: tuple[StepTimeline, ...] = ()
    communication: tuple[tuple[int, int], ...] = ()  # when it was in flight, on the host's clock in nanoseconds


class Window:
    """One window on one rank.

    Args:
        number: of the window.
        first_step: the step at which it opens.
        gate: registered.
        native: a form of the framework's own, which then takes the gate's place in sequential steps.
        schedule: of the window, whose blocks may become longer than those of the monitor's schedule.
        meter: of power; None for none.
    """

    def __init__(
        self,
        number: int,
        first_step: int,
        gate: Gate,
        native: SwitchState,
        schedule: Schedule,
        meter: PowerMeter | None = None,
    ) -> None:
        self.number = number
        self.first_step = first_step
        self.schedule = schedule
        self.clock = clocks.StepClock()
        self.steps: list[MeasuredStep] = []
        self.problems: list[str] = []
        self.complete = False
        self.wall_ms = 0.0
        self.profile: Profile | None = None
        self.no_profile = ""  # why kernel times are missing
        self._gate = gate
        self._native = native
        self._meter = meter
        self._opened_ns = clocks.now()
        if meter is not None:
            meter.begin(self.clock.look)
        self._plan: Plan | None = None
        self._start: clocks.Mark = 0
        self._spoilt = False
        self._skipped = ""
        self._suspended = False
        self._profiling_refused = False
        self._profiled = 0

    @property
    def age_s(self) -> float:
        """Host time since the window opened."""
        return (clocks.now() - self._opened_ns) / 1e9

    def begin_step(self, plan: Plan, checked: CollectiveSequence | None) -> None:
        """Start the step's instruments and set its mode.

        Args:
            plan: of the step.
            checked: the sequence that passed the order check; needed in sequential mode.
        """
        self._plan = plan
        self._spoilt = False
        self._skipped = ""
        self._suspended = False
        if plan.part is Part.PROFILED and self.profile is None and not self._profiling_refused:
            self._start_profile()
        sequential = plan.mode is Mode.SEQUENTIAL
        self._native.set(sequential)
        # On the host a profile alone does not tell when a collective was complete: see ``Profile.end_step``.
        watch = self.profile is not None and self.clock.compute_stream is None
        # Every step of a window is recorded: what the gate costs the host is then the same in both modes, and cancels.
        self._gate.begin_step(
            sequential=sequential and self._native.form is None,
            expected=ExpectedSequence.of(checked) if checked is not None else None,
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
        log = self._gate.end_step()
        if self.profile is not None:
            self.profile.end_step(quiet=log.quiet)
            index = self._profiled
            self._profiled += 1
        counted = self._plan.counted and not self._spoilt and not self._skipped and self._gate.stuck is None
        if counted and log.compiled:
            counted = False
            self.note("a step in which torch.compile compiled was left out")
        if counted:
            for group in log.foreign:
                self.note(
                    f"another thread communicated on group {group!r} during measured steps; its collectives are "
                    f"neither recorded nor serialised"
                )
        if log.divergence is not None and not self._skipped:
            counted = False
            self.note(f"a sequential step was left out: {log.divergence}")
        step = MeasuredStep(self._plan, self._start, end, log, index, counted, self._skipped)
        self.steps.append(step)
        self._plan = None
        return step

    def _leave_out_odd_steps(self) -> None:
        """Have steps not count that issued far more or fewer collectives than most of the window's.

        Such a step (one with all micro-batches twice, because a loss scaler left out an update in between) says nothing
        of the others. A few collectives that a job's logging adds make no difference.
        """
        counted = [step for step in self.steps if step.counted]
        if not counted:
            return
        usual = float(np.median([len(step.log.collectives) for step in counted]))
        odd = [step for step in counted if abs(len(step.log.collectives) - usual) > _ODD * usual]
        if odd:
            self.note("steps that issued far more or fewer collectives than most of their window were left out")
            self.steps = [replace(step, counted=False) if step in odd else step for step in self.steps]

    def skip_step(self, reason: str) -> None:
        """The open step trains nothing: it does not count."""
        self._skipped = reason

    def suspend(self) -> None:
        """Let something that is no part of training run within the step, unseen: the step then does not count."""
        self._spoilt = True
        self._suspended = True
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
        self._leave_out_odd_steps()
        self._gate.stop()
        if self._meter is not None:
            self._meter.end()
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
        clocks.leave_captures_alone()
        steps = [s for s in self.steps if s.counted and s.plan.part is Part.TIMED and s.plan.block == block]
        times = tuple(clocks.elapsed_ms(s.start, s.end) for s in steps if self._await_mark(s.end))
        return TimedBlock(arm, block, times) if times else None

    def measure(self, rank: int, backend: str) -> RankWindow:
        """All figures of the window, once it is closed. Waits for the device to pass the window's last mark."""
        clocks.leave_captures_alone()
        profile = self._measure_profile(with_pictures=rank == 0)
        blocks = sorted({(s.plan.block, s.plan.arm) for s in self.steps if s.plan.part is Part.TIMED}, key=_by_block)
        timed = [block for number, arm in blocks if (block := self.measure_block(number, arm)) is not None]
        power = self._measure_power(profile.communication)
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
            power=power.figures,
            power_trace=power.trace if rank == 0 else None,
            power_elsewhere=self._meter is not None and self._meter.elsewhere,
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
        kernels: KernelTable = self.profile.kernels()
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
            pictures=tuple(picture for step in drawn if (picture := step_timeline(kernels, *step)) is not None),
            communication=self._communication_of(kernels) if with_pictures and self._meter is not None else (),
        )

    def _communication_of(self, kernels: KernelTable) -> tuple[tuple[int, int], ...]:
        """When communication was in flight in the profiled steps, on the host's clock."""
        found = []
        for step in self.steps:
            if step.profile_index < 0:
                continue
            picture = step_timeline(kernels, step.profile_index, step.plan.arm, most=_MOST_IN_TRACE)
            if picture is not None and self._await_mark(step.end):
                start_ns = sum(self.clock.host_bounds_ns(step.start)) // 2
                found += [(start_ns + round(1e6 * a), start_ns + round(1e6 * b)) for a, b in picture.communication]
        return tuple(found)

    def _measure_power(self, communication: Sequence[tuple[int, int]]) -> MeasuredPower:
        if self._meter is None:
            return MeasuredPower()
        if not all(self._await_mark(step.end) for step in self.steps):
            return MeasuredPower()
        timed = [s for s in self.steps if s.plan.part is Part.TIMED]
        segments = self._segments(timed, counted_only=True)
        if not segments and any(step.counted for step in timed):
            self.note("power is missing: when the device began and ended its steps is not known well enough")
        shown = self._segments([s for s in self.steps if s.plan.part is not Part.RECORDED])
        return self._meter.measure(segments, since_ns=self._opened_ns, shown=shown, communication=communication)

    def _segments(self, steps: Sequence[MeasuredStep], counted_only: bool = False) -> list[Segment]:
        """Stretches of time in one mode, a block each: or more, where something else went on within one.

        As the device's times are known between bounds only, each is as short as they allow.
        """
        found: list[Segment] = []
        longest_gap_ms = _longest_gap_ms(steps)

        def block_of(step: MeasuredStep) -> tuple[Part, int, Mode, bool]:
            return step.plan.part, step.plan.block, step.plan.arm, step.counted or not counted_only

        for (_, _, arm, counts), run in itertools.groupby(steps, block_of):
            for stretch in _without_gaps(list(run), longest_gap_ms) if counts else ():
                _, start_ns = self.clock.host_bounds_ns(stretch[0].start)
                end_ns, _ = self.clock.host_bounds_ns(stretch[-1].end)
                if end_ns > start_ns:
                    found.append(Segment(start_ns, end_ns, arm, len(stretch)))
        return found

    def _measure_dimensions(self, kernels: KernelTable, by_arm: dict[Mode, list[int]]) -> tuple[DimensionTime, ...]:
        issued = {s.profile_index: s.log.collectives for s in self.steps if s.profile_index >= 0}
        recorded = self._recorded()
        if recorded is None or not issued:
            return ()
        overlapped, sequential = by_arm.values()
        found = dimensions_of_rows(kernels, issued)
        return dimension_times(kernels, *found, overlapped, sequential, recorded.collectives)

    def _recorded(self) -> StepLog | None:
        return next((s.log for s in self.steps if s.plan.part is Part.RECORDED), None)

    def _measure_collectives(self) -> tuple[CollectiveTime, ...]:
        """Counts and bytes from the recorded step, isolated times from the sequential timed steps."""
        recorded = self._recorded()
        if recorded is None:
            return ()
        timed = [s.log for s in self.steps if s.counted and s.plan.part is Part.TIMED]
        isolated: dict[tuple[str, str], float] = defaultdict(float)
        for log in timed:
            for collective in log.collectives:
                start, end = collective.start, collective.end
                if start is not None and end is not None and self._await_mark(end):
                    isolated[collective.key] += clocks.elapsed_ms(start, end) / len(timed)
        rows: dict[tuple[str, str], list[int]] = {}
        groups = {}
        for collective in recorded.collectives:
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


def _gap_ms(before: MeasuredStep, after: MeasuredStep) -> float:
    return clocks.elapsed_ms(before.end, after.start)


def _longest_gap_ms(steps: Sequence[MeasuredStep]) -> float:
    """Longest time between two steps that still belongs to them: loading a batch does, an evaluation does not."""
    if len(steps) < 2:
        return 0.0
    typical = float(np.median([_gap_ms(before, after) for before, after in itertools.pairwise(steps)]))
    step_ms = float(np.median([clocks.elapsed_ms(step.start, step.end) for step in steps]))
    return typical + max(5.0, 0.1 * step_ms)


def _without_gaps(steps: list[MeasuredStep], longest_gap_ms: float) -> list[list[MeasuredStep]]:
    """The steps of a block, cut where something else took time between two of them."""
    stretches = [[steps[0]]]
    for before, after in itertools.pairwise(steps):
        if _gap_ms(before, after) > longest_gap_ms:
            stretches.append([])
        stretches[-1].append(after)
    return stretches


def _by_block(block: tuple[int, Mode]) -> int:
    return block[0]
