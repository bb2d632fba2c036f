"""Which windows open next: by the schedule, back to back, or none; as configured, or as asked from outside."""

from __future__ import annotations

import sys

from overlap_callbacks.analysis.results.request import QUICK, STOP
from overlap_callbacks.monitor.background.budget import SilenceBackoff, Skip
from overlap_callbacks.monitor.background.plans import WindowPlan
from overlap_callbacks.monitor.background.quick import quick_schedule
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.schedule import Plan, Schedule


class Course:
    """One rank's course: the same on every rank, but for those that heard no ruling. The training thread changes it.

    Attributes:
        own: the schedule as configured, or as asked; of the windows that are not back to back.
        schedule: the one in force.
        is_quick: whether windows follow one another back to back.
        is_stopped: whether no window opens, by request.
        holds: no window opens until it is known whether the ranks follow a plan.
        skip: windows that rank 0 has left out in advance.
        backoff: windows that are left out because a rank is silent.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self.own = config.schedule
        self.is_quick, self.is_stopped, self.holds = config.quick, False, False
        self.schedule: Schedule = quick_schedule(self.own) if config.quick else self.own
        self.skip = Skip("", 0)
        self.backoff = SilenceBackoff(config.max_overhead)

    @property
    def state(self) -> str:
        """As ``Status`` has it."""
        return "stopped" if self.is_stopped else QUICK if self.is_quick else "windows"

    def plan(self, step: int) -> Plan | None:
        """The plan of a step outside windows; None for an ordinary one."""
        return None if self.is_stopped or self.holds else self.schedule.plan(step)

    def next_window_step(self, step: int) -> int:
        """First step of the first window that starts at or after ``step``; ``sys.maxsize`` if none comes."""
        return sys.maxsize if self.is_stopped else self.schedule.next_window_step(step)

    def opens_at(self, step: int) -> int:
        """First step of the first window at or after ``step`` that is not left out in advance. From any thread."""
        schedule, first = self.schedule, self.schedule.next_window_step(step)
        while schedule.number_at(first) < max(self.skip.next_window, self.backoff.next_window):
            first += schedule.every_n_steps
        return first

    def start_over(self) -> None:
        """Skip no window: numbers have gone back, or all ranks have agreed on other windows."""
        self.backoff.rewind()
        self.skip = Skip("", 0)

    def end_quick(self) -> None:
        """Go on by the own schedule. Windows keep the numbers that those back to back would have: none comes twice."""
        self.is_quick = False
        self.schedule = self.own.numbered_by(self.schedule.every_n_steps)

    def is_stopped_by(self, plan: WindowPlan | None) -> bool:
        """Whether an open window ends by a plan that holds, or may hold."""
        self.holds = plan is not None and plan.decided is None
        return plan is not None and plan.does == STOP

    def follow(self, plan: WindowPlan) -> Schedule:
        """Go on by a plan that all ranks follow. Returns the own schedule."""
        self.start_over()
        self.is_quick, self.is_stopped = plan.does == QUICK, plan.does == STOP
        if not self.is_stopped:
            self.own = self.own.moved(plan.first_step, plan.every_n_steps, plan.first_number)
            self.schedule = quick_schedule(self.own) if self.is_quick else self.own
        return self.own
