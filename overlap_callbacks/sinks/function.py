"""Metrics to a user's function: loggers of a framework, a database."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from overlap_callbacks import _validation
from overlap_callbacks.analysis.results.report import WindowReport
from overlap_callbacks.sinks.base import DETAILS, Sink, chosen, fit

# Maximum number of windows waiting for a flush; older ones are dropped: the record has them.
_MAX_WAITING = 100

Write = Callable[[dict[str, float], int], object]


class FunctionSink(Sink):
    """Calls ``write(metrics, step)`` with each window's metrics and its first step.

    Args:
        write: takes the metrics, under keys of letters, digits, underscores and a slash after the section, and a step.
        deferred: call it only from ``flush()`` and ``close()``. For functions tied to the training thread: call
            ``flush()`` on the training thread, between steps. At most 100 windows wait; older ones are dropped.
        flush_on_close: whether ``close()`` writes what waits. If False, call ``flush()`` once more after the monitor is
            closed.
        exact_keys: give ``write`` the unchanged keys of ``OverlapReport.metrics()``: a group's or operator's name
            may contain any character, and a value may be infinite or NaN.
        detail: ``"all"`` metrics, or the ``"short"`` list that W&B gets by default.

    Raises:
        TypeError: ``write`` is not callable.
        ValueError: ``detail`` is neither ``"short"`` nor ``"all"``.
    """

    def __init__(
        self,
        write: Write,
        *,
        deferred: bool = False,
        flush_on_close: bool = True,
        exact_keys: bool = False,
        detail: str = "all",
    ) -> None:
        if not callable(write):
            raise TypeError(
                f"write must be a function of the metrics and the step, got {write!r} (a {type(write).__name__})"
            )
        self._write = write
        self._deferred = deferred
        self._flush_on_close = flush_on_close
        self._exact_keys = exact_keys
        self.detail = _validation.one_of("detail", detail, allowed=DETAILS)
        self._stopped = False
        # Safe between two threads: one appends, the other pops from the left.
        self._waiting: deque[tuple[dict[str, float], int]] = deque(maxlen=_MAX_WAITING)

    def log(self, report: WindowReport) -> None:
        if self._stopped:
            return
        values = chosen(report.values(), self.detail)
        by_key = {value.key: value for value in values} if self._exact_keys else fit(values)
        self._waiting.append(({key: value.number for key, value in by_key.items()}, report.first_step))
        if not self._deferred:
            self.flush()

    log_arm = log

    def flush(self) -> None:
        """Write the waiting windows."""
        while self._waiting:
            self._write(*self._waiting.popleft())

    def stop(self) -> None:
        """Drop the waiting windows, and write nothing from now on: for callers whose ``flush()`` failed."""
        self._stopped = True
        self._waiting.clear()

    def close(self) -> None:
        if self._flush_on_close:
            self.flush()
