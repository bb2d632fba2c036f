"""Rank 0's plans of the windows to come, where they differ from the schedule: what was asked from outside.

All ranks follow a plan from the same step on, or none does. Rank 0 publishes it ahead of time, as an entry of the job's
store. Each rank that reads it in time votes for it, and from that step on opens no window until it knows what was
decided. Rank 0 alone decides: yes if all have voted in good time, else no. So a rank that does not hear the decision
measures nothing; and since a window is measured only if all ranks come to it (``order_check.py``), none does.

A rank looks for plans on the order check's thread while that is idle: one reading of the store a second.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from overlap_callbacks.analysis.results.request import WINDOW
from overlap_callbacks.monitor.background.store import StoreChannel, StoreFailedError

# Intervals between looks: usually; while a plan is being decided; and at most, while the store fails. All ranks read
# one store: in a large job they do so less often.
LOOK_S, _SOON_S, _FAILING_S, _LOOKS_PER_S = 1.0, 0.1, 64.0, 1000
# A plan holds after this many steps, seconds or looks, whichever is later.
_LEAD_STEPS, _LEAD_S, _LEAD_LOOKS = 20, 10.0, 6
# Ranks vote in the first part of that time, and rank 0 decides before the second is over; or after so many seconds.
_VOTE_PART, _DECIDE_PART = 0.5, 0.75
_PATIENCE_S = 30.0
_KEY = "plan"
_FAR = 2**62


class WindowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which windows open from a step on.

    Attributes:
        name: unique, even among plans of a killed job in the same store.
        session: of rank 0; see ``Plans``.
        from_step: the first step for which it holds; if a window is open there, the first one after it.
        vote_by: the last step at which a rank may vote for it.
        first_step: where the next window opens.
        every_n_steps: steps from one window to the next.
        first_number: number of that window.
        does: ``window`` (by this schedule), ``quick`` (back to back first) or ``stop`` (none, and an open one ends).
        decided: whether all ranks follow it; None as long as that is open.
        before: the last one that all ranks follow, for those that missed its decision; None if there is none.
    """

    name: str
    session: str
    from_step: int
    vote_by: int
    first_step: int
    every_n_steps: int
    first_number: int
    does: str = WINDOW
    decided: bool | None = None
    before: WindowPlan | None = None

    @classmethod
    def of(cls, session: str, last_step: int, from_step: int, **fields: Any) -> WindowPlan:
        """A new plan, made after ``last_step``."""
        vote_by = last_step + round((from_step - last_step) * _VOTE_PART)
        return cls(name=secrets.token_hex(8), session=session, from_step=from_step, vote_by=vote_by, **fields)

    @property
    def votes(self) -> str:
        """Key of the count of votes."""
        return f"{_KEY}/{self.name}"


class Plans:
    """One rank's part. The order check's thread calls ``look`` and ``propose``; the training thread reads.

    Args:
        channel: to the other ranks.
        last_step: returns the number of this rank's latest step; from any thread.
        wake: makes the training thread look before its next step.
    """

    def __init__(self, channel: StoreChannel, last_step: Callable[[], int], wake: Callable[[], None]) -> None:
        self._channel = channel
        self._job = channel.job
        self._last_step = last_step
        self._wake = wake
        # Names this start of the job; other ranks hear it with rank 0's rulings. Plans of a killed one do not count.
        self.session = "" if self._job.rank else secrets.token_hex(8)
        self._open: WindowPlan | None = None  # voted for, and not decided
        self._due: WindowPlan | None = None  # decided, and not followed yet
        self._newest: WindowPlan | None = None  # decided, followed or not
        self._seen = b""
        self._failures = 0
        # on rank 0:
        self._told: Callable[[WindowPlan], None] = lambda plan: None  # gets the decided plan
        self._verdict: WindowPlan | None = None  # not known to be published
        self._decide_by = 0, 0.0  # a step, and a time

    # -- on the training thread

    def at(self, step: int) -> WindowPlan | None:
        """The plan that holds at a step, or may hold (``decided`` is None); None if there is none."""
        return next((plan for plan in (self._due, self._open) if plan is not None and step >= plan.from_step), None)

    def followed(self, plan: WindowPlan) -> None:
        """This rank follows the plan now."""
        if self._due is plan:
            self._due = None

    def next_step(self, step: int) -> int:
        """The first step after ``step`` at which ``at`` must be asked; a later decision wakes the training thread."""
        steps = [plan.from_step for plan in (self._due, self._open) if plan is not None and plan.from_step > step]
        return min(steps, default=_FAR)

    @property
    def is_under_way(self) -> bool:
        """Whether a plan is not decided yet, or not followed by this rank; from any thread."""
        return self._open is not None or self._due is not None

    # -- on the order check's thread

    def open(self) -> None:
        """On rank 0, delete the plan of a killed job."""
        if not self._job.rank:
            self._channel.delete(_KEY)

    def look(self) -> float:
        """Hear, vote or decide. Returns the seconds until the next look."""
        try:
            if not self._job.rank:
                self._decide()
            elif self.session:
                self._hear()
            self._failures = 0
        except StoreFailedError:  # the next order check says so; the job may just have ended
            self._failures += 1
            if self._open is None and self._job.rank:
                self.session = ""  # nothing is heard until that check has a ruling: torch prints each failure
        interval_s = (LOOK_S if self._open is None else _SOON_S) * max(1.0, self._job.world_size / _LOOKS_PER_S)
        return max(interval_s, min(interval_s * (1 << min(self._failures, 6)), _FAILING_S))

    def propose(self, plan: WindowPlan, told: Callable[[WindowPlan], None]) -> None:
        """On rank 0, ask all ranks to follow a plan; ``told`` gets it once it is decided, or the job ends."""
        last = self._last_step()
        self._decide_by = last + round((plan.from_step - last) * _DECIDE_PART), time.monotonic() + _PATIENCE_S
        self._told, self._verdict, self._open = told, None, msgspec.structs.replace(plan, before=self._newest)
        self._wake()
        with contextlib.suppress(StoreFailedError):  # if it is not published, nobody votes for it
            self._channel.publish(_KEY, msgspec.json.encode(self._open))

    def leave(self) -> None:
        """The job ends: delete what is left in the store. A plan that is not decided never is."""
        with contextlib.suppress(StoreFailedError):
            if not self._job.rank or self._seen:
                self._channel.delete(_KEY, *([] if self._open is None else [self._open.votes]))
        if self._open is not None:
            self._told(self._open)

    def _hear(self) -> None:
        message = self._channel.peek(_KEY)
        if message is None or message == self._seen:
            return
        self._seen = message
        try:
            plan = msgspec.json.decode(message, type=WindowPlan)
        except msgspec.MsgspecError:
            return
        if plan.session != self.session:
            return
        self._follow(plan if plan.decided else plan.before)
        votes = plan.decided is None and self._last_step() <= plan.vote_by
        before, self._open = self._open, plan if votes else None
        self._wake()
        if votes:  # only now: from here on this rank waits for the decision
            self._channel.add(plan.votes)
        elif before is not None:
            self._channel.delete(before.votes)  # this rank's vote may have come after rank 0 deleted them

    def _follow(self, plan: WindowPlan | None) -> None:
        if plan is not None and (self._newest is None or plan.name != self._newest.name):
            self._due = self._newest = msgspec.structs.replace(plan, before=None)

    def _decide(self) -> None:
        plan = self._open
        if plan is None:
            return
        if self._verdict is None:
            last_step, last_s = self._decide_by
            is_late = self._last_step() > last_step or time.monotonic() >= last_s
            agreed = self._channel.add(plan.votes, 0) == self._job.world_size - 1
            if not agreed and not is_late:
                return
            self._verdict = msgspec.structs.replace(plan, decided=agreed and not is_late)
        # If this fails, some ranks may have read it: rank 0 waits too, and publishes it again at the next look.
        self._channel.publish(_KEY, msgspec.json.encode(self._verdict))
        plan, self._verdict = self._verdict, None
        self._follow(plan if plan.decided else None)
        self._open = None
        self._wake()
        self._told(plan)
        self._channel.delete(plan.votes)


def lead_steps(step_s: float, world_size: int) -> int:
    """Steps from now until a plan holds, given the time of a step; 0 if not known."""
    lead_s = max(_LEAD_S, _LEAD_LOOKS * LOOK_S * world_size / _LOOKS_PER_S)
    return max(_LEAD_STEPS, math.ceil(lead_s / step_s) if step_s > 0 else 0)
