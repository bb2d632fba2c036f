"""The arms of a monitor, bound to their switches, and which window has which if nobody decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from overlap_callbacks.gate.arms import BaseArm, Offers
from overlap_callbacks.gate.switches import Switch
from overlap_callbacks.monitor.faults import Notices

# Rotating by the golden ratio is even for all arms, even if only every k-th window opens, for any k: the budget and
# silent ranks skip windows by numbers of their own. A plain rotation could then skip the same arms for ever.
_TURN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class BoundArm:
    """An arm of this job and its switch; None if steps are made sequential without one."""

    arm: BaseArm
    switch: Switch | None


def turn_of(window: int, num_arms: int) -> int:
    """Index of the arm that window number ``window`` uses."""
    return int(window * _TURN % 1 * num_arms)


class ArmRotation:
    """The arms of a monitor, each bound to its switch when its first window comes.

    Warns about arms that this job cannot have (``strict`` raises instead) and arms that change results.
    """

    def __init__(self, arms: Sequence[BaseArm], offers: Offers, notices: Notices, *, strict: bool) -> None:
        self._offers = offers
        self._arms = tuple(arms)
        self._notices = notices
        self._strict = strict
        self._bound: dict[str, BoundArm | None] = {}  # None for an arm that this job cannot have

    @property
    def names(self) -> tuple[str, ...]:
        return tuple([arm.name for arm in self._arms])

    def of_window(self, number: int) -> BoundArm | None:
        """The arm of a window; None if this job cannot have it: the window is skipped. Raises the reason if strict."""
        return self._of(self._arms[turn_of(number, len(self._arms))])

    def available(self) -> tuple[str, ...]:
        """Names of the arms that this job can have. Binds all; raises if strict and it cannot have one."""
        return tuple([arm.name for arm in self._arms if self._of(arm) is not None])

    def named(self, name: str) -> BoundArm:
        """An arm of ``available``."""
        bound = self._bound[name]
        assert bound is not None
        return bound

    def _of(self, arm: BaseArm) -> BoundArm | None:
        if arm.name not in self._bound:
            self._bound[arm.name] = self._bind(arm)
        return self._bound[arm.name]

    def _bind(self, arm: BaseArm) -> BoundArm | None:
        try:
            bound = BoundArm(arm, arm.switch(self._offers))
        except (ValueError, RuntimeError) as error:
            if self._strict:
                raise
            self._notices.warn_once(f"arm {arm.name}", f"the arm {arm.name} is left out: {error} [OC131]")
            return None
        if not arm.equal_results:
            self._notices.warn_on_first(
                f"the arm {arm.name} changes results: losses and weights are not those of the job without it [OC132]"
            )
        return bound
