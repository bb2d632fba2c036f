"""Messages between the ranks, through the job's key-value store.

No collective of ours can hang the job, because there is none: a dead, late or disagreeing rank costs one missing row.
All of this runs on threads of our own, with store clients of our own: a store client holds its lock while it waits, and
the job uses its client to create groups. Every wait here polls (``check``) and never blocks.

Rank 0 leads two exchanges:

- the **order check** before the sequential steps of a window (``order_check.py``);
- the **reports**: every rank publishes what it measured, and rank 0 makes one report of it (``reporter.py``).
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from overlap_callbacks.gate.collectives import backend_name

# Time between two polls of the store. It grows from the first to the second, so that a thousand ranks that wait for one
# do not keep the job's store busy.
_MIN_POLL_S = 0.002
_MAX_POLL_S = 0.1
# Timeout of a single store operation, on our clients only. The operations do not block on missing keys, so it is only
# reached if the server is gone. It does not hold where the server is stopped: see ``OpenCall``.
_OPERATION_TIMEOUT = datetime.timedelta(seconds=10)
# Maximum time that others wait for a thread of ours whose call the store does not answer. A healthy store takes
# milliseconds.
ANSWER_TIMEOUT_S = 5.0

# Numbers the monitors of one process in the order in which they opened. The order is the same on every rank of an SPMD
# job.
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


class OpenCall:
    """How long a call of the job's store has been under way. One thread calls, others look.

    A server that is stopped, but not gone, keeps every call waiting until it goes on, whatever the timeout of the
    client.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = None

    @property
    def under_way(self) -> bool:
        return self._since is not None

    @property
    def is_stuck(self) -> bool:
        """Whether the store does not answer."""
        since = self._since
        return since is not None and time.monotonic() - since > ANSWER_TIMEOUT_S


class StoreChannel:
    """Messages between the ranks. Not thread-safe: each thread has its own channel.

    Args:
        job: the job of this rank.
        prefix: keeps our keys apart from the job's.
        call: told of each call of the store; by default nobody looks.
    """

    def __init__(self, job: Job, prefix: str, call: OpenCall | None = None) -> None:
        self.job = job
        self._call = OpenCall() if call is None else call
        with self._call:
            store: Any = c10d._get_default_store()
            store = store.clone()
            store.set_timeout(_OPERATION_TIMEOUT)
        self._store: Any = c10d.PrefixStore(prefix, store)

    def publish(self, key: str, message: bytes) -> None:
        """Put ``message`` under ``key`` for the other ranks."""
        with self._call:
            self._store.set(key, message)

    def publish_once(self, key: str, message: bytes) -> None:
        """Publish a message that several ranks have in common: only the first of them does."""
        with self._call:
            if self._store.add(f"{key}/published", 1) == 1:
                self._store.set(key, message)

    def peek(self, key: str) -> bytes | None:
        """The message under ``key``, or None if there is none yet. Does not wait."""
        with self._call:
            return self._store.get(key) if self._store.check([key]) else None

    def delete(self, *keys: str) -> None:
        """Remove messages that nobody will read again."""
        with self._call:
            for key in keys:
                self._store.delete_key(key)

    def delete_once(self, key: str) -> None:
        """Remove a message of ``publish_once``."""
        self.delete(key, f"{key}/published")

    def gather(self, key: str, timeout_s: float, stop: Callable[[float], bool]) -> dict[int, bytes]:
        """Rank 0: the messages that the ranks published under ``key``, by rank. Deletes what it reads.

        Args:
            key: of the messages; each rank publishes under ``{key}/{rank}``.
            timeout_s: ranks whose message does not come within this time are missing in the result.
            stop: ends the waiting early when it returns True. It gets the time of the last message, or of the call if
                none has come (``time.monotonic``).
        """
        last = time.monotonic()
        deadline = last + timeout_s
        missing = list(range(self.job.world_size))
        messages: dict[int, bytes] = {}
        poll_s = _MIN_POLL_S
        while True:
            for rank in missing:
                message = self.peek(f"{key}/{rank}")
                if message is not None:
                    messages[rank] = message
                    last = time.monotonic()
                    self.delete(f"{key}/{rank}")
            missing = [rank for rank in missing if rank not in messages]
            if not missing or time.monotonic() > deadline or stop(last):
                return messages
            time.sleep(poll_s)
            poll_s = min(1.2 * poll_s, _MAX_POLL_S)

    def await_message(self, key: str, timeout_s: float, stop: Callable[[], bool]) -> bytes | None:
        """The message under ``key`` as soon as it is there; None after ``timeout_s``, or once ``stop`` returns True."""
        deadline = time.monotonic() + timeout_s
        poll_s = _MIN_POLL_S
        while True:
            message = self.peek(key)
            if message is not None or time.monotonic() > deadline or stop():
                return message
            time.sleep(poll_s)
            poll_s = min(1.2 * poll_s, _MAX_POLL_S)


def next_prefix() -> str:
    """A prefix for the keys of one monitor; the same on every rank."""
    return f"overlap_callbacks/{next(_instances)}"
