"""A window in which collectives were delayed, to see whether the step gets longer. Plain data."""

from __future__ import annotations

import msgspec

from overlap_callbacks.analysis.results.exposure import ExposedCollective


class DelayedCall(msgspec.Struct, frozen=True, array_like=True):
    """A collective of a step, the same for all groups of ranks that issue one for the same purpose.

    Attributes:
        operator: of torch.
        group: dimension of parallelism that its group serves; the group's name if that is not known.
        place: how many of this operator, group and name the step has issued before.
        name: of what it is for, as its framework knows it; empty if nobody says.
    """

    operator: str
    group: str
    place: int
    name: str = ""


class DelayedSet(msgspec.Struct, frozen=True):
    """What a causal window delays: ``members``, each by ``delay_ms`` in the longest of its levels."""

    members: tuple[DelayedCall, ...]
    delay_ms: float


class CausalWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A causal window on rank 0.

    Attributes:
        delayed: what was delayed; its ``delay_ms`` is what a member's longest delay measured on rank 0, as planned if
            rank 0 issues no member.
        levels: of each step: its delay is so many halves of the longest.
        step_ms: of each step; None for one that does not count, or in which some rank did not delay all members.
        missed: members of rank 0 that could not be delayed, in all steps.
        missed_steps: steps that do not count because some rank could not delay all its members.
        charged_ms: of training time.
        names: of its members, as in ``Exposure``: their times in its profiled steps, which delay nothing.
    """

    window: int
    first_step: int
    delayed: DelayedSet
    levels: tuple[int, ...]
    step_ms: tuple[float | None, ...]
    missed: int = 0
    missed_steps: int = 0
    charged_ms: float = 0.0
    names: tuple[ExposedCollective, ...] = ()
