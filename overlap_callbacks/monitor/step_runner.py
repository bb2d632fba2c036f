"""The states of a monitor: running windows, running every step in a pinned mode, or stopped."""

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
    """Drives steps. A monitor has one runner at a time, and passes it only the steps that it needs."""

    def __init__(self, slot: SessionSlot) -> None:
        self.next_step = 0  # the first step that needs ``begin``
        self.in_step = False  # the open step has instruments or a mode of its own, so it needs ``end``
        self.finished = False  # hand back to the window runner
        self._slot = slot
        self._gate = slot.gate
        self._switch = slot.switch
        self._notices = slot.notices
        self._faults = slot.faults

    @property
    def in_window(self) -> bool:
        return False

    @property
    def steps_left(self) -> int:
        """Steps of the open window after the latest one, as far as they are placed; 0 if none is open."""
        return 0

    def begin(self, step: int) -> None:
        """Begin step number ``step``, which is at least ``next_step``."""

    def end(self) -> None:
        """End the open step; called only if ``in_step``."""

    def skip(self, reason: str) -> None:
        """The open step trains nothing, so it does not count."""

    def pause(self) -> None:
        """Until ``resume``, the open step runs something that is not training."""

    def resume(self) -> None:
        """End the pause. The step may have been abandoned meanwhile."""

    def abandon(self, reason: str, *, within_step: bool = False, job_ends: bool = False) -> None:
        """Abandon the current work: collectives pass from now on, and steps are overlapped again.

        ``within_step``: the step goes on, so a framework's own switch must stay until its end. ``job_ends``: nothing
        more is measured.
        """
        self._gate.stop()
        if not within_step:
            self._switch.go_back()
        self.in_step = False

    def discard(self) -> None:
        """Stop all instruments after an internal error, without a report."""


class Stopped(StepRunner):
    """Measures nothing more. A switch that is turned is turned back: if a step is open, at its end."""

    def __init__(self, slot: SessionSlot, *, within_step: bool) -> None:
        super().__init__(slot)
        self.next_step = NEVER
        self.in_step = within_step and self._switch.is_turned
        self._gate.stop()
        slot.keeping.end("measuring has ended")
        if not self.in_step:
            self._switch.go_back()

    def begin(self, step: int) -> None:
        self.end()

    def end(self) -> None:
        self.in_step = False
        self._gate.stop()
        self._switch.go_back()


class PinnedRunner(StepRunner):
    """Runs every step in a mode pinned by the user. No window opens, and nothing is reported.

    Overlapped mode needs no preparation. For sequential mode, a step is recorded, overlapped, and its order check
    starts at its end. If a step deviates from what was checked, the next one is recorded again.
    """

    def __init__(self, mode: Mode, slot: SessionSlot) -> None:
        super().__init__(slot)
        self.mode = mode
        self._session: Session | None = None
        self._is_checked = False  # a step was recorded and its order check started
        self._granted: ExpectedSequence | None = None  # what the ruling allows to be serialised
        self._skipped = False  # the open step trains nothing

    def pin(self, mode: Mode) -> None:
        """From the next step on; the order that was checked stays so."""
        self.mode, self.next_step = mode, 0

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
            self._faults.switch_off("stuck", f"measuring is switched off, training goes on: {stuck}")
        elif log.unsupported_device:
            self._faults.switch_off("accelerator", device.refusal(log.unsupported_device))
        elif self._skipped:
            return  # unlike other steps: the next one is recorded if needed
        elif not self._is_checked:
            assert self._session is not None
            recorded = RecordedKinds.of([log], self._session.job.rank)
            self._session.order_checker.start(f"pinned{next(self._session.pinned_checks)}", recorded, window=None)
            self._is_checked = True
        elif log.compiled:
            return  # some of its collectives may be missing, which says nothing about other steps
        elif log.divergence is not None:
            self._notices.info(f"a step was not sequential throughout: {log.divergence} [OC218]")
            self._is_checked, self._granted = False, None  # record and check again

    def _go_on(self, checker: OrderChecker) -> bool:
        """Act on the ruling. False if steps will not become sequential."""
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
    """Why the gate cannot continue after a step: a serialised collective got stuck. None if it can.

    Raises the gate's own error from the step, which could not be raised within a collective.
    """
    if gate.last_error is not None:
        raise gate.last_error
    if gate.stuck is None:
        return None
    return (
        f"{gate.stuck} did not finish within {gate.patience_s:g} s when it was serialised: the ranks' order of "
        f"collectives differs from step to step, or a rank was held up [OC219]"
    )
