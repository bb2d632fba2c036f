"""Checks whether the profile of a device is whole, before figures are computed from it.

What the profiler lost, or took from elsewhere, would otherwise look like what overlap costs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from overlap_callbacks.analysis.formatting import one_digit
from overlap_callbacks.analysis.kernels.step_counts import (
    compare_counts,
    kernels_of_steps,
    kinds_by_number,
    tails_of_steps,
)
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.monitor.window import MeasuredStep


@dataclass(frozen=True)
class CheckedProfile:
    """What a check found.

    Attributes:
        by_arm: indices of the steps of each mode that count.
        problems: what is doubtful about them, in words.
        missing: why nothing of the profile can be used, in words; empty if it can.
    """

    by_arm: dict[Mode, list[int]]
    problems: tuple[str, ...] = ()
    missing: str = ""


def with_kinds_by_kernels(
    kernels: KernelTable, steps: Sequence[MeasuredStep]
) -> tuple[list[MeasuredStep], tuple[str, ...]]:
    """A window's steps, with the kinds of those told apart that communicate alike and called other kernels.

    Args:
        kernels: the whole profile.
        steps: of the window, with their kinds by what they communicate.

    Returns:
        The steps, and a note if there are such kinds.
    """
    by_arm, kinds = counted_steps(steps)
    counts = kernels_of_steps(kernels, list(kinds))
    found = kinds_by_number(counts, by_arm, kinds)
    if found == kinds:
        return list(steps), ()
    listed = " and ".join(f"{number:,}" for number in sorted({min(counts.values()), max(counts.values())}))
    note = (
        f"profiled steps that communicate alike called other kernels ({listed}): they are compared by kind, but timed "
        f"steps cannot be told apart by what they communicate"
    )
    return [replace(step, kind=found.get(step.profile_index, step.kind)) for step in steps], (note,)


def counted_steps(steps: Sequence[MeasuredStep]) -> tuple[dict[Mode, list[int]], dict[int, int]]:
    """Indices of the counted profiled steps of each mode, and the kind of each."""
    by_arm: dict[Mode, list[int]] = {Mode.OVERLAPPED: [], Mode.SEQUENTIAL: []}
    counted = [step for step in steps if step.counted and step.profile_index >= 0]
    for step in counted:
        by_arm[step.plan.arm].append(step.profile_index)
    return by_arm, {step.profile_index: step.kind for step in counted}


def check_profile(
    kernels: KernelTable, by_arm: dict[Mode, list[int]], kinds: Mapping[int, int], *, on_device: bool
) -> CheckedProfile:
    """Find the steps of a profile that count, as many of each kind in both modes.

    Args:
        kernels: the whole profile.
        by_arm: indices of the counted steps of each mode; at least one.
        kinds: the kind of each of them.
        on_device: whether the profile is of a device, whose kernels may be missing.
    """
    checked = check_device_profile(kernels, by_arm, kinds) if on_device else CheckedProfile(by_arm)
    if checked.missing or len(set(kinds.values())) == 1:
        return checked
    balanced = _balanced(checked.by_arm, kinds)
    if balanced == checked.by_arm:
        return checked
    note = "profiled steps were left out so that both modes have as many of each kind"
    return replace(checked, by_arm=balanced, problems=(*checked.problems, note))


def _balanced(by_arm: Mapping[Mode, Sequence[int]], kinds: Mapping[int, int]) -> dict[Mode, list[int]]:
    """As many steps of each kind in both modes."""
    numbers = [Counter([kinds[step] for step in steps]) for steps in by_arm.values()]
    common = numbers[0] & numbers[1]
    kept: dict[Mode, list[int]] = {}
    for mode, steps in by_arm.items():
        room = Counter(common)
        kept[mode] = []
        for step in steps:
            room[kinds[step]] -= 1
            if room[kinds[step]] >= 0:
                kept[mode].append(step)
    return kept


def check_device_profile(
    kernels: KernelTable, by_arm: Mapping[Mode, Sequence[int]], kinds: Mapping[int, int]
) -> CheckedProfile:
    """Check the profile of a device.

    Args:
        kernels: the whole profile.
        by_arm: indices of the counted steps of each mode; at least one.
        kinds: the kind of each of them.
    """
    steps = [step for of_mode in by_arm.values() for step in of_mode]
    if not (np.isin(kernels.step, steps) & (kernels.kind == Kind.COMPUTE)).any():
        why = "the profiler saw no kernels of the device; another CUPTI user (nsys, a monitoring agent) may hold it"
        if (kernels.without_launch & (kernels.kind == Kind.COMPUTE)).any():
            # Their own starts do not tell their steps: the device lags behind the host by up to a step.
            why = "the profile does not tell which steps launched the kernels of the device"
        return CheckedProfile({}, missing=why)
    by_kind: dict[tuple[Mode, int], list[int]] = defaultdict(list)
    for mode, of_mode in by_arm.items():
        for step in of_mode:
            by_kind[mode, kinds[step]].append(step)
    found = compare_counts(kernels_of_steps(kernels, steps), by_kind, tails_of_steps(kernels, steps))
    if found.truncated:
        why = "the profile ends before its last step does: its last steps lack the kernels that end the others"
        return CheckedProfile({}, missing=why)
    problems = []
    if found.varying:
        problems.append("the number of kernels differs from step to step: figures of kernels are less precise")
    if found.odd:
        problems.append("profiled steps with more or fewer kernels than most of their mode were left out")
    counted = {mode: [step for step in of_mode if step not in found.odd] for mode, of_mode in by_arm.items()}
    notes = _notes(kernels, [step for of in counted.values() for step in of])
    return CheckedProfile(counted, (*problems, *notes))


def _notes(kernels: KernelTable, steps: Sequence[int]) -> list[str]:
    """What the launches of the counted steps tell, in words that are the same on all ranks of a job."""
    problems = []
    inside = np.isin(kernels.step, steps)
    placed = inside & kernels.without_launch
    if placed.any():
        number, time_ms = one_digit(int(placed.sum())), one_digit(kernels.intervals[placed].sum_ns / 1e6)
        problems.append(
            f"{number} kernels ({time_ms} ms) of the profiled steps have no launch in the profile; they are placed by "
            f"their start"
        )
    communicates = inside & (kernels.kind == Kind.COMMUNICATION)
    replayed = int((communicates & kernels.from_graph).sum())
    if replayed:
        problems.append(
            f"{one_digit(replayed)} of {one_digit(int(communicates.sum()))} communication kernels come from CUDA "
            f"graphs, which the gate cannot serialise"
        )
    return problems
