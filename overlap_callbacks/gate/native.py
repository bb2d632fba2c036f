"""A second, named way to run a step sequentially: a framework's own switches, flipped between steps.

The gate is the first way, and needs nothing of the framework. Where both exist, their agreement is a check of the
measurement. A native form is risky where the gate is not: flipped wrongly, it corrupts training without an error. So a
form only switches off what the job was built with, only between steps, reads back the value in force, and puts it back.
"""

from __future__ import annotations


class OverlapSwitch:
    """Interface of an adapter's switches. Both are called on the training thread, between steps.

    Attributes:
        name: for the record, e.g. ``overlap_comm``.
        only_between_steps: whether it cannot even be put back within a step, so that a ``close()`` there waits for the
            step's end with it.
    """

    name = "native"
    only_between_steps = False

    def disable(self) -> None:
        """Switch overlap off for the steps that follow.

        Raises:
            RuntimeError: a switch did not take, or was found changed: measuring is then given up.
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Put back what the job was built with. Must not raise, and may be called twice."""
        raise NotImplementedError


class SwitchState:
    """Keeps track of where a form stands."""

    def __init__(self, form: OverlapSwitch | None) -> None:
        self.form = form
        self.is_sequential = False

    @property
    def must_wait(self) -> bool:
        """Whether overlap is off, and can only be switched on again once the step has ended."""
        return self.is_sequential and self.form is not None and self.form.only_between_steps

    def set(self, sequential: bool) -> None:
        """Flip to a mode, where the form is not in it already."""
        if self.form is None or sequential == self.is_sequential:
            return
        if sequential:
            try:
                self.form.disable()
            except BaseException:
                self.form.restore()  # what was switched before it failed goes back before any step runs like this
                raise
            self.is_sequential = True
        else:
            self.is_sequential = False
            self.form.restore()
