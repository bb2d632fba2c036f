"""The threads and instruments of one monitor in one job: opened for the first window, closed once."""

from __future__ import annotations

import datetime
import itertools
import platform
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from overlap_callbacks._log import logger
from overlap_callbacks._version import __version__
from overlap_callbacks.analysis.environment.privacy import numbered
from overlap_callbacks.analysis.results.catalogue import recorded_figures
from overlap_callbacks.analysis.results.env_overrides import TIME_ONLY
from overlap_callbacks.analysis.results.environment import RankEnvironment
from overlap_callbacks.analysis.results.request import WINDOW, Request
from overlap_callbacks.gate.arms import Keep
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.switches import SwitchState
from overlap_callbacks.instruments.clocks import StepClock
from overlap_callbacks.instruments.environment import EnvironmentReader, hidden_names
from overlap_callbacks.instruments.other_profilers import other_profilers
from overlap_callbacks.instruments.power.discovery import devices_to_read
from overlap_callbacks.instruments.power.meter import PowerMeter
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.causes import Causes
from overlap_callbacks.monitor.background.deciding import Deciding
from overlap_callbacks.monitor.background.desk import CHANGED, Desk, View
from overlap_callbacks.monitor.background.listener import Listener
from overlap_callbacks.monitor.background.order_check import OrderChecker
from overlap_callbacks.monitor.background.parts import PartsOfRanks
from overlap_callbacks.monitor.background.plans import Plans
from overlap_callbacks.monitor.background.quick import QuickLook
from overlap_callbacks.monitor.background.reporter import Reporter
from overlap_callbacks.monitor.background.roll_call import RollCall
from overlap_callbacks.monitor.background.store import Job, StoreChannel, StoreFailedError
from overlap_callbacks.monitor.background.watching import Watching
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.course import Course
from overlap_callbacks.monitor.faults import FaultGuard, Notices
from overlap_callbacks.monitor.keeping import Keeping, least_notice_s
from overlap_callbacks.monitor.race.ballot import Ballot
from overlap_callbacks.monitor.race.check import RaceChecks
from overlap_callbacks.monitor.step_ring import StepRing
from overlap_callbacks.monitor.window import Window
from overlap_callbacks.sinks import RunInfo

# Time that what is not reported yet has when a process group is made.
_ALONE_CLOSE_S = 1.0


class Session:
    """The threads and instruments of one monitor in one job. Created on the training thread, to measure its device."""

    def __init__(
        self,
        job: Job,
        config: MonitorConfig,
        faults: FaultGuard,
        ring: StepRing,
        write_page: Callable[[Path], Path] | None = None,
        view: Callable[[], View | None] = lambda: None,
        last_step: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        self.job = job
        world: Any = dist.group.WORLD
        group: Callable[[], Any] = (lambda: None) if world is None else weakref.ref(world)
        self.group = group  # the default process group when the session opened, held weakly
        self.pinned_checks = itertools.count(1)  # numbers the order checks of pinned modes, the same on every rank
        # All threads share one connection to the store.
        channel = self.channel = StoreChannel.of(job)
        # Rank 0's; shared by the order checker and the reporter.
        self.budget = WindowBudget(config.max_overhead)
        self.quick = (
            QuickLook(sinks=config.sinks) if config.quick and job.rank == 0 else None
        )  # on rank 0, shared likewise
        search = config.search
        self.deciding = (
            None
            if search is None or job.rank
            else Deciding(
                search,
                keeps=isinstance(config.decide, Keep),
                arms=config.arms or (),
                least_notice_s=least_notice_s(job.world_size),
                steps_apart=config.schedule.every_n_steps,
            )
        )  # on rank 0, shared likewise
        self.plans = Plans(channel, last_step, faults.wake)
        self.causes = Causes(self.budget, chooses=config.causal and not job.rank)
        # Read here, because other threads have their own current device.
        self.meter = _power_meter(config, faults.notices) if config.power else None
        device = StepClock().device
        hide = None if config.hosts else hidden_names()
        environment = EnvironmentReader(config.framework, hide)

        def report_error(error: Exception) -> None:
            if isinstance(error, StoreFailedError) and group() is not dist.group.WORLD:
                # The store is gone with its process group; the user is warned when the next window would open.
                logger.debug("the store of a process group that is gone", exc_info=error)
            else:
                faults.report(error)

        self.reporter = Reporter(
            channel,
            config,
            run=lambda: run_info(config, job, device, environment.read()),
            environment=environment.read,
            hide=hide,
            budget=self.budget,
            quick=self.quick,
            deciding=self.deciding,
            causes=self.causes,
            write_page=write_page,
            watching=Watching(
                PartsOfRanks(channel, ring, config.schedule),
                self.budget,
                ask=lambda reply: desk.respond(Request.of(WINDOW), reply, CHANGED),
            ),
            on_error=report_error,
            on_sink_error=faults.sink_failed,
        )
        self.order_checker = OrderChecker(
            channel,
            timeout_s=config.order_timeout_s,
            budget=self.budget,
            deciding=self.deciding,
            plans=self.plans,
            on_error=report_error,
        )
        desk = Desk(config, self.budget, self.plans, view, self.order_checker.submit, job.world_size)
        self.listener = Listener(desk, config, faults.notices) if not job.rank and config.ask != "off" else None
        try:
            self.order_checker.open()
            self.reporter.open()
        except Exception:  # the system cannot start another thread
            self.order_checker.close(1.0)
            self.reporter.close(1.0)
            raise
        if self.listener is not None:
            self.listener.start()
        other_profilers.watch()
        self.ballot = Ballot(channel, config.order_timeout_s)

    def close(self, timeout_s: float, *, settle: bool) -> None:
        """End all threads; see ``Reporter.close``."""
        other_profilers.unwatch()
        if self.listener is not None:
            self.listener.close(1.0)
        self.order_checker.close(1.0)
        self.ballot.close()
        self.reporter.close(timeout_s, settle=settle, others=[self.order_checker.exchange])
        if self.meter is not None:
            self.meter.close()


def _power_meter(config: MonitorConfig, notices: Notices) -> PowerMeter:
    def tell(why: str, serious: bool) -> None:
        # Called on the meter's own thread. Most CPUs restrict their counters to root, which is not worth a warning.
        say = notices.warn_once if serious else notices.info_once
        say("power", f"{why}; the rest is measured")

    return PowerMeter(devices_to_read(config.power_per_node), config.power_options, tell=tell)


def run_info(config: MonitorConfig, job: Job, device: str, environment: RankEnvironment | None = None) -> RunInfo:
    """The facts of a run that are known before its first window."""
    figures = recorded_figures()
    info = RunInfo(
        library_version=__version__,
        torch_version=str(torch.__version__),
        python_version=platform.python_version(),
        started_at=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        hostname=platform.node(),
        framework=config.framework,
        world_size=job.world_size,
        backend=job.backend,
        device=device,
        schedule={**config.schedule.as_dict(), **({"quick": True} if config.quick else {})},
        units={name: figure.unit for name, figure in figures.items()},
        meanings={name: figure.meaning for name, figure in figures.items()},
        environment=environment,
        workload=config.workload,
        configuration=dict(config.configuration),
        hosts_named=config.hosts,
    )
    if config.hosts:
        return info
    # Rank 0 writes this, so its host is the first one.
    mark = "" if environment is None else environment.hostname
    return numbered(msgspec.structs.replace(info, hostname="host 0"), {mark: 0})


class SessionSlot:
    """Shared state of a monitor's runners, and the session: opened when the first window needs it, closed once.

    It does not reference the monitor, and is closed when the monitor is collected.
    """

    def __init__(self, config: MonitorConfig, gate: Gate, faults: FaultGuard, ring: StepRing) -> None:
        self.config = config
        self.gate = gate
        self.faults = faults
        self.ring = ring
        self.notices = faults.notices
        self.switch = SwitchState()  # a framework's own switch, or an arm's, turned between steps
        self.window: Window | None = None  # the open window
        self.keeping = Keeping(self.switch, self.notices)
        self.race = RaceChecks(config.check_gradients, gate, self.switch, self.notices)
        self._session: Session | None = None
        self._is_measuring = False  # the session may run windows
        self._roll_call: RollCall | None = None
        self.write_page: Callable[[Path], Path] | None = None  # writes the page of a record, and returns its path
        self.view: Callable[[], View | None] = lambda: None  # of the training thread, for others
        self.last_step: Callable[[], int] = lambda: sys.maxsize  # the same of its latest step

    def call_roll(self, job: Job, *, timed_only: bool) -> RollCall:
        """Ask the ranks whether all of them can measure; rank 0 checks its sinks, which the other ranks do not use."""
        asked = f"{TIME_ONLY} is set" if timed_only else "quick is set" if self.config.quick else ""
        sinks = self.config.sinks if job.rank == 0 else ()

        def check() -> None:
            for sink in sinks:
                sink.check()

        self._roll_call = RollCall(job, check, self.faults.refused, asked)
        return self._roll_call

    @property
    def is_of_one_rank(self) -> bool:
        """Whether there is nothing to measure but the parts of steps."""
        return self._session is not None and self._session.job.world_size == 1

    def acquire(self) -> Session | None:
        """The session, with the gate registered; opened on first use. None if there is no job to measure.

        Raises RuntimeError in strict mode if another monitor of this process is measuring.
        """
        self._end_alone()
        if self._session is not None and self._session.group() is not dist.group.WORLD:
            self.faults.switch_off(
                "group", "the process group was replaced, and measuring is switched off: make a new monitor [OC108]"
            )
            return None
        if not self._is_measuring:
            session = self._open()
            if session is None:
                return None
            self._session, self._is_measuring = session, True
        self.gate.register()
        return self._session

    def acquire_for_parts(self, *, opens: bool) -> Session | None:
        """The session without the gate, for parts of steps: of one rank too, and without a process group.

        None, without a word, if there is none.
        """
        self._end_alone()
        job, session = Job.current() or Job.alone(), self._session
        if job is None or (session is None and (self.gate.taken or not opens)):
            return None
        if session is None:
            session = self._session = self._new(job)
        return session if session.job == job and session.group() is dist.group.WORLD else None

    def _end_alone(self) -> None:
        """If a process group was made meanwhile, its ranks begin with another session."""
        if self._session is not None and not self._session.job.backend and Job.current() is not None:
            session, self._session = self._session, None
            session.close(_ALONE_CLOSE_S, settle=True)

    def _open(self) -> Session | None:
        job = Job.current() or Job.alone()
        if job is None:
            self.notices.warn_once(
                "job", "torch.distributed has no process group: there is no communication to measure yet [OC106]"
            )
            return None
        if job.world_size == 1:
            has = "one rank" if dist.is_initialized() else "no process group"
            self.notices.warn_once(
                "alone",
                f"the job has {has}: nothing to overlap, so only the parts of its steps are timed [OC107]",
            )
            return None
        if self.gate.taken:
            why = "another OverlapMonitor of this process is measuring, and only one can: close() it first"
            if self.config.strict:
                raise RuntimeError(why)
            self.faults.switch_off("second", f"{why}; this one is switched off, training goes on [OC109]")
            return None
        return self._session or self._new(job)

    def _new(self, job: Job) -> Session:
        return Session(job, self.config, self.faults, self.ring, self.write_page, self.view, self.last_step)

    def next_plan_step(self, step: int) -> int:
        """The first step after ``step`` at which ``follow`` must be called."""
        return sys.maxsize if self._session is None else self._session.plans.next_step(step)

    def is_stopped_at(self, step: int, course: Course) -> bool:
        """Whether an open window ends by what was asked from outside, at the step that all ranks were told."""
        return course.is_stopped_by(None if self._session is None else self._session.plans.at(step))

    def follow(self, step: int, course: Course) -> None:
        """Follow what was asked from outside, from the step on that all ranks were told; no window is open."""
        session = self._session
        plan = None if session is None else session.plans.at(step)
        if session is None or plan is None or not plan.decided:
            return
        session.reporter.schedule = course.follow(plan)
        session.plans.followed(plan)
        if not course.is_quick:
            session.reporter.submit_answer()  # of a quick look that this ends
        elif not session.job.rank:
            session.quick = session.reporter.quick = QuickLook()

    def close(self, timeout_s: float, restore: bool = True, settle: bool = False) -> None:
        """Close the session and the gate, and stop the instruments of an open window.

        Pending reports have ``timeout_s``; ``settle`` as in ``Reporter.close``. ``restore``: switch a framework's
        overlap back on; False if that must wait for the step's end.
        """
        if self._roll_call is not None:
            self._roll_call.leave()
        session, self._session = self._session, None
        window, self.window = self.window, None
        if window is not None:
            # The interpreter exits, or the monitor was collected, within the window. torch crashes if its profiler
            # still runs when the interpreter has exited.
            window.discard()
        self.gate.close()
        self.keeping.close()
        if restore:
            self.switch.go_back()
        if session is not None:
            session.close(timeout_s, settle=settle)
