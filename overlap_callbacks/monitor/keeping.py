"""The arm that all ranks keep turned on between windows, as one rank sees it.

Rank 0's ruling on a window names the arm. While the window goes on, every rank votes (``race/ballot.py``): the decision
is one entry of the store, so no two ranks read different ones. It holds from a step that all ranks know to the first
step of the next window that opens, where all turn the arm off, and vote anew.

A rank turns it on only if it has read, by that step, that all voted yes. A rank that does not know, or must go back
sooner (an exception, an error, ``close()``), trains as configured and withdraws: a key of the store, for which the
others look off the training path, and go back between two steps. So they may differ for some steps. Therefore an arm is
kept only if every rank issues the same collectives in the same order with it as without: then ranks that differ train
the same, and none waits for another in vain.
"""

from __future__ import annotations

import contextlib
import enum
import threading

from overlap_callbacks._threads import NoAnswerError, QuestionFailedError, Worker
from overlap_callbacks.gate.process_groups import SequenceNumbers
from overlap_callbacks.gate.switches import SwitchState
from overlap_callbacks.monitor.arm_rotation import BoundArm
from overlap_callbacks.monitor.background.store import ANSWER_TIMEOUT_S, StoreChannel
from overlap_callbacks.monitor.faults import Notices
from overlap_callbacks.monitor.race.ballot import KEEP, Ballot, Vote

# Maximum time that the training thread waits at the step from which the arm holds, once for the others' votes and once
# for the store's answer. The votes have had the time since the ruling, so after a wait in vain they get less. The
# store's answer does not: a rank that does not know it would go another way than the others.
_PATIENCE_S, _SHORT_PATIENCE_S = 0.5, 0.02
# How often a rank looks whether another has withdrawn; less often in a large job, whose store serves all ranks.
_LOOK_S, _LOOKS_PER_S = 1.0, 100
_FAR = 2**62


class _State(enum.Enum):
    OFF = enum.auto()  # -> VOTING by a ruling that names an arm
    VOTING = enum.auto()  # -> ON at the step from which it holds, if all ranks voted yes; else -> OFF
    ON = enum.auto()  # -> OFF where the next window opens, or where this rank or another withdraws


class Keeping:
    """Turns the arm that is kept on and off, between two steps. Used by the training thread."""

    def __init__(self, switch: SwitchState, notices: Notices) -> None:
        self._switch = switch
        self._notices = notices
        self._state = _State.OFF
        self._arm: BoundArm | None = None
        self._from_step = _FAR
        self._vote: Vote | None = None
        self._watch: _Watch | None = None
        self._is_paused = False
        self._patience_s = _PATIENCE_S
        self._numbers: SequenceNumbers | None = None  # of collectives when the open step began, while it is on

    @property
    def next_step(self) -> int:
        """The step at which ``between_steps`` must be called; the next one while the arm is on."""
        return {_State.OFF: _FAR, _State.VOTING: self._from_step, _State.ON: 0}[self._state]

    @property
    def is_under_way(self) -> bool:
        """Whether an arm is turned on, or voted on."""
        return self._state is not _State.OFF

    @property
    def has_communicated(self) -> bool:
        """Whether the open step has issued a collective, or may have, while the arm is on."""
        issued = None if self._numbers is None else self._numbers.issued
        return self._state is _State.ON and issued != 0

    def vote(self, channel: StoreChannel, ballot: Ballot, arm: BoundArm, ruling: str, from_step: int) -> None:
        """Vote to turn an arm on before a step; ``ruling`` names it in the store."""
        if self._watch is not None:
            self._watch.forget()
        self._arm, self._from_step = arm, from_step
        self._watch = _Watch(channel, f"keep/{ruling}")
        self._vote = ballot.begin(ruling, KEEP, f"{arm.arm.name} {from_step}")
        self._state = _State.VOTING

    def between_steps(self, step: int) -> None:
        """Turn what is to be turned before a step outside windows."""
        if self._state is _State.VOTING and step >= self._from_step:
            self._resolve()
        watch = self._watch
        if self._state is _State.ON and watch is not None and watch.reason:
            self._end(watch.reason, withdraw=not watch.is_told)
        if self._state is not _State.ON or self._arm is None:
            self._switch.turn(on=False)
            return
        self._switch.use(self._arm.switch)
        self._switch.turn(on=True)
        self._numbers = SequenceNumbers()

    def pause(self, *, within_step: bool) -> None:
        """Something that is not training begins: as configured, unless the open step has begun to communicate."""
        if self._state is _State.ON and not (within_step and self.has_communicated):
            self._is_paused = True
            self._switch.turn(on=False)

    def resume(self) -> None:
        """End the pause."""
        paused, self._is_paused = self._is_paused, False
        if paused and self._state is _State.ON:
            self._switch.turn(on=True)
            self._numbers = SequenceNumbers()

    def window_opens(self) -> None:
        """The next window begins: all ranks go back here."""
        if self._state is _State.VOTING:  # the window it was for was shorter than planned
            self._end("a window opened sooner than was planned")
        self._stop(withdraw=False)
        self._switch.turn(on=False)

    def end(self, reason: str) -> None:
        """Go back before the next window: on all ranks, as soon as they know. The caller turns the switch."""
        if self._state is not _State.OFF:
            self._end(reason)

    def close(self) -> None:
        """End at the end of the job, where all ranks end. The caller turns the switch."""
        self._stop(withdraw=False)
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.forget()

    def _resolve(self) -> None:
        """Turn the arm on if all ranks voted for it; waits a bounded time for the votes."""
        vote, watch = self._vote, self._watch
        assert vote is not None
        assert watch is not None
        assert self._arm is not None
        if not vote.done.wait(self._patience_s):
            vote.hurry()
            vote.done.wait(_PATIENCE_S)
        decision = vote.decision
        self._patience_s = _PATIENCE_S if decision is not None and decision.agreed else _SHORT_PATIENCE_S
        if decision is None:
            # The others may have read a yes.
            self._end("the job's store did not answer in time")
        elif decision.agreed:
            self._state = _State.ON
            watch.start()
        else:
            self._say_off(decision.reason)
            self._stop(withdraw=False)

    def _end(self, reason: str, *, withdraw: bool = True) -> None:
        self._say_off(reason)
        self._stop(withdraw=withdraw)

    def _say_off(self, reason: str) -> None:
        name = "" if self._arm is None else self._arm.arm.name
        self._notices.info(f"the arm {name} is off until the next window: {reason} [OC143]")

    def _stop(self, *, withdraw: bool) -> None:
        vote, watch = self._vote, self._watch
        was, self._state = self._state, _State.OFF
        self._vote, self._numbers, self._from_step = None, None, _FAR
        if vote is not None:
            vote.hurry()
        if watch is not None and was is not _State.OFF:
            watch.stop(withdraw=withdraw)


class _Watch:
    """Looks whether another rank has withdrawn, on two threads of its own: a call to the store may hang."""

    def __init__(self, channel: StoreChannel, key: str) -> None:
        self._channel = channel
        self._key = key
        self._over = threading.Event()
        self._worker = Worker("overlap-callbacks-keep-store", lambda error: None)
        self._thread: threading.Thread | None = None
        self._interval_s = max(_LOOK_S, channel.job.world_size / _LOOKS_PER_S)
        self.reason = ""  # why this rank must go back; empty if it need not
        self.is_told = False  # by another rank
        self._has_withdrawn = False

    def start(self) -> None:
        """Begin to look. Raises RuntimeError if the system cannot start another thread."""
        self._thread = threading.Thread(target=self._run, name="overlap-callbacks-keep", daemon=True)
        self._thread.start()

    def stop(self, *, withdraw: bool) -> None:
        """Look no longer. ``withdraw``: tell the others to go back too, once the store answers."""
        self._over.set()
        with contextlib.suppress(RuntimeError):  # the system cannot start another thread
            if withdraw:
                self._has_withdrawn = True
                self._worker.submit(lambda: self._channel.publish(self._key, b"1"))
            self._worker.close(0.0)

    def forget(self) -> None:
        """Delete the key: it was seen by now, or all ranks have trained a window since, or leave.

        It stays in the store if all ranks that see it are gone.
        """
        if self.reason or (self._channel.job.rank == 0 and not self._has_withdrawn):
            with contextlib.suppress(RuntimeError):
                last = Worker("overlap-callbacks-keep-store", lambda error: None)
                last.submit(lambda: self._channel.delete(self._key))
                last.close(0.0)

    def _run(self) -> None:
        while True:
            try:
                if self._worker.ask(lambda: self._channel.has(self._key), ANSWER_TIMEOUT_S):
                    self.is_told = True
                    self.reason = "another rank has gone back"
            except (NoAnswerError, QuestionFailedError, RuntimeError):
                self.reason = "the job's store does not answer"
            if self.reason or self._over.wait(self._interval_s):
                return
