"""From the profile of a closed window to its figures on one rank: kernels, pairs, dimensions, timelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from overlap_callbacks.analysis.aggregate import MAX_KERNELS
from overlap_callbacks.analysis.contention.sm_loss import sm_loss
from overlap_callbacks.analysis.kernels.attribution import pair_times_of
from overlap_callbacks.analysis.kernels.by_collective import CollectiveKey, kernel_times_by_collective
from overlap_callbacks.analysis.kernels.by_dimension import dimension_times, dimensions_of_rows
from overlap_callbacks.analysis.kernels.calls import call_times
from overlap_callbacks.analysis.kernels.host import uncounted_note
from overlap_callbacks.analysis.kernels.matching import matched
from overlap_callbacks.analysis.kernels.receives import transfer_starts
from overlap_callbacks.analysis.kernels.step_detail import MAX_SLICES, step_detail
from overlap_callbacks.analysis.kernels.table import KernelTable
from overlap_callbacks.analysis.kernels.timeline import step_timeline
from overlap_callbacks.analysis.kernels.times import KernelSums, kernel_times, num_sms, profiled_block
from overlap_callbacks.analysis.kernels.with_log import with_log
from overlap_callbacks.analysis.power.phases import StepPhases
from overlap_callbacks.analysis.results.kernel_times import KernelTime, PairTime, StepTimeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import DimensionTime, ProfiledBlock, SmLoss
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments import clocks
from overlap_callbacks.instruments.chip import chip_of
from overlap_callbacks.monitor.background.phases import phases_on_host
from overlap_callbacks.monitor.background.profile_check import CheckedProfile, check_device_profile
from overlap_callbacks.monitor.background.profile_log import ProfileLog, profile_log
from overlap_callbacks.monitor.window import ClosedWindow, MeasuredStep


@dataclass(frozen=True)
class ProfileFigures:
    """What the profiled part of a window gives; empty if there was no profile.

    Attributes:
        blocks, kernels, pairs, dimension_pairs, dimensions, pictures, sm_loss, num_sms: as in ``RankWindow``.
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
    problems: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def profile_figures(
    window: ClosedWindow,
    steps: Sequence[MeasuredStep],
    recorded: StepLog | None,
    await_passed: Callable[[clocks.Mark], bool],
    *,
    with_pictures: bool,
) -> ProfileFigures:
    """The figures of a window's profile. The profile can be read once.

    Args:
        window: closed.
        steps: its steps, as far as they count.
        recorded: the collectives of the recorded step; None without one.
        await_passed: waits for the device to pass a mark; False if that takes too long.
        with_pictures: whether to add the timelines of two steps.
    """
    if window.profile is None:
        return ProfileFigures()
    try:
        kernels = window.profile.kernels()
    except Exception as error:
        return _missing(f"the profile cannot be read ({type(error).__name__}: {error})")
    by_arm: dict[Mode, list[int]] = {Mode.OVERLAPPED: [], Mode.SEQUENTIAL: []}
    for step in steps:
        if step.counted and step.profile_index >= 0:
            by_arm[step.plan.arm].append(step.profile_index)
    if not any(by_arm.values()):
        return _missing("no profiled step counts")
    on_device = window.clock.compute_stream is not None
    checked = check_device_profile(kernels, by_arm) if on_device else CheckedProfile(by_arm)
    if checked.missing:
        return _missing(checked.missing)
    by_arm, problems = checked.by_arm, list(checked.problems)
    log = profile_log(steps).of_steps({index for indices in by_arm.values() for index in indices})
    if on_device:  # profiles of CPU jobs are not compared with the log
        problems += log.problems
    seen = with_log(kernels, log.issued, log.whole, log.sequential)
    problems += seen.problems
    if seen.doubts:
        return ProfileFigures(problems=tuple(problems), doubts=seen.doubts)
    kernels = seen.kernels
    if note := uncounted_note([kernels.uncounted[index] for index in by_arm[Mode.OVERLAPPED] if kernels.uncounted]):
        problems.append(note)
    by_block: dict[tuple[int, Mode], list[int]] = defaultdict(list)
    for step in steps:
        if step.profile_index in by_arm[step.plan.arm]:
            by_block[step.plan.block, step.plan.arm].append(step.profile_index)
    transfers = transfer_starts(kernels, log.issued)
    problems += transfers.notes
    sums = KernelSums(kernels, transfers.start_ns)
    blocks = tuple(
        [
            profiled_block(arm, block, sums, indices, _mean_step_ms(steps, indices, await_passed))
            for (block, arm), indices in sorted(by_block.items(), key=lambda item: item[0][0])
        ]
    )
    dimensions = None
    if recorded is not None and log.issued:
        dimensions = dimensions_of_rows(kernels, log.issued, serialised=log.sequential)
    overlapped, sequential = (np.array(by_arm[mode], dtype=np.int64) for mode in by_arm)
    pairs = pair_times_of(kernels, overlapped, sequential, dimensions)
    drawn = [(indices[0], arm) for arm, indices in by_arm.items() if indices and with_pictures]
    has_power = window.meter is not None and not window.meter.elsewhere
    return ProfileFigures(
        blocks=blocks,
        kernels=kernel_times(kernels, overlapped, sequential, max_kernels=MAX_KERNELS),
        pairs=pairs.by_kind,
        dimension_pairs=pairs.by_dimension,
        dimensions=(
            dimension_times(
                kernels, *dimensions, by_arm[Mode.OVERLAPPED], by_arm[Mode.SEQUENTIAL], recorded.collectives
            )
            if recorded is not None and dimensions is not None
            else ()
        ),
        kernels_ms=_kernels_ms(kernels, log) if window.clock.compute_stream is not None else {},
        pictures=_pictures(kernels, drawn, by_arm, steps, log, window.clock, await_passed),
        phases=phases_on_host(kernels, steps, window.clock, await_passed) if has_power else (),
        sm_loss=sm_loss(kernels, kernels.launches, chip_of(window.clock.compute_stream), overlapped, sequential),
        num_sms=num_sms(kernels),
        problems=tuple(problems),
    )


def _pictures(
    kernels: KernelTable,
    drawn: Sequence[tuple[int, Mode]],
    by_arm: Mapping[Mode, Sequence[int]],
    steps: Sequence[MeasuredStep],
    log: ProfileLog,
    clock: clocks.StepClock,
    await_passed: Callable[[clocks.Mark], bool],
) -> tuple[StepTimeline, ...]:
    """The timelines of profiled steps, each with its longest kernels and the times of single calls in its mode.

    Args:
        kernels: of the window's profile.
        drawn: index and mode of each of the steps.
        by_arm: the profiled steps of each mode, over which the times of calls are.
        steps: all steps of the window.
        log: what the gate saw issued in profiled steps.
        clock: which made their marks.
        await_passed: waits for the device to pass a mark; False if that takes too long.
    """
    if not drawn:
        return ()
    sizes = {row: match.size_bytes or 0 for row, match in matched(kernels, log.issued, log.sequential).items()}
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


def _missing(why: str) -> ProfileFigures:
    """No figures, and why."""
    return ProfileFigures(problems=(f"kernel times are missing: {why}",))


def _mean_step_ms(
    steps: Sequence[MeasuredStep], indices: Sequence[int], await_passed: Callable[[clocks.Mark], bool]
) -> float | None:
    """Mean time of profiled steps, from mark to mark; None if the device has not passed all of them."""
    profiled = [step for step in steps if step.profile_index in indices]
    if not all(await_passed(step.end) for step in profiled):
        return None
    return float(np.mean([clocks.elapsed_ms(step.start, step.end) for step in profiled]))


def _kernels_ms(kernels: KernelTable, log: ProfileLog) -> dict[CollectiveKey, float]:
    """Time of the kernels of each collective in a sequential step; of a device alone.

    On CPU, the profiler makes steps much longer, and the ranges of Gloo with them. There, the time from issue to end
    has no launch in it, and is as good.
    """
    # A group of one rank has no kernels.
    issued = {step: [c for c in log.issued[step] if c.group_size > 1] for step in log.sequential}
    return kernel_times_by_collective(kernels, issued)
