"""Rank 0 answers what the job is asked from outside: by a file, torch's debug server, or a signal."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec

from overlap_callbacks.analysis.results.request import (
    EVERY,
    QUICK,
    RESUME,
    STATUS,
    STOP,
    WINDOW,
    JobAnswer,
    Request,
    Status,
)
from overlap_callbacks.analysis.status_words import status_in_words, time_in_words
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.plans import Plans, WindowPlan, lead_steps
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.faults import Notices
from overlap_callbacks.monitor.schedule import Schedule

# Extra training before a window that the budget has postponed: the time of a step varies.
_SPARE = 1.05

Reply = Callable[[JobAnswer], None]


class View(NamedTuple):
    """What the training thread is about, as other threads see it.

    Attributes:
        schedule: in force.
        own: of the windows that are not back to back.
        skip_before: windows with lower numbers are left out.
    """

    status: Status
    schedule: Schedule
    own: Schedule
    skip_before: int

    def opens_at(self, step: int) -> int:
        """First step of the first window that opens at or after a step."""
        first = self.schedule.next_window_step(step)
        while self.schedule.number_at(first) < self.skip_before:
            first += self.schedule.every_n_steps
        return first


class Desk:
    """Decides what becomes of a request, and answers. Any thread may call ``respond``.

    Args:
        view: returns where the job is; None once nobody trains.
        submit: runs a task on the order check's thread.
        world_size: ranks of the job.
    """

    def __init__(
        self,
        config: MonitorConfig,
        budget: WindowBudget,
        plans: Plans,
        view: Callable[[], View | None],
        submit: Callable[[Callable[[], object]], bool],
        world_size: int,
    ) -> None:
        self._config = config
        self._budget = budget
        self._plans = plans
        self._view = view
        self._submit = submit
        self._world_size = world_size
        self._lock = threading.Lock()
        self._is_deciding = False  # a plan was proposed, and is not decided yet

    def respond(self, request: Request, reply: Reply) -> None:
        """Answer by ``reply``: at once, or on the order check's thread once all ranks have voted."""
        view = self._view()
        if view is None:
            return
        status = msgspec.structs.replace(view.status, unpaid_s=self._budget.unpaid_s())
        if self._world_size == 1:
            status = msgspec.structs.replace(status, state="alone", next_window=None)
        view = view._replace(status=status)

        def answer(text: str, outcome: str = "done", from_step: int | None = None) -> None:
            if request.what != STATUS and outcome != "busy":
                Notices.announce(f"asked from outside: {request.what}; {text} [OC146]")
            reply(JobAnswer(id=request.id, text=text, outcome=outcome, status=status, from_step=from_step))

        with self._lock:
            if request.what == STATUS:
                answer(status_in_words(status))
            elif status.state in ("off", "pinned", "alone"):
                answer(f"only status is answered: {status_in_words(status)}", "refused")
            elif self._is_deciding or self._plans.is_under_way:
                answer("another request is not decided yet", "busy")
            else:
                {WINDOW: self._window, QUICK: self._quick, STOP: self._stop, RESUME: self._resume, EVERY: self._every}[
                    request.what
                ](view, request, answer)

    def _window(self, view: View, request: Request, answer: Callable[..., None]) -> None:
        status, schedule = view.status, view.schedule
        step_s, from_step = self._pace(status)
        if status.state == "stopped":
            answer("measuring is stopped: ask to resume", "refused")
            return
        if status.window is not None:
            answer(f"window {status.window} is open")
            return
        comes = view.opens_at(status.step + 1)
        wait_s = 0.0 if request.now or status.state == QUICK else status.unpaid_s
        if wait_s is None:
            answer("what the last window cost is not known yet", "busy")
        elif comes <= from_step and wait_s <= 0:
            self._budget.exempt(schedule.number_at(comes), exempt=request.now)
            answer(f"a window opens at step {comes:,}", from_step=comes)
        elif wait_s > 0 and not step_s:
            answer("the budget forbids a window now, and the time of a step is not known yet", "busy")
        else:
            # A window that the budget forbids takes some steps to be left out.
            first = max(from_step, comes + schedule.soon_decided if comes <= from_step else 0)
            text = "a window opens at step {first:,}, in about {wait}"
            if wait_s > 0:
                first = max(first, status.step + math.ceil(wait_s * _SPARE / step_s))
                text = "the budget forbids a window now: " + text + "; --now measures at once, outside the budget"
            number = schedule.number_at(first)
            self._budget.exempt(number, exempt=request.now)
            text = text.format(first=first, wait=time_in_words(max(0, first - status.step) * step_s))
            self._propose(view, from_step, first, answer, text, undo=lambda: self._budget.exempt(number, exempt=False))

    def _quick(self, view: View, request: Request, answer: Callable[..., None]) -> None:
        if view.status.state == QUICK:
            answer("windows follow one another already")
            return
        _, step = self._pace(view.status)
        self._propose(view, step, step, answer, f"windows follow one another from step {step:,} on", does=QUICK)

    def _stop(self, view: View, request: Request, answer: Callable[..., None]) -> None:
        if view.status.state == "stopped":
            answer("measuring is stopped already")
            return
        _, step = self._pace(view.status)
        self._propose(view, step, step, answer, f"nothing is measured from step {step:,} on", does=STOP)

    def _resume(self, view: View, request: Request, answer: Callable[..., None]) -> None:
        if view.status.state != "stopped":
            answer("measuring is not stopped")
            return
        _, step = self._pace(view.status)
        first = view.schedule.next_window_step(step)
        self._propose(view, step, first, answer, f"the next window opens at step {first:,}, if the budget allows it")

    def _every(self, view: View, request: Request, answer: Callable[..., None]) -> None:
        status, every = view.status, request.every_n_steps
        if status.state != "windows":
            answer(f"measuring is {'stopped' if status.state == 'stopped' else 'quick'}: ask again later", "refused")
            return
        try:
            replace(self._config, schedule=view.own.moved(every_n_steps=every))
        except ValueError as error:
            answer(str(error), "refused")
            return
        _, step = self._pace(status)
        last = view.schedule.next_window_step(status.step + 1) - view.schedule.every_n_steps
        first = max(step, last + every)
        text = f"windows open every {every:,} steps from step {first:,} on, if the budget allows it"
        self._propose(view, step, first, answer, text, every=every)

    def _pace(self, status: Status) -> tuple[float, int]:
        """The time of a step, 0 if not known; and the first step that all ranks can be told of."""
        step_s = (status.step_ms or 0.0) / 1e3
        return step_s, status.step + lead_steps(step_s, self._world_size)

    def _propose(
        self,
        view: View,
        from_step: int,
        first_step: int,
        answer: Callable[..., None],
        text: str,
        *,
        does: str = WINDOW,
        every: int = 0,
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        plan = WindowPlan.of(
            self._plans.session,
            view.status.step,
            from_step,
            first_step=first_step,
            every_n_steps=every or view.own.every_n_steps,
            first_number=view.schedule.number_at(first_step),
            does=does,
        )

        def told(decided: WindowPlan) -> None:
            self._is_deciding = False
            if decided.decided:
                answer(text, from_step=max(from_step, first_step) if does == WINDOW else from_step)
            else:
                undo()
                answer("not all ranks agreed in time, and none follows: ask again", "refused")

        self._is_deciding = True
        if not self._submit(lambda: self._plans.propose(plan, told)):
            self._is_deciding = False
            undo()
            answer("the library's thread is busy", "busy")
