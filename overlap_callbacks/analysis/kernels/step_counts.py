"""Whether the steps of a profile match each other: lost records show in their numbers of kernels."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlap_callbacks.analysis.kernels.table import KernelTable
from overlap_callbacks.analysis.results.mode import Mode

# Maximum relative deviation of a step's number of kernels from the usual one of its mode.
_MAX_DEVIATION = 0.02
# Maximum kinds of steps with one sequence of collectives: more mean that the numbers vary randomly.
_MOST_KINDS = 3


@dataclass(frozen=True)
class StepCounts:
    """What the numbers of kernels say about a profile's steps.

    Attributes:
        truncated: the profile ends before its last step does.
        odd: the steps with a different number of kernels than most of their mode.
        varying: more than half of the steps of a mode differ from the usual number (e.g. if tokens choose experts), or
            a mode has two steps that differ. Then no step is odd.
    """

    truncated: bool = False
    odd: frozenset[int] = frozenset()
    varying: bool = False


def kernels_of_steps(kernels: KernelTable, steps: Sequence[int]) -> dict[int, int]:
    """Number of compute and communication kernels of each of the given steps."""
    counts = np.bincount(kernels.step[kernels.busy & (kernels.step >= 0)], minlength=max(steps, default=-1) + 1)
    return {step: int(counts[step]) for step in steps}


def tails_of_steps(kernels: KernelTable, steps: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """Name of the last compute or communication kernel on each stream, for each of the steps; latest last."""
    tails = {}
    for step in steps:
        rows = np.flatnonzero(kernels.busy & (kernels.step == step))
        rows = rows[np.argsort(kernels.intervals.start_ns[rows], kind="stable")]
        last_of_lane = {lane: place for place, lane in enumerate(kernels.lane[rows].tolist())}
        tails[step] = tuple([kernels.names[kernels.name[rows[place]]] for place in sorted(last_of_lane.values())])
    return tails


def kinds_by_number(
    counts: Mapping[int, int], by_arm: Mapping[Mode, Sequence[int]], kinds: Mapping[int, int]
) -> dict[int, int]:
    """Split kinds of steps further, by their number of kernels: steps may differ only in their micro-batches.

    A number makes a kind if both modes have it, and if there are few. The most common steps of each kind keep its
    number. ``by_arm`` has the counted steps of each mode.
    """
    found = dict(kinds)
    arm_of = {step: arm for arm, steps in by_arm.items() for step in steps}
    for kind in sorted(set(kinds.values())):
        steps = sorted((step for step in arm_of if kinds[step] == kind), key=lambda step: counts[step])
        groups: list[list[int]] = []
        for before, step in zip([None, *steps], steps, strict=False):
            if before is None or counts[step] > (1 + _MAX_DEVIATION) * counts[before]:
                groups.append([])
            groups[-1].append(step)
        common = [of for of in groups if counts[of[0]] and {arm_of[step] for step in of} == set(Mode)]
        common.sort(key=len, reverse=True)
        if len(common) > _MOST_KINDS or 4 * sum(map(len, common)) < 3 * len(steps):
            continue
        for group in common[1:]:
            found |= dict.fromkeys(group, max(found.values()) + 1)
    return found


def compare_counts(
    counts: Mapping[int, int], by_arm: Mapping[Any, Sequence[int]], tails: Mapping[int, Sequence[str]]
) -> StepCounts:
    """Compare the steps of each mode, or of each mode and kind, with each other.

    A profiler with full buffers records nothing more. So a truncated profile has fewer kernels in its last steps, and
    the last one does not end with a kernel that ends the others of its mode (``tails_of_steps``). Other odd steps are
    the job's own.
    """
    in_order = sorted(counts)
    if not any(counts.values()):
        return StepCounts()
    last = in_order[-1]
    if not counts[last]:
        return StepCounts(truncated=True)
    unlike: set[int] = set()
    odd: set[int] = set()
    usual_ends: set[str] = set()  # of the mode of the last step
    all_short = True
    for steps in by_arm.values():
        if not steps:
            continue
        # With an even number, use the higher of the middle two: kernels get lost, but there are never too many.
        usual = statistics.median_high(counts[step] for step in steps)
        of_mode = {step for step in steps if abs(counts[step] - usual) > _MAX_DEVIATION * usual}
        if 2 * len(of_mode) > len(steps):
            return StepCounts(varying=True)
        all_short = all_short and all(counts[step] < usual for step in of_mode)
        unlike |= of_mode
        if len(steps) > 2:  # of two, either may be odd
            odd |= of_mode
        if last in steps:
            usual_ends = {name for step in steps if step not in of_mode for name in tails[step]}
    is_tail = bool(unlike) and all_short and unlike == set(in_order[-len(unlike) :])
    if is_tail and not usual_ends.intersection(tails[last][-1:]):
        return StepCounts(truncated=True)
    return StepCounts(odd=frozenset(odd), varying=bool(unlike - odd))
