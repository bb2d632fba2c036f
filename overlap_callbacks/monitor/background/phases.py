"""When the profiled steps computed and communicated, on the host's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from overlap_callbacks.analysis.kernels.table import KernelTable
from overlap_callbacks.analysis.power.phases import ProfilePhases, StepPhases
from overlap_callbacks.instruments.clocks import Mark, StepClock
from overlap_callbacks.monitor.window import MeasuredStep


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
