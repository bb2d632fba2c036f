"""Measures windows, gathers the figures of all ranks, and gives the reports to the sinks, on its own thread.

Every rank makes a ``JobPart`` of what it measured. Each level of the ranks' tree merges the parts below it, so rank 0's
work does not grow with the job.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from overlap_callbacks._log import logger
from overlap_callbacks._threads import Worker
from overlap_callbacks.analysis.arms import arm_report_of
from overlap_callbacks.analysis.decision_words import decision_in_words
from overlap_callbacks.analysis.environment.privacy import hidden_window
from overlap_callbacks.analysis.formatting import name_ranks
from overlap_callbacks.analysis.headline import arm_summary, summary
from overlap_callbacks.analysis.job.part import JobPart, decode, encode, merge, part_of
from overlap_callbacks.analysis.job.report import report_of
from overlap_callbacks.analysis.measuring_cost import LostTime
from overlap_callbacks.analysis.race import race_sentence
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.environment import JobEnvironment, RankEnvironment
from overlap_callbacks.analysis.results.messages import JobMessages
from overlap_callbacks.analysis.results.race import RaceCheck, RaceVerdict
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import RankWindow
from overlap_callbacks.analysis.run_summary import drop_incomparable_figures
from overlap_callbacks.analysis.settled import SettledFit
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.causes import Causes, gather_parts
from overlap_callbacks.monitor.background.deciding import Deciding
from overlap_callbacks.monitor.background.measurement import measure, measure_block, stretches_of, trial_extra_s
from overlap_callbacks.monitor.background.quick import QuickLook, quick_schedule
from overlap_callbacks.monitor.background.store import StoreChannel
from overlap_callbacks.monitor.background.tree import Exchange, Tree
from overlap_callbacks.monitor.background.watching import Watching
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.faults import Notices
from overlap_callbacks.monitor.window import MeasuredStep, MeasuredWindow
from overlap_callbacks.monitor.window_cost import WindowCost
from overlap_callbacks.sinks import RunInfo, Sink
from overlap_callbacks.sinks.fan_out import FanOut

# At the end of the job, while ranks are missing: maximum time without a report.
SETTLE_S = 5.0
# Added per further level of the tree, whose merged parts arrive later.
_LEVEL_S = 1.0
# Time for the sinks if the reporting thread still waits for the store.
_LAST_CLOSE_S = 2.0
# How often the closing thread checks whether the store still answers.
_LOOK_S = 0.25
# Maximum time that a report waits for the steps after its window to be back to normal: at most this fraction of
# ``report_timeout_s``, because the other ranks wait for it, and less than ``SETTLE_S``, after which a rank that has
# closed deletes its unread report.
_AFTERMATH_S = 4.0
_AFTERMATH_PART = 1 / 3
_AFTERMATH_LOOK_S = 0.05


def gather_from_children(
    exchange: Exchange, own: JobPart, key: str, timeout_s: float, stop: Callable[[float], bool]
) -> JobPart:
    """Merge this rank's part (``own``) with those from below that arrive in time. ``exchange`` learns who is missing.

    Rank 0 waits for ``timeout_s``, other ranks as long as their place in the tree allows. See ``Exchange.gather``.
    """
    tree = exchange.tree
    parts = [own]
    for child, message in exchange.gather(key, tree.patience_s(timeout_s), stop).items():
        # Ignore undecodable messages, and parts that claim ranks outside the sender's subtree.
        with contextlib.suppress(msgspec.DecodeError):
            part, members = decode(message), Tree(child, tree.world_size, tree.fan_in).members
            if part.heard[0][0] in members and part.heard[-1][1] in members:
                parts.append(part)
    part = merge(parts)
    exchange.unheard = tree.members_without(part.heard)
    return part


class _InRecord:
    """What the last window wrote to the record, and need not be written again while it is unchanged."""

    def __init__(self) -> None:
        self._environment: JobEnvironment | None = None
        self._messages: JobMessages | None = None

    def without(self, report: OverlapReport) -> OverlapReport:
        """The report without what is unchanged since the previous window."""
        if report.environment == self._environment:
            report = msgspec.structs.replace(report, environment=None)
        else:
            self._environment = report.environment
        if report.messages == self._messages:
            return msgspec.structs.replace(report, messages=None)
        self._messages = report.messages
        return report


class Reporter:
    """Turns windows into reports and, on rank 0, gives them to the sinks. Tells the budget what each window cost.

    On the reporting thread, ``run`` returns the run info that sinks get first, ``environment`` this rank's environment,
    and ``on_error`` gets errors outside sinks. ``on_sink_error`` gets a sink that failed and is no longer used, and the
    error. ``hide`` replaces host names in texts; None if they may be shown. On rank 0, ``quick`` gets the reports of
    windows back to back, ``deciding`` those of a job that decides, ``watching`` stretches; ``write_page`` a page.
    """

    def __init__(
        self,
        channel: StoreChannel,
        config: MonitorConfig,
        *,
        run: Callable[[], RunInfo],
        environment: Callable[[], RankEnvironment],
        hide: Callable[[str], str] | None = None,
        budget: WindowBudget,
        quick: QuickLook | None = None,
        deciding: Deciding | None = None,
        causes: Causes | None = None,
        write_page: Callable[[Path], Path] | None = None,
        watching: Watching | None = None,
        on_error: Callable[[Exception], None],
        on_sink_error: Callable[[Sink, Exception], None],
    ) -> None:
        self._job = channel.job
        self._channel = channel
        self._exchange = Exchange(channel, Tree.of(channel.job), "report", answered=False)
        self.schedule = config.schedule  # of the windows to come
        self._sinks = FanOut(config.sinks if self._job.rank == 0 else (), on_sink_error)
        self._run, self._environment, self._hide = run, environment, hide
        self._workload = config.workload
        self._in_record = _InRecord()
        self._timeout_s = config.report_timeout_s
        self._budget = budget
        self.quick = quick
        self._deciding = deciding
        self._causes = causes or Causes(budget, chooses=False)
        self._write_page = write_page
        self._watching = watching
        self._exchanges = [self._exchange] if watching is None else [self._exchange, watching.exchange]
        self._worker = Worker("overlap-callbacks-report", on_error)
        self._stop, self._closing = threading.Event(), threading.Event()
        self._settled = SettledFit()
        self._last_cost: WindowCost | None = None  # of the window reported last
        self._settle_from = math.inf  # host time from which missing ranks are soon given up
        self._own_s = 0.0  # time this rank took to measure the last window
        self._abandoned = False  # close() gave up waiting for the thread
        self._opened = self._closed = False
        self._close_by = 0.0
        self._parent_is_slow = False  # no slot was free for the last report

    def open(self) -> None:
        """Connect to the store, and open the sinks so that a record exists before the first window ends.

        Connecting blocks if the server has died: done later, it could outlive the job.
        """
        self._worker.submit(self._channel.open)
        for exchange in self._exchanges:
            self._worker.submit(exchange.open)
        self._worker.submit(self._open_sinks)

    def submit_block(self, window: MeasuredWindow, steps: Sequence[MeasuredStep]) -> None:
        """Write the counted steps of a timed block to the record at once, so that a crash does not lose them."""
        if self._sinks and steps:
            self._worker.submit(lambda: self._log_block(window, steps))

    def submit_stretch(self, number: int, key: str) -> None:
        """Add up the parts of a stretch of steps over the ranks, under ``key``; -1: look at the job's first steps."""
        if self._watching is not None:
            self._watching.submit(self._worker, number, key, self._stop.is_set, self._open_sinks)

    def submit_left_out(self, window: int, first_step: int, reason: str) -> None:
        """Write to the record why a window has no report."""
        if self._sinks:
            self._worker.submit(lambda: self._log_left_out(window, first_step, reason))

    def submit_window(self, window: MeasuredWindow, key: str, tokens_per_step: int | None) -> None:
        """Measure a window, gather it under ``key`` and report it. Rank 0 alone measures a trial."""
        if not window.quick:
            self._budget.await_cost(window.number, window.opened_ns, window.wall_ms)
        elif self.quick is not None:
            self.quick.submitted()
        if not self._worker.submit(lambda: self._report(window, key, tokens_per_step)):
            self._done(window)
            logger.warning("overlap-callbacks: window %d is lost: too many reports are waiting [OC601]", window.number)

    def _done(self, window: MeasuredWindow) -> None:
        """There is a report of a window that was submitted, or there will be none."""
        cost = window.cost
        self._budget.give_up(window.number, lambda: 0.0 if cost is None else cost.left_out_ns / 1e6)
        if window.quick and self.quick is not None:
            self.quick.done()

    def submit_answer(self) -> None:
        """Give the quick answer, once the windows before it are reported."""
        if self.quick is not None:
            self._worker.submit(self._give_answer)

    def close(self, timeout_s: float, *, settle: bool = False, others: Sequence[Exchange] = ()) -> None:
        """Finish the pending reports, then close the sinks. Takes at most ``timeout_s``.

        ``settle``: all ranks end at about the same time, so give up soon on missing ranks and on a store that does not
        answer. ``others``: exchanges of threads that have ended, whose messages are deleted too.
        """
        self._close_by = time.monotonic() + timeout_s
        self._closing.set()
        if not self._worker.started:
            self._close_sinks()  # without a new thread, which an exiting interpreter would refuse
            return
        if settle:
            self._settle_from = time.monotonic()
        self.submit_answer()  # if it was not given yet
        self._worker.submit(self._close_sinks)
        self._worker.submit(lambda: self._leave([*self._exchanges, *others]))
        if not self._await_end(settle):
            self._stop.set()  # ranks that have not reported by now are missing; the others still count
            if not self._worker.close(1.0) and self._channel.call.under_way:
                self._abandoned = True
                logger.warning(
                    "overlap-callbacks: what was not reported yet is lost: the job's store does not answer [OC602]"
                )
                self._close_by = time.monotonic() + _LAST_CLOSE_S
                self._close_sinks()

    def _await_end(self, settle: bool) -> bool:
        """Wait for the thread to end, until the closing deadline; False if it has not."""
        while not self._worker.close(max(0.0, min(_LOOK_S, self._close_by - time.monotonic()))):
            if time.monotonic() >= self._close_by or (settle and self._channel.call.is_stuck):
                return False
        return True

    # -- on the reporting thread

    def _report(self, window: MeasuredWindow, key: str, tokens_per_step: int | None) -> None:
        cost = window.cost or WindowCost(window.opened_ns, None)
        try:
            if window.tried:
                self._report_trial(window, cost)
            elif window.delayed is not None:
                gathered = functools.partial(gather_parts, self._exchange, key, self._timeout_s, self._is_over)
                send_up = functools.partial(self._send_up, key=key)
                for found in self._causes.report(window, cost, self._await_normal_steps, gathered, send_up):
                    self._sinks.log_causal(found)
            else:
                self._report_with_cost(window, cost, key, tokens_per_step)
        finally:
            self._done(window)
            cost.work_done(finished=True)
            self._last_cost = cost

    def _report_trial(self, window: MeasuredWindow, cost: WindowCost) -> None:
        self._await_normal_steps(cost)
        lost, extra_s = cost.lost((), 0.0), trial_extra_s(window)
        cost_s = max(0.0, extra_s or 0.0, 0.0 if lost is None else lost.ms / 1e3)
        self._budget.charge(window.number, cost.opened_ns, cost_s, lambda: cost.cost_after_report_ms)
        if self._deciding is not None:
            self._deciding.record_trial(window.tried, extra_s, cost_s)
            self._tell_decision()

    def _report_with_cost(
        self, window: MeasuredWindow, cost: WindowCost, key: str, tokens_per_step: int | None
    ) -> None:
        began_s = time.monotonic()
        own = measure(window, self._job.rank, self._job.backend)
        self._own_s = time.monotonic() - began_s
        self._await_normal_steps(cost)
        own = _with_cost(own, cost, self._last_cost, window.steps)
        if self._hide is not None:
            own = hidden_window(own, self._hide)
        # Sent with every window: a rank's message may miss one, and this is small.
        own = msgspec.structs.replace(own, environment=self._environment())
        part = gather_from_children(self._exchange, part_of(own), key, self._timeout_s, self._is_over)
        if self._job.rank != 0:
            self._send_up(encode(part), key)
            return
        cost.work_began()
        arm, silent = window.compared_with, self._exchange.unheard
        report = report_of(
            part,
            world_size=self._job.world_size,
            every_n_steps=(quick_schedule(self.schedule) if window.quick else self.schedule).every_n_steps,
            control=self.schedule.control,
            quick=window.quick,
            other_arm=arm is not None and not arm.sequential,
            problems=[f"no report came from {name_ranks(silent)} [OC330]"] if silent else [],
            tokens_per_step=tokens_per_step,
            work=self._workload,
        )
        if self._abandoned:
            return
        charged_s: float | None = 0.0
        if window.quick:
            self._budget.note(report)
        else:
            charged_s = self._budget.record(report, cost.opened_ns, lambda: cost.cost_after_report_ms)
        if arm is not None:
            of_arm = arm_report_of(report, arm, part.figures, None if silent else part.same_order)
            logger.info("%s", arm_summary(of_arm))
            self._open_sinks()
            self._sinks.log_arm(of_arm)
            self._decide(of_arm, charged_s)
            return
        report = self._causes.note(report)
        report = msgspec.structs.replace(self._in_record.without(report), settled=self._settled.after(report, own))
        if not report.complete:
            report = drop_incomparable_figures(report)
        if window.quick and self.quick is not None:
            self.quick.record(report)
        logger.info("%s", summary(report))
        _log_race_check(report.race)
        self._open_sinks()
        self._sinks.log(report)
        if self._watching is not None:
            self._watching.window(report, self._open_sinks)
        self._decide(report, charged_s)

    def _decide(self, report: ArmReport | OverlapReport, charged_s: float | None) -> None:
        if self._deciding is not None and not report.quick:
            self._deciding.record(report, charged_s)
            self._tell_decision()

    def _tell_decision(self, *, job_ends: bool = False) -> None:
        """Say what was decided, if it is news, and keep it."""
        decision, is_news = (None, False) if self._deciding is None else self._deciding.news(job_ends=job_ends)
        if decision is not None and is_news:
            Notices.announce(f"decision on the arms: {decision_in_words(decision)} [OC142]")
        if decision is not None:
            self._open_sinks().decision(decision)

    def _await_normal_steps(self, cost: WindowCost) -> None:
        """Wait a bounded time until the steps after a window are back to normal."""
        cost.work_done()
        wait_until_s = time.monotonic() + min(_AFTERMATH_S, _AFTERMATH_PART * self._timeout_s)
        while not (self._closing.is_set() or cost.is_stalled or time.monotonic() >= wait_until_s):
            if cost.await_settled(_AFTERMATH_LOOK_S):
                break

    def _send_up(self, message: bytes, key: str) -> None:
        if self._job.rank == 0:
            return
        patience_s = 0.0 if self._parent_is_slow else self._timeout_s
        self._parent_is_slow = not self._exchange.send_up(key, message, patience_s, self._stop.is_set)

    def _leave(self, exchanges: Sequence[Exchange]) -> None:
        """Wait a bounded time until this rank's messages were read, then delete what is left in the store."""
        patience_s = SETTLE_S + self._own_s + _LEVEL_S * max(0, self._exchange.tree.num_levels - 1)
        deadline_s = min(time.monotonic() + patience_s, self._close_by)
        all_end = self._settle_from < math.inf  # otherwise this rank may be leaving alone
        _leave_exchanges(exchanges, deadline_s, all_end, self._stop.is_set)

    def _is_over(self, last_s: float) -> bool:
        """Whether to stop waiting for reports of a window; the last one came at ``last_s`` (``time.monotonic``)."""
        # The others take about as long as this rank to measure the window.
        patience_s = SETTLE_S + self._own_s + _LEVEL_S * max(0, self._exchange.tree.level - 1)
        return self._stop.is_set() or time.monotonic() > max(last_s, self._settle_from) + patience_s

    def _log_left_out(self, window: int, first_step: int, reason: str) -> None:
        self._open_sinks()
        self._sinks.left_out(window, first_step, reason if self._hide is None else self._hide(reason))

    def _log_block(self, window: MeasuredWindow, steps: Sequence[MeasuredStep]) -> None:
        measured = measure_block(steps)
        if measured is None:
            return
        self._open_sinks()
        if window.compared_with is None:
            self._sinks.block(window.number, window.first_step, measured)
        else:
            self._sinks.arm_block(window.number, window.first_step, window.compared_with, measured)

    def _give_answer(self) -> None:
        quick, self.quick = self.quick, None
        if quick is None:
            return
        message = quick.message(self._sinks.record, self._write_page)
        if quick.is_over and not quick.was_answered:
            self._open_sinks()
            self._sinks.answer(quick.answer())
        Notices.announce(message)

    def _open_sinks(self) -> FanOut:
        if not (self._opened or self._job.rank):
            self._opened = True
            run = self._run()
            self._sinks.open(run)
            self._causes.open(self._sinks.record, run)
            if self._deciding is not None:
                self._deciding.open(self._sinks.record, run)
        return self._sinks

    def _close_sinks(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.ExitStack() as stack:  # all are done, whatever fails
                stack.callback(lambda: self._sinks.close(self._close_by - time.monotonic()))
                if self._opened and self._watching is not None:
                    stack.callback(self._watching.close, self._sinks)
                self._tell_decision(job_ends=True)


def _leave_exchanges(exchanges: Sequence[Exchange], deadline_s: float, all_end: bool, stop: Callable[[], bool]) -> None:
    with contextlib.suppress(Exception):  # the store may be gone, and the messages with it
        stale = [each.stale_messages() for each in exchanges] if all_end else []
        taken = [each.await_taken(deadline_s - time.monotonic(), stop) for each in exchanges]
        for each in exchanges:
            each.leave(parent_is_gone=not all(taken) and all_end)
        for messages in stale:
            messages.delete_unread(deadline_s - time.monotonic(), stop, after_s=SETTLE_S)


def _with_cost(own: RankWindow, cost: WindowCost, last: WindowCost | None, steps: Sequence[MeasuredStep]) -> RankWindow:
    """Add the window's cost, and that of the previous one (``last``) after its report."""
    lost = cost.lost(stretches_of(steps), own.report_cpu_ms)
    late_ms = 0.0 if last is None else last.cost_after_report_ms
    return own if lost is None or lost.step_ms <= 0 else _with_lost(own, lost, late_ms)


def _with_lost(own: RankWindow, lost: LostTime, late_ms: float) -> RankWindow:
    return msgspec.structs.replace(
        own,
        lost_ms=lost.ms + late_ms,
        lost_low_ms=None if lost.low_ms is None else lost.low_ms + late_ms,
        lost_high_ms=None if lost.high_ms is None else lost.high_ms + late_ms,
        usual_step_ms=lost.step_ms,
    )


def _log_race_check(race: RaceCheck | None) -> None:
    """Log the result of a window's race check."""
    if race is not None:
        say = logger.info if race.verdict is RaceVerdict.EQUAL else logger.warning
        say("overlap-callbacks: %s", race_sentence(race))
