"""A window in which collectives were delayed, to see whether the step gets longer. Plain data."""

from __future__ import annotations

import msgspec


class DelayedCall(msgspec.Struct, frozen=True, array_like=True):
    """A collective of a step.

    Attributes:
        operator, group: of torch, and the group's name.
        place: how many of this operator and group the step has issued before.
        name: as its framework knows it; empty if nobody says.
        dimension: of parallelism that the group serves; empty if not known.
    """

    operator: str
    group: str
    place: int
    name: str = ""
    dimension: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.operator, self.group, self.place

    @property
    def label(self) -> str:
        return self.name or f"{self.operator.strip('_')} {self.place} of {self.dimension or self.group}"


class DelayedSet(msgspec.Struct, frozen=True):
    """What a causal window delays: ``members``, each by ``delay_ms`` in the longest of its levels."""

    members: tuple[DelayedCall, ...]
    delay_ms: float


class CausalWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A causal window on rank 0.

    Attributes:
        delayed: what was delayed; its ``delay_ms`` is what a member's longest delay measured.
        levels: of each step: its delay is so many halves of the longest.
        step_ms: of each step; None for one that does not count.
        missed: collectives that could not be delayed, in all steps.
        charged_ms: of training time.
    """

    window: int
    first_step: int
    delayed: DelayedSet
    levels: tuple[int, ...]
    step_ms: tuple[float | None, ...]
    missed: int = 0
    charged_ms: float = 0.0
