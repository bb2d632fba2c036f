"""Whether the steps of a profile are like each other: what a profile has lost shows in their numbers of kernels."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.results.mode import Mode

# Steps of one mode are like each other if their numbers of kernels differ from the usual one by at most this share.
_MAX_DEVIATION = 0.02


@dataclass(frozen=True)
class StepCounts:
    """What the numbers of kernels tell of a profile's steps.

    Attributes:
        truncated: the profile ends before its last step does.
        odd: the steps that have another number of kernels than most of their mode.
        varying: more than half of the steps of a mode have another number of kernels than the usual one. That is the
            job's way, e.g. where the tokens decide which experts run; so no step is odd.
    """

    truncated: bool = False
    odd: frozenset[int] = frozenset()
    varying: bool = False


def kernels_of_steps(kernels: KernelTable, steps: Sequence[int]) -> dict[int, int]:
    """Number of compute and communication kernels of each of the given steps."""
    rows = ((kernels.kind == Kind.COMPUTE) | (kernels.kind == Kind.COMMUNICATION)) & (kernels.step >= 0)
    counts = np.bincount(kernels.step[rows], minlength=max(steps, default=-1) + 1)
    return {step: int(counts[step]) for step in steps}


def compare_counts(counts: Mapping[int, int], by_arm: Mapping[Mode, Sequence[int]]) -> StepCounts:
    """Compare the steps of each mode with each other.

    A profiler whose buffers are full records nothing more. So in a truncated profile the last steps have fewer kernels
    than the others, or none. Odd steps anywhere else are of the job's making.

    Args:
        counts: number of kernels of each counted step, by its index.
        by_arm: the counted steps of each mode.
    """
    in_order = sorted(counts)
    if not any(counts.values()):
        return StepCounts()
    if not counts[in_order[-1]]:
        return StepCounts(truncated=True)
    odd: set[int] = set()
    all_short = True
    for steps in by_arm.values():
        if not steps:
            continue
        # Of an even number, the higher one of the two in the middle: kernels get lost, and never too many are found.
        usual = statistics.median_high(counts[step] for step in steps)
        of_mode = {step for step in steps if abs(counts[step] - usual) > _MAX_DEVIATION * usual}
        if 2 * len(of_mode) > len(steps):
            return StepCounts(varying=True)
        all_short = all_short and all(counts[step] < usual for step in of_mode)
        odd |= of_mode
    if odd and all_short and odd == set(in_order[-len(odd) :]):
        return StepCounts(truncated=True)
    return StepCounts(odd=frozenset(odd))
