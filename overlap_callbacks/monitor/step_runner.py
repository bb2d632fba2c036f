"""What a monitor is doing: running windows, running every step in a pinned mode, or nothing any more."""

from __future__ import annotations

import sys

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import ExpectedSequence
from overlap_callbacks.instruments import device
from overlap_callbacks.instruments.clocks import StepClock
from overlap_callbacks.monitor.background.order_check import Decision, OrderChecker
from overlap_callbacks.monitor.background.submissions import RecordedKinds
from overlap_callbacks.monitor.session import Session, SessionSlot

NEVER = sys.maxsize


class StepRunner:
    """Drives steps. A monitor has one at a time, and gives it the steps in which it has something to do."""

    def __init__(self, slot: SessionSlot) -> None:
        self.next_step = 0  # the first step at which ``begin`` has anything to do
        self.in_step = False  # the open step has instruments or a mode of its own, so that ``end`` has something to do
        self.finished = False  # the runner gives its place back to the one for windows
        self._slot = slot
        self._gate = slot.gate
        self._switch = slot.switch
        self._notices = slot.notices
        self._faults = slot.faults

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

        ``within_step``: the step goes on, so that a framework's own switch must stay until its end. ``job_ends``:
        nothing more is measured.
        """
        self._gate.stop()
        if not within_step:
            self._switch.go_back()
        self.in_step = False

    def discard(self) -> None:
        """Stop all instruments after an error of ours; nothing is reported."""


class Stopped(StepRunner):
    """Nothing is measured any more, for good. A switch that is turned goes back: if a step is open, at its end."""

    def __init__(self, slot: SessionSlot, *, within_step: bool) -> None:
        super().__init__(slot)
        self.next_step = NEVER
        self.in_step = within_step and self._switch.is_turned
        self._gate.stop()
        if not self.in_step:
            self._switch.go_back()

    def begin(self, step: int) -> None:
        self.end()

    def end(self) -> None:
        self.in_step = False
        self._gate.stop()
        self._switch.go_back()


class PinnedRunner(StepRunner):
    """Runs every step in a mode that the user pinned by hand. No window opens, and nothing is reported.

    Overlapped steps need nothing. Before a sequential one, a step is recorded, overlapped, and the order check begins
    at its end. Where a step departs from what was checked, the next one is recorded again.
    """

    def __init__(self, mode: Mode, slot: SessionSlot) -> None:
        super().__init__(slot)
        self.mode = mode
        self._session: Session | None = None
        self._is_checked = False  # a step was recorded, and its order check begun
        self._granted: ExpectedSequence | None = None  # what may be serialised, by its ruling
        self._skipped = False  # the open step trains nothing

    def begin(self, step: int) -> None:
        self.in_step = False
        if self.mode is Mode.OVERLAPPED:
            self._switch.turn(on=False)
            self.next_step = NEVER
            return
        self._session = self._slot.acquire()
        if self._session is None:
            return
        if self._is_checked and self._granted is None and not self._go_on(self._session.order_checker):
            return
        # Overlapped and recorded until its sequence is granted.
        sequential = self._granted is not None
        self.in_step = True
        self._skipped = False
        self._switch.use(self._switch.native)
        self._switch.turn(on=sequential)
        self._gate.begin_step(
            sequential=sequential and self._switch.form is None,
            expected=self._granted,
            compute_stream=StepClock().compute_stream,
            watch=False,
        )

    def end(self) -> None:
        self.in_step = False
        log = self._gate.end_step()
        stuck = check_gate_health(self._gate)
        if stuck is not None:
            self.abandon(stuck)
            self._faults.switch_off("stuck", f"{stuck}; measuring is switched off, training goes on")
        elif log.unsupported_device:
            self._faults.switch_off("accelerator", device.refusal(log.unsupported_device))
        elif self._skipped:
            return  # such a step is not like the others: the next one is recorded, if need be
        elif not self._is_checked:
            assert self._session is not None
            recorded = RecordedKinds.of([log], self._session.job.rank)
            self._session.order_checker.start(f"pinned{next(self._session.pinned_checks)}", recorded, window=None)
            self._is_checked = True
        elif log.compiled:
            return  # its collectives may be missing, which says nothing of the others
        elif log.divergence is not None:
            self._notices.info(f"a step was not sequential throughout: {log.divergence}")
            self._is_checked, self._granted = False, None  # record and check again

    def _go_on(self, checker: OrderChecker) -> bool:
        """Act on the ruling. False if no step is made sequential any more."""
        ruling = checker.await_ruling()
        match ruling.decision:
            case Decision.GRANTED:
                self._granted = checker.granted(ruling)
                return True
            case Decision.SKIPPED | Decision.CONFIG_MISMATCH | Decision.STEP_MISMATCH:
                self._is_checked = False  # record and check again
                return True
            case Decision.CONFLICT:
                # Every later step would show the same conflict.
                self._faults.switch_off(
                    "conflict", f"sequential mode is refused, and measuring is switched off: {ruling.reason}"
                )
                return False
            case Decision.LATE | Decision.FAILED:
                self._switch.turn(on=False)
                self._notices.warn_once("pinned", f"the mode stays overlapped: {ruling.reason}")
                self.finished = True
                return False

    def skip(self, reason: str) -> None:
        self._skipped = self.in_step

    def pause(self) -> None:
        if self.in_step:
            self._gate.suspend()

    def resume(self) -> None:
        if self.in_step:
            self._gate.resume()


def check_gate_health(gate: Gate) -> str | None:
    """Why the gate cannot go on after a step, in words: a serialised collective got stuck. None if it can.

    Raises the gate's own error of the step, because nothing may be raised within a collective.
    """
    if gate.last_error is not None:
        raise gate.last_error
    if gate.stuck is None:
        return None
    return (
        f"{gate.stuck} did not finish within {gate.patience_s:g} s when it was serialised: the ranks' order of "
        f"collectives differs from step to step, or a rank was held up"
    )
