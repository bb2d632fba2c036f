"""Sends reports from rank 0 to the last rank, where Megatron-LM has its W&B run.

When training has ended, and not before, both ends wait for each other, each for a bounded time: the last rank for the
last report, rank 0 for its reports to be taken. What nobody takes, rank 0 takes back. So nothing is left in the store,
unless both ranks die.
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

# The rank with the W&B run looks for reports at most this often.
_LOOK_INTERVAL_S = 1.0
# At the end, this is the time for reports: for rank 0 to make them, and then for the last rank to take them.
LAST_REPORT_S = 30.0
# And the last rank waits so much longer than rank 0 may take to make them.
LATER_S = 15.0
# The last rank trains the steps of the windows itself, and looks between them. So it is gone if so many reports wait,
# the oldest of them for so long. In a burst, or while a monitor closes, many may come before it looks.
_MOST_WAITING = 4
_GONE_AFTER_S = 30.0
# Time for the store to answer when nothing else is waited for.
_STORE_S = 2.0

_READER = "reader"  # its value names what is sent: what a killed job has left under another name is not read
_END = "end"
_NO_ANSWER = "the job's store does not answer"

T = TypeVar("T")


class Outbox(Sink):
    """Rank 0's end: puts reports into the job's store. Other ranks have one that does nothing."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._run: RunInfo | None = None
        self._name = ""  # as the reader gave it
        self._sent = 0
        self._waiting: deque[tuple[str, float]] = deque()  # keys that were not taken yet, and since when they wait
        self._closed = threading.Event()
        self._left = False
        self._turn = threading.Lock()  # nothing is sent once this rank has left

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
        """Leave nothing in the store. Waits at most ``timeout_s`` for the last rank to take the reports, if it has not.

        Returns why reports were taken back, if they were.
        """
        job = Job.current()
        if job is None or job.rank != 0:
            return None
        failed: list[Exception] = []
        # A store that does not answer keeps the thread, and not the job.
        worker = Worker("overlap-callbacks-outbox", lambda error: None)
        with contextlib.suppress(RuntimeError):  # the system has no more threads to give
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

        with contextlib.suppress(StoreFailedError):  # all that is in it is gone
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
        if reader is None:  # the message would stay in the store forever
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
        self._sink = WandbSink(getattr(writer, "run", None))
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
                self._leave()  # so rank 0 sends nothing more
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
        """What ``question`` returns, on a thread of its own: a store that does not answer must not keep training.

        It uses the store, and may wait ``wait_s`` for other ranks. A StoreFailedError if there is no answer.
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
        """The reports that have come; at the end, all of them, and whether some may be missing."""
        missing = wait_s is not None and not self._has_ended(wait_s)
        messages = list(iter(self._take, None))
        if wait_s is not None:
            self._take_away()  # at once, so that rank 0 need not wait for what W&B takes
        return messages, missing

    def _has_ended(self, wait_s: float) -> bool:
        """Wait for rank 0 to have sent all. False if it has not in time; one that has left sends nothing more."""

        def look() -> bool | None:
            return self._channel.has(self._key(_END)) or not self._channel.has(_READER) or None

        return bool(poll(look, wait_s, lambda: False))

    def _take(self) -> bytes | None:
        """The next report; None if none has come."""
        key = self._key(str(self._taken))
        message = self._channel.peek(key)
        if message is not None:
            self._channel.delete(key)
            self._taken += 1
        return message

    def _leave(self) -> None:
        with contextlib.suppress(StoreFailedError):
            self._ask(self._take_away)

    def _take_away(self) -> None:
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
