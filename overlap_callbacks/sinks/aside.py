"""For sinks that talk to something which may stall: a thread of their own, and an end to all waiting.

The reporting thread, which also writes the record, gives a piece of work here and waits a moment for it, so that an
error is known where it belongs. Once something has stalled it waits no more: work queues up here, the record goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from overlap_callbacks.background import Worker


class Aside:
    """Does a sink's work on a thread of its own.

    Args:
        name: of the thread.
        patience_s: longest that the caller is kept waiting; once, not for each piece of work behind one that stalls.
        capacity: pieces of work that may wait; more are dropped, and counted.

    Attributes:
        dropped: pieces of work that found no place.
    """

    def __init__(self, name: str, *, patience_s: float, capacity: int = 1000) -> None:
        self._worker = Worker(name, self._keep_error, capacity)
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._waiting = 0
        self._error: Exception | None = None
        self.dropped = 0

    def do(self, work: Callable[[], None]) -> bool:
        """Have ``work`` done; False where it has not been done yet.

        Raises:
            Exception: what it raised, or what earlier work raised after its caller had been let go.
        """
        self._raise_error()
        done = self._submit(work)
        with self._lock:
            stalled = self._waiting > 1
        finished = done is not None and done.wait(0.0 if stalled else self._patience_s)
        self._raise_error()
        return finished

    def close(self, last: Callable[[], None], timeout_s: float) -> bool:
        """Have ``last`` done and end the thread; False, and the thread is left behind, if that takes too long.

        Raises:
            Exception: what any work raised whose caller has not been told.
        """
        if not self._worker.started:
            last()  # and start no thread, which an interpreter that is ending would refuse
            return True
        self._submit(last)
        ended = self._worker.close(timeout_s)
        self._raise_error()
        return ended

    def _submit(self, work: Callable[[], None]) -> threading.Event | None:
        done = threading.Event()

        def task() -> None:
            try:
                work()
            except Exception as error:
                self._keep_error(error)
            finally:
                with self._lock:
                    self._waiting -= 1
                done.set()

        with self._lock:
            self._waiting += 1
        if not self._worker.submit(task):
            with self._lock:
                self._waiting -= 1
            self.dropped += 1
            return None
        return done

    def _keep_error(self, error: Exception) -> None:
        self._error = self._error or error

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
