"""Metrics to wherever a function takes them: the loggers of a framework, MLflow, a database."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.sinks.base import Sink
from overlap_callbacks.sinks.metric_keys import fit

# Windows that wait at most for a flush; older ones are dropped: the record has them.
_MOST_WAITING = 100

Write = Callable[[dict[str, float], int], object]


class FunctionSink(Sink):
    """Calls ``write(metrics, step)`` with each window's metrics and its first step.

    ``FunctionSink(lambda metrics, step: mlflow.log_metrics(metrics, step=step))`` is all that MLflow needs.

    Args:
        write: takes the metrics, under keys of letters, digits, underscores and a slash after the section, and a step.
        deferred: call it from ``flush()`` and ``close()`` alone. For what must not be used from another thread: call
            ``flush()`` on the training thread, between steps.

    Raises:
        TypeError: ``write`` cannot be called.
    """

    def __init__(self, write: Write, *, deferred: bool = False) -> None:
        if not callable(write):
            raise TypeError(
                f"write must be a function of the metrics and the step, got {write!r} (a {type(write).__name__})"
            )
        self._write = write
        self._deferred = deferred
        self._waiting: deque[tuple[dict[str, float], int]] = deque(maxlen=_MOST_WAITING)

    def log(self, report: OverlapReport) -> None:
        self._waiting.append((fit(report.metrics()), report.first_step))
        if not self._deferred:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        while self._waiting:
            self._write(*self._waiting.popleft())

    def close(self) -> None:
        self.flush()
