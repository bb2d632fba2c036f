"""Do all ranks repeat the step? All do, or none does: what one rank alone repeats would never end, or train wrongly.

The decision is one entry of the job's store, which is written once: by the last rank that says yes, or by the first
that says no or gives up waiting. Whoever comes later reads what was decided. So there is no moment at which one rank
believes yes and another no, however late or dead a rank is. No collective is used.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from dataclasses import dataclass

from overlap_callbacks._threads import Worker
from overlap_callbacks.monitor.background.store import StoreChannel, StoreFailedError

_YES = b"yes"
_NO = b"no:"
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
    """What was decided, the same on every rank.

    Attributes:
        agreed: whether all ranks said yes.
        reason: why not, in words.
    """

    agreed: bool
    reason: str = ""


class Ballot:
    """Votes of all ranks, one after the other. Used on the training thread, which waits for a bounded time.

    Args:
        channel: to the job's store.
        timeout_s: maximum time that ranks wait for each other.
    """

    def __init__(self, channel: StoreChannel, timeout_s: float) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._used: dict[str, list[str]] = {}  # keys in the store, by window
        self._worker = Worker("overlap-callbacks-ballot", lambda error: None)

    def vote(self, window: str, question: str, terms: str) -> Decision:
        """Say yes, and wait for the decision.

        Args:
            window: names the window; the same on every rank, and never used twice.
            question: what is decided, once in a window.
            terms: what all ranks must have alike.

        Raises:
            UndecidedError: the store stopped answering when this rank's vote was on its way.
        """
        return self._do(lambda: self._vote(window, question, terms))

    def decline(self, window: str, question: str, reason: str) -> Decision:
        """Say no, for all ranks.

        Args:
            window: as for ``vote``.
            question: as for ``vote``.
            reason: in words.
        """
        return self._do(lambda: self._decline(window, question, reason))

    def close(self) -> None:
        """Leave nothing in the store, and end the thread."""
        if self._worker.started:
            self._worker.submit(lambda: self._take_away(but=None))
            self._worker.close(1.0)

    def _do(self, work: Callable[[], Decision]) -> Decision:
        if self._channel.call.is_stuck:
            return Decision(False, _NO_ANSWER)  # this rank has not voted, so that none goes on
        answers: queue.SimpleQueue[Decision | Exception] = queue.SimpleQueue()

        def task() -> None:
            try:
                answers.put(work())
            except Exception as error:
                answers.put(error)

        self._worker.submit(task)
        try:
            answer = answers.get(timeout=_PATIENCE * self._timeout_s)
        except queue.Empty:
            raise UndecidedError(_UNDECIDED) from None
        if isinstance(answer, Exception):
            raise UndecidedError(_UNDECIDED) from answer
        return answer

    # -- on the ballot's thread

    def _vote(self, window: str, question: str, terms: str) -> Decision:
        self._take_away(but=window)
        try:
            votes = self._channel.add(self._key(window, f"{question}/{terms}"))
        except StoreFailedError:
            return Decision(False, _NO_ANSWER)  # not counted
        if votes == self._channel.job.world_size:
            return self._settle(window, question, _YES)
        key = self._key(window, question)
        answer = self._channel.await_message(key, self._timeout_s, lambda: False)
        if answer is not None:
            return _read(answer)
        late = f"not all ranks came to the same step, and wanted the same of it, within {self._timeout_s:g} s"
        return self._settle(window, question, _NO + late.encode())

    def _decline(self, window: str, question: str, reason: str) -> Decision:
        try:
            return self._settle(window, question, _NO + reason.encode())
        except StoreFailedError:
            return Decision(False, reason)

    def _settle(self, window: str, question: str, proposal: bytes) -> Decision:
        """Write the decision, unless there is one; what stands there counts."""
        return _read(self._channel.settle(self._key(window, question), proposal))

    def _key(self, window: str, name: str) -> str:
        key = f"race/{window}/{name}"
        keys = self._used.setdefault(window, [])
        if key not in keys:
            keys.append(key)
        return key

    def _take_away(self, *, but: str | None) -> None:
        """Remove the votes of earlier windows: every rank has read them, for all have trained together since.

        Rank 0 has used the keys of all, and does it. At the end each rank does: where the ranks did not agree, which
        ends the checks, their keys differ, and rank 0 may be gone.
        """
        old = [window for window in self._used if window != but]
        keys = [key for window in old for key in self._used.pop(window)]
        if self._channel.job.rank == 0 or but is None:
            with contextlib.suppress(StoreFailedError):
                # The count before its decision: a rank that comes late then counts alone, and decides no.
                self._channel.delete(*keys)


def _read(message: bytes) -> Decision:
    if message == _YES:
        return Decision(True)
    return Decision(False, message.removeprefix(_NO).decode(errors="replace"))
