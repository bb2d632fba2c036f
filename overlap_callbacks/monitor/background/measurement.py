"""Computes one rank's figures from the marks of a closed window, on the reporting thread, seconds after the window."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import msgspec
import numpy as np

from overlap_callbacks.analysis import memory
from overlap_callbacks.analysis.kernels.by_collective import CollectiveKey
from overlap_callbacks.analysis.measuring_cost import Kind, Stretch
from overlap_callbacks.analysis.outliers import LeftOut, far_longer, stalls_in_words
from overlap_callbacks.analysis.power.phases import StepPhases
from overlap_callbacks.analysis.power.readings import Segment
from overlap_callbacks.analysis.results.messages import NO_STAGE
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.settled import StepSeries
from overlap_callbacks.analysis.results.window import CollectiveTime, MemoryPeak, RankWindow, TimedBlock
from overlap_callbacks.analysis.rhythms import rhythm_note
from overlap_callbacks.analysis.sums import grouped
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments import clocks
from overlap_callbacks.instruments.device import reading_of
from overlap_callbacks.instruments.power.meter import MeasuredPower
from overlap_callbacks.monitor.background.calls import (
    collective_times,
    experts_of,
    is_negligible,
    messages_of,
    timed_calls,
    unserialised_notes,
)
from overlap_callbacks.monitor.background.kinds import kinds_of, with_kinds_by_kernels
from overlap_callbacks.monitor.background.profile_figures import ProfileFigures, profile_figures, read_kernels
from overlap_callbacks.monitor.schedule import Part
from overlap_callbacks.monitor.window import MeasuredStep, MeasuredWindow

# Maximum wait for the device to pass a mark.
_READY_TIMEOUT_S = 60.0
# The overlapped steps around the timed part are grouped into stretches about as long as its blocks.
_STEPS_OF_STRETCH = 4
# A step longer than this many medians of its kind contains something else, e.g. an evaluation here or on another rank.
_MAX_MEDIANS = 3.0
# Upper limits of clock drift, as a share of a block, and of the error of a bound.
_CLOCK_DRIFT, _CLOCK_ERROR_NS = 0.01, 1e6


def measure(window: MeasuredWindow, rank: int, backend: str) -> RankWindow:
    """All figures of a closed window on this rank. Waits, for a bounded time, for the device to pass its last mark.

    Works once per window, because the profile can be read only once. Rank 0 adds the timelines of two steps and a power
    trace. ``backend``: of the default process group.
    """
    started_s = time.thread_time()  # CPU time of this thread: waiting for the device costs the job nothing
    if window.steps:
        clocks.prepare_own_thread(clocks.device_of(window.steps[-1].end))
    measured = _Measurement(window).result(rank, backend)
    return msgspec.structs.replace(measured, report_cpu_ms=(time.thread_time() - started_s) * 1e3)


def measure_block(steps: Sequence[MeasuredStep]) -> TimedBlock | None:
    """The step times of one timed block (at least one); None if the device passes none of its steps in time."""
    clocks.prepare_own_thread(clocks.device_of(steps[-1].end))
    passed = [step for step in with_times(steps) if step.ms is not None]
    return _timed_block(passed) if passed else None


def _timed_block(steps: Sequence[MeasuredStep], *, with_kinds: bool = False) -> TimedBlock:
    plan = steps[0].plan
    return TimedBlock(
        plan.arm,
        plan.block,
        tuple([step.ms for step in steps if step.ms is not None]),
        tuple([step.number for step in steps]),
        tuple([step.kind for step in steps]) if with_kinds else (),
    )


def with_times(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """The steps in order, with their times. Waits for each for a bounded time; a step that takes longer has none."""
    return [
        replace(step, ms=clocks.elapsed_ms(step.start, step.end)) if await_mark(step.end) else step for step in steps
    ]


def same_order(steps: Sequence[MeasuredStep]) -> bool | None:
    """Whether steps with the window's arm issued the collectives of steps as configured, in the same order.

    False if the gate did not see all of them; None if the arm was not turned.
    """
    sides: dict[bool, set[object]] = {False: set(), True: set()}
    for step in steps:
        log = step.log
        if step.skipped or not log.is_whole or step.plan.part is Part.LONG:
            continue
        if log.foreign or not log.collectives or (log.issued or 0) > len(log.collectives):
            return False
        # Uneven all-to-alls have other sizes in each step.
        sizes = [None if c.splits else (c.bytes_in, c.bytes_out, c.dtype) for c in log.collectives]
        sides[step.plan.turned].add((log.signature, log.micro_batches, *sizes))
    return sides[True] <= sides[False] if sides[True] else None


def trial_extra_s(window: MeasuredWindow) -> float | None:
    """How much longer than those before it the one step with the arm took, of a trial; None if not known."""
    if not window.complete:
        return None
    clocks.prepare_own_thread(clocks.device_of(window.steps[-1].end))
    *own, turned = with_times(window.steps)
    own_ms = [step.ms for step in own if step.ms is not None and not step.spoilt]
    if turned.ms is None or turned.spoilt or not own_ms:
        return None
    return (turned.ms - fmean(own_ms)) / 1e3


def await_mark(mark: clocks.Mark) -> bool:
    """Wait for the device to pass a mark; False if it takes too long."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not clocks.is_ready(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class _Measurement:
    """One window being measured: its steps, and the problems found so far."""

    def __init__(self, window: MeasuredWindow) -> None:
        self._window = window
        self._problems = list(window.problems)
        steps = with_times(window.steps)
        if any(step.ms is None for step in steps):
            self._note(f"the device did not finish a step within {_READY_TIMEOUT_S:g} s: its time is missing [OC341]")
        self._long = [step for step in steps if step.plan.part is Part.LONG]
        steps = [step for step in steps if step.plan.part is not Part.LONG]
        self._kinds = kinds_of(steps)
        for note in self._kinds.notes:
            self._note(note)
        self._steps = [
            replace(
                step,
                counted=step.counted and index not in self._kinds.left_out,
                kind=self._kinds.of_steps.get(index, 0),
            )
            for index, step in enumerate(steps)
        ]
        self._has_several_kinds = any(step.kind for step in self._steps)
        self._left_out: Counter[Mode] = Counter()

    def result(self, rank: int, backend: str) -> RankWindow:
        window = self._window
        for rhythm in window.rhythms:
            self._note(rhythm_note(rhythm))
        kernels, problems = read_kernels(window)
        if kernels is not None:  # before stalls are removed: a step that simply does more work is not a stall
            self._steps, problems = with_kinds_by_kernels(kernels, self._steps)
        self._leave_out_stalls()
        own = RankWindow(
            rank=rank,
            window=window.number,
            first_step=window.first_step,
            num_steps=window.steps[-1].plan.offset + 1 if window.steps else 0,
            complete=window.complete,
            backend=backend,
            device=window.clock.device,
            wall_ms=window.wall_ms,
            power_elsewhere=window.meter is not None and window.meter.elsewhere,
            memory=memory_peaks(self._steps),
            terms=window.config_digest,
            arrivals=timed_calls(self._planned_sequential()),
            race=window.race,
            rhythms=window.rhythms,
            left_out=(self._left_out[Mode.OVERLAPPED], self._left_out[Mode.SEQUENTIAL]),
            series=self._series() if rank == 0 else None,
            same_order=same_order(self._steps),
        )
        recorded = self._recorded()
        profile = ProfileFigures(own)
        if kernels is not None:
            profile = profile_figures(window, kernels, self._steps, recorded, own)
        for problem in (*problems, *profile.problems):
            self._note(problem)
        timed = self._timed_blocks()
        for note in self._kinds.costs(
            [(kind, block.mode, ms) for block in timed for kind, ms in zip(block.kinds, block.step_ms, strict=False)]
        ):
            self._note(note)
        power = self._power(profile.phases)
        messages = messages_of(recorded, [step.log for step in self._counted()], rank, window.chunks)
        return msgspec.structs.replace(
            profile.own,
            timed=timed,
            collectives=self._collectives(recorded, profile.kernels_ms),
            let_pass=self._unserialised(),
            messages=messages,
            experts=experts_of(self._steps, window.sampled, rank, NO_STAGE if messages is None else messages.stage),
            power=power.figures,
            power_trace=power.trace if rank == 0 else None,
            problems=tuple(self._problems),
        )

    def _leave_out_stalls(self) -> None:
        """Exclude counted steps that took far longer than others of their mode; see ``analysis.outliers``."""
        counted, found = self._far_longer(self._long, Part.LONG)
        for index, is_far in zip(counted, found.far, strict=True):
            if is_far and not found.kept:
                self._long[index] = replace(self._long[index], counted=False)
        for part, what in ((Part.TIMED, "step"), (Part.PROFILED, "profiled step")):
            counted, found = self._far_longer(self._steps, part)
            far: dict[Mode, list[int]] = {mode: [] for mode in Mode}
            for (index, step), is_far in zip(counted.items(), found.far, strict=True):
                if is_far:
                    far[step.plan.arm].append(step.number)
                    if not found.kept:
                        self._steps[index] = replace(step, counted=False)
                        self._left_out[step.plan.arm] += 1
            if found.far.any():
                self._note(stalls_in_words(far[Mode.OVERLAPPED], far[Mode.SEQUENTIAL], kept=found.kept, what=what))

    def _far_longer(self, steps: Sequence[MeasuredStep], part: Part) -> tuple[dict[int, MeasuredStep], LeftOut]:
        """The counted steps of a part by position, and those that took far longer than others of their kind."""
        counted = {
            index: step
            for index, step in enumerate(steps)
            if step.counted and step.plan.part is part and step.ms is not None
        }
        numbers = [step.number for step in counted.values()]
        hits = [rhythm.hits(numbers) for rhythm in self._window.rhythms]
        like = [
            (step.plan.arm, step.kind, tuple([bool(hit[place]) for hit in hits]))
            for place, step in enumerate(counted.values())
        ]
        times_ms = [step.ms for step in counted.values() if step.ms is not None]
        return counted, far_longer(times_ms, like, [step.plan.arm is Mode.SEQUENTIAL for step in counted.values()])

    def _note(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.append(problem)

    def _of(self, part: Part) -> list[MeasuredStep]:
        return [step for step in self._steps if step.plan.part is part]

    def _counted(self) -> list[MeasuredStep]:
        """The counted steps of the timed part."""
        return [step for step in self._of(Part.TIMED) if step.counted]

    def _timed_blocks(self) -> tuple[TimedBlock, ...]:
        timed = [step for step in self._counted() if step.ms is not None]
        by_block = grouped(timed, lambda step: (step.plan.block, step.plan.arm))
        return tuple([_timed_block(steps, with_kinds=self._has_several_kinds) for steps in by_block.values()])

    def _series(self) -> StepSeries | None:
        """The steps of timed and long blocks and around them, in order; None if the device has not passed all.

        Warm-up steps count: they show how step time follows a change of mode. Outliers and steps of rarer kinds do not
        count, but keep their mode in the series.
        """
        odd = self._kinds.left_out
        steps = [(i, step) for i, step in enumerate(self._steps) if step.plan.part in (Part.AROUND, Part.TIMED)]
        # Long blocks do not record collectives, so if there are several kinds, theirs are unknown.
        has_several = self._has_several_kinds or bool(odd)
        long = [(-1, replace(step, spoilt=step.spoilt or has_several)) for step in self._long]
        steps = sorted([*steps, *long], key=lambda numbered: numbered[1].plan.offset)
        offsets = [step.plan.offset for _, step in steps]
        if not steps or offsets != list(range(offsets[0], offsets[0] + len(steps))):
            return None  # a missing step leaves a gap of unknown mode
        timed = [
            (step.plan.arm, step.ms, not step.spoilt and index not in odd and step.kind == 0)
            for index, step in steps
            if step.ms is not None
        ]
        return StepSeries.of(self._window.first_step + offsets[0], timed) if len(timed) == len(steps) else None

    # -- power

    def _power(self, phases: Sequence[StepPhases]) -> MeasuredPower:
        meter = self._window.meter
        if meter is None or any(step.ms is None for step in [*self._steps, *self._long]):
            return MeasuredPower()
        timed = self._of(Part.TIMED)
        long = segments_of(self._long, self._window.clock, counted_only=True)
        segments = segments_of(timed, self._window.clock, counted_only=True)
        known = {segment.mode for segment in segments}
        for mode in Mode:
            if mode not in known and any(step.counted and step.plan.arm is mode for step in timed):
                self._note(
                    f"power of {mode.value} steps is missing: the device's start and end times of these steps are too "
                    "uncertain [OC411]"
                )
        others = [step for step in self._steps if step.plan.part is not Part.RECORDED]
        shown = segments_of(sorted([*others, *self._long], key=lambda step: step.plan.offset), self._window.clock)
        return meter.measure(segments, since_ns=self._window.opened_ns, long=long, shown=shown, phases=phases)

    # -- collectives

    def _recorded(self) -> StepLog | None:
        """A recorded step of the most common kind that communicates; None if no recorded step trained."""
        logs = [step.log for step in self._of(Part.RECORDED) if not step.skipped]
        numbers = Counter([log.signature for log in logs if log.collectives])
        usual = numbers.most_common(1)[0][0] if numbers else ()
        return next((log for log in logs if log.signature == usual), None)

    def _collectives(
        self, recorded: StepLog | None, kernels_ms: Mapping[CollectiveKey, float]
    ) -> tuple[CollectiveTime, ...]:
        """The collectives of the recorded step, timed over sequential steps of its kind, or over all if none are."""
        timed = [step.log for step in self._counted() if step.plan.mode is Mode.SEQUENTIAL and step.ms is not None]
        alike = [log for log in timed if recorded is not None and log.signature == recorded.signature]
        return collective_times(recorded, alike or timed, kernels_ms)

    def _planned_sequential(self) -> list[tuple[int, StepLog | None]]:
        """The sequential steps that all ranks planned to time, with positions; None for one that does not count."""
        return [
            (place, step.log if step.counted and step.ms is not None else None)
            for place, step in enumerate(self._steps)
            if step.plan.part is Part.TIMED and step.plan.mode is Mode.SEQUENTIAL and step.plan.counted
        ]

    def _unserialised(self) -> tuple[str, ...]:
        """Why collectives were not serialised in sequential steps; only a note if they are negligible."""
        sentences = unserialised_notes(self._steps)
        if not is_negligible(self._steps):
            return sentences
        for sentence in sentences:
            self._note(sentence)
        return ()


def memory_peaks(steps: Sequence[MeasuredStep]) -> tuple[MemoryPeak, ...]:
    """Bounds of each mode's memory peak, over the counted steps with readings."""
    stepped = []
    for step in steps:
        if step.counted and step.memory is not None:
            before, after = map(reading_of, step.memory)
            if before is not None and after is not None:
                stepped.append(memory.SteppedMemory(step.plan.arm, before, after))
    return memory.peaks_by_mode(stepped)


def segments_of(steps: Sequence[MeasuredStep], clock: clocks.StepClock, counted_only: bool = False) -> list[Segment]:
    """Time intervals spent in one mode: counted steps and warm-up of each block apart, split where something else ran.

    Device times are known only within bounds, so each interval is as short as these allow. The device must have
    passed all steps.
    """
    segments: list[Segment] = []
    positions: Counter[tuple[Part, int, Mode, bool]] = Counter()  # steps so far
    max_gap_ms = _max_gap_ms(steps)

    def block_of(step: MeasuredStep) -> tuple[Part, int, Mode, bool]:
        return step.plan.part, step.plan.block, step.plan.arm, step.counted

    for block, run in itertools.groupby(steps, block_of):
        part, _, arm, counted = block
        for stretch in _cut_at_gaps(list(run), max_gap_ms) if counted or not counted_only else ():
            position = positions[block]
            positions[block] += len(stretch)
            _, start_ns = clock.host_bounds_ns(stretch[0].start)
            end_ns, _ = clock.host_bounds_ns(stretch[-1].end)
            length_s = clocks.elapsed_ms(stretch[0].start, stretch[-1].end) / 1e3
            # Bounds further apart than the time by the device's clock contradict it: use neither.
            if 0 < end_ns - start_ns <= 1e9 * (1 + _CLOCK_DRIFT) * length_s + _CLOCK_ERROR_NS:
                # Step starts, computed backwards from the block's end on the device clock.
                starts_ns = [end_ns - round(clocks.elapsed_ms(s.start, stretch[-1].end) * 1e6) for s in stretch]
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
                        position=position,
                    )
                )
    return segments


def _gap_ms(before: MeasuredStep, after: MeasuredStep) -> float:
    return clocks.elapsed_ms(before.end, after.start)


def _max_gap_ms(steps: Sequence[MeasuredStep]) -> float:
    """The longest gap between two steps that counts as training: loading a batch does, an evaluation does not."""
    if len(steps) < 2:
        return 0.0
    typical_ms = float(np.median([_gap_ms(before, after) for before, after in itertools.pairwise(steps)]))
    step_ms = float(np.median([clocks.elapsed_ms(step.start, step.end) for step in steps]))
    return typical_ms + max(5.0, 0.1 * step_ms)


def _cut_at_gaps(steps: list[MeasuredStep], max_gap_ms: float) -> list[list[MeasuredStep]]:
    """The steps of a block, split where something else ran between two of them."""
    stretches = [[steps[0]]]
    for before, after in itertools.pairwise(steps):
        if _gap_ms(before, after) > max_gap_ms:
            stretches.append([])
        stretches[-1].append(after)
    return stretches


def stretches_of(steps: Sequence[MeasuredStep]) -> tuple[Stretch, ...]:
    """The stretches that give a window's cost. Step time includes the median gap after steps of that kind."""
    trained = [step for step in steps if not step.skipped and clocks.is_ready(step.end)]
    times_ms = {step.plan.offset: clocks.elapsed_ms(step.start, step.end) for step in trained}
    of_kind: dict[Kind, list[float]] = defaultdict(list)
    for step in trained:
        of_kind[_kind(step)].append(times_ms[step.plan.offset])
    max_ms = {kind: _MAX_MEDIANS * float(np.median(times)) for kind, times in of_kind.items()}
    gaps_ms: dict[Kind, list[float]] = defaultdict(list)
    for before, after in itertools.pairwise(trained):
        if after.plan.offset == before.plan.offset + 1:
            gaps_ms[_kind(before)].append(_gap_ms(before, after))
    between_ms = {kind: float(np.median(gaps)) for kind, gaps in gaps_ms.items()}
    found = []
    for _, run in itertools.groupby(trained, _place_in_window):
        own = list(run)
        kind = _kind(own[0])
        known = [times_ms[s.plan.offset] for s in own if times_ms[s.plan.offset] <= max_ms[kind]]
        mean_ms = sum(known) / len(known) + between_ms.get(kind, 0.0) if known else 0.0
        middle = (own[0].plan.offset + own[-1].plan.offset) / 2
        found.append(Stretch(kind, middle, len(own), len(known), mean_ms))
    return tuple(found)


def _kind(step: MeasuredStep) -> Kind:
    if step.plan.part is Part.RECORDED:
        return Kind.RECORDED
    other = step.plan.arm is Mode.SEQUENTIAL
    if step.plan.part is Part.PROFILED:
        return Kind.OTHER_PROFILED if other else Kind.PROFILED
    return Kind.OTHER if other else Kind.OVERLAPPED


def _place_in_window(step: MeasuredStep) -> tuple[Part, int, int]:
    """Groups steps into stretches; the steps around the timed part are split into short ones."""
    cut = step.plan.offset // _STEPS_OF_STRETCH if step.plan.part is Part.AROUND else 0
    return step.plan.part, step.plan.block, cut
