"""Something of the job that is turned between two steps: a framework's own switches for overlap, or an arm's.

Overlap first: the gate is one way to run a step sequentially, and needs nothing from the framework. A framework's own
switches are a second one. Where both exist, their agreement checks the measurement.

A switch is risky where the gate is not: turned wrongly, it corrupts training without an error. So it only changes what
the job was built for, only between steps, reads back the value in force, and restores it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Switch:
    """Interface of what can be turned. Both methods are called on the training thread, between steps.

    Attributes:
        name: for the record, e.g. ``overlap_comm``.
        sequential: whether steps are sequential while it is turned.
        only_between_steps: whether it cannot even be restored within a step. A ``close()`` within a step then restores
            it when the step has ended.
        begins_with_communication: whether a step that has issued no collective yet counts as not begun. In loops that
            are marked by ``optimizer.step()``, a step is open when the loop has ended.
    """

    name = "switch"
    sequential = False
    only_between_steps = True
    begins_with_communication = False

    def apply(self) -> None:
        """Turn it for the steps that follow.

        Raises:
            RuntimeError: it did not take effect, or somebody else has changed it: measuring then ends.
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Restore what the job was built with. Must not raise, and may be called twice."""
        raise NotImplementedError


class OverlapSwitch(Switch):
    """A framework's own switches for overlap: turned, they make steps sequential."""

    name = "native"
    sequential = True
    only_between_steps = False

    def apply(self) -> None:
        self.disable()

    def disable(self) -> None:
        """Switch overlap off for the steps that follow.

        Raises:
            RuntimeError: a switch did not take effect, or somebody else has changed it: measuring then ends.
        """
        raise NotImplementedError


class SwitchState:
    """The switch in use, and which way it is turned.

    Args:
        native: what makes steps sequential instead of the gate; None if the gate does.

    Attributes:
        native: the same.
        form: the switch in use; None if nothing is turned, and the gate makes steps sequential.
        is_turned: whether it is turned.
        offers: makers of the switches of arms, which adapters add to.
    """

    def __init__(self, native: Switch | None) -> None:
        self.native = native
        self.form = native
        self.is_turned = False
        self.offers: dict[str, Callable[[Any], Switch]] = {}

    @property
    def is_sequential(self) -> bool:
        """Whether the switch in use makes the open step sequential."""
        return self.is_turned and self.form is not None and self.form.sequential

    def must_wait(self, *, communicated: bool) -> bool:
        """Whether the switch is turned, and can only be restored once the open step has ended.

        Args:
            communicated: whether the step has issued a collective.
        """
        if not self.is_turned or self.form is None or not self.form.only_between_steps:
            return False
        return communicated or not self.form.begins_with_communication

    def adopt(self, native: Switch) -> None:
        """Make steps sequential by this switch, from here on."""
        self.use(native)
        self.native = native

    def use(self, switch: Switch | None) -> None:
        """Turn this switch from here on. Between steps only: the one in use goes back first."""
        if switch is not self.form:
            self.turn(on=False)
            self.form = switch

    def turn(self, *, on: bool) -> None:
        """Turn the switch in use, unless it is turned that way already.

        Raises:
            RuntimeError: the switch did not take effect; it is restored.
        """
        if self.form is None or on == self.is_turned:
            return
        if on:
            try:
                self.form.apply()
            except BaseException:
                self.form.restore()  # what was turned before the failure goes back before any step runs like this
                raise
            self.is_turned = True
        else:
            self.is_turned = False
            self.form.restore()
