"""When the race check runs: after each complete window whose order check allowed sequential steps."""

from __future__ import annotations

from overlap_callbacks.analysis.results.race import RaceCheck
from overlap_callbacks.gate.dispatcher import dispatcher
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.interruptions import is_own
from overlap_callbacks.gate.step_log import ExpectedSequence
from overlap_callbacks.gate.switch import SwitchState
from overlap_callbacks.monitor.notices import Notices
from overlap_callbacks.monitor.race.ballot import Ballot, UndecidedError
from overlap_callbacks.monitor.race.check import RaceChecker
from overlap_callbacks.monitor.race.repeatable import RepeatableStep

_NOTHING_TO_REPEAT = (
    "check_gradients=True has no step to repeat: give attach(..., repeat_step=...) of the PyTorch or the DeepSpeed "
    "adapter a function that runs forward and backward; no other adapter offers the race check"
)


class RaceChecks:
    """The race checks of one monitor.

    Args:
        enabled: the monitor's option ``check_gradients``.
        gate: of the monitor.
        switch: of the monitor.
        notices: of the monitor.

    Attributes:
        step: what an adapter offers to repeat; None if none does.
    """

    def __init__(self, enabled: bool, gate: Gate, switch: SwitchState, notices: Notices) -> None:
        self.step: RepeatableStep | None = None
        self._enabled = enabled
        self._gate = gate
        self._switch = switch
        self._notices = notices
        self._checker: RaceChecker | None = None

    @property
    def running(self) -> bool:
        """Whether a step is repeated just now."""
        return self._checker is not None and self._checker.running

    def granted(self, window: str, ballot: Ballot) -> None:
        """Say that a window may have sequential steps, so that a check may follow it.

        Args:
            window: as for ``after_window``.
            ballot: with the other ranks.
        """
        if self._enabled and self.step is not None:
            ballot.expect(window)

    def after_window(
        self, window: str, step: int, granted: ExpectedSequence | None, ballot: Ballot, rank: int
    ) -> RaceCheck | None:
        """Check a window's job, if that is wanted and possible.

        Args:
            window: names it in the store; the same on every rank, and never used twice.
            step: number of its last step.
            granted: what passed its order check; None if nothing did.
            ballot: with the other ranks.
            rank: of this process.

        Returns:
            What came of it; None where nothing was to be checked.
        """
        if not self._enabled or granted is None:
            return None
        if self.step is None:
            self._notices.warn_once("race", _NOTHING_TO_REPEAT)
            self._enabled = False
            return None
        if self._checker is None:
            self._checker = RaceChecker(self.step, self._gate, self._switch, ballot, rank)
        error: BaseException | None
        try:
            outcome, error = self._checker.check(window, step, granted)
        except UndecidedError as undecided:
            outcome, error = None, undecided
        if error is not None:
            # It must reach the job, whatever becomes of errors of ours: ``step_end`` raises it.
            dispatcher.interrupts.append(RuntimeError(f"repeat_step: {error!r}") if is_own(error) else error)
        if self._checker.finished or error is not None:
            self._enabled = False
        return outcome
