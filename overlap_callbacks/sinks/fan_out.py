"""Hands each report to every sink, so that no sink can delay the record or fail another.

Sinks know nothing of threads. The record is written on the caller's thread, first. Every other sink runs on a thread of
its own, with a bounded wait.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence

from overlap_callbacks._threads import DetachedWorker
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.analysis.results.window import TimedBlock
from overlap_callbacks.sinks.base import Sink

logger = logging.getLogger("overlap_callbacks")

# Maximum time that the record waits for another sink, once. What that sink is late with, it does on its own thread.
_SINK_PATIENCE_S = 2.0


class FanOut:
    """Several sinks as one. All methods are called on one thread.

    Args:
        sinks: where reports go.
        on_error: called with a sink that failed, and why; the sink is not used again.
    """

    def __init__(self, sinks: Sequence[Sink], on_error: Callable[[Sink, Exception], None]) -> None:
        # The record first: it is on the disk before any other sink may stall.
        self._sinks = sorted(sinks, key=lambda sink: not sink.keeps_record)
        self._on_error = on_error
        self._workers = {
            id(sink): DetachedWorker(f"overlap-callbacks-{type(sink).__name__}", patience_s=_SINK_PATIENCE_S)
            for sink in self._sinks
            if not sink.keeps_record and not sink.has_own_thread
        }

    def __bool__(self) -> bool:
        """Whether any sink is left."""
        return bool(self._sinks)

    def open(self, run: RunInfo) -> None:
        """Tell every sink of the run, once, before anything else."""
        self._each(lambda sink: sink.open(run))

    def block(self, window: int, first_step: int, block: TimedBlock) -> None:
        """Have the record keep a timed block at once."""
        self._each(lambda sink: sink.block(window, first_step, block))

    def log(self, report: OverlapReport) -> None:
        """Hand over the report of a window."""
        self._each(lambda sink: sink.log(report))

    def close(self, timeout_s: float) -> None:
        """Close every sink; those that stall have ``timeout_s`` in all."""
        deadline = time.monotonic() + timeout_s
        for sink in self._sinks:
            try:
                worker = self._workers.get(id(sink))
                if worker is None:
                    sink.close()
                elif not worker.close(sink.close, max(_SINK_PATIENCE_S, 0.5 * (deadline - time.monotonic()))):
                    logger.warning(
                        "overlap-callbacks: %s hangs, and may lack the last windows; the record has them",
                        type(sink).__name__,
                    )
            except Exception as error:
                self._on_error(sink, error)
        self._sinks = []

    def _each(self, use: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                worker = self._workers.get(id(sink))
                if worker is None:
                    use(sink)
                else:
                    worker.do(functools.partial(use, sink))
            except Exception as error:
                self._sinks.remove(sink)
                self._on_error(sink, error)
