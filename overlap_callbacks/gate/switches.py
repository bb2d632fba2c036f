"""Switches: what can be turned between two steps, and restored.

A switch turned wrongly corrupts training without an error. So it changes only what the job was built for, only between
steps, reads back the effective value, and restores the original.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from overlap_callbacks.gate.interruptions import is_from_handler


class RefusedError(RuntimeError):
    """A step or a switch that is refused by design: no error of the library."""


def expect_taken(what: str, is_taken: bool) -> None:
    """Raise RefusedError if torch has ignored its own setter."""
    if not is_taken:
        raise RefusedError(f"torch did not take {what} [OC133]")


class Switch:
    """Interface of a switch. Both methods are called on the training thread, between steps.

    Attributes:
        name: for the record, e.g. ``overlap_comm``.
        sequential: whether steps are sequential while it is turned.
        only_between_steps: it cannot be restored within a step. ``close()`` then restores it when the step has ended.
        begins_with_communication: a step without a collective so far counts as not begun, as when a loop has ended.
    """

    name = "switch"
    sequential = False
    only_between_steps = True
    begins_with_communication = False

    def apply(self) -> None:
        """Turn it for the following steps. RuntimeError, if it had no effect or was changed, ends measuring."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the job's original setting. Must not raise; may be called twice."""
        raise NotImplementedError


class OverlapSwitch(Switch):
    """A framework's own overlap switches; turned, they make steps sequential."""

    name = "native"
    sequential = True
    only_between_steps = False

    def apply(self) -> None:
        self.disable()

    def disable(self) -> None:
        """Disable overlap for the following steps; see ``Switch.apply``."""
        raise NotImplementedError


class AttributeSwitch(Switch):
    """Base of switches that set attributes of objects and restore their values."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def keep(self, holder: Any, name: str) -> None:
        """Make ``restore`` restore this attribute."""
        self._before.append((holder, name, getattr(holder, name)))

    def set(self, holder: Any, name: str, value: Any) -> None:
        """Set an attribute until ``restore``."""
        self.keep(holder, name)
        setattr(holder, name, value)

    def restore(self) -> None:
        while self._before:
            setattr(*self._before.pop())


class SwitchState:
    """The switch in use (``form``) and whether it is turned. Without one, nothing is turned and the gate serialises.

    ``native``, if set, makes steps sequential instead of the gate. ``offers`` makes the switches of arms; adapters add
    to it.
    """

    def __init__(self) -> None:
        self.native: Switch | None = None
        self.form: Switch | None = None
        self.is_turned = False
        self.offers: dict[str, Callable[[Any], Switch]] = {}

    @property
    def turned(self) -> str | None:
        """Name of the switch, if it is turned."""
        return self.form.name if self.is_turned and self.form is not None else None

    @property
    def is_sequential(self) -> bool:
        """Whether the switch in use makes the open step sequential."""
        return self.is_turned and self.form is not None and self.form.sequential

    def must_wait(self, *, communicated: bool) -> bool:
        """Whether the switch stays turned until the open step ends. ``communicated``: the step has communicated."""
        if not self.is_turned or self.form is None or not self.form.only_between_steps:
            return False
        return communicated or not self.form.begins_with_communication

    def adopt(self, native: Switch) -> None:
        """Use this switch to make steps sequential, from now on."""
        self.use(native)
        self.native = native

    def use(self, switch: Switch | None) -> None:
        """Use this switch from now on. Between steps only: the previous one is restored first."""
        if switch is not self.form:
            self.turn(on=False)
            self.form = switch

    def go_back(self) -> None:
        """Restore the switch in use, if it is turned. Between steps only; never raises."""
        with contextlib.suppress(Exception):  # a switch that cannot be restored has raised when it was turned
            self.turn(on=False)

    def turn(self, *, on: bool) -> None:
        """Turn the switch in use on or off, unless it already is. If it has no effect, it is restored."""
        if self.form is None or on == self.is_turned:
            return
        if on:
            try:
                self.form.apply()
            except BaseException:
                self.form.restore()  # undo partial changes before any step runs with them
                raise
            self.is_turned = True
        else:
            self.is_turned = False
            self.form.restore()


class FunctionSwitch(Switch):
    """Turned and restored by two functions; an exception of theirs ends measuring."""

    begins_with_communication = True

    def __init__(self, name: str, on: Callable[[], None], off: Callable[[], None], *, only_between_steps: bool) -> None:
        self.name = name
        self.only_between_steps = only_between_steps
        self._on, self._off = on, off

    def apply(self) -> None:
        self._call(self._on)

    def restore(self) -> None:
        self._call(self._off)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            if isinstance(error, RefusedError) or is_from_handler(error):
                raise
            raise RefusedError(f"a function of the arm {self.name} raised {error!r} [OC140]") from error
