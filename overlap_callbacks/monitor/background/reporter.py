"""The two things that happen off the training thread: the order check, and the making of reports.

Each has a thread and a store client of its own, so that a sink that stalls cannot delay a check.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from overlap_callbacks._threads import Worker
from overlap_callbacks.analysis.aggregate import aggregate_windows, drop_incomparable_figures
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import RankWindow
from overlap_callbacks.analysis.verdict import summary
from overlap_callbacks.gate.deadlock import CollectiveSequence
from overlap_callbacks.monitor.background.store import Job, Ruling, StoreChannel, check_order
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.monitor.window import Window
from overlap_callbacks.sinks import RunInfo, Sink
from overlap_callbacks.sinks.fan_out import FanOut

logger = logging.getLogger("overlap_callbacks")

# Longest that a check is waited for after one that was late: its ranks may have recovered, but should not hold up
# training once more.
_SHORT_PATIENCE_S = 0.5

ErrorHandler = Callable[[Exception], None]


class _Check:
    """One order check under way."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.verdict: Ruling | None = None


class OrderChecker:
    """Runs order checks; the training thread starts one after a recorded step, and asks for its verdict steps later.

    Args:
        job: who we are.
        prefix: of our keys.
        timeout_s: longest time for the ranks to be heard.
        veto: asked on rank 0 before a window's check counts: a reason to leave the window out, or None.
        on_error: gets what goes wrong.
    """

    def __init__(
        self,
        job: Job,
        prefix: str,
        *,
        timeout_s: float,
        veto: Callable[[int | None], str | None],
        on_error: ErrorHandler,
    ) -> None:
        self._job = job
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._veto = veto
        self._worker = Worker("overlap-callbacks-order", on_error)
        self._channel: StoreChannel | None = None
        self._stop = threading.Event()
        self._check = _Check()
        self._last_key = ""
        self.patience_s = 3 * timeout_s

    def start(self, key: str, order: CollectiveSequence, window: int | None, steps_per_block: int = 0) -> None:
        """Begin the check ``key`` with this rank's sequence.

        Args:
            key: names the check, the same on every rank.
            order: this rank's sequence.
            window: the window that it is for; None for a mode forced by hand.
            steps_per_block: on rank 0, what it has decided on the window's length.
        """
        self._check = check = _Check()  # one that is late must not answer for the next
        self._worker.submit(lambda: self._run(check, key, order, window, steps_per_block))

    def verdict(self) -> Ruling:
        """The verdict of the check begun last; waits for it, for a bounded time.

        The training thread waits long in vain once: while somebody is not heard, later windows are left out rather
        than waited for.
        """
        check = self._check
        if check.done.wait(self.patience_s) and check.verdict is not None:
            verdict = check.verdict
        else:
            verdict = Ruling(False, f"the order check was not done within {self.patience_s:g} s", late=True)
        self.patience_s = min(_SHORT_PATIENCE_S, self._timeout_s) if verdict.late else 3 * self._timeout_s
        return verdict

    def close(self, timeout_s: float) -> None:
        self._stop.set()
        self._worker.close(timeout_s)
        self._channel = None

    def _run(
        self, check: _Check, key: str, order: CollectiveSequence, window: int | None, steps_per_block: int
    ) -> None:
        try:
            if self._channel is None:
                self._channel = StoreChannel(self._job, self._prefix)
            check.verdict = check_order(
                self._channel,
                key,
                order,
                timeout_s=self._timeout_s,
                veto=self._veto(window) if self._job.rank == 0 else None,
                stop=self._stop.is_set,
                steps_per_block=steps_per_block,
            )
            if self._job.rank == 0 and self._last_key:
                self._channel.delete(f"{self._last_key}/verdict")  # read by all by now: they came to this check
            self._last_key = key
        except Exception as error:
            check.verdict = Ruling(False, f"the ranks' store failed: {error}")
            raise
        finally:
            check.done.set()


class Reporter:
    """Turns closed windows into reports and hands them to the sinks.

    Args:
        job: who we are; rank 0 reports.
        prefix: of our keys.
        schedule: of the windows.
        sinks: used on rank 0 only.
        run: what the sinks are told first; made on the reporting thread.
        timeout_s: longest time for the ranks' reports to come in.
        max_overhead: largest fraction of training time that measuring may cost; None for no limit.
        on_error: gets what goes wrong outside sinks.
        on_sink_error: gets a sink that failed, and why; the sink is not used again.
    """

    def __init__(
        self,
        job: Job,
        prefix: str,
        *,
        schedule: Schedule,
        sinks: Sequence[Sink],
        run: Callable[[], RunInfo],
        timeout_s: float,
        max_overhead: float | None,
        on_error: ErrorHandler,
        on_sink_error: Callable[[Sink, Exception], None],
    ) -> None:
        self._job = job
        self._prefix = prefix
        self._schedule = schedule
        self._sinks = FanOut(sinks if job.rank == 0 else (), on_sink_error)
        self._close_by = 0.0
        self._run = run
        self._timeout_s = timeout_s
        self._max_overhead = max_overhead
        self._worker = Worker("overlap-callbacks-report", on_error)
        self._channel: StoreChannel | None = None
        self._stop = threading.Event()
        self._opened = False
        self._late_keys: list[str] = []
        self._next_window = 0
        self._why_skipped = ""
        self.step_s = 0.0  # of an overlapped step, as measured last; 0 before the first report
        self.tokens_per_step: int | None = None

    def open(self) -> None:
        """Have the sinks told of the run, so that there is a record before the first window is done."""
        if self._sinks:
            self._worker.submit(self._open_sinks)

    def block(self, window: Window, block: int, arm: Mode) -> None:
        """Have the record keep a timed block as soon as its times are known: a crash must not lose it."""
        if self._sinks:
            self._worker.submit(lambda: self._log_block(window, block, arm))

    def window(self, window: Window, key: str) -> None:
        """Have a closed window measured, gathered and reported, under a key that is the same on every rank."""
        if not self._worker.submit(lambda: self._report(window, key)):
            logger.warning("overlap-callbacks: window %d is lost: too many reports are waiting", window.number)

    def veto(self, window: int | None) -> str | None:
        """Rank 0: why a window is to be left out for its cost, or None."""
        if window is None or window >= self._next_window:
            return None
        return self._why_skipped

    def close(self, timeout_s: float) -> None:
        """Finish what waits, then close the sinks."""
        self._close_by = time.monotonic() + timeout_s
        if not self._worker.started:
            self._close_sinks()  # and start no thread, which an interpreter that is ending would refuse
            return
        self._worker.submit(self._close_sinks)
        if not self._worker.close(timeout_s):
            self._stop.set()  # what has not come in by now is missing; what has is still reported
            self._worker.close(1.0)
        self._channel = None

    # -- on the reporting thread

    def _report(self, window: Window, key: str) -> None:
        own = window.measure(self._job.rank, self._job.backend)
        if self._channel is None:
            self._channel = StoreChannel(self._job, self._prefix)
        if self._job.rank != 0:
            self._channel.post(f"{key}/report/{self._job.rank}", msgspec.json.encode(own))
            return
        gathered, problems = self._gather(key, own)
        result = aggregate_windows(
            gathered,
            world_size=self._job.world_size,
            every_n_steps=self._schedule.every_n_steps,
            control=self._schedule.control,
            problems=problems,
            tokens_per_step=self.tokens_per_step,
        )
        self._hold_to_budget(result)
        if not result.complete:
            result = drop_incomparable_figures(result, self._schedule.blocks)
        if result.e2e_overlapped_ms is not None:
            self.step_s = result.e2e_overlapped_ms.value / 1e3
        logger.info("%s", summary(result))
        self._open_sinks()
        self._sinks.log(result)

    def _gather(self, key: str, own: RankWindow) -> tuple[list[RankWindow], list[str]]:
        assert self._channel is not None
        self._channel.post(f"{key}/report/0", msgspec.json.encode(own))
        messages = self._channel.gather(f"{key}/report", self._timeout_s, self._stop.is_set)
        messages.pop(0, None)
        # What came too late for the windows before is of no use any more, and must not pile up in the store.
        self._channel.delete(*self._late_keys)
        missing = set(range(self._job.world_size)) - messages.keys() - {0}
        self._late_keys = [f"{key}/report/{rank}" for rank in missing]
        others = [msgspec.json.decode(message, type=RankWindow) for message in messages.values()]
        return [own, *others], []

    def _log_block(self, window: Window, block: int, arm: Mode) -> None:
        measured = window.measure_block(block, arm)
        if measured is not None:
            self._open_sinks()
            self._sinks.block(window.number, window.first_step, measured)

    def _open_sinks(self) -> None:
        if self._sinks and not self._opened:
            self._opened = True
            self._sinks.open(self._run())

    def _close_sinks(self) -> None:
        self._sinks.close(self._close_by - time.monotonic())

    def _hold_to_budget(self, result: OverlapReport) -> None:
        """Leave windows out where they cost more than ``max_overhead`` allows."""
        cost = result.measurement_overhead
        if self._max_overhead is None or cost is None or cost <= self._max_overhead:
            return
        intervals = math.ceil(cost / self._max_overhead)
        self._next_window = result.window + intervals
        self._why_skipped = (
            f"a window costs {cost:.2%} of training time and max_overhead allows {self._max_overhead:.2%}, "
            f"so one window in {intervals} is measured"
        )
