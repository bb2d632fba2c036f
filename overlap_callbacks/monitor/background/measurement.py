"""From the marks of a closed window to the figures of one rank.

Runs on the reporting thread, steps or seconds after the window: device times are read once the device has passed the
marks.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from overlap_callbacks.analysis import memory
from overlap_callbacks.analysis.power.phases import StepPhases
from overlap_callbacks.analysis.power.segments import Segment
from overlap_callbacks.analysis.results.memory import MemoryPeak
from overlap_callbacks.analysis.results.messages import NO_STAGE
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import RankWindow, TimedBlock
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments import clocks
from overlap_callbacks.instruments.memory import reading_of
from overlap_callbacks.instruments.power.meter import MeasuredPower
from overlap_callbacks.monitor.background.arrivals import timed_calls
from overlap_callbacks.monitor.background.collective_times import collective_times
from overlap_callbacks.monitor.background.experts import experts_of
from overlap_callbacks.monitor.background.let_pass import is_little, what_was_let_pass
from overlap_callbacks.monitor.background.messages import messages_of
from overlap_callbacks.monitor.background.profile_figures import profile_figures
from overlap_callbacks.monitor.schedule import Part
from overlap_callbacks.monitor.window import ClosedWindow, FinishedBlock, MeasuredStep

# A step is left out if its number of collectives differs from the usual one by more than this share.
_MAX_DEVIATION = 0.25
# Maximum time that we wait for the device to pass a mark.
_READY_TIMEOUT_S = 60.0


def measure(window: ClosedWindow, rank: int, backend: str) -> RankWindow:
    """All figures of a window on this rank. Waits for the device to pass the window's last mark, for a bounded time.

    Args:
        window: closed. Its profile can be read once, so a window can be measured once.
        rank: of this process. Rank 0 adds the timelines of two steps and a trace of power.
        backend: of the default process group.
    """
    started_s = time.thread_time()  # of this thread alone: while it waits for the device, it takes nothing from the job
    if window.steps:
        clocks.prepare_own_thread(clocks.device_of(window.steps[-1].end))
    measured = _Measurement(window).result(rank, backend)
    return msgspec.structs.replace(measured, report_cpu_ms=(time.thread_time() - started_s) * 1e3)


def measure_block(block: FinishedBlock) -> TimedBlock | None:
    """The step times of one timed block; None if none of its steps counted."""
    if block.steps:
        clocks.prepare_own_thread(clocks.device_of(block.steps[-1].end))
    return _timed_block(block.block, block.arm, [step for step in block.steps if await_mark(step.end)])


def _timed_block(block: int, arm: Mode, steps: Sequence[MeasuredStep]) -> TimedBlock | None:
    times_ms = tuple([clocks.elapsed_ms(step.start, step.end) for step in steps])
    return TimedBlock(arm, block, times_ms) if times_ms else None


def await_mark(mark: clocks.Mark) -> bool:
    """Wait for the device to pass a mark; False if it takes too long."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not clocks.is_ready(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def odd_steps(steps: Sequence[MeasuredStep]) -> set[int]:
    """Indices of the counted steps that issued far more or fewer collectives than the median step of their side.

    Such a step is not like the others: for example, it ran all micro-batches twice because a loss scaler skipped an
    update in between. A few more collectives, as a job's logging adds them, make no difference.

    What the measured threads issue decides, and not what others do beside them. But a communication hook may issue
    collectives where an earlier one ends (PowerSGD does). That is on the training thread if it has ended already, as
    in sequential steps, and else on a thread of the backend's, which nobody sees. So a step is odd only if the number
    of all threads together, which does not depend on that, is odd too.
    """
    odd: set[int] = set()
    for side in Mode:  # an arm may issue other collectives than the job as configured
        counted = {index: step.log for index, step in enumerate(steps) if step.counted and step.plan.arm is side}
        far = _far_from_median({index: len(log.collectives) for index, log in counted.items()})
        issued = {index: log.issued for index, log in counted.items() if log.issued is not None}
        odd |= far & _far_from_median(issued) if len(issued) == len(counted) else far
    return odd


def _far_from_median(numbers: Mapping[int, int]) -> set[int]:
    usual = float(np.median(list(numbers.values()))) if numbers else 0.0
    return {index for index, number in numbers.items() if abs(number - usual) > _MAX_DEVIATION * usual}


class _Measurement:
    """The measuring of one window: its steps, and the problems found on the way."""

    def __init__(self, window: ClosedWindow) -> None:
        self._window = window
        self._problems = list(window.problems)
        odd = odd_steps(window.steps)
        if odd:
            self._note("steps that issued far more or fewer collectives than most of their window were left out")
        self._steps = [
            replace(step, counted=False) if index in odd else step for index, step in enumerate(window.steps)
        ]

    def result(self, rank: int, backend: str) -> RankWindow:
        window = self._window
        profile = profile_figures(window, self._steps, self._recorded(), self._await_passed, with_pictures=rank == 0)
        for problem in profile.problems:
            self._note(problem)
        timed = self._timed_blocks()
        power = self._power(profile.phases)
        timed_sequential = [
            step.log for step in self._of(Part.TIMED) if step.counted and step.plan.mode is Mode.SEQUENTIAL
        ]
        collectives = collective_times(self._recorded(), timed_sequential, profile.kernels_ms, self._await_passed)
        arrivals = timed_calls(self._planned_sequential(), self._await_passed)
        let_pass = self._let_pass()
        counted = [step.log for step in self._of(Part.TIMED) if step.counted]
        messages = messages_of(self._recorded(), counted, rank, window.chunks)
        stage = NO_STAGE if messages is None else messages.stage
        return RankWindow(
            rank=rank,
            window=window.number,
            first_step=window.first_step,
            num_steps=len(self._steps),
            complete=window.complete,
            backend=backend,
            device=window.clock.device,
            wall_ms=window.wall_ms,
            timed=timed,
            profiled=profile.blocks,
            kernels=profile.kernels,
            pairs=profile.pairs,
            dimension_pairs=profile.dimension_pairs,
            dimensions=profile.dimensions,
            pictures=profile.pictures,
            collectives=collectives,
            power=power.figures,
            power_trace=power.trace if rank == 0 else None,
            power_elsewhere=window.meter is not None and window.meter.elsewhere,
            problems=tuple(self._problems),
            doubts=profile.doubts,
            num_sms=profile.num_sms,
            sm_loss=profile.sm_loss,
            memory=memory_peaks(self._steps),
            let_pass=let_pass,
            terms=window.terms,
            messages=messages,
            experts=experts_of(window.first_step, self._steps, window.sampled, rank, stage),
            arrivals=arrivals,
            race=window.race,
        )

    def _planned_sequential(self) -> list[tuple[int, StepLog | None]]:
        """The sequential steps that all ranks planned to time, with their places; None for one that does not count."""
        return [
            (place, step.log if step.counted else None)
            for place, step in enumerate(self._steps)
            if step.plan.part is Part.TIMED and step.plan.mode is Mode.SEQUENTIAL and step.plan.counted
        ]

    def _let_pass(self) -> tuple[str, ...]:
        """What sequential steps let pass, in words; a note where it is too little to matter."""
        sentences = what_was_let_pass(self._steps)
        if not is_little(self._steps):
            return sentences
        for sentence in sentences:
            self._note(sentence)
        return ()

    def _note(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.append(problem)

    def _await_passed(self, mark: clocks.Mark) -> bool:
        """Wait for the device to pass a mark. Returns False, and notes it, if that takes too long."""
        passed = await_mark(mark)
        if not passed:
            self._note(f"the device did not finish a step within {_READY_TIMEOUT_S:g} s: its time is missing")
        return passed

    def _of(self, part: Part) -> list[MeasuredStep]:
        return [step for step in self._steps if step.plan.part is part]

    def _timed_blocks(self) -> tuple[TimedBlock, ...]:
        by_block: dict[tuple[int, Mode], list[MeasuredStep]] = defaultdict(list)
        for step in self._of(Part.TIMED):
            if step.counted and self._await_passed(step.end):
                by_block[step.plan.block, step.plan.arm].append(step)
        blocks = [_timed_block(number, arm, steps) for (number, arm), steps in by_block.items()]
        return tuple([block for block in blocks if block is not None])

    # -- power

    def _power(self, phases: Sequence[StepPhases]) -> MeasuredPower:
        meter = self._window.meter
        if meter is None or not all(self._await_passed(step.end) for step in self._steps):
            return MeasuredPower()
        timed = self._of(Part.TIMED)
        segments = segments_of(timed, self._window.clock, counted_only=True)
        if not segments and any(step.counted for step in timed):
            self._note("power is missing: when the device began and ended its steps is not known well enough")
        shown = segments_of([s for s in self._steps if s.plan.part is not Part.RECORDED], self._window.clock)
        return meter.measure(segments, since_ns=self._window.opened_ns, shown=shown, phases=phases)

    # -- collectives

    def _recorded(self) -> StepLog | None:
        return next((step.log for step in self._of(Part.RECORDED)), None)


def memory_peaks(steps: Sequence[MeasuredStep]) -> tuple[MemoryPeak, ...]:
    """Bounds of the memory peak of each mode, over the steps that count and were read."""
    stepped = []
    for step in steps:
        if step.counted and step.memory is not None:
            before, after = map(reading_of, step.memory)
            if before is not None and after is not None:
                stepped.append(memory.SteppedMemory(step.plan.arm, before, after))
    return memory.peaks_by_mode(stepped)


def segments_of(steps: Sequence[MeasuredStep], clock: clocks.StepClock, counted_only: bool = False) -> list[Segment]:
    """Intervals of time in one mode: one for each block's counted steps and one for its warm-up.

    There are more of them if something else ran between two of its steps.

    The device's times are known between bounds only, so each interval is as short as the bounds allow.

    Args:
        steps: in order, all passed by the device.
        clock: which made their marks.
        counted_only: leave out steps that do not count.
    """
    segments: list[Segment] = []
    max_gap_ms = _max_gap_ms(steps)

    def block_of(step: MeasuredStep) -> tuple[Part, int, Mode, bool]:
        return step.plan.part, step.plan.block, step.plan.arm, step.counted

    for (part, _, arm, counted), run in itertools.groupby(steps, block_of):
        for stretch in _cut_at_gaps(list(run), max_gap_ms) if counted or not counted_only else ():
            _, start_ns = clock.host_bounds_ns(stretch[0].start)
            end_ns, _ = clock.host_bounds_ns(stretch[-1].end)
            if end_ns > start_ns:
                # By the device's own clock, back from the end: which of the steps a reading falls into.
                starts_ns = [end_ns - round(clocks.elapsed_ms(s.start, stretch[-1].end) * 1e6) for s in stretch]
                length_s = clocks.elapsed_ms(stretch[0].start, stretch[-1].end) / 1e3
                segments.append(
                    Segment(
                        start_ns,
                        end_ns,
                        arm,
                        len(stretch),
                        tuple(starts_ns),
                        length_s,
                        counted=counted,
                        profiled=part is Part.PROFILED,
                    )
                )
    return segments


def _gap_ms(before: MeasuredStep, after: MeasuredStep) -> float:
    return clocks.elapsed_ms(before.end, after.start)


def _max_gap_ms(steps: Sequence[MeasuredStep]) -> float:
    """Maximum time between two steps that still belongs to them: loading a batch does, an evaluation does not."""
    if len(steps) < 2:
        return 0.0
    typical_ms = float(np.median([_gap_ms(before, after) for before, after in itertools.pairwise(steps)]))
    step_ms = float(np.median([clocks.elapsed_ms(step.start, step.end) for step in steps]))
    return typical_ms + max(5.0, 0.1 * step_ms)


def _cut_at_gaps(steps: list[MeasuredStep], max_gap_ms: float) -> list[list[MeasuredStep]]:
    """The steps of a block, cut where something else took time between two of them."""
    stretches = [[steps[0]]]
    for before, after in itertools.pairwise(steps):
        if _gap_ms(before, after) > max_gap_ms:
            stretches.append([])
        stretches[-1].append(after)
    return stretches
