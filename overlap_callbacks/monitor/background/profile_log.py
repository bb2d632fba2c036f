"""The gate's log of the profiled steps of a window."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.gate.collectives import Collective
from overlap_callbacks.monitor.window import MeasuredStep


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
