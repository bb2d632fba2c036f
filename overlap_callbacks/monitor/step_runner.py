"""What a monitor is doing: running windows, running every step in a pinned mode, or nothing any more."""

from __future__ import annotations

import contextlib
import sys

from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.switch import SwitchState

NEVER = sys.maxsize


class StepRunner:
    """Drives steps. A monitor has one at a time, and hands it the steps in which it has something to do.

    Args:
        gate: of the monitor.
        switch: a framework's own switch, if an adapter has one.

    Attributes:
        next_step: the first step at which ``begin`` has anything to do.
        in_step: whether the open step has instruments or a mode of its own, so that ``end`` has something to do.
        finished: whether the runner gives its place back to the one for windows.
    """

    def __init__(self, gate: Gate, switch: SwitchState) -> None:
        self.next_step = 0
        self.in_step = False
        self.finished = False
        self._gate = gate
        self._switch = switch

    @property
    def in_window(self) -> bool:
        """Whether a window is open."""
        return False

    def begin(self, step: int) -> None:
        """Step number ``step`` begins, and is at least ``next_step``."""

    def end(self) -> None:
        """The open step ends; called only if ``in_step``."""

    def skip(self, reason: str) -> None:
        """The open step trains nothing: it does not count."""

    def pause(self) -> None:
        """Something that is no part of training runs within the open step, from here to ``resume``."""

    def resume(self) -> None:
        """The pause ends. The step may have been given up meanwhile."""

    def abandon(self, reason: str, *, within_step: bool = False, job_ends: bool = False) -> None:
        """Give up what is under way: collectives pass from here on, and steps are overlapped again.

        Args:
            reason: why, in words.
            within_step: the step goes on, so that a framework's own switch must stay until its end.
            job_ends: nothing more is measured.
        """
        self._gate.stop()
        if not within_step:
            restore_overlap(self._switch)
        self.in_step = False

    def discard(self) -> None:
        """Stop all instruments after an error of ours; nothing is reported."""


class Stopped(StepRunner):
    """Nothing is measured any more, for good. All that may be left to do is to switch overlap on again.

    Args:
        gate: of the monitor.
        switch: a framework's own switch, if an adapter has one.
        within_step: whether a step is open. A switch that made it sequential is put back at its end, because switches
            may only be turned between steps.
    """

    def __init__(self, gate: Gate, switch: SwitchState, *, within_step: bool) -> None:
        super().__init__(gate, switch)
        self.next_step = NEVER
        self.in_step = within_step and switch.is_turned
        gate.stop()
        if not self.in_step:
            restore_overlap(switch)

    def begin(self, step: int) -> None:
        self.end()

    def end(self) -> None:
        self.in_step = False
        self._gate.stop()
        restore_overlap(self._switch)


def restore_overlap(switch: SwitchState) -> None:
    """Switch a framework's overlap on again, if it is off. Between steps only."""
    with contextlib.suppress(Exception):  # a switch that cannot go back has raised where it was turned
        switch.turn(on=False)


def check_gate_health(gate: Gate) -> str | None:
    """Look at the gate after a step.

    Returns:
        Why the gate cannot go on, in words: a serialised collective got stuck. None if it can.

    Raises:
        Exception: what the gate kept to itself during the step, because nothing may be raised within a collective.
    """
    if gate.last_error is not None:
        raise gate.last_error
    if gate.stuck is None:
        return None
    reason = (
        f"{gate.stuck} did not finish within {gate.patience_s:g} s when it was serialised: the ranks' order of "
        f"collectives differs from step to step, or a rank was held up"
    )
    return reason
