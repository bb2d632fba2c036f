"""Messages between the ranks, through the job's key-value store.

The library runs no collective, so it cannot hang the job: a dead, late or disagreeing rank costs one missing row.
Everything here runs on the library's own threads, over its own connection: a store client holds its lock while it
waits, and the job needs its client to create groups. Every wait polls and never blocks. Messages go along the edges of
a tree (``tree.py``).
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import multiprocessing
import os
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

# Poll interval of the store. It grows from the first to the second, so that a thousand waiting ranks do not keep the
# job's store busy.
_MIN_POLL_S = 0.002
_MAX_POLL_S = 0.1
# Timeout of a single store operation, on our client only. The operations do not block on missing keys, so it is only
# reached if the server is gone. It has no effect while the server is suspended: see ``CallInFlight``.
_OPERATION_TIMEOUT = datetime.timedelta(seconds=10)
# Maximum wait for one of the library's threads whose store call gets no answer. A healthy store takes milliseconds.
ANSWER_TIMEOUT_S = 5.0
# File descriptors that connecting needs, including the look-up of the host's name.
_DESCRIPTORS = 4
# Where launchers say how many processes there are.
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
# Sentinel that no message equals.
_MISSING = b"\0"

# Numbers the monitors of one process in the order in which they opened: the same on every rank of an SPMD job.
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
        """The current job; None if no process group is initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        return cls(dist.get_rank(), dist.get_world_size(), backend_name())

    @classmethod
    def alone(cls) -> Job | None:
        """The job of a process without a process group; None if it looks like one of several, which will have one."""
        several = [name for name in _WORLD_SIZES if os.environ.get(name, "1") not in ("", "0", "1")]
        return None if several or multiprocessing.parent_process() is not None else cls(0, 1, "")


class CallInFlight:
    """How long a store call has been in flight. One thread calls, others check.

    A server that is suspended, but not gone, blocks a call until it resumes, whatever the client's timeout.
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
    """A connection to the job's store, opened by the first call. Threads take turns, one short call at a time."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._store: Any = None
        self._turn = threading.Lock()
        self.call = CallInFlight()

    def run(self, action: Callable[[Any], T]) -> T:
        """Return ``action(client)``; it must not wait for a key. Raises StoreFailedError."""
        with self._turn, self.call:
            try:
                if self._store is None:
                    self._store = self._connect()
                return action(self._store)
            except (OSError, RuntimeError) as error:
                raise StoreFailedError(f"the ranks' store failed: {error} [OC215]") from error

    def renew(self) -> None:
        """Make the next call reconnect."""
        with self._turn:
            self._store = None


def _connect_to_default() -> Any:
    # Without a free descriptor torch retries the connection until its timeout, and a process that ends meanwhile
    # crashes. So check first.
    with contextlib.ExitStack() as free:
        for _ in range(_DESCRIPTORS):
            free.enter_context(socket.socket())
    store: Any = c10d._get_default_store()
    store = store.clone()
    store.set_timeout(_OPERATION_TIMEOUT)
    return store


class _Shared:
    """The connection shared by this process, kept while anything uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: Callable[[], Any] = lambda: None
        self._connection: Callable[[], Connection | None] = lambda: None

    def connection(self) -> Connection:
        """The connection to the store of the default process group; without one, to a store of its own."""
        torch_distributed: Any = dist
        group = torch_distributed.group.WORLD
        if group is None:
            return Connection(torch_distributed.HashStore)
        with self._lock:
            found = self._connection() if self._group() is group else None
            if found is None:
                found = Connection(_connect_to_default)
                self._group, self._connection = weakref.ref(group), weakref.ref(found)
            return found


_shared = _Shared()


class StoreChannel:
    """Messages between the ranks. Threads may share it. The first call connects.

    ``prefix`` separates the library's keys from the job's. Without a ``connection`` it uses the process's shared one.
    """

    @classmethod
    def of(cls, job: Job) -> StoreChannel:
        """One monitor's. A process without a group has a store of its own, and takes no number that ranks count."""
        if job.backend:
            return cls(job, next_prefix())
        return cls(job, "alone", Connection(dist.HashStore))  # type: ignore[attr-defined]

    def __init__(self, job: Job, prefix: str, connection: Connection | None = None) -> None:
        self.job = job
        self.connection = connection or _shared.connection()
        self._prefix = prefix

    @property
    def call(self) -> CallInFlight:
        """The call in flight, from any thread."""
        return self.connection.call

    def open(self) -> None:
        """Connect. Waits for the server, even for one that has died."""
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
        """Add ``amount`` to the count under ``key``, atomically. Returns the count."""
        return int(self.connection.run(lambda store: store.add(self._name(key), amount)))

    def set_if_absent(self, key: str, message: bytes) -> bytes:
        """Store ``message`` under ``key`` unless one is there, atomically. Returns the stored message."""
        return bytes(self.connection.run(lambda store: store.compare_set(self._name(key), b"", message)))

    def delete(self, *keys: str) -> int:
        """Remove messages, if they are there. Returns their number."""
        names = [self._name(key) for key in keys]
        return sum(self.connection.run(lambda store: [store.delete_key(name) for name in names])) if names else 0

    def await_message(self, key: str, timeout_s: float, stop: Callable[[], bool]) -> bytes | None:
        """The message under ``key`` as soon as it arrives; None after ``timeout_s``, or once ``stop`` returns True."""
        return poll(lambda: self.peek(key), timeout_s, stop)

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def poll(look: Callable[[], T | None], timeout_s: float, stop: Callable[[], bool]) -> T | None:
    """The first result of ``look`` that is not None; None after ``timeout_s``, or once ``stop`` returns True."""
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
