"""Do all ranks repeat the step? All do, or none does: what one rank alone repeats would never end, or train wrongly.

The decision is one entry of the job's store, written once: by the last rank that says yes, or by the first that says no
or gives up waiting. Whoever comes later reads it. So no two ranks ever believe different things, however late or dead a
rank is. No collective is used.

A question has three keys, whose names all ranks know: the terms, which the first vote sets, the count of votes with
these terms, and the decision. Whoever leaves takes them away. They are left behind only if all ranks are gone; or if a
rank votes too late, makes the others' count full, and dies before it leaves, and it dies, or the last of the others
leaves, within the next two calls of the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from overlap_callbacks._threads import NoAnswerError, QuestionFailedError, Worker
from overlap_callbacks.monitor.background.store import StoreChannel, StoreFailedError

# What is decided, each once in a window: whether to repeat the step; whether all failed in it alike.
REPEAT, FAILED = "repeat", "failed"
_YES = b"yes"
_NO = b"no:"
# More than any number of votes: with it added, a count is that of all ranks for nobody.
_CLOSED = 2**40
# How much longer than the ranks wait for each other the training thread waits for its own vote: once it is cast, the
# others may go on without asking again.
_PATIENCE = 6.0
_NO_ANSWER = "the job's store does not answer"
_UNDECIDED = (
    "the job's store failed in the midst of a vote on the race check: whether the other ranks repeat the step is not "
    "known, and to train on could mix up their collectives"
)


class UndecidedError(RuntimeError):
    """The store stopped answering between this rank's vote and the decision: whether the others go on is not known."""


@dataclass(frozen=True)
class Decision:
    """What was decided, the same on every rank: whether all said yes, and if not, why."""

    agreed: bool
    reason: str = ""


@dataclass
class _Used:
    """What a rank has used of the store for a question."""

    decision: str  # the key of what was decided
    has_voted: bool = False  # this rank may have been counted
    is_read: bool = False  # nobody who has not said yes can still do so: the keys may go

    @property
    def terms(self) -> str:
        """The key of what those who are counted have alike."""
        return f"{self.decision}/terms"

    @property
    def count(self) -> str:
        """The key of the number of votes."""
        return f"{self.decision}/count"

    @property
    def keys(self) -> tuple[str, ...]:
        # The count before its decision: a rank that comes in between counts alone, and decides no.
        return self.count, self.terms, self.decision


class Ballot:
    """Votes of all ranks, one after the other, on the training thread. Ranks wait for each other for ``timeout_s``."""

    def __init__(self, channel: StoreChannel, timeout_s: float) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._used: dict[tuple[str, str], _Used] = {}  # by window and question
        self._expected = ""
        self._worker = Worker("overlap-callbacks-ballot", lambda error: None)

    def expect(self, window: str) -> None:
        """Say that there may be votes in a window: they are taken away even if this rank leaves before it votes."""
        self._expected = window

    def vote(self, window: str, question: str, terms: str) -> Decision:
        """Say yes to ``REPEAT`` or ``FAILED``, if all ranks have the same terms, and wait for the decision.

        ``window`` names the window: the same on every rank, and never used twice.

        Raises:
            UndecidedError: the store stopped answering when this rank's vote was on its way.
        """
        return self._do(lambda: self._vote(window, question, terms))

    def decline(self, window: str, question: str, reason: str) -> Decision:
        """Say no, for all ranks, and why."""
        return self._do(lambda: self._decline(window, question, reason))

    def close(self) -> None:
        """Leave nothing in the store, and end the thread."""
        if self._worker.started or self._expected:
            with contextlib.suppress(RuntimeError):  # the system has no more threads to give
                self._worker.submit(self._leave)
            self._worker.close(1.0)

    def _do(self, work: Callable[[], Decision]) -> Decision:
        if self._channel.call.is_stuck:
            return Decision(False, _NO_ANSWER)  # this rank has not voted, so that none goes on
        try:
            return self._worker.ask(work, _PATIENCE * self._timeout_s)
        except NoAnswerError:
            raise UndecidedError(_UNDECIDED) from None
        except QuestionFailedError as error:
            raise UndecidedError(_UNDECIDED) from error.__cause__

    # -- on the ballot's thread

    def _vote(self, window: str, question: str, terms: str) -> Decision:
        self._take_away(but=window)
        used = self._use(window, question)
        unlike = f"not all ranks came to the same step, and wanted the same of it, within {self._timeout_s:g} s"
        try:
            if self._channel.set_if_absent(used.terms, terms.encode()) != terms.encode():
                return self._settle(used, _NO + unlike.encode())
            used.has_voted = True
            votes = self._channel.add(used.count)
        except StoreFailedError:
            return Decision(False, _NO_ANSWER)  # not counted
        if votes == self._channel.job.world_size:
            used.is_read = True  # this rank alone can say yes for all, and does it now
            decision = self._settle(used, _YES)
            if not decision.agreed:  # it came late; those who leave need not leave the keys to it any more
                with contextlib.suppress(StoreFailedError):
                    self._channel.add(used.count, -1)
            return decision
        answer = self._channel.await_message(used.decision, self._timeout_s, lambda: False)
        if answer is not None:
            return _decided(used, answer)
        return self._settle(used, _NO + unlike.encode())

    def _decline(self, window: str, question: str, reason: str) -> Decision:
        try:
            return self._settle(self._use(window, question), _NO + reason.encode())
        except StoreFailedError:
            return Decision(False, reason)

    def _settle(self, used: _Used, proposal: bytes) -> Decision:
        """Write the decision, unless there is one; what stands there counts."""
        return _decided(used, self._channel.set_if_absent(used.decision, proposal))

    def _use(self, window: str, question: str) -> _Used:
        return self._used.setdefault((window, question), _Used(f"race/{window}/{question}"))

    def _take_away(self, *, but: str) -> None:
        """Rank 0 removes the votes of earlier windows. All ranks have read them: they have trained together since."""
        old = [self._used.pop(place) for place in list(self._used) if place[0] != but]
        if self._channel.job.rank == 0:
            with contextlib.suppress(StoreFailedError):
                for used in old:
                    self._channel.delete(*used.keys)

    def _leave(self) -> None:
        """Leave nothing in the store, of this rank or of others: any of them may be gone, or have voted alone."""
        windows = {window for window, _ in self._used} | ({self._expected} if self._expected else set())
        with contextlib.suppress(StoreFailedError):
            for window in sorted(windows):
                for question in (REPEAT, FAILED):
                    used = self._use(window, question)
                    if used.is_read or self._close(used):
                        self._channel.delete(*used.keys)
        self._used.clear()

    def _close(self, used: _Used) -> bool:
        """Close the votes on a question that was decided with no. Returns whether no vote has made the count full.

        A rank may come later than the others wait for it. If its vote made the count full, it is about to say yes, must
        find what was decided, and takes that away itself. A vote after the count was closed does not make it full, nor
        one after the count was taken away: the votes of those who have left are missing then. The same holds if this
        rank has not voted. So other terms may be set once these were taken away.
        """
        return not used.has_voted or self._channel.add(used.count, _CLOSED) % _CLOSED < self._channel.job.world_size


def _decided(used: _Used, message: bytes) -> Decision:
    if message != _YES:
        return Decision(False, message.removeprefix(_NO).decode(errors="replace"))
    # Where all agreed, they repeat the step together: each has read the decision before any of them leaves.
    used.is_read = True
    return Decision(True)
