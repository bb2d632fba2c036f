"""From the profile of a closed window to its figures on one rank: kernels, pairs, dimensions, timelines."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.aggregate import MAX_KERNELS
from overlap_callbacks.analysis.design import rank_weights
from overlap_callbacks.analysis.kernels.alignment import Alignment, align
from overlap_callbacks.analysis.kernels.attribution import pair_times_of
from overlap_callbacks.analysis.kernels.by_collective import (
    CollectiveKey,
    collective_calls,
    dimension_times,
    kernel_times_by_collective,
)
from overlap_callbacks.analysis.kernels.cross_check import cross_check
from overlap_callbacks.analysis.kernels.host import uncounted_note
from overlap_callbacks.analysis.kernels.receives import transfer_starts
from overlap_callbacks.analysis.kernels.sm_loss import sm_loss
from overlap_callbacks.analysis.kernels.table import KernelTable
from overlap_callbacks.analysis.kernels.timeline import MAX_SLICES, call_times, step_detail, step_timeline
from overlap_callbacks.analysis.kernels.times import KernelSums, kernel_times, num_sms, profiled_block
from overlap_callbacks.analysis.power.phases import ProfilePhases, StepPhases
from overlap_callbacks.analysis.results.arrivals import CollectiveCalls, ProfiledStep
from overlap_callbacks.analysis.results.kernel_times import KernelTime, PairTime, StepTimeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import DimensionTime, ProfiledBlock, Rhythm, SmLoss
from overlap_callbacks.gate.collectives import Collective
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments import clocks
from overlap_callbacks.instruments.clocks import Mark, StepClock
from overlap_callbacks.instruments.device import chip_of
from overlap_callbacks.monitor.background.profile_check import check_profile, counted_steps
from overlap_callbacks.monitor.window import ClosedWindow, MeasuredStep


@dataclass(frozen=True)
class ProfileFigures:
    """What the profiled part of a window gives; empty if there was no profile.

    Attributes:
        blocks, kernels, pairs, dimension_pairs, dimensions, pictures, sm_loss, num_sms, calls, lower_bound: as in
            ``RankWindow``.
        kernels_ms: time of each collective's kernels in a sequential step.
        phases: when the profiled steps computed and communicated, on the host's clock; empty where this rank reads no
            power.
        problems: why parts of the profile do not count or are missing, in words.
        doubts: why the window cannot be trusted, in words.
    """

    blocks: tuple[ProfiledBlock, ...] = ()
    kernels: tuple[KernelTime, ...] = ()
    pairs: tuple[PairTime, ...] = ()
    dimension_pairs: tuple[PairTime, ...] = ()
    dimensions: tuple[DimensionTime, ...] = ()
    kernels_ms: Mapping[CollectiveKey, float] = field(default_factory=dict)
    pictures: tuple[StepTimeline, ...] = ()
    phases: tuple[StepPhases, ...] = ()
    sm_loss: SmLoss | None = None
    num_sms: int = 0
    calls: tuple[CollectiveCalls, ...] = ()
    lower_bound: bool = False
    problems: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def profile_figures(
    window: ClosedWindow,
    kernels: KernelTable,
    steps: Sequence[MeasuredStep],
    recorded: StepLog | None,
    await_passed: Callable[[clocks.Mark], bool],
    rank: int,
) -> ProfileFigures:
    """The figures of a window's profile.

    Args:
        window: closed.
        kernels: its whole profile.
        steps: its steps, as far as they count.
        recorded: the collectives of the recorded step; None without one.
        await_passed: waits for the device to pass a mark; False if that takes too long.
        rank: of this process. Rank 0 adds the timelines of two steps.
    """
    by_arm, kinds = counted_steps(steps)
    if not any(by_arm.values()):
        return _missing("no profiled step counts")
    on_device = window.clock.compute_stream is not None
    checked = check_profile(kernels, by_arm, kinds, on_device=on_device)
    if checked.missing:
        return _missing(checked.missing)
    by_arm, problems = checked.by_arm, list(checked.problems)
    log = profile_log(steps).of_steps({index for indices in by_arm.values() for index in indices})
    if on_device:  # profiles of CPU jobs are not compared with the log
        problems += log.problems
    aligned = align(kernels, log.issued, log.sequential, log.whole)
    kernels = aligned.kernels
    checked_log = cross_check(aligned, log.sequential, log.whole, _symmetric_groups())
    if checked_log.missing:
        return ProfileFigures(problems=tuple(problems), doubts=(checked_log.missing,))
    problems += checked_log.notes
    if note := uncounted_note([kernels.uncounted[index] for index in by_arm[Mode.OVERLAPPED] if kernels.uncounted]):
        problems.append(note)
    by_block: dict[tuple[int, Mode], list[MeasuredStep]] = defaultdict(list)
    for step in steps:
        if step.profile_index in by_arm[step.plan.arm]:
            by_block[step.plan.block, step.plan.arm].append(step)
    transfers = transfer_starts(aligned)
    problems += transfers.notes
    sums = KernelSums(kernels, transfers.start_ns)
    blocks = tuple(
        [
            _profiled_block(window, arm, block, of_block, sums, kinds, await_passed)
            for (block, arm), of_block in sorted(by_block.items(), key=lambda item: item[0][0])
        ]
    )
    weights = _step_weights(kernels, blocks, by_block, by_arm, window.rhythms)
    overlapped, sequential = (np.array(by_arm[mode], dtype=np.int64) for mode in by_arm)
    pairs = pair_times_of(
        kernels, overlapped, sequential, aligned.dimensions if recorded is not None else None, weights
    )
    drawn = [(indices[0], arm) for arm, indices in by_arm.items() if indices and rank == 0]
    has_power = window.meter is not None and not window.meter.elsewhere
    return ProfileFigures(
        blocks=blocks,
        kernels=kernel_times(kernels, overlapped, sequential, MAX_KERNELS, weights),
        pairs=pairs.by_kind,
        dimension_pairs=pairs.by_dimension,
        dimensions=(
            dimension_times(aligned, by_arm[Mode.OVERLAPPED], by_arm[Mode.SEQUENTIAL], recorded.collectives)
            if recorded is not None
            else ()
        ),
        kernels_ms=_kernels_ms(kernels, log, steps, recorded) if window.clock.compute_stream is not None else {},
        pictures=_pictures(aligned, drawn, by_arm, steps, window.clock, await_passed),
        phases=phases_on_host(kernels, steps, window.clock, await_passed) if has_power else (),
        sm_loss=sm_loss(kernels, kernels.launches, chip_of(window.clock.compute_stream), overlapped, sequential),
        num_sms=num_sms(kernels),
        lower_bound=checked_log.lower_bound,
        calls=collective_calls(aligned, _numbered(window, steps, by_arm), rank, transfers),
        problems=tuple(problems),
    )


def _symmetric_groups() -> tuple[str, ...]:
    """The groups for which the job has enabled torch's symmetric memory."""
    module = sys.modules.get("torch.distributed._symmetric_memory")
    return tuple(getattr(module, "_group_name_to_store", {}))


def _numbered(
    window: ClosedWindow, steps: Sequence[MeasuredStep], by_arm: Mapping[Mode, Sequence[int]]
) -> dict[int, ProfiledStep]:
    """The profiled steps that count, by their index in the profile, as all ranks know them."""
    return {
        step.profile_index: ProfiledStep(
            window.first_step + step.plan.offset, step.plan.block, step.plan.arm is Mode.SEQUENTIAL
        )
        for step in steps
        if step.profile_index in by_arm[step.plan.arm]
    }


def _step_weights(
    kernels: KernelTable,
    blocks: Sequence[ProfiledBlock],
    by_block: Mapping[tuple[int, Mode], Sequence[MeasuredStep]],
    by_arm: Mapping[Mode, Sequence[int]],
    rhythms: Sequence[Rhythm],
) -> npt.NDArray[np.float64]:
    """The weight of each step in the mean of its mode over that of a plain mean, by its index in the profile."""
    weights = np.ones(
        1 + max(int(kernels.step.max(initial=0)), *[max(indices, default=0) for indices in by_arm.values()])
    )
    of_blocks = rank_weights(blocks, [block.num_steps for block in blocks], rhythms)
    for block, weight in zip(blocks, of_blocks, strict=True):
        indices = [step.profile_index for step in by_block[block.block, block.mode]]
        weights[indices] = weight / block.num_steps * len(by_arm[block.mode])
    return weights


def _pictures(
    aligned: Alignment,
    drawn: Sequence[tuple[int, Mode]],
    by_arm: Mapping[Mode, Sequence[int]],
    steps: Sequence[MeasuredStep],
    clock: clocks.StepClock,
    await_passed: Callable[[clocks.Mark], bool],
) -> tuple[StepTimeline, ...]:
    """The timelines of profiled steps, each with its longest kernels and the times of single calls in its mode.

    Args:
        aligned: the window's profile and the log.
        drawn: index and mode of each of the steps.
        by_arm: the profiled steps of each mode, over which the times of calls are.
        steps: all steps of the window.
        clock: which made their marks.
        await_passed: waits for the device to pass a mark; False if that takes too long.
    """
    if not drawn:
        return ()
    kernels, sizes = aligned.kernels, {row: part.size_bytes for row, part in aligned.of_row.items()}
    starts_ns = {
        step.profile_index: sum(clock.host_bounds_ns(step.start)) // 2
        for step in steps
        if step.profile_index in {index for index, _ in drawn} and await_passed(step.end)
    }
    found = []
    for index, arm in drawn:
        picture = step_timeline(kernels, index, arm)
        if picture is not None:
            detail = step_detail(kernels, index, sizes, MAX_SLICES, starts_ns.get(index))
            found.append(msgspec.structs.replace(picture, detail=detail, call_times=call_times(kernels, by_arm[arm])))
    return tuple(found)


def read_kernels(window: ClosedWindow) -> tuple[KernelTable | None, tuple[str, ...]]:
    """A window's profile, which can be read once. If it cannot be read: None, and why, in words."""
    try:
        return (None if window.profile is None else window.profile.kernels()), ()
    except Exception as error:
        return None, _missing(f"the profile cannot be read ({type(error).__name__}: {error})").problems


def _missing(why: str) -> ProfileFigures:
    """No figures, and why."""
    return ProfileFigures(problems=(f"kernel times are missing: {why}",))


def _profiled_block(
    window: ClosedWindow,
    arm: Mode,
    block: int,
    steps: Sequence[MeasuredStep],
    sums: KernelSums,
    kinds: Mapping[int, int],
    await_passed: Callable[[clocks.Mark], bool],
) -> ProfiledBlock:
    step_ms = None  # if the device has not passed all of them
    if all(await_passed(step.end) for step in steps):
        step_ms = float(np.mean([clocks.elapsed_ms(step.start, step.end) for step in steps]))
    figures = profiled_block(arm, block, sums, [step.profile_index for step in steps], step_ms)
    numbers = tuple([window.first_step + step.plan.offset for step in steps])
    of_steps = tuple([kinds[step.profile_index] for step in steps]) if any(kinds.values()) else ()
    return msgspec.structs.replace(figures, steps=numbers, kinds=of_steps)


def _kernels_ms(
    kernels: KernelTable, log: ProfileLog, steps: Sequence[MeasuredStep], recorded: StepLog | None
) -> dict[CollectiveKey, float]:
    """Time of the kernels of each collective in a sequential step of the recorded one's kind; of a device alone.

    On CPU, the profiler makes steps much longer, and the ranges of Gloo with them. There, the time from issue to end
    has no launch in it, and is as good.
    """
    alike = [
        step.profile_index
        for step in steps
        if step.profile_index in log.sequential and recorded is not None and step.log.signature == recorded.signature
    ]
    return kernel_times_by_collective(kernels, {step: log.issued[step] for step in alike or log.sequential})


# -- phases of steps


def phases_on_host(
    kernels: KernelTable, steps: Sequence[MeasuredStep], clock: StepClock, await_passed: Callable[[Mark], bool]
) -> tuple[StepPhases, ...]:
    """The phases of the profiled steps.

    Args:
        kernels: of the window's profile.
        steps: all steps of the window.
        clock: which made their marks.
        await_passed: waits for the device to pass a mark; False if it takes too long.
    """
    found, profile = [], ProfilePhases(kernels)
    for step in steps:
        if step.profile_index >= 0 and await_passed(step.end):
            bounds_ns = clock.host_bounds_ns(step.start)
            phases = profile.of(step.profile_index, step.plan.arm, bounds_ns, counted=step.counted)
            if phases is not None:
                found.append(phases)
    return tuple(found)


# -- what the log has of profiled steps


@dataclass(frozen=True)
class ProfileLog:
    """What the gate saw in the profiled steps; steps are told by their index in the profile.

    Attributes:
        issued: the collectives of each step, in the order of issue.
        not_whole: for each step that counts, why its log does not hold what its profile should show, in words; empty
            where it does.
        sequential: sequential steps that count. (In a control window, the steps of the sequential arm overlap too.)
    """

    issued: dict[int, tuple[Collective, ...]]
    not_whole: dict[int, str]
    sequential: tuple[int, ...]

    @property
    def whole(self) -> frozenset[int]:
        """Steps that count and whose log can be held against the profile."""
        return frozenset(step for step, why in self.not_whole.items() if not why)

    @property
    def problems(self) -> tuple[str, ...]:
        """That no step could be compared, and why, in words; empty if one can."""
        if not self.not_whole or self.whole:
            return ()
        reasons = " or ".join(sorted(set(self.not_whole.values())))
        return (f"the gate's log could not be held against the profile: in every profiled step {reasons}",)

    def of_steps(self, counted: Collection[int]) -> ProfileLog:
        """The same, if of all steps only these count."""
        not_whole = {step: why for step, why in self.not_whole.items() if step in counted}
        return ProfileLog(self.issued, not_whole, tuple([step for step in self.sequential if step in counted]))


def profile_log(steps: Sequence[MeasuredStep]) -> ProfileLog:
    """The log of those of a window's steps that were profiled."""
    profiled = [step for step in steps if step.profile_index >= 0]
    counted = [step for step in profiled if step.counted]
    return ProfileLog(
        issued={step.profile_index: step.log.collectives for step in profiled},
        not_whole={step.profile_index: _why_not_whole(step) for step in counted},
        sequential=tuple([step.profile_index for step in counted if step.plan.mode is Mode.SEQUENTIAL]),
    )


def _why_not_whole(step: MeasuredStep) -> str:
    if step.log.captured:
        return "a CUDA graph was captured"  # its collectives were issued, and launched no kernel
    if step.log.compiled:
        return "torch.compile compiled"
    return "collectives were lost from the log" if step.log.dropped else ""
