"""Rank 0's permission to serialise what a step recorded."""

from __future__ import annotations

from overlap_callbacks.gate.deadlock import CollectiveSequence
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.monitor.background.agreement import WindowTerms
from overlap_callbacks.monitor.background.order_check import Decision, OrderChecker, Ruling


class Clearance:
    """Asks for the permission after a recorded step, and gets it some steps later. Used once for each recorded step.

    Args:
        checker: runs the order check on its own thread.
        rank: of this process.

    Attributes:
        sequence: what may be serialised; None until it is granted.
        name: of the ruling that granted it.
    """

    def __init__(self, checker: OrderChecker, rank: int) -> None:
        self.sequence: CollectiveSequence | None = None
        self.name = ""
        self._checker = checker
        self._rank = rank
        self._requested: CollectiveSequence | None = None

    def request(
        self,
        key: str,
        log: StepLog,
        *,
        window: int | None,
        steps_per_block: int = 0,
        terms: WindowTerms | None = None,
        usual_step_s: float | None = None,
    ) -> None:
        """Hand in what a step recorded.

        Args:
            key: names the request; the same on every rank, and never used twice.
            log: of the recorded step.
            window: number of the window; None for a mode pinned by hand.
            steps_per_block: on rank 0, what it decided on the window's length.
            terms: what this rank is about to measure; None for a mode pinned by hand.
            usual_step_s: how long a step takes outside windows; None if not known.
        """
        # A rank whose step compiled asks all the same: the others wait for it, and all must decide alike.
        self._requested = CollectiveSequence.of(
            log.collectives, self._rank, incomplete=log.dropped > 0, compiled=log.compiled
        )
        counts = log.issued_before if terms is not None else {}
        self._checker.start(
            key, self._requested, window, steps_per_block, terms=terms, counts=counts, usual_step_s=usual_step_s
        )

    def ruling(self) -> Ruling:
        """Rank 0's ruling. Waits for it, for a bounded time; ``sequence`` is set if it is granted."""
        if self._requested is None:
            return Ruling(Decision.FAILED, "no sequence of collectives was recorded")
        ruling = self._checker.await_ruling()
        if ruling.decision is Decision.GRANTED:
            self.sequence, self.name = self._requested, ruling.name
        return ruling
