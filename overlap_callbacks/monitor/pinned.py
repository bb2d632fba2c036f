"""Runs every step in a mode that the user pinned by hand. No window opens, and nothing is reported."""

from __future__ import annotations

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.gate.switch import SwitchState
from overlap_callbacks.instruments import device
from overlap_callbacks.instruments.clocks import StepClock
from overlap_callbacks.monitor.background.order_check import Decision, Ruling
from overlap_callbacks.monitor.clearance import Clearance
from overlap_callbacks.monitor.faults import FaultGuard
from overlap_callbacks.monitor.notices import Notices
from overlap_callbacks.monitor.session import Session, SessionSlot
from overlap_callbacks.monitor.step_runner import NEVER, StepRunner, check_gate_health


class PinnedRunner(StepRunner):
    """Pins one mode. Overlapped steps need nothing; sequential ones need a clearance first, as those of a window do.

    A step is recorded, overlapped, and the order check begins at its end. From the next step on, steps are sequential.
    Where one departs from what was checked, the next step is recorded again.

    Args:
        mode: of every step.
        slot: gives the session.
        gate: of the monitor.
        switch: a framework's own switch, if an adapter has one.
        notices: says where a step was not sequential.
        faults: switches measuring off where it cannot go on.
    """

    def __init__(
        self,
        mode: Mode,
        slot: SessionSlot,
        gate: Gate,
        switch: SwitchState,
        notices: Notices,
        faults: FaultGuard,
    ) -> None:
        super().__init__(gate, switch)
        self.mode = mode
        self._slot = slot
        self._notices = notices
        self._faults = faults
        self._session: Session | None = None
        self._clearance: Clearance | None = None  # of the step recorded last; None before one is recorded
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
        clearance = self._clearance
        if clearance is not None and clearance.sequence is None:
            self._act_on(clearance.ruling())
            if self._clearance is not None and clearance.sequence is None:
                return
        self._begin_step(self._clearance)

    def _begin_step(self, clearance: Clearance | None) -> None:
        """Start a step: sequential if there is a clearance, else overlapped and recorded."""
        sequence = clearance.sequence if clearance is not None else None
        sequential = sequence is not None
        self.in_step = True
        self._skipped = False
        self._switch.use(self._switch.native)
        self._switch.turn(on=sequential)
        self._gate.begin_step(
            sequential=sequential and self._switch.form is None,
            expected=sequence,
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
        elif self._clearance is None:
            self._request(log)
        elif log.compiled:
            return  # its collectives may be missing, which says nothing of the others
        elif log.divergence is not None:
            self._notices.info(f"a step was not sequential throughout: {log.divergence}")
            self._clearance = None  # record and check again

    def _request(self, log: StepLog) -> None:
        assert self._session is not None
        self._clearance = Clearance(self._session.order_checker, self._session.job.rank)
        self._clearance.request(f"pinned{next(self._session.pinned_checks)}", [log], window=None)

    def _act_on(self, ruling: Ruling) -> None:
        """Go on as the ruling says."""
        match ruling.decision:
            case Decision.GRANTED:
                return
            case Decision.CONFLICT:
                # Every later step would show the same conflict.
                self._faults.switch_off(
                    "conflict", f"sequential mode is refused, and measuring is switched off: {ruling.reason}"
                )
            case Decision.SKIPPED | Decision.UNLIKE | Decision.ASTRAY:
                self._clearance = None  # record and check again
            case Decision.LATE | Decision.FAILED:
                self._switch.turn(on=False)
                self._notices.warn_once("pinned", f"the mode stays overlapped: {ruling.reason}")
                self.finished = True

    def skip(self, reason: str) -> None:
        self._skipped = self.in_step

    def pause(self) -> None:
        if self.in_step:
            self._gate.suspend()

    def resume(self) -> None:
        if self.in_step:
            self._gate.resume()
