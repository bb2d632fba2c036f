"""Which arm a window has: a pure function of its number, so that every rank decides alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from overlap_callbacks.gate.arms import BaseArm, Offers
from overlap_callbacks.gate.switch import Switch
from overlap_callbacks.monitor.notices import Notices

# Turns by the golden ratio come evenly to all arms, also where only every k-th window opens, for any k: the budget and
# a silent rank leave windows out by numbers of their own. A plain rotation would then leave out the same arms for ever.
_TURN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class BoundArm:
    """An arm of this job.

    Attributes:
        arm: as declared.
        switch: what is turned for it; None if the gate, or what ``sequential="native"`` asks for, makes its steps
            sequential.
    """

    arm: BaseArm
    switch: Switch | None


def turn_of(window: int, num_arms: int) -> int:
    """Which of the arms window number ``window`` has, from 0."""
    return int(window * _TURN % 1 * num_arms)


class ArmRotation:
    """The arms of a monitor, each bound to what it turns when its first window comes.

    Args:
        arms: as declared; at least one.
        offers: what adapters offer, by ``BaseArm.needs``; they may add to it.
        notices: says which of them this job cannot have, and which change results.
        strict: raise instead.
    """

    def __init__(self, arms: Sequence[BaseArm], offers: Offers, notices: Notices, *, strict: bool) -> None:
        self._offers = offers
        self._arms = tuple(arms)
        self._notices = notices
        self._strict = strict
        self._bound: dict[str, BoundArm | None] = {}  # None for one that this job cannot have

    @property
    def names(self) -> tuple[str, ...]:
        """Their names: alike on all ranks."""
        return tuple([arm.name for arm in self._arms])

    def of_window(self, number: int) -> BoundArm | None:
        """The arm of a window; None if this job cannot have it, and the window is left out.

        Raises:
            ValueError, RuntimeError: (strict only) this job cannot have it; with the reason.
        """
        arm = self._arms[turn_of(number, len(self._arms))]
        if arm.name not in self._bound:
            self._bound[arm.name] = self._bind(arm)
        return self._bound[arm.name]

    def _bind(self, arm: BaseArm) -> BoundArm | None:
        try:
            bound = BoundArm(arm, arm.switch(self._offers))
        except (ValueError, RuntimeError) as error:
            if self._strict:
                raise
            self._notices.warn_once(f"arm {arm.name}", f"the arm {arm.name} is left out: {error}")
            return None
        if not arm.equal_results:
            self._notices.warn_once(
                f"arm {arm.name}",
                f"the arm {arm.name} changes results: losses and weights are not those of the job without it",
            )
        return bound
