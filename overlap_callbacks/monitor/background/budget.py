"""The budget of windows: rank 0 skips windows where earlier ones cost more than ``max_overhead`` allows."""

from __future__ import annotations

import math
import threading

from overlap_callbacks.analysis.results.report import OverlapReport


class WindowBudget:
    """Says which windows to skip because of their cost, and keeps the time of a step.

    Only rank 0 makes reports, so on other ranks the budget stays empty. Three threads use it: the reporting thread
    calls ``record``, the order check's thread ``reason_to_skip``, and the training thread reads ``step_s``.

    Args:
        max_overhead: maximum fraction of training time that measuring may cost; None for no limit.
    """

    def __init__(self, max_overhead: float | None) -> None:
        self._max_overhead = max_overhead
        self._lock = threading.Lock()
        self._next_window = 0
        self._reason = ""
        self._step_s = 0.0

    def record(self, report: OverlapReport) -> None:
        """Take note of what a window cost, and of how long an overlapped step took in it."""
        cost = report.measurement_overhead
        with self._lock:
            if report.e2e_overlapped_ms is not None:
                self._step_s = report.e2e_overlapped_ms.value / 1e3
            if self._max_overhead is None or cost is None or cost <= self._max_overhead:
                return
            intervals = math.ceil(cost / self._max_overhead)
            self._next_window = report.window + intervals
            self._reason = (
                f"a window costs {cost:.2%} of training time and max_overhead allows {self._max_overhead:.2%}, "
                f"so one window in {intervals} is measured"
            )

    def reason_to_skip(self, window: int | None) -> str | None:
        """Why a window is left out because of its cost, or None if it is not.

        Args:
            window: its number; None for a mode pinned by hand, which has no budget.
        """
        with self._lock:
            return None if window is None or window >= self._next_window else self._reason

    @property
    def step_s(self) -> float:
        """Time of an overlapped step as measured in the last window; 0 before the first report."""
        with self._lock:
            return self._step_s
