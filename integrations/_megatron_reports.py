"""Sends reports from rank 0 to the last rank, where Megatron-LM has its W&B run.

Only when training has ended do the two ends wait for each other, each for a bounded time: the last rank for the last
report, rank 0 for its reports to be taken. Rank 0 deletes what is not taken. So nothing is left in the store unless
both ranks die.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from overlap_callbacks import OverlapMonitor, OverlapReport, Sink, WandbSink
from overlap_callbacks._threads import NoAnswerError, QuestionFailedError, Worker
from overlap_callbacks.monitor.background.store import ANSWER_TIMEOUT_S, Job, StoreChannel, StoreFailedError, poll
from overlap_callbacks.sinks import RunInfo

# Minimum interval at which the rank with the W&B run looks for reports.
_LOOK_INTERVAL_S = 1.0
# At the end, time for reports: for rank 0 to make them, and then for the last rank to take them.
LAST_REPORT_S = 30.0
# Additional time that the last rank waits for rank 0 to make them.
LATER_S = 15.0
# The last rank also trains the steps of the windows, and looks between them. So it is considered gone if this many
# reports wait, the oldest for this long. In a burst, or while a monitor closes, many may arrive before it looks.
_MOST_WAITING = 4
_GONE_AFTER_S = 30.0
# Time for the store to answer when the call waits for nothing else.
_STORE_S = 2.0

_READER = "reader"  # names the messages, so that those of a killed job under another name are not read
_END = "end"
_NO_ANSWER = "the job's store does not answer"

T = TypeVar("T")


class Outbox(Sink):
    """Rank 0's end: puts reports into the job's store. On other ranks it does nothing."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._run: RunInfo | None = None
        self._name = ""  # set by the reader
        self._sent = 0
        self._waiting: deque[tuple[str, float]] = deque()  # keys not taken yet, and since when they wait
        self._closed = threading.Event()
        self._left = False
        self._turn = threading.Lock()  # nothing is sent after this rank has left

    def open(self, run: RunInfo) -> None:
        self._run = run

    def log(self, report: OverlapReport) -> None:
        with self._turn:
            channel = _channel(self._prefix)
            self._forget_taken(channel)
            if len(self._waiting) >= _MOST_WAITING and time.monotonic() - self._waiting[0][1] >= _GONE_AFTER_S:
                self._closed.set()
                raise self._take_back(channel)
            self._post(channel, str(self._sent), msgspec.json.encode((self._run, report)))
            self._sent += 1

    def close(self) -> None:
        try:
            with self._turn:
                self._post(_channel(self._prefix), _END, b"-")
        finally:
            self._closed.set()

    def leave(self, timeout_s: float) -> Exception | None:
        """Delete what is left in the store, after waiting at most ``timeout_s`` for the last rank to take the reports.

        Returns an error if reports were deleted unread.
        """
        job = Job.current()
        if job is None or job.rank != 0:
            return None
        failed: list[Exception] = []
        # A store that does not answer blocks the worker, not the job.
        worker = Worker("overlap-callbacks-outbox", lambda error: None)
        with contextlib.suppress(RuntimeError):  # the system cannot start another thread
            worker.submit(lambda: self._leave(timeout_s, failed))
        worker.close(_STORE_S + (0.0 if self._run is None else timeout_s))
        return failed[0] if failed else None

    def _leave(self, timeout_s: float, failed: list[Exception]) -> None:
        channel = _channel(self._prefix)

        def all_taken() -> bool | None:
            if self._run is not None and not self._closed.is_set():
                return None  # more may come
            with self._turn:
                self._forget_taken(channel)
                return None if self._waiting else True

        with contextlib.suppress(StoreFailedError):  # the store is gone, and everything in it
            poll(all_taken, timeout_s, lambda: not channel.has(_READER))
            with self._turn:
                self._left = True
                self._forget_taken(channel)
                if self._waiting:
                    failed.append(self._take_back(channel))
                else:
                    channel.delete(_READER, self._key(_END))

    def _forget_taken(self, channel: StoreChannel) -> None:
        while self._waiting and not channel.has(self._waiting[0][0]):  # they are taken in order
            self._waiting.popleft()

    def _take_back(self, channel: StoreChannel) -> Exception:
        keys = [key for key, _ in self._waiting]
        channel.delete(_READER, self._key(_END), *keys)
        self._waiting.clear()
        return RuntimeError(f"the last rank has taken none of the last {len(keys)} reports")

    def _post(self, channel: StoreChannel, name: str, message: bytes) -> None:
        reader = None if self._left else channel.peek(_READER)
        if reader is None:  # the message would stay in the store for ever
            return
        self._name = reader.decode()
        channel.publish(self._key(name), message)
        if name != _END:
            self._waiting.append((self._key(name), time.monotonic()))

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"


class Inbox:
    """The last rank's end: takes reports from the store, and logs them to Megatron-LM's W&B run.

    It logs between steps, on the training thread, because Megatron-LM logs there too.
    """

    def __init__(self, prefix: str, writer: Any, monitor: OverlapMonitor) -> None:
        self._channel = _channel(prefix)
        self._name = secrets.token_hex(4)
        self._worker = Worker("overlap-callbacks-inbox", lambda error: None)
        self._ask(lambda: self._channel.publish(_READER, self._name.encode()))
        self._sink = WandbSink(getattr(writer, "run", None), detail=monitor.config.detail)
        self._monitor = monitor
        self._taken = 0
        self._opened = False
        self._expecting = False  # whether there has been a window
        self._failed = False
        self._next_look_s = 0.0

    def look(self, wait_s: float | None = None) -> None:
        """Log the reports that have arrived. At the end, ``wait_s`` is how long to wait for the last one."""
        ends = wait_s is not None
        if self._monitor.in_window:
            self._expecting = True
        elif self._expecting and not self._failed and (ends or time.monotonic() > self._next_look_s):
            self._next_look_s = time.monotonic() + _LOOK_INTERVAL_S
            try:
                self._log_all(wait_s)
            except Exception as error:
                self._failed = True
                self._leave()  # so that rank 0 sends no more
                self._monitor.sink_failed(self._sink, error)
        if ends:
            self._leave()
            self._worker.close(0.0)

    def _log_all(self, wait_s: float | None) -> None:
        messages, missing = self._ask(lambda: self._receive(wait_s), wait_s or 0.0)
        for message in messages:
            run, report = msgspec.json.decode(message, type=tuple[RunInfo, OverlapReport])
            if not self._opened:
                self._opened = True
                self._sink.open(run)
            self._sink.log(report)
        if wait_s is not None:
            self._sink.close()
        if missing:
            raise TimeoutError(f"rank 0 has sent no last report within {wait_s:g} s; if it made one, the record has it")

    def _ask(self, question: Callable[[], T], wait_s: float = 0.0) -> T:
        """Call ``question`` on a separate thread and return its result: an unresponsive store must not block training.

        It uses the store, and may wait ``wait_s`` for other ranks. Raises a StoreFailedError without an answer.
        """
        if self._channel.call.is_stuck:
            raise StoreFailedError(_NO_ANSWER)
        try:
            return self._worker.ask(question, ANSWER_TIMEOUT_S + wait_s)
        except NoAnswerError:
            raise StoreFailedError(_NO_ANSWER) from None
        except QuestionFailedError as error:
            raise error.__cause__ or error from None

    def _receive(self, wait_s: float | None) -> tuple[list[bytes], bool]:
        """The reports that have arrived; at the end, all of them, and whether some may be missing."""
        missing = wait_s is not None and not self._has_ended(wait_s)
        messages = list(iter(self._take, None))
        if wait_s is not None:
            self._delete_unread()  # at once, so that rank 0 need not wait for W&B
        return messages, missing

    def _has_ended(self, wait_s: float) -> bool:
        """Wait for rank 0 to have sent everything. False if it has not in time; if it has left, it sends no more."""

        def look() -> bool | None:
            return self._channel.has(self._key(_END)) or not self._channel.has(_READER) or None

        return bool(poll(look, wait_s, lambda: False))

    def _take(self) -> bytes | None:
        """The next report; None if none has arrived."""
        key = self._key(str(self._taken))
        message = self._channel.peek(key)
        if message is not None:
            self._channel.delete(key)
            self._taken += 1
        return message

    def _leave(self) -> None:
        with contextlib.suppress(StoreFailedError):
            self._ask(self._delete_unread)

    def _delete_unread(self) -> None:
        self._channel.delete(_READER)
        while self._take() is not None:
            pass
        self._channel.delete(self._key(_END))

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"


def _channel(prefix: str) -> StoreChannel:
    job = Job.current()
    assert job is not None
    return StoreChannel(job, prefix)
