"""The roll call at attach: the ranks agree through the job's store whether all of them can measure.

A rank that raised there would leave the others waiting for it in their next collective. So what may be wrong on one
rank alone goes to the store: then no rank measures, and rank 0 says why.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import msgspec

from overlap_callbacks._log import logger
from overlap_callbacks.monitor.background.store import Job, StoreChannel

# Maximum time that attach waits for the other ranks. Ranks that come later are heard on the library's thread.
WAIT_S = 3.0
# Interval between looks for the verdict. It grows from the first to the second, which is longer with many ranks.
_MIN_LOOK_S, _MAX_LOOK_S = 0.002, 0.1
_RANKS_PER_LOOK_S = 10_000
# A rank that is very late may never come: the interval is then this part of the time waited, up to a maximum.
_PART_WAITED, _MAX_LATE_LOOK_S = 0.05, 30.0

_calls = itertools.count()


class Refusal(msgspec.Struct, frozen=True):
    """Why no rank measures."""

    rank: int
    why: str

    @property
    def text(self) -> str:
        return self.why if self.rank == 0 else f"rank {self.rank}: {self.why}"


class RollCall:
    """One rank's part in a roll call. Every rank takes part once per attach, in the same order.

    Four keys: ``verdict`` is the first refusal, or null once all ranks came without one; ``came`` and ``read`` count
    ranks; ``asked`` is what the first rank was asked for. The last reader deletes them.

    Args:
        job: the job; a ``fake`` backend has no other ranks.
        check: run on the roll call's thread; raises if this rank cannot measure.
        on_refusal: called on that thread if no rank measures. ``wait`` may have returned before.
        asked: what this rank is asked for in place of the schedule, which must be the same on all ranks: empty, or a
            sentence's beginning such as ``quick is set``; None if not known.
    """

    def __init__(
        self,
        job: Job,
        check: Callable[[], None],
        on_refusal: Callable[[Refusal], None],
        asked: str | None = None,
    ) -> None:
        self._job = job
        self._asked = asked
        self._check = check
        self._on_refusal = on_refusal
        self._channel = StoreChannel(job, f"overlap_callbacks/attach{next(_calls)}")
        self._decided = threading.Event()
        self._leaving = threading.Event()
        self.refusal: Refusal | None = None
        self.agreed = False  # the store has taken this rank's answer, and the verdict is known
        self.error: Exception | None = None  # what this rank's own check raised
        self._thread = threading.Thread(target=self._run, name="overlap-callbacks-attach", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system cannot start another thread: said when the first window opens
            logger.debug("the roll call at attach", exc_info=error)
            self._decided.set()

    @property
    def is_over(self) -> bool:
        """Whether this rank's part is done."""
        return self._decided.is_set()

    def wait(self, timeout_s: float = WAIT_S) -> Refusal | None:
        """The refusal, if there is one within ``timeout_s``."""
        self._decided.wait(timeout_s)
        return self.refusal

    def leave(self, timeout_s: float = 1.0) -> None:
        """Wait for the others no more."""
        self._leaving.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        refusal = None
        try:
            self._check()
        except Exception as error:
            self.error = error
            refusal = Refusal(self._job.rank, str(error))
        try:
            refusal = self._ask(refusal)
        except Exception as error:  # no store, or one that failed: said when the first window opens
            logger.debug("the roll call at attach", exc_info=error)
        self.refusal = refusal
        if refusal is not None:
            self._on_refusal(refusal)
        self._decided.set()

    def _ask(self, own: Refusal | None) -> Refusal | None:
        """This rank's refusal; without one, the verdict."""
        channel, world_size = self._channel, self._job.world_size
        if self._asked is not None and own is None:
            first = channel.set_if_absent("asked", self._asked.encode() or b"-").decode().strip("-")
            if first != self._asked:
                where = ("this rank", "another") if self._asked else ("another rank", "this one")
                own = Refusal(self._job.rank, f"{self._asked or first} on {where[0]}, and not on {where[1]}")
        if own is not None:
            channel.set_if_absent("verdict", msgspec.json.encode(own))
        if channel.add("came") == world_size:
            channel.set_if_absent("verdict", b"null")
        look_s, began_s = _MIN_LOOK_S, time.monotonic()
        while (verdict := channel.peek("verdict")) is None:
            if self._leaving.wait(look_s):
                if channel.add("came", -1) == 0:
                    channel.delete("came", "asked")
                return None
            look_s = _next_look_s(look_s, time.monotonic() - began_s, world_size)
        self.agreed = True
        if channel.add("read") == world_size:
            channel.delete("verdict", "came", "read", "asked")
        return own or msgspec.json.decode(verdict, type=Refusal | None)


def _next_look_s(look_s: float, waited_s: float, world_size: int) -> float:
    """The interval between looks after one of ``look_s``."""
    late_s = min(_PART_WAITED * waited_s, _MAX_LATE_LOOK_S)
    return min(1.2 * look_s, max(_MAX_LOOK_S, world_size / _RANKS_PER_LOOK_S, late_s))


def has_others(job: Job) -> bool:
    """Whether there are other ranks to agree with; the backend ``fake`` has none."""
    return job.world_size > 1 and job.backend != "fake"
