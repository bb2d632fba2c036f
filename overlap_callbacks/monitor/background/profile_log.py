"""The gate's log of the profiled steps of a window."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.gate.collectives import Collective
from overlap_callbacks.gate.let_pass import LetPass
from overlap_callbacks.monitor.window import MeasuredStep


@dataclass(frozen=True)
class ProfileLog:
    """What the gate saw in the profiled steps; steps are told by their index in the profile.

    Attributes:
        issued: the collectives of each step, in the order of issue.
        whole: steps that count and whose log holds all of their collectives.
        sequential: sequential steps that count. (In a control window, the steps of the sequential arm overlap too.)
    """

    issued: dict[int, tuple[Collective, ...]]
    whole: frozenset[int]
    sequential: tuple[int, ...]

    def of_steps(self, counted: Collection[int]) -> ProfileLog:
        """The same, if of all steps only these count."""
        sequential = tuple([step for step in self.sequential if step in counted])
        return ProfileLog(self.issued, self.whole.intersection(counted), sequential)


def profile_log(steps: Sequence[MeasuredStep]) -> ProfileLog:
    """The log of those of a window's steps that were profiled."""
    profiled = [step for step in steps if step.profile_index >= 0]
    counted = [step for step in profiled if step.counted]
    whole = [step for step in counted if not (step.log.dropped or step.log.compiled or _captured(step))]
    return ProfileLog(
        issued={step.profile_index: step.log.collectives for step in profiled},
        whole=frozenset(step.profile_index for step in whole),
        sequential=tuple([step.profile_index for step in counted if step.plan.mode is Mode.SEQUENTIAL]),
    )


def _captured(step: MeasuredStep) -> bool:
    """Whether a CUDA graph was captured in the step: its collectives were issued, and launched no kernel."""
    return LetPass.CAPTURE in step.log.let_pass
