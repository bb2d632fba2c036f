"""Names the steps of windows in other people's profiles: as ranges of ``record_function`` and of NVTX.

A user's own ``torch.profiler`` shows the former, Nsight Systems the latter. The NVTX ranges are of the kind that has a
start and an end, not those that are pushed and popped: a step need not nest with the ranges of the job.
"""

from __future__ import annotations

from typing import Any

import torch

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.instruments import device
from overlap_callbacks.monitor.schedule import Plan

PREFIX = "overlap_callbacks: "


class StepRanges:
    """One range around each step of a window.

    Args:
        enabled: whether there are any; else nothing is done.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._nvtx: Any = device.ranges() if enabled else None
        self._function: torch.profiler.record_function | None = None
        self._nvtx_range: Any = None

    def begin(self, plan: Plan, step: int) -> None:
        """A step begins.

        Args:
            plan: of the step.
            step: its number.
        """
        if not self._enabled:
            return
        self.end()
        name = range_name(plan, step)
        self._function = torch.profiler.record_function(name)
        self._function.__enter__()
        if self._nvtx is not None:
            try:
                self._nvtx_range = self._nvtx.range_start(name)
            except RuntimeError:  # this build of torch has no NVTX
                self._nvtx = None

    def end(self) -> None:
        """The step ends, or is given up; does nothing if none is open."""
        function, self._function = self._function, None
        if function is not None:
            function.__exit__(None, None, None)
        opened, self._nvtx_range = self._nvtx_range, None
        if opened is not None and self._nvtx is not None:
            self._nvtx.range_end(opened)


def range_name(plan: Plan, step: int) -> str:
    """What a step is called, e.g. ``overlap_callbacks: sequential step 41 of window 0, timed``."""
    side = "other arm's" if plan.turned and plan.mode is not Mode.SEQUENTIAL else plan.mode.value
    warm_up = ", warm-up" if not plan.counted and plan.block >= 0 else ""
    return f"{PREFIX}{side} step {step} of window {plan.window}, {plan.part.value}{warm_up}"
