"""What the ranks tell each other, through the job's key-value store.

No collective of ours can hang the job, because there is none: a rank that is dead, late or of another mind costs one
missing row. Everything runs on threads of our own with clients of our own, since a store's client holds its lock while
it waits and the job uses its client to create groups; and every wait here looks (``check``) rather than blocks.

Two conversations take place, both led by rank 0:

- the **order check** before the sequential steps of a window: every rank posts the sequence of its recorded step, rank
  0 searches them for a cycle and publishes its verdict (``order.py``);
- the **reports**: every rank posts what it measured, rank 0 makes one report of them.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from overlap_callbacks.analysis.formatting import name_ranks
from overlap_callbacks.gate.collectives import backend_name
from overlap_callbacks.gate.deadlock import CollectiveSequence, find_conflict

# Time between two looks at the store: short at first, then ever longer, so that a thousand ranks that wait for one do
# not keep the job's store busy.
_POLL_S = 0.002
_LONGEST_POLL_S = 0.1
# Longest that a single store operation may take, on our clients only. The operations do not block on missing keys, so
# this is reached only where the server is gone.
_OPERATION_TIMEOUT = datetime.timedelta(seconds=10)

# Monitors of one process, in the order in which they opened: the same on every rank of an SPMD job.
_instances = itertools.count()


@dataclass(frozen=True)
class Job:
    """The job as the default process group sees it."""

    rank: int
    world_size: int
    backend: str

    @classmethod
    def current(cls) -> Job | None:
        """None where no process group is initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        return cls(dist.get_rank(), dist.get_world_size(), backend_name())


class Ruling(msgspec.Struct, frozen=True):
    """Rank 0's word on whether the sequences of a step may be serialised.

    Attributes:
        serialise: whether they may.
        reason: why not, in words.
        conflict: whether the reason is a cycle in the ranks' orders.
        skip: whether the reason is that rank 0 wants this window left out.
        late: whether the reason is that somebody was not heard in time.
        steps_per_block: counted steps that the timed blocks of the window have; 0 for those of the schedule.
    """

    serialise: bool
    reason: str = ""
    conflict: bool = False
    skip: bool = False
    late: bool = False
    steps_per_block: int = 0


class StoreChannel:
    """Messages between the ranks. Not thread-safe: each thread has a channel of its own.

    Args:
        job: who we are.
        prefix: keeps our keys apart from the job's.
    """

    def __init__(self, job: Job, prefix: str) -> None:
        self.job = job
        store: Any = c10d._get_default_store()
        store = store.clone()
        store.set_timeout(_OPERATION_TIMEOUT)
        self._store: Any = c10d.PrefixStore(prefix, store)

    def post(self, key: str, message: bytes) -> None:
        self._store.set(key, message)

    def post_once(self, key: str, message: bytes) -> None:
        """Post what several ranks have in common: only the first does."""
        if self._store.add(f"{key}/posted", 1) == 1:
            self._store.set(key, message)

    def look(self, key: str) -> bytes | None:
        """The message under ``key`` if it is there."""
        return self._store.get(key) if self._store.check([key]) else None

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._store.delete_key(key)

    def gather(self, key: str, timeout_s: float, stop: Callable[[], bool]) -> dict[int, bytes]:
        """Rank 0: the messages that all ranks posted under ``key`` and that came in time; deleted as they are read."""
        deadline = time.monotonic() + timeout_s
        missing = list(range(self.job.world_size))
        found: dict[int, bytes] = {}
        poll_s = _POLL_S
        while True:
            for rank in missing:
                message = self.look(f"{key}/{rank}")
                if message is not None:
                    found[rank] = message
                    self.delete(f"{key}/{rank}")
            missing = [rank for rank in missing if rank not in found]
            if not missing or time.monotonic() > deadline or stop():
                return found
            time.sleep(poll_s)
            poll_s = min(1.2 * poll_s, _LONGEST_POLL_S)

    def await_message(self, key: str, timeout_s: float, stop: Callable[[], bool]) -> bytes | None:
        """The message under ``key``, as soon as it is there; None if that takes too long."""
        deadline = time.monotonic() + timeout_s
        poll_s = _POLL_S
        while True:
            message = self.look(key)
            if message is not None or time.monotonic() > deadline or stop():
                return message
            time.sleep(poll_s)
            poll_s = min(1.2 * poll_s, _LONGEST_POLL_S)


def next_prefix() -> str:
    """A prefix for the keys of one monitor; the same on every rank."""
    return f"overlap_callbacks/{next(_instances)}"


def check_order(
    channel: StoreChannel,
    key: str,
    own: CollectiveSequence,
    *,
    timeout_s: float,
    veto: str | None,
    stop: Callable[[], bool],
    steps_per_block: int = 0,
) -> Ruling:
    """One rank's part of the order check; rank 0 decides for all.

    Args:
        channel: of this thread.
        key: names the check, the same on every rank.
        own: this rank's sequence.
        timeout_s: longest time for the ranks to be heard, and again for the verdict.
        veto: on rank 0, a reason of its own to refuse; None for none.
        stop: ends the waiting early.
        steps_per_block: on rank 0, what it has decided on the window's length.
    """
    rank = channel.job.rank
    channel.post_once(f"{key}/sequence/{own.digest}", own.encode())
    channel.post(f"{key}/order/{rank}", own.digest.encode())
    if rank == 0:
        verdict = _decide(channel, key, timeout_s, stop)
        if verdict.serialise and veto is not None:
            verdict = Ruling(False, veto, skip=True)
        verdict = msgspec.structs.replace(verdict, steps_per_block=steps_per_block)
        channel.post(f"{key}/verdict", msgspec.json.encode(verdict))
        return verdict
    message = channel.await_message(f"{key}/verdict", 2 * timeout_s, stop)
    if message is None:
        return Ruling(False, f"rank 0 did not decide within {2 * timeout_s:g} s", late=True)
    return msgspec.json.decode(message, type=Ruling)


def _decide(channel: StoreChannel, key: str, timeout_s: float, stop: Callable[[], bool]) -> Ruling:
    digests = channel.gather(f"{key}/order", timeout_s, stop)
    missing = [rank for rank in range(channel.job.world_size) if rank not in digests]
    if missing:
        return Ruling(
            False, f"{name_ranks(missing)} did not report the order of collectives within {timeout_s:g} s", late=True
        )
    by_digest: dict[bytes, CollectiveSequence] = {}  # one copy of each sequence
    for digest in set(digests.values()):
        name = f"{key}/sequence/{digest.decode()}"
        message = channel.await_message(name, timeout_s, stop)
        if message is None:
            return Ruling(False, "a rank that posted the order of its collectives is gone")
        channel.delete(name, f"{name}/posted")
        by_digest[digest] = CollectiveSequence.decode(message)
    for rank, digest in sorted(digests.items()):
        if by_digest[digest].incomplete:
            return Ruling(False, f"rank {rank} issued more collectives in one step than the gate has storage for")
    conflict = find_conflict({rank: by_digest[digest] for rank, digest in digests.items()})
    if conflict is not None:
        return Ruling(
            False,
            f"the ranks issue the collectives of different groups in different orders, so that serialising them would "
            f"deadlock: {conflict}",
            conflict=True,
        )
    return Ruling(True)
