"""A vote on what all ranks must do or none: repeat a step, keep an arm turned on. A rank alone would hang, or train
wrongly.

The decision is one entry of the job's store, written once: by the last rank that votes yes, or by the first that votes
no or gives up waiting. Later ranks read it. So no two ranks ever disagree on it, however late or dead a rank is. No
collective is used.

A question has three keys, whose names all ranks know: the terms, set by the first vote; the count of votes with these
terms; and the decision. Leaving ranks delete them. They are left behind only if all ranks are gone; or if a rank votes
too late, completes the others' count, and dies before it leaves, and it dies, or the last of the others leaves, within
the next two store calls.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from overlap_callbacks._threads import NoAnswerError, QuestionFailedError, Worker
from overlap_callbacks.monitor.background.store import StoreChannel, StoreFailedError

# The questions, each decided once per window: whether to repeat the step; whether all ranks failed in it in the same
# way; whether to turn on an arm after the window.
REPEAT, FAILED, KEEP = "repeat", "failed", "keep"
_YES = b"yes"
_NO = b"no:"
# More than any number of votes: adding it closes a count, which then never equals the number of ranks.
_CLOSED = 2**40
# How many times longer the training thread waits for its own vote than ranks wait for each other: once it is cast, the
# others may go on without asking again.
_PATIENCE = 6.0
_NO_ANSWER = "the job's store does not answer"
_UNDECIDED = (
    "the job's store failed in the midst of a vote on the race check: whether the other ranks repeat the step is not "
    "known, and to train on could mix up their collectives [OC255]"
)


class UndecidedError(RuntimeError):
    """The store stopped answering between this rank's vote and the decision, so whether the others go on is unknown."""


@dataclass(frozen=True)
class Decision:
    """The decision, the same on every rank: whether all voted yes, and if not, why."""

    agreed: bool
    reason: str = ""


class Vote:
    """A vote off the training thread: ``decision`` once it is ``done``; None if the store stopped answering."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.decision: Decision | None = None
        self._hurries = threading.Event()

    def hurry(self) -> None:
        """Wait no longer for other ranks: without all votes, the decision is no."""
        self._hurries.set()

    @property
    def hurries(self) -> bool:
        return self._hurries.is_set()


@dataclass
class _Question:
    """What a rank has used in the store for one question."""

    decision: str  # key of the decision
    has_voted: bool = False  # this rank may have been counted
    is_read: bool = False  # no rank can still turn to yes: the keys may be deleted

    @property
    def terms(self) -> str:
        """Key of the terms that all counted ranks share."""
        return f"{self.decision}/terms"

    @property
    def count(self) -> str:
        """Key of the vote count."""
        return f"{self.decision}/count"

    @property
    def keys(self) -> tuple[str, ...]:
        # Delete the count before the decision: a rank that comes in between counts alone, and decides no.
        return self.count, self.terms, self.decision


class Ballot:
    """Votes of all ranks, in sequence, called on the training thread. Ranks wait ``timeout_s`` for each other."""

    def __init__(self, channel: StoreChannel, timeout_s: float) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._questions: dict[tuple[str, str], _Question] = {}  # by window and question
        self._expected = ""
        self._worker = Worker("overlap-callbacks-ballot", lambda error: None)

    def expect(self, window: str) -> None:
        """Announce possible votes in a window: their keys are deleted even if this rank leaves before it votes."""
        self._expected = window

    def vote(self, window: str, question: str, terms: str) -> Decision:
        """Vote yes to ``REPEAT`` or ``FAILED``, provided all ranks have the same terms, and wait for the decision.

        ``window`` names the window: the same on every rank, and never reused.

        Raises:
            UndecidedError: the store stopped answering while this rank's vote was in flight.
        """
        return self._do(lambda: self._vote(window, question, terms))

    def begin(self, window: str, question: str, terms: str) -> Vote:
        """Vote as ``vote`` does, without waiting for the decision. Called on the training thread."""
        vote = Vote()

        def cast() -> None:
            try:
                vote.decision = self._vote(window, question, terms, lambda: vote.hurries)
            finally:
                vote.done.set()

        if self._channel.call.is_stuck:
            vote.decision = Decision(False, _NO_ANSWER)
            vote.done.set()
        else:
            self._worker.submit(cast)
        return vote

    def decline(self, window: str, question: str, reason: str) -> Decision:
        """Decide no for all ranks, with a reason."""
        return self._do(lambda: self._decline(window, question, reason))

    def close(self) -> None:
        """Delete what is left in the store, and end the thread."""
        if self._worker.started or self._expected:
            with contextlib.suppress(RuntimeError):  # the system cannot start another thread
                self._worker.submit(self._leave)
            self._worker.close(1.0)

    def _do(self, work: Callable[[], Decision]) -> Decision:
        if self._channel.call.is_stuck:
            return Decision(False, _NO_ANSWER)  # without this rank's vote, no rank goes on
        try:
            return self._worker.ask(work, _PATIENCE * self._timeout_s)
        except NoAnswerError:
            raise UndecidedError(_UNDECIDED) from None
        except QuestionFailedError as error:
            raise UndecidedError(_UNDECIDED) from error.__cause__

    # -- on the ballot's thread

    def _vote(self, window: str, question: str, terms: str, stop: Callable[[], bool] = lambda: False) -> Decision:
        self._delete_earlier_votes(but=window)
        used = self._question(window, question)
        unlike = f"not all ranks came to the same step, and wanted the same of it, within {self._timeout_s:g} s"
        try:
            if self._channel.set_if_absent(used.terms, terms.encode()) != terms.encode():
                return self._decide(used, _NO + unlike.encode())
            used.has_voted = True
            votes = self._channel.add(used.count)
        except StoreFailedError:
            return Decision(False, _NO_ANSWER)  # not counted
        if votes == self._channel.job.world_size:
            used.is_read = True  # only this rank can decide yes for all, and does so now
            decision = self._decide(used, _YES)
            if not decision.agreed:  # too late; leaving ranks need not keep the keys for it
                with contextlib.suppress(StoreFailedError):
                    self._channel.add(used.count, -1)
            return decision
        answer = self._channel.await_message(used.decision, self._timeout_s, stop)
        if answer is not None:
            return _decided(used, answer)
        return self._decide(used, _NO + unlike.encode())

    def _decline(self, window: str, question: str, reason: str) -> Decision:
        try:
            return self._decide(self._question(window, question), _NO + reason.encode())
        except StoreFailedError:
            return Decision(False, reason)

    def _decide(self, used: _Question, proposal: bytes) -> Decision:
        """Write the decision, unless there is one already; the stored one counts."""
        return _decided(used, self._channel.set_if_absent(used.decision, proposal))

    def _question(self, window: str, question: str) -> _Question:
        return self._questions.setdefault((window, question), _Question(f"race/{window}/{question}"))

    def _delete_earlier_votes(self, *, but: str) -> None:
        """Delete earlier windows' votes, on rank 0. All ranks have read them: they have trained together since."""
        old = [self._questions.pop(place) for place in list(self._questions) if place[0] != but]
        if self._channel.job.rank == 0:
            with contextlib.suppress(StoreFailedError):
                for used in old:
                    self._channel.delete(*used.keys)

    def _leave(self) -> None:
        """Delete all keys of this rank's questions: any other rank may be gone, or have voted alone."""
        windows = {window for window, _ in self._questions} | ({self._expected} if self._expected else set())
        with contextlib.suppress(StoreFailedError):
            for window in sorted(windows):
                for question in (REPEAT, FAILED, KEEP):
                    used = self._question(window, question)
                    if used.is_read or self._close(used):
                        self._channel.delete(*used.keys)
        self._questions.clear()

    def _close(self, used: _Question) -> bool:
        """Close the votes on a question that was decided with no. Returns whether no vote completed the count.

        A rank may arrive after the others stopped waiting. If its vote completed the count, it is about to vote yes,
        must find the decision, and deletes the keys itself. A vote after the count was closed does not complete it, nor
        does one after the count was deleted: the votes of ranks that have left are missing then. The same holds if this
        rank has not voted. So other terms may be set once these were deleted.
        """
        return not used.has_voted or self._channel.add(used.count, _CLOSED) % _CLOSED < self._channel.job.world_size


def _decided(used: _Question, message: bytes) -> Decision:
    if message != _YES:
        return Decision(False, message.removeprefix(_NO).decode(errors="replace"))
    # If all agreed, they repeat the step together: each has read the decision before any of them leaves.
    used.is_read = True
    return Decision(True)
