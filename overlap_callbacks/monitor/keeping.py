"""The arm that all ranks keep turned on between windows, as one rank sees it.

Rank 0's ruling on a window names the arm. While the window goes on, every rank votes (``race/ballot.py``): the decision
is one entry of the store, so no two ranks read different ones. It holds from a step that all ranks know to the first
step of the next window that opens, where all turn the arm off, and vote anew.

Rank 0 counts how long steps take with it, and has all go back before they have cost more than they may (``Stretch``).

A rank turns it on only if it has read, by that step, that all voted yes. Where rank 0 finds between windows that the
arm no longer wins, it names a step some seconds ahead in the store, from which all train as configured: the others look
for it off the training path. A rank that does not know, or must go back at once (an exception, an error, ``close()``,
steps that have already cost all that they may), names the present step. Then, and where the machine or the store is too
slow to answer in those seconds, ranks may differ for some steps. Therefore an arm is kept only if every rank issues the
same collectives in the same order with it as without: then ranks that differ train the same, and none waits for another
in vain.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from overlap_callbacks._threads import NoAnswerError, QuestionFailedError, Worker
from overlap_callbacks.analysis.arm_costs import Stretch
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
_LOOK_S, _LOOKS_PER_S = 0.2, 500
# A step is announced at least so many looks ahead from which all go back.
_LOOKS_AHEAD = 10
# The pace of so many steps is that of now.
_RECENT = 3
_SLOWER = "the job is too slow with it, or no longer keeps it"
# Before any step; after all steps.
_NOW, _FAR = -1, 2**62


class _State(enum.Enum):
    OFF = enum.auto()  # -> VOTING by a ruling that names an arm
    VOTING = enum.auto()  # -> ON at the step from which it holds, if all ranks voted yes; else -> OFF
    ON = enum.auto()  # -> OFF where the next window opens, or where this rank or another withdraws


def least_notice_s(world_size: int) -> float:
    """Least time in which all ranks can be told to go back."""
    return _LOOKS_AHEAD * _look_s(world_size)


def _look_s(world_size: int) -> float:
    return max(_LOOK_S, world_size / _LOOKS_PER_S)


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
        self._turned_on = 0, 0.0  # how many steps it has trained with it, and since when
        self._begins_s: deque[float] = deque(maxlen=_RECENT + 1)  # of the last steps with it, on rank 0
        self._stretch: Stretch | None = None  # on rank 0
        self._steps_per_window = 1
        self.paused_s = 0.0  # in all
        self._paused_at_s: float | None = None

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

    def limit(self, stretch: Stretch | None, steps_per_window: int) -> None:
        """On rank 0: have all ranks go back once the steps after the next vote have lost what they may."""
        self._stretch, self._steps_per_window = stretch, steps_per_window

    def between_steps(self, step: int) -> None:
        """Turn what is to be turned before a step outside windows."""
        if self._state is _State.VOTING and step >= self._from_step:
            self._resolve(step)
        watch = self._watch
        if self._state is _State.ON and self._stretch is not None:
            self._count(self._stretch, step)
        if self._state is _State.ON and watch is not None and step >= watch.last.step:
            self._end(watch.last.reason, withdraw=not watch.last.is_told)
        if self._state is not _State.ON or self._arm is None:
            self._switch.turn(on=False)
            return
        self._switch.use(self._arm.switch)
        self._switch.turn(on=True)
        self._numbers = SequenceNumbers()

    def pause(self, *, within_step: bool) -> None:
        """Something that is not training begins: as configured, unless the open step has begun to communicate."""
        self._paused_at_s = self._paused_at_s or time.monotonic()
        if self._state is _State.ON and not (within_step and self.has_communicated):
            self._is_paused = True
            self._switch.turn(on=False)

    def resume(self) -> None:
        """End the pause."""
        if self._paused_at_s is not None:
            self.paused_s += time.monotonic() - self._paused_at_s
            self._paused_at_s = None
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

    def has_slowed(self, step: int) -> None:
        """On rank 0: go back on all ranks at a step ahead, or where the next window opens, if that is sooner."""
        stretch, (num_steps, since_s) = self._stretch, self._turned_on
        if self._state is _State.ON and self._watch is not None and stretch is not None:
            step_s = (self._training_s - since_s) / max(1, num_steps)
            recent_s = [end_s - begin_s for begin_s, end_s in itertools.pairwise(self._begins_s)]
            step_s = max(step_s, median(recent_s) if recent_s else 0.0, 1e-9)
            self._watch.announce(step + math.ceil(stretch.notice_s / step_s))

    def _count(self, stretch: Stretch, step: int) -> None:
        (num_steps, since_s), now_s = self._turned_on, self._training_s
        num_steps += bool(self._begins_s)  # not by the step's number, which may jump
        self._turned_on = num_steps, since_s
        self._begins_s.append(now_s)
        stretch.has_trained(num_steps / self._steps_per_window, now_s - since_s)
        if stretch.must_end_now():  # steps became so much slower that the ranks would be told too late
            self._end(_SLOWER)
        elif stretch.is_used_up():
            self.has_slowed(step)

    @property
    def _training_s(self) -> float:
        return time.monotonic() - self.paused_s

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

    def _resolve(self, step: int) -> None:
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
            self._state, self._turned_on = _State.ON, (0, self._training_s)
            self._begins_s.clear()
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
        self._vote, self._numbers, self._stretch, self._from_step = None, None, None, _FAR
        if vote is not None:
            vote.hurry()
        if watch is not None and was is not _State.OFF:
            watch.stop(withdraw=withdraw)


class _Last(NamedTuple):
    """The step before which a rank goes back, and why."""

    step: int
    reason: str
    is_told: bool  # all ranks know, or will


class _Watch:
    """Looks whether another rank names a step to go back at, on two threads of its own: a call to the store may hang.

    The key holds that step: one ahead, from rank 0, or ``_NOW`` from a rank that has gone back.
    """

    def __init__(self, channel: StoreChannel, key: str) -> None:
        self._channel = channel
        self._key = key
        self._over = threading.Event()
        self._worker = Worker("overlap-callbacks-keep-store", lambda error: None)
        self._thread: threading.Thread | None = None
        self._interval_s = _look_s(channel.job.world_size)
        self._own = self._found = _Last(_FAR, "", is_told=False)
        self._has_read = self._has_withdrawn = False

    @property
    def last(self) -> _Last:
        return min(self._own, self._found)

    def start(self) -> None:
        """Begin to look. Raises RuntimeError if the system cannot start another thread."""
        self._thread = threading.Thread(target=self._run, name="overlap-callbacks-keep", daemon=True)
        self._thread.start()

    def announce(self, step: int) -> None:
        """Tell the others the step before which all go back; a rank that has gone back already goes first."""
        if self._own.step == _FAR:
            self._own = _Last(step, _SLOWER, is_told=True)
            self._write(lambda: self._channel.set_if_absent(self._key, str(step).encode()))

    def stop(self, *, withdraw: bool) -> None:
        """Look no longer. ``withdraw``: tell the others to go back too, once the store answers."""
        self._over.set()
        if withdraw:
            self._has_withdrawn = True
            self._write(lambda: self._channel.publish(self._key, str(_NOW).encode()))
        with contextlib.suppress(RuntimeError):  # the system cannot start another thread
            self._worker.close(0.0)

    def forget(self) -> None:
        """Delete the key: it was seen by now, or all ranks have trained a window since, or leave.

        It stays in the store if all ranks that see it are gone.
        """
        if not self._has_withdrawn and (self._has_read or self._channel.job.rank == 0):
            with contextlib.suppress(RuntimeError):
                last = Worker("overlap-callbacks-keep-store", lambda error: None)
                last.submit(lambda: self._channel.delete(self._key))
                last.close(0.0)

    def _write(self, task: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the system cannot start another thread
            self._worker.submit(task)

    def _run(self) -> None:
        while self._found.step != _NOW:
            try:
                step = self._worker.ask(self._read, ANSWER_TIMEOUT_S)
            except (NoAnswerError, QuestionFailedError, RuntimeError):
                self._found = _Last(_NOW, "the job's store does not answer", is_told=False)
                return
            if step is not None:
                self._found = _Last(step, "another rank has gone back" if step == _NOW else _SLOWER, is_told=True)
            if self._over.wait(self._interval_s):
                return

    def _read(self) -> int | None:
        message = self._channel.peek(self._key)
        self._has_read = self._has_read or message is not None
        return None if message is None else int(message)
