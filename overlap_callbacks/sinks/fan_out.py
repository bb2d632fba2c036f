"""Passes each report to every sink, so that no sink can delay the record or break another.

Sinks need not handle threads. The record is written first, on the caller's thread. Every other sink runs on its own
thread, with a bounded wait.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from overlap_callbacks._log import logger
from overlap_callbacks._threads import DetachedWorker, as_exception
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.sinks.base import Sink

# Maximum time that the record waits for another sink, once. A slower sink finishes on its own thread.
_SINK_PATIENCE_S = 2.0


class FanOut:
    """Several sinks as one. All methods are called on one thread.

    Args:
        sinks: the destinations.
        on_error: called with a sink that failed and its error; the sink is not used again.
    """

    def __init__(self, sinks: Sequence[Sink], on_error: Callable[[Sink, Exception], None]) -> None:
        # The record first, so that it is on disk before another sink can stall.
        self._sinks = sorted(sinks, key=lambda sink: sink.kept_record() is None)
        self.record = self._sinks[0].kept_record() if self._sinks else None  # the file, if one of the sinks keeps it
        self._on_error = on_error
        self._workers = {
            id(sink): DetachedWorker(f"overlap-callbacks-{type(sink).__name__}", patience_s=_SINK_PATIENCE_S)
            for sink in self._sinks
            if sink.kept_record() is None
        }

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def open(self, run: RunInfo) -> None:
        """Open every sink for a run; called once, first."""

        def open_one(sink: Sink) -> None:
            if self.record is not None and sink.kept_record() is None:
                sink.use_record(self.record)
            sink.open(run)

        for sink in list(self._sinks):
            self._use(sink, open_one, sink)

    def _each(self, method: str, *arguments: object) -> None:
        for sink in list(self._sinks):
            # A stalled sink's queue is bounded, in windows: do not fill it with calls that the sink does not handle.
            if getattr(type(sink), method) is not getattr(Sink, method):
                self._use(sink, getattr(sink, method), *arguments)

    # Each as in ``Sink``.
    block = functools.partialmethod(_each, "block")
    arm_block = functools.partialmethod(_each, "arm_block")
    log_arm = functools.partialmethod(_each, "log_arm")
    log_causal = functools.partialmethod(_each, "log_causal")
    left_out = functools.partialmethod(_each, "left_out")
    answer = functools.partialmethod(_each, "answer")
    frontier = functools.partialmethod(_each, "frontier")
    change = functools.partialmethod(_each, "change")
    goodput = functools.partialmethod(_each, "goodput")
    decision = functools.partialmethod(_each, "decision")
    log = functools.partialmethod(_each, "log")

    def close(self, timeout_s: float) -> None:
        """Close every sink. Those that stall have ``timeout_s`` together, one with a ``close_timeout_s`` that."""
        deadline = time.monotonic() + timeout_s
        for sink in self._sinks:
            try:
                worker = self._workers.get(id(sink))
                if worker is None:
                    sink.close()
                else:
                    self._close_detached(sink, worker, deadline)
            except BaseException as error:  # the library's own threads: a sink must not end them
                self._on_error(sink, as_exception(error))
        self._sinks = []

    def _close_detached(self, sink: Sink, worker: DetachedWorker, deadline: float) -> None:
        name = type(sink).__name__
        if sink.close_timeout_s is not None:
            timeout_s = sink.close_timeout_s + _SINK_PATIENCE_S  # it may finish at the last moment
        else:
            timeout_s = max(_SINK_PATIENCE_S, 0.5 * (deadline - time.monotonic()))
        closed = worker.close(sink.close, timeout_s)
        if worker.dropped:
            logger.warning(
                "overlap-callbacks: %s dropped %d windows: it stalled for too long [OC604]", name, worker.dropped
            )
        if closed:
            return
        error = sink.close_timeout_error()
        if error is not None:
            self._on_error(sink, error)
        else:
            logger.warning(
                "overlap-callbacks: %s hangs, and may lack the last windows; the record has them [OC605]", name
            )

    def _use(self, sink: Sink, call: Callable[..., None], *arguments: object) -> None:
        try:
            worker = self._workers.get(id(sink))
            if worker is None:
                call(*arguments)
            else:
                worker.do(functools.partial(call, *arguments))
        except BaseException as error:
            self._sinks.remove(sink)
            self._on_error(sink, as_exception(error))
