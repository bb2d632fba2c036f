"""Rank 0's permission to serialise what steps recorded."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.gate.deadlock import CollectiveSequence
from overlap_callbacks.gate.step_log import ExpectedSequence, StepLog
from overlap_callbacks.monitor.background.agreement import RecordedKinds, WindowTerms
from overlap_callbacks.monitor.background.order_check import Decision, OrderChecker, Ruling, WindowPlanner


class Clearance:
    """Asks for the permission after recorded steps, and gets it some steps later. Used once.

    Args:
        checker: runs the order check on its own thread.
        rank: of this process.

    Attributes:
        sequence: what may be serialised; None until it is granted.
        name: of the ruling that granted it.
    """

    def __init__(self, checker: OrderChecker, rank: int) -> None:
        self.sequence: ExpectedSequence | None = None
        self.name = ""
        self._checker = checker
        self._rank = rank
        self._requested: RecordedKinds | None = None

    def request(
        self,
        key: str,
        logs: Sequence[StepLog],
        *,
        window: int | None,
        plan_window: WindowPlanner | None = None,
        terms: WindowTerms | None = None,
        usual_step_s: float | None = None,
    ) -> None:
        """Hand in what steps recorded.

        Args:
            key: names the request; the same on every rank, and never used twice.
            logs: of the recorded steps, at least one.
            window: number of the window; None for a mode pinned by hand.
            plan_window: on rank 0, plans the window; called on the checker's thread.
            terms: what this rank is about to measure; None for a mode pinned by hand.
            usual_step_s: how long a step takes outside windows; None if not known.
        """
        # A rank whose step compiled asks all the same: the others wait for it, and all must decide alike.
        self._requested = _kinds_of(logs, self._rank)
        before = logs[0].issued_before if terms is not None else {}
        # A group on which somebody else communicates in any of the steps tells nothing.
        counts = {name: count for name, count in before.items() if all(name in log.issued_before for log in logs)}
        self._checker.start(
            key,
            self._requested,
            window,
            plan_window=plan_window,
            terms=terms,
            counts=counts,
            usual_step_s=usual_step_s,
        )

    def ruling(self) -> Ruling:
        """Rank 0's ruling. Waits for it, for a bounded time; ``sequence`` is set if it is granted."""
        if self._requested is None:
            return Ruling(Decision.FAILED, "no sequence of collectives was recorded")
        ruling = self._checker.await_ruling()
        if ruling.decision is Decision.GRANTED:
            self.sequence = ExpectedSequence.of(self._requested.granted(ruling.only))
            self.name = ruling.name
        return ruling


def _kinds_of(logs: Sequence[StepLog], rank: int) -> RecordedKinds:
    kinds: dict[object, CollectiveSequence] = {}
    keys = [(log.signature, log.dropped > 0, log.compiled) for log in logs]
    for key, log in zip(keys, logs, strict=True):
        if key not in kinds:
            kinds[key] = CollectiveSequence.of(log.collectives, rank, incomplete=key[1], compiled=key[2])
    places = {key: place for place, key in enumerate(kinds)}
    return RecordedKinds(tuple(kinds.values()), tuple([places[key] for key in keys]))
