"""The library's threads, for work that must not run on the training thread.

Each is a daemon with a bounded queue. The job waits for it only for a limited time, the interpreter not at all
(``concurrent.futures`` would join its threads at exit, without a timeout).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

_STOP = None
_AFTER_ERROR_S = 60.0


class ThreadExitError(RuntimeError):
    """A task raised ``SystemExit`` or ``KeyboardInterrupt``, which on these threads ends neither thread nor process."""


class NoAnswerError(Exception):
    """A question was not answered in time."""


class QuestionFailedError(Exception):
    """A question raised an error, which is the cause of this one."""


T = TypeVar("T")


class Worker:
    """Runs tasks in order, on one thread that starts with the first task; at most ``capacity`` may wait.

    ``on_error`` is called on the worker's thread with each exception of a task. ``idle``, if given, is called there
    while no task waits, and returns after how many seconds again.
    """

    def __init__(
        self,
        name: str,
        on_error: Callable[[Exception], None],
        capacity: int = 1024,
        idle: Callable[[], float] | None = None,
    ) -> None:
        self._name = name
        self._idle, self._idle_s = idle, None if idle is None else 0.0
        self._on_error = on_error
        self._tasks: queue.Queue[Callable[[], object] | None] = queue.Queue(capacity)
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def started(self) -> bool:
        return self._thread is not None

    def submit(self, task: Callable[[], object], timeout_s: float = 0.0) -> bool:
        """Run ``task`` later. Returns False, and drops it, if the queue is full and stays so for ``timeout_s``.

        Raises RuntimeError if the system cannot start another thread.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread  # only now: a thread that did not start cannot be joined
        try:
            self._tasks.put(task, timeout=timeout_s)
        except queue.Full:
            return False
        return True

    def ask(self, question: Callable[[], T], timeout_s: float) -> T:
        """Call ``question`` on the worker's thread and return its result. After a timeout it may still be running.

        Raises NoAnswerError without an answer within ``timeout_s``, QuestionFailedError if ``question`` raised, and
        RuntimeError if the system cannot start another thread.
        """
        answers: queue.SimpleQueue[tuple[T] | Exception] = queue.SimpleQueue()

        def task() -> None:
            try:
                answers.put((question(),))
            except BaseException as error:
                answers.put(as_exception(error))

        self.submit(task)
        try:
            answer = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise NoAnswerError from None
        if isinstance(answer, Exception):
            raise QuestionFailedError from answer
        return answer[0]

    def close(self, timeout_s: float) -> bool:
        """Run the waiting tasks, then end the thread.

        Returns False if that takes longer than ``timeout_s``. The thread then continues, and ``close`` may be called
        again.
        """
        if self._thread is None:
            return True
        deadline = time.monotonic() + timeout_s
        if not self._closing:
            try:
                self._tasks.put(_STOP, timeout=max(0.0, timeout_s))
            except queue.Full:
                return False
            self._closing = True
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            return False
        self._thread, self._closing = None, False
        return True

    def _run(self) -> None:
        while (task := self._next_task()) is not _STOP:
            try:
                task()
            except BaseException as error:
                self._on_error(as_exception(error))
            del task  # otherwise the last task would keep its window alive until the next one

    def _next_task(self) -> Callable[[], object] | None:
        try:
            task = self._tasks.get(timeout=self._idle_s)
        except queue.Empty:
            return self._do_idle
        self._idle_s = None if self._idle is None else 0.0  # the task may have left something to do
        return task

    def _do_idle(self) -> None:
        assert self._idle is not None
        self._idle_s = _AFTER_ERROR_S  # if it raises
        self._idle_s = self._idle()


def as_exception(error: BaseException) -> Exception:
    """The exception of a task, as a reportable error: no task may end the library's threads or the job."""
    if isinstance(error, Exception):
        return error
    told = ThreadExitError(f"raised {type(error).__name__}({error})")
    told.__cause__ = error
    return told


class DetachedWorker:
    """Runs work on its own thread, with a bounded wait, so that a stalled backend cannot delay the caller.

    Args:
        name: of the thread.
        patience_s: maximum time ``do`` blocks. While earlier work is still stalled it does not block at all.
        capacity: maximum number of waiting calls; further ones are dropped and counted in ``dropped``.
    """

    def __init__(self, name: str, *, patience_s: float, capacity: int = 1000) -> None:
        self._worker = Worker(name, self._keep_error, capacity)
        self._patience_s = patience_s
        self._last = threading.Event()  # set when the latest work is done
        self._last.set()
        self._error: Exception | None = None
        self.dropped = 0

    def do(self, work: Callable[[], None]) -> bool:
        """Run ``work``, and wait for it. Returns False if it is not done yet.

        Raises its exception, or one of earlier work that came after its own call of ``do`` had returned.
        """
        self._raise_error()
        earlier, done = self._last, self._submit(work)
        if done is None:
            self.dropped += 1
        finished = done is not None and done.wait(self._patience_s if earlier.is_set() else 0.0)
        self._raise_error()
        return finished

    def close(self, last: Callable[[], None], timeout_s: float) -> bool:
        """Run ``last``, then end the thread. Returns False, and abandons the thread, if that takes too long.

        Raises any exception of earlier work that was not raised yet.
        """
        if not self._worker.started:
            last()  # without a new thread, which an exiting interpreter would refuse
            return True
        deadline = time.monotonic() + timeout_s
        if self._submit(last, max(0.0, timeout_s)) is None:  # no slot became free
            return False
        ended = self._worker.close(max(0.0, deadline - time.monotonic()))
        self._raise_error()
        return ended

    def _submit(self, work: Callable[[], None], timeout_s: float = 0.0) -> threading.Event | None:
        done = threading.Event()

        def task() -> None:
            try:
                work()
            except BaseException as error:
                self._keep_error(as_exception(error))
            finally:
                done.set()

        if not self._worker.submit(task, timeout_s):
            return None
        self._last = done
        return done

    def _keep_error(self, error: Exception) -> None:
        self._error = self._error or error

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
