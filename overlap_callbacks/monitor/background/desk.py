"""Rank 0 answers what the job is asked from outside: by a file, torch's debug server, or a signal."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from overlap_callbacks.analysis.results.request import QUICK, STATUS, STOP, WINDOW, JobAnswer, Request, Status
from overlap_callbacks.analysis.status_words import status_in_words, time_in_words
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.plans import Plans, WindowPlan, lead_steps
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.course import Course
from overlap_callbacks.monitor.faults import Notices

# Extra training before a window that the budget has postponed: the time of a step varies.
_SPARE = 1.05
# Where the job is, and which windows open.
View = tuple[Status, Course]
# Why a request is made: by somebody, or by the library itself.
ASKED, CHANGED = "from outside", "to measure what has changed"

Reply = Callable[[JobAnswer], None]


class _Said(NamedTuple):
    """What a request comes to: the answer, and the plan that the ranks must agree on first.

    Attributes:
        first_step: where the plan's first window opens.
        every_n_steps, does: as ``WindowPlan`` has them; ``does`` is empty if nothing changes.
        exempt: window that is outside the budget from then on.
    """

    text: str
    outcome: str = "done"
    first_step: int | None = None
    does: str = ""
    every_n_steps: int = 0
    exempt: int | None = None


@dataclass(eq=False)
class Desk:
    """Decides what becomes of a request, and answers. Any thread may call ``respond``.

    Attributes:
        view: of the training thread; returns None once nobody trains.
        submit: runs a task on the order check's thread.
        world_size: ranks of the job.
    """

    config: MonitorConfig
    budget: WindowBudget
    plans: Plans
    view: Callable[[], View | None]
    submit: Callable[[Callable[[], object]], bool]
    world_size: int
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _is_deciding: bool = field(default=False, init=False)  # a plan was proposed, and is not decided yet

    def respond(self, request: Request, reply: Reply, why: str = ASKED, *, is_new: bool = True) -> None:
        """Answer by ``reply``: at once, or on the order check's thread once all ranks have voted.

        One that is not new may be of a job before: whoever waits for the answer asks again.
        """
        view = self.view()
        if view is None:
            return
        status = msgspec.structs.replace(view[0], unpaid_s=self.budget.unpaid_s())
        if self.world_size == 1:
            status = msgspec.structs.replace(status, state="alone", next_window=None)

        def answer(said: _Said) -> None:
            if request.what != STATUS and (said.outcome == "done" or (said.outcome == "refused" and why == ASKED)):
                Notices.announce(f"asked {why}: {request.what}; {said.text} [OC146]")
            if said.exempt is not None:
                self.budget.exempt(said.exempt)
            from_step = said.first_step
            reply(JobAnswer(id=request.id, text=said.text, outcome=said.outcome, status=status, from_step=from_step))

        with self._lock:
            step_s = (status.step_ms or 0.0) / 1e3 or self.budget.step_s
            from_step = status.step + lead_steps(step_s, self.world_size)
            said = _Said("the job has only begun to listen", "busy")
            if is_new:
                said = self._said(request, status, view[1], step_s, from_step, why)
            if said.does:
                self._propose(said, status, view[1], from_step, answer)
            else:
                answer(said)

    def _said(self, request: Request, status: Status, course: Course, step_s: float, step: int, why: str) -> _Said:
        """``step``: the first one that all ranks can be told of."""
        if request.what == STATUS:
            return _Said(status_in_words(status))
        if status.state in ("off", "pinned", "alone"):
            return _Said(f"only status is answered: {status_in_words(status)}", "refused")
        if self._is_deciding or self.plans.is_under_way:
            return _Said("another request is not decided yet", "busy")
        match request.what, status.state:
            case "window" | "every", "stopped":
                return _Said("measuring is stopped: ask to resume", "refused")
            case "every", "quick":
                return _Said("windows follow one another: ask again later", "refused")
            case "window", _:
                return self._window(request, status, course, step_s, step, why)
            case "every", _:
                return self._every(request.every_n_steps, status, course, step)
            case "stop", "stopped":
                return _Said("measuring is stopped already")
            case "stop", _:
                return _Said(f"nothing is measured from step {step:,} on", "done", step, STOP)
            case "quick", "quick":
                return _Said("windows follow one another already")
            case "quick", _:
                return _Said(f"windows follow one another from step {step:,} on", "done", step, QUICK)
            case _, "stopped":
                first = course.schedule.next_window_step(step)
                text = f"the next window opens at step {first:,}, if the budget allows it"
                return _Said(text, "done", first, WINDOW)
        return _Said("measuring is not stopped")

    def _window(self, request: Request, status: Status, course: Course, step_s: float, step: int, why: str) -> _Said:
        schedule, comes = course.schedule, course.opens_at(status.step + 1)
        unpaid_s = 0.0 if status.state == QUICK else status.unpaid_s
        if status.window is not None and (unpaid_s == 0 or self.budget.is_exempt(status.window)):
            return _Said(f"window {status.window} is open")  # and will not be left out
        wait_s = 0.0 if request.now else unpaid_s
        if wait_s is None:
            return _Said("what the last window cost is not known yet", "busy")
        if wait_s > 0 and not step_s:
            return _Said("the budget forbids a window now, and the time of a step is not known yet", "busy")
        is_soon = comes <= step and wait_s == 0
        # An open window ends first; one that the budget forbids takes some steps to be left out.
        first = max(step, status.step + status.steps_left + 1, comes + schedule.soon_decided if comes <= step else 0)
        first = comes if is_soon else max(first, status.step + math.ceil(wait_s * _SPARE / (step_s or 1.0)))
        text = f"a window opens at step {first:,}"
        if step_s:
            text += f", in about {time_in_words((first - status.step) * step_s)}"
        if self.config.decide is not None and status.state != QUICK:
            text += ", if an arm is left to measure" if request.now else ", if an arm is due then"
        if wait_s > 0:
            text = f"the budget forbids a window now: {text}"
            text += "; --now measures at once, outside the budget" if why == ASKED else ""
        number = schedule.number_at(first) if request.now else None
        return _Said(text, "done", first, "" if is_soon else WINDOW, exempt=number)

    def _every(self, every: int, status: Status, course: Course, step: int) -> _Said:
        try:
            replace(self.config, schedule=course.own.moved(every_n_steps=every))
        except ValueError as error:
            return _Said(str(error), "refused")
        last = course.schedule.next_window_step(status.step + 1) - course.schedule.every_n_steps
        first = max(step, last + every)
        text = f"windows open every {every:,} steps from step {first:,} on, if the budget allows it"
        return _Said(text, "done", first, WINDOW, every)

    def _propose(
        self, said: _Said, status: Status, course: Course, from_step: int, answer: Callable[[_Said], None]
    ) -> None:
        if not status.num_windows:
            answer(_Said("ranks hear of requests from the first window on", "busy"))
            return
        assert said.first_step is not None
        plan = WindowPlan.of(
            self.plans.session,
            status.step,
            from_step,
            first_step=said.first_step,
            every_n_steps=said.every_n_steps or course.own.every_n_steps,
            first_number=course.schedule.number_at(said.first_step),
            does=said.does,
        )

        def told(decided: WindowPlan) -> None:
            self._is_deciding = False
            why = "the job ended first" if decided.decided is None else "not all ranks agreed in time"
            answer(said if decided.decided else _Said(f"{why}, and none follows: ask again", "refused"))

        self._is_deciding = True
        if not self.submit(lambda: self.plans.propose(plan, told)):
            self._is_deciding = False
            answer(_Said("the library's thread is busy", "busy"))
