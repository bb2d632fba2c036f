"""The threads and instruments of one monitor in one job: opened for the first window, closed once."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from overlap_callbacks._log import logger
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.switch import SwitchState
from overlap_callbacks.instruments.clocks import StepClock
from overlap_callbacks.instruments.environment import EnvironmentReader, hidden_names
from overlap_callbacks.instruments.other_profilers import other_profilers
from overlap_callbacks.instruments.power.discovery import devices_to_read
from overlap_callbacks.instruments.power.meter import PowerMeter
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.order_check import OrderChecker
from overlap_callbacks.monitor.background.reporter import Reporter
from overlap_callbacks.monitor.background.store import Job, StoreChannel, StoreFailedError, next_prefix
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.faults import FaultGuard
from overlap_callbacks.monitor.notices import Notices
from overlap_callbacks.monitor.race.ballot import Ballot
from overlap_callbacks.monitor.race.in_windows import RaceChecks
from overlap_callbacks.monitor.run_info import run_info
from overlap_callbacks.monitor.step_runner import restore_overlap
from overlap_callbacks.monitor.window import Window


@dataclass(frozen=True, kw_only=True)
class Session:
    """The threads and instruments of one monitor in one job.

    Attributes:
        job: the job of this rank.
        order_checker: decides whether sequences may be serialised.
        reporter: makes reports of closed windows.
        budget: what windows have cost so far, on rank 0; shared by the two above.
        meter: of power; None if power is not measured.
        group: the default process group at the time, held weakly.
        ballot: in which all ranks decide whether to repeat a step.
        pinned_checks: numbers the order checks of modes pinned by hand, alike on every rank.
    """

    job: Job
    order_checker: OrderChecker
    reporter: Reporter
    budget: WindowBudget
    meter: PowerMeter | None
    group: Callable[[], dist.ProcessGroup | None]
    ballot: Ballot
    pinned_checks: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def open(cls, job: Job, config: MonitorConfig, notices: Notices, faults: FaultGuard) -> Session:
        """Start the threads and instruments. Called on the training thread, whose current device is measured."""
        # One connection to the store, which the two threads share.
        channel = StoreChannel(job, next_prefix())
        budget = WindowBudget(config.max_overhead)
        # These three are read here because other threads have a current device of their own.
        meter = _power_meter(config, notices) if config.power else None
        device = StepClock().device
        hide = None if config.hosts else hidden_names()
        environment = EnvironmentReader(config.framework, hide)
        group: Any = weakref.ref(dist.group.WORLD)

        def report_error(error: Exception) -> None:
            if isinstance(error, StoreFailedError) and group() is not dist.group.WORLD:
                # The store went with its process group. That is said when the next window would open.
                logger.debug("the store of a process group that is gone", exc_info=error)
            else:
                faults.report(error)

        reporter = Reporter(
            channel,
            schedule=config.schedule,
            sinks=config.sinks,
            run=lambda: run_info(
                job,
                config.schedule,
                config.framework,
                device,
                environment.read(),
                hosts=config.hosts,
                workload=config.workload,
                configuration=config.configuration,
            ),
            environment=environment.read,
            hide=hide,
            workload=config.workload,
            timeout_s=config.report_timeout_s,
            budget=budget,
            on_error=report_error,
            on_sink_error=faults.sink_failed,
        )
        checker = OrderChecker(channel, timeout_s=config.order_timeout_s, budget=budget, on_error=report_error)
        try:
            checker.open()
            reporter.open()
        except Exception:  # the system has no more threads to give
            checker.close(1.0)
            reporter.close(1.0)
            raise
        other_profilers.watch()
        ballot = Ballot(channel, config.order_timeout_s)
        return cls(
            job=job, order_checker=checker, reporter=reporter, budget=budget, meter=meter, group=group, ballot=ballot
        )

    def close(self, timeout_s: float, *, settle: bool) -> None:
        """End all threads; see ``Reporter.close``."""
        other_profilers.unwatch()
        self.order_checker.close(1.0)
        self.ballot.close()
        self.reporter.close(timeout_s, settle=settle, others=[self.order_checker.exchange])
        if self.meter is not None:
            self.meter.close()


def _power_meter(config: MonitorConfig, notices: Notices) -> PowerMeter:
    def tell(why: str, serious: bool) -> None:
        # Called on a thread of the meter's own. Most CPUs show their counters to root only: that is no trouble.
        say = notices.warn_once if serious else notices.info_once
        say("power", f"{why}; the rest is measured")

    options = config.power_options
    return PowerMeter(devices_to_read(options.per_node), options, tell=tell)


class SessionSlot:
    """Holds a monitor's session: opens it when the first window needs it, and closes it once.

    It knows nothing of the monitor, so that it can outlive it: it is closed when the monitor is collected.

    Args:
        config: the options.
        gate: of the monitor.
        switch: a framework's own switch, if an adapter has one.
        notices: says why there is nothing to measure.
        faults: gets the errors of the session's threads.

    Attributes:
        window: the open window of the session; None if none is open.
        race: checks gradients after windows.
    """

    def __init__(
        self, config: MonitorConfig, gate: Gate, switch: SwitchState, notices: Notices, faults: FaultGuard
    ) -> None:
        self._config = config
        self._gate = gate
        self._switch = switch
        self._notices = notices
        self._faults = faults
        self._session: Session | None = None
        self.window: Window | None = None
        self.race = RaceChecks(config.check_gradients, gate, switch, notices)

    def acquire(self) -> Session | None:
        """The session, with the gate registered; opened on first use.

        Returns:
            None if there is no job to measure. A message says why, and measuring may be switched off for good.

        Raises:
            RuntimeError: in strict mode, another monitor of this process is measuring.
        """
        if self._session is None:
            self._session = self._open()
        elif self._session.group() is not dist.group.WORLD:
            self._faults.switch_off(
                "group", "the process group was replaced, and measuring is switched off: make a new monitor"
            )
            return None
        if self._session is not None:
            self._gate.register()
        return self._session

    def _open(self) -> Session | None:
        job = Job.current()
        if job is None:
            self._notices.warn_once(
                "job", "torch.distributed has no process group: there is no communication to measure yet"
            )
            return None
        if job.world_size == 1:
            self._faults.switch_off(
                "alone", "the job has one rank: there is nothing to overlap, and nothing is measured"
            )
            return None
        if self._gate.taken:
            why = "another OverlapMonitor of this process is measuring, and only one can: close() it first"
            if self._config.strict:
                raise RuntimeError(why)
            self._faults.switch_off("second", f"{why}; this one is switched off, training goes on")
            return None
        return Session.open(job, self._config, self._notices, self._faults)

    def close(self, timeout_s: float, restore: bool = True, settle: bool = False) -> None:
        """Close the session and the gate, and stop the instruments of a window that is still open.

        Args:
            timeout_s: maximum time for the reports that are on their way.
            restore: switch a framework's overlap on again; False if that must wait for the step's end.
            settle: give up earlier what does not come any more, see ``Reporter.close``.
        """
        session, self._session = self._session, None
        window, self.window = self.window, None
        if window is not None:
            # The interpreter ends, or the monitor was dropped, within the window. torch crashes if its profiler still
            # runs when the interpreter has ended.
            window.discard()
        self._gate.close()
        if restore:
            restore_overlap(self._switch)
        if session is not None:
            session.close(timeout_s, settle=settle)
