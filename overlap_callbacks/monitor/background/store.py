"""Messages between the ranks, through the job's key-value store.

No collective of ours can hang the job, because there is none: a dead, late or disagreeing rank costs one missing row.
All of this runs on threads of our own, over one connection of our own: a store client holds its lock while it waits,
and the job uses its client to create groups. Every wait here polls and never blocks. Messages go along the edges of a
tree (``tree.py``).
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from overlap_callbacks.gate.collectives import backend_name

# Time between two polls of the store. It grows from the first to the second, so that a thousand ranks that wait for one
# do not keep the job's store busy.
_MIN_POLL_S = 0.002
_MAX_POLL_S = 0.1
# Timeout of a single store operation, on our client only. The operations do not block on missing keys, so it is only
# reached if the server is gone. It does not hold where the server is stopped: see ``CallInFlight``.
_OPERATION_TIMEOUT = datetime.timedelta(seconds=10)
# Maximum time that others wait for a thread of ours whose call the store does not answer. A healthy store takes
# milliseconds.
ANSWER_TIMEOUT_S = 5.0
# File descriptors that connecting takes, those for looking up the host's name included.
_DESCRIPTORS = 4
# Sentinel that no message equals.
_MISSING = b"\0"

# Numbers the monitors of one process in the order in which they opened. The order is the same on every rank of an SPMD
# job.
_instances = itertools.count()

T = TypeVar("T")


class StoreFailedError(RuntimeError):
    """The job's store is gone, refused a request, or cannot be reached."""


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


class CallInFlight:
    """How long a call of the job's store has been under way. One thread calls, others look.

    A server that is stopped, but not gone, keeps a call waiting until it resumes, whatever the client's timeout.
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


class Connection:
    """A connection to the job's store, made with the first call. Threads take turns, one short call at a time."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._store: Any = None
        self._turn = threading.Lock()
        self.call = CallInFlight()

    def run(self, action: Callable[[Any], T]) -> T:
        """What ``action`` returns; it gets the client, and must not wait for a key. Raises StoreFailedError."""
        with self._turn, self.call:
            try:
                if self._store is None:
                    self._store = self._connect()
                return action(self._store)
            except (OSError, RuntimeError) as error:
                raise StoreFailedError(f"the ranks' store failed: {error}") from error

    def renew(self) -> None:
        """Have the next call connect anew."""
        with self._turn:
            self._store = None


def _connect_to_default() -> Any:
    # Without a free descriptor torch tries to connect for as long as its timeout, and a process that ends meanwhile
    # crashes. So ask before.
    with contextlib.ExitStack() as free:
        for _ in range(_DESCRIPTORS):
            free.enter_context(socket.socket())
    store: Any = c10d._get_default_store()
    store = store.clone()
    store.set_timeout(_OPERATION_TIMEOUT)
    return store


class _Shared:
    """The connection that this process shares, kept as long as anybody uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: Callable[[], Any] = lambda: None
        self._connection: Callable[[], Connection | None] = lambda: None

    def connection(self) -> Connection:
        """The connection to the store of the default process group."""
        group: Any = dist.group.WORLD
        with self._lock:
            found = self._connection() if self._group() is group else None
            if found is None:
                found = Connection(_connect_to_default)
                self._group, self._connection = weakref.ref(group), weakref.ref(found)
            return found


_shared = _Shared()


class StoreChannel:
    """Messages between the ranks. Threads may share it. It connects with the first call.

    ``prefix`` keeps our keys apart from the job's. Without a ``connection`` it uses the one that this process shares.
    """

    def __init__(self, job: Job, prefix: str, connection: Connection | None = None) -> None:
        self.job = job
        self.connection = connection or _shared.connection()
        self._prefix = prefix

    @property
    def call(self) -> CallInFlight:
        """The call that is under way, of whatever thread."""
        return self.connection.call

    def open(self) -> None:
        """Connect. This waits for the server, even for one that has died."""
        self.connection.run(lambda _: None)

    def publish(self, key: str, message: bytes) -> None:
        """Put ``message`` under ``key`` for the other ranks."""
        self.connection.run(lambda store: store.set(self._name(key), message))

    def has(self, key: str) -> bool:
        """Whether there is a message under ``key``. Does not wait."""
        return bool(self.connection.run(lambda store: store.check([self._name(key)])))

    def peek(self, key: str) -> bytes | None:
        """The message under ``key``, or None if there is none yet. Does not wait.

        ``get`` blocks if the key is deleted after ``check``. ``compare_set`` with a sentinel reads without blocking or
        writing.
        """
        found = bytes(self.connection.run(lambda store: store.compare_set(self._name(key), _MISSING, b"")))
        return None if found == _MISSING else found

    def add(self, key: str, amount: int = 1) -> int:
        """Count ``amount`` more under ``key``, at once for all ranks. Returns the count."""
        return int(self.connection.run(lambda store: store.add(self._name(key), amount)))

    def set_if_absent(self, key: str, message: bytes) -> bytes:
        """Put ``message`` under ``key`` unless there is one, at once for all ranks. Returns what is there then."""
        return bytes(self.connection.run(lambda store: store.compare_set(self._name(key), b"", message)))

    def delete(self, *keys: str) -> int:
        """Remove messages, if they are there. Returns their number."""
        names = [self._name(key) for key in keys]
        return sum(self.connection.run(lambda store: [store.delete_key(name) for name in names])) if names else 0

    def await_message(self, key: str, timeout_s: float, stop: Callable[[], bool]) -> bytes | None:
        """The message under ``key`` as soon as it is there; None after ``timeout_s``, or once ``stop`` returns True."""
        return poll(lambda: self.peek(key), timeout_s, stop)

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def poll(look: Callable[[], T | None], timeout_s: float, stop: Callable[[], bool]) -> T | None:
    """What ``look`` returns, as soon as that is not None; None after ``timeout_s``, or once ``stop`` returns True."""
    deadline = time.monotonic() + timeout_s
    poll_s = _MIN_POLL_S
    while True:
        found = look()
        if found is not None or time.monotonic() > deadline or stop():
            return found
        time.sleep(poll_s)
        poll_s = min(1.2 * poll_s, _MAX_POLL_S)


def next_prefix() -> str:
    """A prefix for the keys of one monitor; the same on every rank."""
    return f"overlap_callbacks/{next(_instances)}"
