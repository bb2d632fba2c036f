"""Sends reports from rank 0 to the last rank, where Megatron-LM has its W&B run."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec

from overlap_callbacks import OverlapMonitor, OverlapReport, Sink, WandbSink
from overlap_callbacks.monitor.background.store import Job, StoreChannel, StoreFailedError
from overlap_callbacks.sinks import RunInfo

# The rank with the W&B run looks for reports at most this often.
_LOOK_INTERVAL_S = 1.0
# At the end it waits this long for the last report.
LAST_REPORT_S = 30.0
# It trains the steps of the windows itself, and looks after each. So if this many wait, it is gone.
_MOST_WAITING = 4


class Outbox(Sink):
    """Rank 0's end: puts reports into the job's store."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._run: RunInfo | None = None
        self._sent = 0

    def open(self, run: RunInfo) -> None:
        self._run = run

    def log(self, report: OverlapReport) -> None:
        if self._sent >= _MOST_WAITING:
            channel, oldest = _channel(self._prefix), self._sent - _MOST_WAITING
            if channel.peek(str(oldest)) is not None:
                channel.delete("reader", *map(str, range(oldest, self._sent)))
                raise RuntimeError(f"the last rank has taken none of the last {_MOST_WAITING} reports")
        self._post(str(self._sent), msgspec.json.encode((self._run, report)))
        self._sent += 1

    def close(self) -> None:
        self._post("end", b"-")

    def _post(self, key: str, message: bytes) -> None:
        channel = _channel(self._prefix)
        if channel.peek("reader"):  # without a reader the message would stay in the store forever
            channel.publish(key, message)


class Inbox:
    """The last rank's end: takes reports from the store, and logs them to Megatron-LM's W&B run.

    It does so between steps, on the training thread, because Megatron-LM logs there too.
    """

    def __init__(self, prefix: str, writer: Any, monitor: OverlapMonitor) -> None:
        self._channel = _channel(prefix)
        self._channel.publish("reader", b"-")
        self._sink = WandbSink(getattr(writer, "run", None))
        self._monitor = monitor
        self._taken = 0
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

    def _log_all(self, wait_s: float | None) -> None:
        if wait_s is not None:
            self._channel.await_message("end", wait_s, stop=lambda: False)
        while (message := self._take()) is not None:
            run, report = msgspec.json.decode(message, type=tuple[RunInfo, OverlapReport])
            if self._taken == 1:
                self._sink.open(run)
            self._sink.log(report)
        if wait_s is not None:
            self._sink.close()

    def _take(self) -> bytes | None:
        """The next report; None if none has come."""
        message = self._channel.peek(str(self._taken))
        if message is not None:
            self._channel.delete(str(self._taken))
            self._taken += 1
        return message

    def _leave(self) -> None:
        """Leave nothing in the store."""
        with contextlib.suppress(StoreFailedError):
            self._channel.delete("reader")
            while self._take() is not None:
                pass
            self._channel.delete("end")


def _channel(prefix: str) -> StoreChannel:
    job = Job.current()
    assert job is not None
    return StoreChannel(job, prefix)
