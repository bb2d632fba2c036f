"""The order check: may the recorded collectives be serialised? Rank 0 decides for all ranks.

Every rank publishes the sequence of its recorded step. Rank 0 searches the sequences for a cycle (``gate/deadlock.py``)
and publishes its ruling. This runs on a thread of its own, with a store client of its own, so that a sink that stalls
cannot delay a check.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

import msgspec

from overlap_callbacks._threads import Worker
from overlap_callbacks.analysis.formatting import name_ranks
from overlap_callbacks.gate.deadlock import CollectiveSequence, find_conflict
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.store import Job, StoreChannel

# Maximum time that the training thread waits for a check after one that was late: the ranks may have recovered, but
# must not hold up training a second time.
_SHORT_PATIENCE_S = 0.5


class Decision(enum.Enum):
    """What rank 0 decided."""

    GRANTED = "granted"  # the recorded sequences may be serialised
    CONFLICT = "conflict"  # serialising them would deadlock, and every later check would find the same
    SKIPPED = "skipped"  # this window is left out, because of its cost or because its first step compiled
    LATE = "late"  # a rank was not heard in time
    FAILED = "failed"  # there could be no check, for another reason


class Ruling(msgspec.Struct, frozen=True):
    """Rank 0's ruling on whether the sequences of a recorded step may be serialised.

    Attributes:
        decision: what rank 0 decided.
        reason: why the sequences may not be serialised, in words; empty if they may.
        steps_per_block: counted steps of the window's timed blocks; 0 for the schedule's own number.
    """

    decision: Decision
    reason: str = ""
    steps_per_block: int = 0


class _Check:
    """One order check under way."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.ruling: Ruling | None = None


class OrderChecker:
    """Runs order checks on its own thread. The training thread starts one and asks for its ruling some steps later.

    Args:
        job: the job of this rank.
        prefix: of our keys in the store.
        timeout_s: maximum time in which the ranks' sequences must come in.
        budget: rank 0 asks it whether a window is too expensive.
        on_error: gets what goes wrong, on the checker's thread.
    """

    def __init__(
        self,
        job: Job,
        prefix: str,
        *,
        timeout_s: float,
        budget: WindowBudget,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._job = job
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._budget = budget
        self._worker = Worker("overlap-callbacks-order", on_error)
        self._channel: StoreChannel | None = None
        self._stop = threading.Event()
        self._check = _Check()
        self._last_key = ""
        self.patience_s = 3 * timeout_s

    def open(self) -> None:
        """Connect to the store, while its server is there; see ``Reporter.open``."""
        self._worker.submit(self._connect)

    def start(self, key: str, sequence: CollectiveSequence, window: int | None, steps_per_block: int = 0) -> None:
        """Start the check ``key`` with this rank's sequence.

        Args:
            key: names the check; the same on every rank, and never used twice.
            sequence: of this rank's recorded step.
            window: number of the window; None for a mode pinned by hand.
            steps_per_block: on rank 0, what it decided on the window's length.
        """
        self._check = check = _Check()  # one that is late must not answer for the next
        self._worker.submit(lambda: self._run(check, key, sequence, window, steps_per_block))

    def await_ruling(self) -> Ruling:
        """The ruling of the check that was started last. Waits for it, for a bounded time.

        After the first timeout the training thread waits only briefly: until every rank responds again, later windows
        are skipped.
        """
        check = self._check
        if check.done.wait(self.patience_s) and check.ruling is not None:
            ruling = check.ruling
        else:
            ruling = Ruling(Decision.LATE, f"the order check was not done within {self.patience_s:g} s")
        late = ruling.decision is Decision.LATE
        self.patience_s = min(_SHORT_PATIENCE_S, self._timeout_s) if late else 3 * self._timeout_s
        return ruling

    def close(self, timeout_s: float) -> None:
        """End the thread; a check that is under way is given up."""
        self._stop.set()
        self._worker.close(timeout_s)
        self._channel = None

    def _connect(self) -> StoreChannel:
        if self._channel is None:
            self._channel = StoreChannel(self._job, self._prefix)
        return self._channel

    def _run(
        self, check: _Check, key: str, sequence: CollectiveSequence, window: int | None, steps_per_block: int
    ) -> None:
        try:
            channel = self._connect()
            check.ruling = check_order(
                channel,
                key,
                sequence,
                timeout_s=self._timeout_s,
                reason_to_skip=self._budget.reason_to_skip(window) if self._job.rank == 0 else None,
                stop=self._stop.is_set,
                steps_per_block=steps_per_block,
            )
            if self._job.rank == 0 and self._last_key:
                # Every rank has read the ruling before: it came to this check.
                channel.delete(f"{self._last_key}/ruling")
            self._last_key = key
        except Exception as error:
            check.ruling = Ruling(Decision.FAILED, f"the ranks' store failed: {error}")
            raise
        finally:
            check.done.set()


def check_order(
    channel: StoreChannel,
    key: str,
    sequence: CollectiveSequence,
    *,
    timeout_s: float,
    reason_to_skip: str | None,
    stop: Callable[[], bool],
    steps_per_block: int = 0,
) -> Ruling:
    """One rank's part of the order check.

    Args:
        channel: of the calling thread.
        key: names the check; the same on every rank.
        sequence: of this rank.
        timeout_s: maximum time for the ranks' sequences; twice this time for rank 0's ruling.
        reason_to_skip: on rank 0, why the window is left out even if its sequences may be serialised; None if it is
            not.
        stop: ends the waiting early when it returns True.
        steps_per_block: on rank 0, what it decided on the window's length.
    """
    rank = channel.job.rank
    channel.publish_once(f"{key}/sequence/{sequence.digest}", sequence.encode())
    channel.publish(f"{key}/order/{rank}", sequence.digest.encode())
    if rank == 0:
        ruling = decide(channel, key, timeout_s, stop)
        if ruling.decision is Decision.GRANTED and reason_to_skip is not None:
            ruling = Ruling(Decision.SKIPPED, reason_to_skip)
        ruling = msgspec.structs.replace(ruling, steps_per_block=steps_per_block)
        channel.publish(f"{key}/ruling", msgspec.json.encode(ruling))
        return ruling
    message = channel.await_message(f"{key}/ruling", 2 * timeout_s, stop)
    if message is None:
        return Ruling(Decision.LATE, f"rank 0 did not decide within {2 * timeout_s:g} s")
    return msgspec.json.decode(message, type=Ruling)


def decide(channel: StoreChannel, key: str, timeout_s: float, stop: Callable[[], bool]) -> Ruling:
    """Rank 0: gather the sequences of all ranks, and search them for a cycle."""
    digests = channel.gather(f"{key}/order", timeout_s, stop)
    missing = [rank for rank in range(channel.job.world_size) if rank not in digests]
    if missing:
        return Ruling(
            Decision.LATE, f"{name_ranks(missing)} did not report the order of collectives within {timeout_s:g} s"
        )
    sequences: dict[bytes, CollectiveSequence] = {}  # by digest: ranks with equal sequences share one copy
    for digest in set(digests.values()):
        name = f"{key}/sequence/{digest.decode()}"
        message = channel.await_message(name, timeout_s, stop)
        if message is None:
            return Ruling(Decision.FAILED, "a rank that posted the order of its collectives is gone")
        channel.delete_once(name)
        sequences[digest] = CollectiveSequence.decode(message)
    if any(sequence.compiled for sequence in sequences.values()):
        return Ruling(Decision.SKIPPED, "torch.compile compiled in its first step")
    for rank, digest in sorted(digests.items()):
        if sequences[digest].incomplete:
            return Ruling(
                Decision.FAILED, f"rank {rank} issued more collectives in one step than the gate has storage for"
            )
    if not any(sequence.communicates for sequence in sequences.values()):
        return Ruling(
            Decision.FAILED,
            "the recorded step issued no collectives that could be serialised, so that sequential steps would be "
            "overlapped ones: replays of CUDA graphs and libraries of one's own pass the gate unseen",
        )
    conflict = find_conflict({rank: sequences[digest] for rank, digest in digests.items()})
    if conflict is not None:
        return Ruling(
            Decision.CONFLICT,
            f"the ranks issue the collectives of different groups in different orders, so that serialising them would "
            f"deadlock: {conflict}",
        )
    return Ruling(Decision.GRANTED)
