"""Checks whether the profile of a device is whole, before figures are computed from it.

What the profiler lost, or took from elsewhere, would otherwise look like what overlap costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from overlap_callbacks.analysis.formatting import one_digit
from overlap_callbacks.analysis.kernels.step_counts import compare_counts, kernels_of_steps, tails_of_steps
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.results.mode import Mode


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


def check_device_profile(kernels: KernelTable, by_arm: Mapping[Mode, Sequence[int]]) -> CheckedProfile:
    """Check the profile of a device.

    Args:
        kernels: the whole profile.
        by_arm: indices of the counted steps of each mode; at least one.
    """
    steps = [step for of_mode in by_arm.values() for step in of_mode]
    if not (np.isin(kernels.step, steps) & (kernels.kind == Kind.COMPUTE)).any():
        why = "the profiler saw no kernels of the device; another CUPTI user (nsys, a monitoring agent) may hold it"
        if (kernels.without_launch & (kernels.kind == Kind.COMPUTE)).any():
            # Their own starts do not tell their steps: the device lags behind the host by up to a step.
            why = "the profile does not tell which steps launched the kernels of the device"
        return CheckedProfile({}, missing=why)
    found = compare_counts(kernels_of_steps(kernels, steps), by_arm, tails_of_steps(kernels, steps))
    if found.truncated:
        why = "the profile ends before its last step does: its last steps lack the kernels that end the others"
        return CheckedProfile({}, missing=why)
    problems = []
    if found.varying:
        problems.append("the number of kernels differs from step to step: figures of kernels are less precise")
    if found.odd:
        problems.append("profiled steps with more or fewer kernels than most of their mode were left out")
    counted = {mode: [step for step in of_mode if step not in found.odd] for mode, of_mode in by_arm.items()}
    return CheckedProfile(counted, (*problems, *_notes(kernels, [step for of in counted.values() for step in of])))


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
