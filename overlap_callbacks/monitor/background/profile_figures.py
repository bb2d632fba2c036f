"""Computes a rank's figures from the profile of a closed window: kernels, pairs, dimensions, timelines."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.design import rank_weights
from overlap_callbacks.analysis.formatting import one_digit
from overlap_callbacks.analysis.kernels.alignment import Alignment, align
from overlap_callbacks.analysis.kernels.attribution import pair_times_of
from overlap_callbacks.analysis.kernels.by_collective import (
    CollectiveKey,
    collective_calls,
    dimension_times,
    exposed_collectives,
    kernel_times_by_collective,
)
from overlap_callbacks.analysis.kernels.cross_check import cross_check
from overlap_callbacks.analysis.kernels.device_time import waits_on_host
from overlap_callbacks.analysis.kernels.host import uncounted_note
from overlap_callbacks.analysis.kernels.receives import transfer_starts
from overlap_callbacks.analysis.kernels.sm_loss import sm_loss
from overlap_callbacks.analysis.kernels.step_counts import compare_counts, kernels_of_steps, tails_of_steps
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.kernels.timeline import MAX_SLICES, call_times, step_detail, step_timeline
from overlap_callbacks.analysis.kernels.times import KernelSums, kernel_times, num_sms, num_streams, profiled_block
from overlap_callbacks.analysis.power.phases import ProfilePhases, StepPhases
from overlap_callbacks.analysis.results.arrivals import ProfiledStep
from overlap_callbacks.analysis.results.exposure import ExposureSums
from overlap_callbacks.analysis.results.kernel_times import StepTimeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow, Rhythm
from overlap_callbacks.analysis.sums import grouped
from overlap_callbacks.gate.collectives import Collective
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments.clocks import StepClock
from overlap_callbacks.instruments.device import chip_of
from overlap_callbacks.monitor.background.calls import calls_on_host, name_calls, name_delayed
from overlap_callbacks.monitor.background.kinds import counted_steps
from overlap_callbacks.monitor.window import MeasuredStep, MeasuredWindow

# Kernels that a rank keeps, longest total time first. Enough for the tables; bounds the messages and the record.
MAX_KERNELS = 50


@dataclass(frozen=True)
class ProfileFigures:
    """Results of a window's profiled part."""

    own: RankWindow  # the rank's figures of the window, including those of the profile
    problems: tuple[str, ...] = ()  # why parts of the profile do not count or are missing
    kernels_ms: Mapping[CollectiveKey, float] = field(default_factory=dict)  # per sequential step
    phases: tuple[StepPhases, ...] = ()  # of the profiled steps, in host time; empty if power is not measured


def profile_figures(
    window: MeasuredWindow,
    kernels: KernelTable,
    steps: Sequence[MeasuredStep],
    recorded: StepLog | None,
    own: RankWindow,
) -> ProfileFigures:
    """The figures of a closed window's profile; its ``steps`` have their times.

    They are added to ``own``; rank 0 also gets the timelines of two steps.
    """
    by_arm, kinds = counted_steps(steps)
    if not any(by_arm.values()):
        return ProfileFigures(own, _missing("no profiled step counts [OC372]"))
    on_device = window.clock.compute_stream is not None
    checked = check_profile(kernels, by_arm, kinds, on_device=on_device)
    if not checked.by_arm:
        why = _missing(checked.missing) if checked.missing else ()
        return ProfileFigures(msgspec.structs.replace(own, doubts=checked.doubts), why)
    by_arm, problems = checked.by_arm, list(checked.problems)
    name_calls(steps)
    log = profile_log(steps, counted={index for indices in by_arm.values() for index in indices})
    if on_device:  # profiles of CPU jobs are not compared with the log
        problems += log.problems
    aligned = align(kernels, log.issued, log.sequential, log.whole)
    kernels = aligned.kernels
    checked_log = cross_check(aligned, log.sequential, log.whole, _symmetric_groups())
    if checked_log.missing:
        return ProfileFigures(msgspec.structs.replace(own, doubts=(checked_log.missing,)), tuple(problems))
    problems += checked_log.notes
    if note := uncounted_note([kernels.uncounted[index] for index in by_arm[Mode.OVERLAPPED] if kernels.uncounted]):
        problems.append(note)
    counting = [step for step in steps if step.profile_index in by_arm[step.plan.arm]]
    by_block = grouped(counting, lambda step: (step.plan.block, step.plan.arm))
    transfers = transfer_starts(aligned)
    problems += transfers.notes
    waited = None
    if on_device and window.profile is not None:
        on_host, of_device = calls_on_host(steps, window.profile.bounds)
        waited = waits_on_host(kernels, on_host, of_device) if on_host else None
    sums = KernelSums(kernels, transfers.start_ns, waited)
    blocks = tuple([_profiled_block(by_block[key], sums, kinds) for key in sorted(by_block, key=lambda key: key[0])])
    weights = _step_weights(kernels, blocks, by_block, by_arm, window.rhythms)
    overlapped, sequential = (np.array(by_arm[mode], dtype=np.int64) for mode in by_arm)
    dimensions = aligned.dimensions if recorded is not None else None
    pairs = pair_times_of(kernels, overlapped, sequential, dimensions, weights)
    numbered = {
        step.profile_index: ProfiledStep(step.number, step.plan.block, step.plan.arm is Mode.SEQUENTIAL)
        for step in counting
    }
    own = msgspec.structs.replace(
        own,
        profiled=blocks,
        kernels=kernel_times(kernels, overlapped, sequential, MAX_KERNELS, weights),
        pairs=pairs.by_kind,
        dimension_pairs=pairs.by_dimension,
        dimensions=(
            dimension_times(aligned, by_arm[Mode.OVERLAPPED], by_arm[Mode.SEQUENTIAL], recorded.collectives)
            if recorded is not None
            else ()
        ),
        pictures=_timelines(aligned, by_arm, steps, window.clock) if own.rank == 0 else (),
        sm_loss=sm_loss(kernels, kernels.launches, chip_of(window.clock.compute_stream), overlapped, sequential),
        num_sms=num_sms(kernels),
        num_streams=num_streams(kernels) if on_device else 0,
        lower_bound=checked_log.lower_bound,
        calls=collective_calls(aligned, numbered, own.rank, transfers),
        exposure=exposed_collectives(aligned, {i: step.number for i, step in numbered.items() if not step.sequential}),
    )
    possible = [step for step in steps if step.profile_index not in kernels.lacking | kernels.impossible]
    has_power = window.meter is not None and not window.meter.elsewhere
    return ProfileFigures(
        own,
        tuple(problems),
        kernels_ms=_kernels_ms(kernels, log, steps, recorded) if on_device else {},
        phases=phases_on_host(kernels, possible, window.clock) if has_power else (),
    )


def undelayed_exposure(window: MeasuredWindow) -> ExposureSums:
    """What is exposed in the profiled steps of a closed causal window; empty if its profile does not tell.

    ``names`` are of what is delayed in other steps; the rest of the step has no name.
    """
    kernels, _ = read_kernels(window)
    by_arm, kinds = counted_steps(window.steps)
    if kernels is None or not kinds:
        return ExposureSums()
    checked = check_profile(kernels, by_arm, kinds, on_device=window.clock.compute_stream is not None)
    counted = {index for indices in checked.by_arm.values() for index in indices}
    if not counted:
        return ExposureSums()
    name_delayed(window.steps, window.delayed_keys)
    log = profile_log(window.steps, counted)
    aligned = align(kernels, log.issued, log.sequential, log.whole)
    if cross_check(aligned, log.sequential, log.whole, _symmetric_groups()).missing:
        return ExposureSums()
    numbers = {step.profile_index: step.number for step in window.steps if step.profile_index in counted}
    return exposed_collectives(aligned, numbers)


def _symmetric_groups() -> tuple[str, ...]:
    """The groups for which torch's symmetric memory is enabled."""
    module = sys.modules.get("torch.distributed._symmetric_memory")
    return tuple(getattr(module, "_group_name_to_store", {}))


def _step_weights(
    kernels: KernelTable,
    blocks: Sequence[ProfiledBlock],
    by_block: Mapping[tuple[int, Mode], Sequence[MeasuredStep]],
    by_arm: Mapping[Mode, Sequence[int]],
    rhythms: Sequence[Rhythm],
) -> npt.NDArray[np.float64]:
    """The weight of each step in its mode's mean, relative to a plain mean, by its index in the profile."""
    weights = np.ones(
        1 + max(int(kernels.step.max(initial=0)), *[max(indices, default=0) for indices in by_arm.values()])
    )
    of_blocks = rank_weights(blocks, [block.num_steps for block in blocks], rhythms)
    for block, weight in zip(blocks, of_blocks, strict=True):
        indices = [step.profile_index for step in by_block[block.block, block.mode]]
        weights[indices] = weight / block.num_steps * len(by_arm[block.mode])
    return weights


def _timelines(
    aligned: Alignment, by_arm: Mapping[Mode, Sequence[int]], steps: Sequence[MeasuredStep], clock: StepClock
) -> tuple[StepTimeline, ...]:
    """The timeline of the first profiled step of each mode, with its longest kernels and its mode's calls."""
    kernels, sizes = aligned.kernels, {row: part.size_bytes for row, part in aligned.by_row.items()}
    names = {row: part.name for row, part in aligned.by_row.items()}
    begins = {step.profile_index: step.start for step in steps if step.ms is not None}
    found = []
    for arm, indices in by_arm.items():
        picture = step_timeline(kernels, indices[0], arm) if indices else None
        if picture is not None:
            begin = begins.get(indices[0])
            start_ns = None if begin is None else sum(clock.host_bounds_ns(begin)) // 2
            detail = step_detail(kernels, indices[0], sizes, MAX_SLICES, start_ns, names)
            found.append(msgspec.structs.replace(picture, detail=detail, call_times=call_times(kernels, indices)))
    return tuple(found)


def read_kernels(window: MeasuredWindow) -> tuple[KernelTable | None, tuple[str, ...]]:
    """Read a window's profile, which works once. If it cannot be read: None, and why."""
    try:
        return (None if window.profile is None else window.profile.kernels()), ()
    except Exception as error:
        return None, _missing(f"the profile cannot be read ({type(error).__name__}: {error}) [OC360]")


def _missing(why: str) -> tuple[str, ...]:
    return (f"kernel times are missing: {why}",)


def _profiled_block(steps: Sequence[MeasuredStep], sums: KernelSums, kinds: Mapping[int, int]) -> ProfiledBlock:
    plan, times_ms = steps[0].plan, [step.ms for step in steps if step.ms is not None]
    step_ms = float(np.mean(times_ms)) if len(times_ms) == len(steps) else None
    figures = profiled_block(plan.arm, plan.block, sums, [step.profile_index for step in steps], step_ms)
    of_steps = tuple([kinds[step.profile_index] for step in steps]) if any(kinds.values()) else ()
    return msgspec.structs.replace(figures, steps=tuple([step.number for step in steps]), kinds=of_steps)


def _kernels_ms(
    kernels: KernelTable, log: ProfileLog, steps: Sequence[MeasuredStep], recorded: StepLog | None
) -> dict[CollectiveKey, float]:
    """Kernel time of each collective per sequential step of the recorded step's kind; on devices only.

    On CPU the profiler lengthens Gloo's ranges; issue-to-end time, which has no launch delay, is used instead.
    """
    alike = [
        step.profile_index
        for step in steps
        if step.profile_index in log.sequential and recorded is not None and step.log.signature == recorded.signature
    ]
    return kernel_times_by_collective(kernels, {step: log.issued[step] for step in alike or log.sequential})


# -- phases of steps


def phases_on_host(kernels: KernelTable, steps: Sequence[MeasuredStep], clock: StepClock) -> tuple[StepPhases, ...]:
    """The phases of the profiled steps, in host time."""
    profile = ProfilePhases(kernels)
    found = [
        profile.of(step.profile_index, step.plan.arm, clock.host_bounds_ns(step.start), counted=step.counted)
        for step in steps
        if step.profile_index >= 0 and step.ms is not None
    ]
    return tuple([phases for phases in found if phases is not None])


# -- the gate's log of profiled steps


class ProfileLog(NamedTuple):
    """What the gate logged in the profiled steps, by their index in the profile."""

    issued: dict[int, tuple[Collective, ...]]  # in the order of issue
    whole: frozenset[int]  # steps that count and whose log can be compared with the profile
    sequential: tuple[int, ...]  # steps that count; in a control window, steps of the sequential arm overlap too
    problems: tuple[str, ...]  # why no step could be compared; empty if one can


def profile_log(steps: Sequence[MeasuredStep], counted: Collection[int]) -> ProfileLog:
    """The log of a window's profiled steps. Only steps in ``counted`` can count."""
    profiled = [step for step in steps if step.profile_index >= 0]
    counting = [step for step in profiled if step.counted and step.profile_index in counted]
    not_whole = {step.profile_index: _why_not_whole(step) for step in counting}
    whole = frozenset(step for step, reason in not_whole.items() if not reason)
    reasons = " or ".join(sorted(set(not_whole.values())))
    why = f"the gate's log could not be compared with the profile: in every profiled step {reasons} [OC371]"
    return ProfileLog(
        issued={step.profile_index: step.log.collectives for step in profiled},
        whole=whole,
        sequential=tuple([step.profile_index for step in counting if step.plan.mode is Mode.SEQUENTIAL]),
        problems=(why,) if not_whole and not whole else (),
    )


def _why_not_whole(step: MeasuredStep) -> str:
    if step.log.captured:
        return "a CUDA graph was captured"  # its collectives were issued but launched no kernel
    if step.log.compiled:
        return "torch.compile compiled"
    return "collectives were lost from the log" if step.log.dropped else ""


# -- is the profile complete? Missing kernels would look like an effect of overlap


@dataclass(frozen=True)
class CheckedProfile:
    """Result of a check: each mode's steps that count and their problems, or why the profile cannot be used.

    ``doubts``: why the window cannot be valid.
    """

    by_arm: dict[Mode, list[int]]
    problems: tuple[str, ...] = ()
    missing: str = ""
    doubts: tuple[str, ...] = ()


def check_profile(
    kernels: KernelTable, by_arm: dict[Mode, list[int]], kinds: Mapping[int, int], *, on_device: bool
) -> CheckedProfile:
    """Find the steps of a profile that count, as many of each kind in both modes; a device's may lack kernels."""
    checked = check_device_profile(kernels, by_arm, kinds) if on_device else CheckedProfile(by_arm)
    if not checked.by_arm or len(set(kinds.values())) == 1:
        return checked
    balanced = _balanced(checked.by_arm, kinds)
    if balanced == checked.by_arm:
        return checked
    note = "profiled steps were left out so that both modes have as many of each kind [OC370]"
    return replace(checked, by_arm=balanced, problems=(*checked.problems, note))


def _balanced(by_arm: Mapping[Mode, Sequence[int]], kinds: Mapping[int, int]) -> dict[Mode, list[int]]:
    """Equally many steps of each kind in both modes: the first of each."""
    one, other = (Counter([kinds[step] for step in steps]) for steps in by_arm.values())
    kept: dict[Mode, list[int]] = {}
    for mode, steps in by_arm.items():
        room = one & other
        kept[mode] = []
        for step in steps:
            room[kinds[step]] -= 1
            if room[kinds[step]] >= 0:
                kept[mode].append(step)
    return kept


def check_device_profile(
    kernels: KernelTable, by_arm: Mapping[Mode, Sequence[int]], kinds: Mapping[int, int]
) -> CheckedProfile:
    """Check the profile of a device; see ``check_profile``."""
    steps = [step for of_mode in by_arm.values() for step in of_mode]
    if not (np.isin(kernels.step, steps) & (kernels.kind == Kind.COMPUTE)).any():
        why = "the profiler saw no kernels of the device; another CUPTI user (nsys, an agent) may hold it [OC361]"
        if (kernels.without_launch & (kernels.kind == Kind.COMPUTE)).any():
            # Kernel start times do not show the step: the device lags behind the host by up to a step.
            why = "the profile does not tell which steps launched the kernels of the device [OC362]"
        return CheckedProfile({}, missing=why)
    by_kind: dict[tuple[Mode, int], list[int]] = defaultdict(list)
    for mode, of_mode in by_arm.items():
        for step in of_mode:
            by_kind[mode, kinds[step]].append(step)
    faulty = kernels.lacking | kernels.impossible
    kept = {mode: [step for step in of_mode if step not in faulty] for mode, of_mode in by_arm.items()}
    doubts: tuple[str, ...] = ()
    if any(2 * len(kept[mode]) < len(of_mode) for mode, of_mode in by_arm.items()):
        why = _faults(kernels, steps)
        doubts = (
            f"kernel times are missing: of a mode, fewer than half of the profiled steps are left: {why} [OC363]",
        )
    found = compare_counts(kernels_of_steps(kernels, steps), by_kind, tails_of_steps(kernels, steps))
    if found.truncated:
        why = "the profile ends before its last step does: its last steps lack the kernels that end the others [OC364]"
        return CheckedProfile({}, missing=why, doubts=doubts)
    if doubts:
        return CheckedProfile({}, doubts=doubts)
    if kept != by_arm:
        checked = check_device_profile(kernels, kept, kinds)
        note = f"profiled steps were left out: {_faults(kernels, steps)} [OC365]"
        return replace(checked, problems=(note, *checked.problems))
    problems = []
    if found.varying:
        problems.append("the number of kernels differs from step to step: figures of kernels are less precise [OC366]")
    if found.odd:
        problems.append("profiled steps with more or fewer kernels than most of their mode were left out [OC367]")
    counted = {mode: [step for step in of_mode if step not in found.odd] for mode, of_mode in by_arm.items()}
    notes = _notes(kernels, [step for of in counted.values() for step in of])
    return CheckedProfile(counted, (*problems, *notes))


def _faults(kernels: KernelTable, steps: Collection[int]) -> str:
    """What is wrong with some of the steps; worded identically on all ranks."""
    words = []
    if kernels.lacking.intersection(steps):
        words.append("kernels that they launched are missing")
    if kernels.impossible.intersection(steps):
        words.append("kernels of theirs run longer than they can")
    return " and ".join(words)


def _notes(kernels: KernelTable, steps: Sequence[int]) -> list[str]:
    """Notes on the launches of the counted steps; worded identically on all ranks."""
    problems = []
    inside = np.isin(kernels.step, steps)
    placed = inside & kernels.without_launch
    if placed.any():
        number, time_ms = one_digit(int(placed.sum())), one_digit(kernels.intervals[placed].sum_ns / 1e6)
        problems.append(
            f"{number} kernels ({time_ms} ms) of the profiled steps have no launch in the profile; they are placed by "
            f"their start [OC368]"
        )
    communicates = inside & (kernels.kind == Kind.COMMUNICATION)
    replayed = int((communicates & kernels.from_graph).sum())
    if replayed:
        share = one_digit(100 * replayed / int(communicates.sum()))
        problems.append(
            f"{share} % of communication kernels come from CUDA graphs, which the gate cannot serialise [OC369]"
        )
    return problems
