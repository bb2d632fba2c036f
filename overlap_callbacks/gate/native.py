"""A second way to run a step sequentially: a framework's own switches for overlap, flipped between steps.

The gate is the first way, and needs nothing from the framework. Where both exist, their agreement checks the
measurement. A framework's switch is risky where the gate is not: flipped wrongly, it corrupts training without an
error. So a switch only turns off what the job was built with, only between steps, reads back the value in force, and
restores it.
"""

from __future__ import annotations


class OverlapSwitch:
    """Interface of an adapter's switches. Both methods are called on the training thread, between steps.

    Attributes:
        name: for the record, e.g. ``overlap_comm``.
        only_between_steps: whether it cannot even be restored within a step. A ``close()`` within a step then restores
            it when the step has ended.
    """

    name = "native"
    only_between_steps = False

    def disable(self) -> None:
        """Switch overlap off for the steps that follow.

        Raises:
            RuntimeError: a switch did not take effect, or somebody else has changed it: measuring then ends.
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Restore what the job was built with. Must not raise, and may be called twice."""
        raise NotImplementedError


class SwitchState:
    """Knows which way a switch is turned.

    Attributes:
        form: the switch; None if the gate serialises.
        is_sequential: whether overlap is switched off.
    """

    def __init__(self, form: OverlapSwitch | None) -> None:
        self.form = form
        self.is_sequential = False

    @property
    def must_wait(self) -> bool:
        """Whether overlap is off, and can only be restored once the step has ended."""
        return self.is_sequential and self.form is not None and self.form.only_between_steps

    def set(self, sequential: bool) -> None:
        """Flip to a mode, unless the switch is in it already.

        Raises:
            RuntimeError: the switch did not take effect; it is restored.
        """
        if self.form is None or sequential == self.is_sequential:
            return
        if sequential:
            try:
                self.form.disable()
            except BaseException:
                self.form.restore()  # what was switched before the failure goes back before any step runs like this
                raise
            self.is_sequential = True
        else:
            self.is_sequential = False
            self.form.restore()
